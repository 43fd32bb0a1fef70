//! The control groups that the process is in, from its own up to the root's: a limit of any of them
//! counts.

use super::root::View;

/// Where groups of version 2, and controllers of version 1, are mounted.
const ROOT: &str = "sys/fs/cgroup";

/// A group's folder.
pub struct Group<'a> {
    view: &'a View,
    folder: String,
}

impl Group<'_> {
    /// What one of its files says.
    pub fn text(&self, file: &str) -> Option<String> {
        self.view.text(&format!("{}/{file}", self.folder))
    }
}

/// What the groups say: each of version 2 in `of_v2`, each of version 1 below a controller in its own
/// words.
pub fn values(
    view: &View,
    of_v2: impl Fn(&Group) -> Option<String>,
    (controller, of_v1): (&str, impl Fn(&Group) -> Option<String>),
) -> Vec<String> {
    let own = view.text("proc/self/cgroup").unwrap_or_default();
    let group = |folder: String| Group { view, folder };
    let mut found: Vec<String> = folders(ROOT, path(&own, ""))
        .into_iter()
        .filter_map(|folder| of_v2(&group(folder)))
        .collect();
    // Such as /sys/fs/cgroup/cpu,cpuacct.
    let mounted = view.names(ROOT);
    let mounts = mounted.iter().filter(|name| name.split(',').any(|part| part == controller));
    for mount in mounts {
        let all = folders(&format!("{ROOT}/{mount}"), path(&own, controller));
        found.extend(all.into_iter().filter_map(|folder| of_v1(&group(folder))));
    }
    found
}

/// The process's group below a controller (none: of version 2), by lines such as "4:cpu,cpuacct:/a/b".
fn path<'a>(own: &'a str, controller: &str) -> &'a str {
    let of = |line: &'a str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == controller).then_some(path)
    };
    let path = own.lines().find_map(of).unwrap_or_default();
    // "/a/../b" leads elsewhere; a group's path that is seen from inside its namespace never holds it.
    if path.split('/').any(|part| part == "..") { "" } else { path }
}

/// A root and all folders on the way from it to a path.
fn folders(root: &str, path: &str) -> Vec<String> {
    let mut folders = vec![root.to_owned()];
    let mut folder = root.to_owned();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        folder = format!("{folder}/{part}");
        folders.push(folder.clone());
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_are_found() {
        let own = "4:cpu,cpuacct:/docker/x\n0::/system.slice/talon.service\n";
        assert_eq!(path(own, ""), "/system.slice/talon.service");
        assert_eq!(path(own, "cpu"), "/docker/x");
        assert_eq!((path(own, "memory"), path("0::/../../x", ""), path("", "")), ("", "", ""));
        assert_eq!(folders("r", "/a//b/"), ["r", "r/a", "r/a/b"]);
    }
}
