//! A rank's thread runs on the cores that are near its GPU.

use super::Device;

/// Keeps the calling thread on the cores that /sys names as near the device, as far as this process
/// may use them. Where there is nothing to read, or nothing near, the thread stays as it is.
pub fn stay_near(device: &Device) {
    let near = device.pci_address().ok().and_then(|address| {
        std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/local_cpulist")).ok()
    });
    let Some(cores) = near.as_deref().and_then(parse_cores) else { return };
    if !stay_on(&cores) {
        log::debug!("{device}: its thread stays where it is");
    }
}

/// `0-3,8,10-11` as numbers; `None` for anything else.
fn parse_cores(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= CORES {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// Cores that a set of the system's has room for.
const CORES: usize = libc::CPU_SETSIZE as usize;

/// Keeps the calling thread on those of `cores` that it may use; false if there are none.
fn stay_on(cores: &[usize]) -> bool {
    // SAFETY: a set of cores is plain bits, of which none set is a value.
    let (mut allowed, mut wanted): (libc::cpu_set_t, libc::cpu_set_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: writes at most `size` bytes to a set of that size; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size, &mut allowed) } != 0 {
        return false;
    }
    let mut any = false;
    for core in cores.iter().copied().filter(|core| *core < CORES) {
        // SAFETY: the number is within the set.
        unsafe {
            if libc::CPU_ISSET(core, &allowed) {
                libc::CPU_SET(core, &mut wanted);
                any = true;
            }
        }
    }
    // SAFETY: reads a set of `size` bytes.
    any && unsafe { libc::sched_setaffinity(0, size, &wanted) } == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(parse_cores("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_cores("5"), Some(vec![5]));
        for text in ["", "a", "3-1", "1-", "-1", "1,,2", "0-99999999999999999999", "0-4294967295"] {
            assert_eq!(parse_cores(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_thread_stays_on_a_core_that_it_may_use() {
        std::thread::spawn(|| {
            assert!(stay_on(&(0..CORES).collect::<Vec<_>>()));
            assert!(!stay_on(&[]));
            assert!(!stay_on(&[CORES + 5]));
        })
        .join()
        .expect("no panic");
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_none(text in "[0-9,\\- \n]{0,40}|\\PC{0,20}") {
            if let Some(cores) = parse_cores(&text) {
                prop_assert!(cores.iter().all(|core| *core < CORES));
            }
        }
    }
}
