//! Where the weights lie: the file system, what is free of it, and how much is in memory already.

use super::gib;
use crate::doctor::check::{Check, Subject};
use crate::doctor::facts::{FULL_MODEL_BYTES, Facts};

/// File systems that are read over a network or through another layer, or that keep a cache of their
/// own beside the kernel's.
const SLOW: [&str; 11] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "virtiofs",
    "zfs",
    "overlay",
    "ceph",
    "glusterfs",
    "lustre",
];

pub fn disk(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "disk",
        expected: "weights on a local file system (ext4, xfs), mapped without another layer",
        cost: "loads at a fraction of the disk's speed, or caches everything twice",
        fix: "put the checkpoint onto a local disk (in a container: a mounted one)",
        renter: true,
    };
    let Some(model) = &facts.model else {
        return IS.unknown("no checkpoint was named: --model DIR");
    };
    let folder = &model.folder;
    let Some(mounts) = facts.view.text("proc/self/mounts") else {
        return IS.unknown("/proc/self/mounts cannot be read");
    };
    let Some((place, kind)) = mount_of(&mounts, folder) else {
        return IS.unknown(format!("{folder} is on no mount that is shown"));
    };
    let value = format!("{kind} at {place}");
    let is_slow = SLOW.contains(&kind) || kind.starts_with("fuse");
    if is_slow { IS.warn(value) } else { IS.ok(value) }
}

/// Place and kind of the mount that holds a folder: the longest place that begins its path.
fn mount_of<'a>(mounts: &'a str, folder: &str) -> Option<(&'a str, &'a str)> {
    let parts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some((words.nth(1)?, words.next()?))
    });
    let holds = |(place, _): &(&str, &str)| std::path::Path::new(folder).starts_with(place);
    parts.filter(holds).max_by_key(|(place, _)| place.len())
}

pub fn free_space(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "free-space",
        expected: "room for the weights where talon is started, as long as none were named",
        cost: "a download of hours ends in the middle",
        fix: "start in a folder on a larger disk, or name the checkpoint that is there: --model DIR",
        renter: true,
    };
    let folder = facts.model.as_ref().map(|model| model.folder.as_str());
    let Some(free) = facts.view.free_bytes(folder.unwrap_or(".")) else {
        return IS.unknown("the disk does not tell what is free");
    };
    let value = format!("{} GB", free / 1_000_000_000);
    match folder {
        Some(_) => IS.ok(format!("{value} beside the checkpoint")),
        None if facts.gpus() > 0 && free < FULL_MODEL_BYTES => IS.warn(format!(
            "{value} here; GLM-5.2 in NVFP4 takes {}",
            FULL_MODEL_BYTES / 1_000_000_000
        )),
        None => IS.ok(format!("{value} here")),
    }
}

pub fn page_cache(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "page-cache",
        expected: "any: what is in memory already loads at memory's speed, the rest at the disk's",
        cost: "the next load takes as long as the disk does for what is missing",
        fix: "nothing to do; memory that others hold, and a limit on a container's, push weights out",
        renter: true,
    };
    let Some(model) = &facts.model else {
        return IS.unknown("no checkpoint was named: --model DIR");
    };
    let Some(share) = model.resident else {
        return IS.ok("part of the program");
    };
    let mib = (model.bytes as f64 * share) as u64 >> 20;
    IS.ok(format!("{:.0} % of the weights are in memory ({})", share * 100.0, gib(mib)))
}
