//! What a container or a limit of the process takes away.

use super::gib;
use super::host::memory_mib;
use crate::doctor::cgroup;
use crate::doctor::check::{Check, Subject};
use crate::doctor::facts::Facts;

/// Memory of its own that a rank needs while it loads.
const RANK_MIB: u64 = 2048;
/// Files that a load has open at once, with room.
const FILES: u64 = 1024;
/// Left-over files in /dev/shm from which on they are named.
const LEFT_MIB: u64 = 64;

pub fn memory_limit(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "memory-limit",
        expected: "no limit on memory (cgroup) below what the ranks and the page cache need",
        cost: "the kernel ends talon in the middle of a load, or reads the weights again and again",
        fix: "start the container without --memory, or with more than the weights",
        renter: true,
    };
    let Some(limit) = cgroup_memory_mib(facts) else {
        return IS.unknown("no cgroup is shown here");
    };
    let total = memory_mib(facts, "MemTotal");
    let Some(limit) = limit.filter(|limit| total.is_none_or(|total| *limit < total)) else {
        return IS.ok("none");
    };
    let needed = RANK_MIB * facts.gpus().max(1) as u64;
    if limit < needed {
        return IS.fail(format!("{limit} MiB; {} ranks need {needed}", facts.gpus().max(1)));
    }
    match facts.weight_bytes().map(|bytes| bytes >> 20) {
        Some(weights) if limit < weights => {
            IS.warn(format!("{}; the weights are {}", gib(limit), gib(weights)))
        }
        _ => IS.ok(gib(limit)),
    }
}

/// The least limit on the way from the process's group to the root's; the inner `None` is no limit.
fn cgroup_memory_mib(facts: &Facts) -> Option<Option<u64>> {
    let texts = cgroup::values(
        &facts.view,
        |group| group.text("memory.max"),
        ("memory", |group| group.text("memory.limit_in_bytes")),
    );
    if texts.is_empty() && !facts.view.exists("sys/fs/cgroup") {
        return None;
    }
    Some(texts.iter().filter_map(|text| text.parse::<u64>().ok()).min().map(|bytes| bytes >> 20))
}

/// The fewest cores at a time that a group on that way allows.
fn cgroup_cores(facts: &Facts) -> Option<f64> {
    let quotas = cgroup::values(
        &facts.view,
        |group| group.text("cpu.max"),
        ("cpu", |group| {
            Some(format!(
                "{} {}",
                group.text("cpu.cfs_quota_us")?,
                group.text("cpu.cfs_period_us")?
            ))
        }),
    );
    let cores = |text: &String| {
        let (quota, period) = text.split_once(' ')?;
        let (quota, period): (f64, f64) = (quota.parse().ok()?, period.trim().parse().ok()?);
        (period > 0.0 && quota > 0.0).then_some(quota / period)
    };
    quotas.iter().filter_map(cores).min_by(f64::total_cmp)
}

pub fn cores(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "cores",
        expected: "a core for each GPU and one more",
        cost: "ranks that share a core wait for each other in every step",
        fix: "start the container with more cores (--cpus, --cpuset-cpus), or unset taskset",
        renter: true,
    };
    let allowed = facts
        .view
        .field("proc/self/status", "Cpus_allowed_list", ':')
        .and_then(|text| count_cores(&text));
    let quota = cgroup_cores(facts);
    let Some(allowed) = allowed else {
        return IS.unknown("/proc/self/status cannot be read");
    };
    let usable = quota.map_or(allowed as f64, |quota| quota.min(allowed as f64));
    let value = match quota {
        Some(quota) if quota < allowed as f64 => {
            format!("{allowed}, of which {quota:.1} at a time")
        }
        _ => allowed.to_string(),
    };
    // Two of the kernel's cores are one where each runs two threads.
    let shared =
        facts.view.text("sys/devices/system/cpu/smt/active").is_some_and(|text| text == "1");
    let value = if shared { format!("{value}, two to a core") } else { value };
    let own = if shared { usable / 2.0 } else { usable };
    match facts.gpus() {
        gpus if gpus > 0 && usable < (gpus + 1) as f64 => {
            IS.fail(format!("{value} for {gpus} GPUs"))
        }
        gpus if gpus > 0 && own < (gpus + 1) as f64 => IS.warn(format!("{value}, for {gpus} GPUs")),
        _ => IS.ok(value),
    }
}

