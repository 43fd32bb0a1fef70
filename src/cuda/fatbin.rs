//! The container that nvcc writes with `-fatbin`: a header, then kernels for one architecture after
//! another. The driver takes it without a length, so its own lengths are checked here first.

/// "sm_90, sm_100, compute_120": what `bytes` hold kernels for, PTX as compute; `None` when they
/// are not a whole fatbin.
pub(super) fn architectures(bytes: &[u8]) -> Option<String> {
    const MAGIC: u64 = 0xba55_ed50;
    const PTX: u64 = 1;
    if number(bytes, 0, 4)? != MAGIC {
        return None;
    }
    let header = usize::try_from(number(bytes, 6, 2)?).ok()?;
    let size = usize::try_from(number(bytes, 8, 8)?).ok()?;
    let mut rest = bytes.get(header..header.checked_add(size)?)?;
    let mut found: Vec<String> = Vec::new();
    while !rest.is_empty() {
        let kind = if number(rest, 0, 2)? == PTX { "compute" } else { "sm" };
        let entry = number(rest, 4, 4)?.checked_add(number(rest, 8, 8)?)?;
        let name = format!("{kind}_{}", number(rest, 28, 4)?);
        if !found.contains(&name) {
            found.push(name);
        }
        // an entry has its header at the least, so this comes to an end
        rest = rest.get(usize::try_from(entry).ok()?.max(32)..)?;
    }
    Some(found.join(", "))
}

/// The bytes in words: the driver reads them as such, and bytes of a binary lie anywhere.
pub(super) fn aligned(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    };
    bytes.chunks(8).map(word).collect()
}

/// A little-endian number of `width` bytes.
fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + width)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fatbin with entries of (kind, architecture), each with 8 bytes of content.
    fn fatbin(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
        bytes.extend((entries.len() as u64 * 72).to_le_bytes());
        for (kind, architecture) in entries {
            let mut entry = [0; 72];
            entry[..2].copy_from_slice(&kind.to_le_bytes());
            entry[4] = 64;
            entry[8] = 8;
            entry[28..32].copy_from_slice(&architecture.to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    #[test]
    fn architectures_are_listed_once() {
        let bytes = fatbin(&[(2, 90), (2, 90), (2, 100), (1, 120)]);
        assert_eq!(architectures(&bytes).as_deref(), Some("sm_90, sm_100, compute_120"));
    }

    #[test]
    fn what_nvcc_writes_is_read() {
        let bytes = include_bytes!("../../tests/fixtures/cuda/driver.fatbin");
        assert_eq!(architectures(bytes).as_deref(), Some("sm_90, compute_75"));
    }

    #[test]
    fn a_part_of_a_fatbin_is_none() {
        let bytes = fatbin(&[(2, 90), (2, 100)]);
        for end in 0..bytes.len() {
            assert_eq!(architectures(&bytes[..end]), None, "{end} bytes");
        }
        assert_eq!(architectures(b"\x7fELF and what follows, not a fatbin"), None);
        let mut long = fatbin(&[(2, 90)]);
        long[8..16].fill(0xff); // the length
        assert_eq!(architectures(&long), None);
        let mut long = fatbin(&[(2, 90)]);
        long[24..32].fill(0xff); // the first entry's
        assert_eq!(architectures(&long), None);
    }

    #[test]
    fn words_hold_the_bytes_and_zeros_behind_them() {
        let words = aligned(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]);
    }
}
