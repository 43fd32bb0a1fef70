//! Whether what was asked for fits this box, told before anything is allocated.

use log::warn;

use super::Limits;
use crate::error::{Error, Result};

const MIB: usize = 1 << 20;
/// Where a container sees the limits of its own control group (v2).
const CGROUP: &str = "/sys/fs/cgroup";

/// Refuses a KV cache that the free memory cannot hold. The weights are mapped files, which the
/// kernel drops and reads again as it needs, so they do not count.
pub fn check_fits(cache_bytes: usize, limits: &Limits) -> Result<()> {
    let Some(available) = available_bytes() else {
        return Ok(());
    };
    if cache_bytes <= available {
        return Ok(());
    }
    // Only where it was asked for: not every command has the option.
    let parallel = match limits.parallel {
        1 => String::new(),
        count => format!(" --parallel {count}"),
    };
    Err(Error::input(format!(
        "--context {} --tp {}{parallel}: the KV cache takes {} MiB, {} MiB of memory are \
         available, {} MiB short; lower one of them",
        limits.context,
        limits.tp,
        cache_bytes / MIB,
        available / MIB,
        (cache_bytes - available).div_ceil(MIB)
    )))
}

/// Warns where the weights cannot stay in memory.
pub fn warn_if_larger_than_memory(tensor_bytes: usize) {
    let total = [read("/proc/meminfo").and_then(|text| meminfo(&text, "MemTotal:")), limit()];
    if let Some(line) = total.into_iter().flatten().min().and_then(|m| slow(tensor_bytes, m)) {
        warn!("{line}");
    }
}

/// Whether the page cache can hold this much beside what is in use.
pub fn holds(bytes: usize) -> bool {
    available_bytes().is_none_or(|available| bytes < available)
}

fn slow(tensor_bytes: usize, total: usize) -> Option<String> {
    (tensor_bytes > total).then(|| {
        format!(
            "the weights take {} MiB and this box has {} MiB of memory: every token will read from \
             disk; use a box with more",
            tensor_bytes / MIB,
            total / MIB
        )
    })
}

/// Memory that is free now: of the box, and of the control group that a container runs in.
fn available_bytes() -> Option<usize> {
    let free = read("/proc/meminfo").and_then(|text| meminfo(&text, "MemAvailable:"));
    let group = limit().and_then(|limit| {
        let used = read(&format!("{CGROUP}/memory.current"))?.trim().parse().ok()?;
        Some(group_available(limit, used, &read(&format!("{CGROUP}/memory.stat"))?))
    });
    [free, group].into_iter().flatten().min()
}

/// The limit of the control group; `None` without one.
fn limit() -> Option<usize> {
    read(&format!("{CGROUP}/memory.max"))?.trim().parse().ok()
}

/// What a group may still take. The pages of files, such as the mapped weights, count as used and
/// are given up when memory is needed.
fn group_available(limit: usize, used: usize, stat: &str) -> usize {
    let value = |key: &str| -> usize {
        let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(name, _)| *name == key).and_then(|(_, n)| n.trim().parse().ok()).unwrap_or(0)
    };
    let files = value("inactive_file") + value("active_file");
    limit.saturating_sub(used.saturating_sub(files))
}

/// A number of /proc/meminfo in bytes.
fn meminfo(text: &str, key: &str) -> Option<usize> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_groups_file_pages_count_as_available() {
        let stat = "anon 10\nfile 70\ninactive_file 50\nactive_file 20\n";
        assert_eq!(group_available(100, 90, stat), 80);
        assert_eq!(group_available(100, 130, "anon 130\n"), 0);
        assert_eq!(meminfo("MemTotal:  9 kB\nMemAvailable: 7 kB\n", "MemAvailable:"), Some(7168));
    }

    #[test]
    fn weights_beyond_the_memory_are_told() {
        assert_eq!(slow(4 * MIB, 4 * MIB), None);
        let line = slow(5 * MIB, 4 * MIB).unwrap();
        assert!(line.contains("5 MiB") && line.contains("every token will read from disk"));
    }

    #[test]
    fn the_refusal_names_the_options_that_there_are() {
        let limits = Limits { context: 7, parallel: 1, prefill_chunk: 1, tp: 2, vocab_limit: 1 };
        let message = check_fits(usize::MAX, &limits).unwrap_err().to_string();
        assert!(message.contains("--context 7 --tp 2: the KV cache takes"), "{message}");
        assert!(!message.contains("--parallel"), "{message}");
    }
}