/// "0-3,8" is 5; `None` for anything else.
fn count_cores(text: &str) -> Option<u64> {
    let mut count: u64 = 0;
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// The soft limit of a line of /proc/self/limits; the inner `None` is no limit.
fn soft_limit(facts: &Facts, name: &str) -> Option<Option<u64>> {
    let text = facts.view.text("proc/self/limits")?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    match rest.split_whitespace().next()? {
        "unlimited" => Some(None),
        number => Some(Some(number.parse().ok()?)),
    }
}

pub fn locked_memory(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "locked-memory",
        expected: "at least 8 MiB (ulimit -l), better no limit",
        cost: "memory that the GPUs copy from may be refused: loads get slower without a word",
        fix: "ulimit -l unlimited; in a container: --ulimit memlock=-1; in systemd: \
              LimitMEMLOCK=infinity",
        renter: true,
    };
    match soft_limit(facts, "Max locked memory") {
        None => IS.unknown("/proc/self/limits cannot be read"),
        Some(None) => IS.ok("no limit"),
        Some(Some(bytes)) if bytes >= 8 << 20 => IS.ok(format!("{} MiB", bytes >> 20)),
        // Where there is no GPU, nothing is locked.
        Some(Some(bytes)) if !facts.has_gpu() => IS.ok(format!("{} KiB", bytes >> 10)),
        Some(Some(bytes)) => IS.warn(format!("{} KiB", bytes >> 10)),
    }
}

pub fn open_files(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "open-files",
        expected: "at least 1024 (ulimit -n)",
        cost: "a load of many shards, or a server with many clients, ends with \"too many open files\"",
        fix: "ulimit -n 65536; in a container: --ulimit nofile=65536; in systemd: LimitNOFILE=65536",
        renter: true,
    };
    match soft_limit(facts, "Max open files") {
        None => IS.unknown("/proc/self/limits cannot be read"),
        Some(None) => IS.ok("no limit"),
        Some(Some(count)) if count >= FILES => IS.ok(count.to_string()),
        Some(Some(count)) => IS.warn(count.to_string()),
    }
}

pub fn shared_memory(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "shared-memory",
        expected: "nothing large left over in /dev/shm (talon itself puts nothing there)",
        cost: "memory that is gone until somebody removes it",
        fix: "remove what no process uses any more: ls -l /dev/shm; fuser -v /dev/shm/*",
        renter: true,
    };
    if !facts.view.exists("dev/shm") {
        return IS.unknown("there is no /dev/shm");
    }
    let sizes = facts.view.names("dev/shm").into_iter().filter_map(|name| {
        let mib = facts.view.size(&format!("dev/shm/{name}"))? >> 20;
        (mib >= LEFT_MIB).then_some(mib)
    });
    let sizes: Vec<u64> = sizes.collect();
    match sizes.len() {
        0 => IS.ok("nothing"),
        1 => IS.warn(format!("1 large file, {} MiB", sizes[0])),
        count => IS.warn(format!("{count} large files, {} MiB", sizes.iter().sum::<u64>())),
    }
}

pub fn container(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "container",
        expected: "any: talon needs none, and no rights in one",
        cost: "in a container BIOS, kernel and driver are somebody else's to change",
        fix: "nothing to do; what says \"not by a renter\" is for the box's owner",
        renter: true,
    };
    let view = &facts.view;
    let groups = view.text("proc/1/cgroup").unwrap_or_default();
    let is_one = view.exists(".dockerenv")
        || view.exists("run/.containerenv")
        || ["docker", "kubepods", "containerd", "lxc"].iter().any(|word| groups.contains(word));
    let Some(status) = view.text("proc/self/status") else {
        return IS.unknown("/proc/self/status cannot be read");
    };
    let field = |name: &str| crate::doctor::root::field(&status, name, ':');
    let filtered = field("Seccomp").is_some_and(|mode| mode == "2");
    let capabilities = field("CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok());
    // Bit 21 is CAP_SYS_ADMIN.
    let privileged = capabilities.is_some_and(|bits| bits >> 21 & 1 == 1);
    let word = |is_so: bool, yes: &str| is_so.then(|| yes.to_owned());
    let mut value = vec![if is_one { "in a container" } else { "none" }.to_owned()];
    value.extend(word(privileged, "privileged"));
    value.extend(word(filtered, "system calls filtered"));
    IS.ok(value.join(", "))
}

#[cfg(test)]
mod tests {
    use super::count_cores;

    #[test]
    fn cores_are_counted() {
        assert_eq!(count_cores("0-3,8"), Some(5));
        for text in ["", "x", "3-1", "0-18446744073709551615"] {
            assert_eq!(count_cores(text), None, "{text}");
        }
    }
}
