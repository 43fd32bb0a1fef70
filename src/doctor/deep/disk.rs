//! How fast a model's files come from the disk, past the page cache.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Numbers of readers that are tried.
const READERS: [usize; 3] = [1, 4, 16];
/// How long each of them reads.
const TIME: Duration = Duration::from_secs(2);
/// Bytes of one read, and what its place in memory and file must be a multiple of.
const CHUNK: usize = 4 << 20;
const ALIGNED: usize = 4096;

/// Bytes a second by number of readers.
pub type Rates = Vec<(usize, f64)>;

/// Reads the shards in `folder`, each number of readers for two seconds.
///
/// # Errors
/// Runtime error if there is nothing to read, or if the file system has no reads past its cache.
pub fn measure(folder: &Path) -> Result<Rates> {
    let shards = shards(folder)?;
    // Each number of readers reads where the one before did not.
    READERS
        .iter()
        .enumerate()
        .map(|(turn, &readers)| Ok((readers, rate(&shards, readers, turn)?)))
        .collect()
}

/// The shards that have at least one chunk, with their bytes.
fn shards(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let refuse = |what: String| Error::runtime(format!("{}: {what}", folder.display()));
    let entries = std::fs::read_dir(folder).map_err(|error| refuse(error.to_string()))?;
    let mut found: Vec<(PathBuf, u64)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let is_shard = path.extension().is_some_and(|extension| extension == "safetensors");
            let bytes = std::fs::metadata(&path).ok().filter(|_| is_shard)?.len();
            (bytes >= CHUNK as u64).then_some((path, bytes))
        })
        .collect();
    found.sort();
    if found.is_empty() {
        return Err(refuse("no shard of 4 MiB or more to read".into()));
    }
    Ok(found)
}

/// Bytes a second that `readers` threads read together.
fn rate(shards: &[(PathBuf, u64)], readers: usize, turn: usize) -> Result<f64> {
    let stop = AtomicBool::new(false);
    let begin = Instant::now();
    let read: Result<Vec<u64>> = std::thread::scope(|scope| {
        let read = |reader: usize| {
            // Apart from each other, in files of their own as long as there are enough.
            let (path, bytes) = &shards[(turn * 5 + reader) % shards.len()];
            let chunks = bytes / CHUNK as u64;
            let part = (reader / shards.len() + turn) as u64 * 7 + 3;
            let stop = &stop;
            move || {
                let read = read_around(path, chunks, part * chunks / 29 % chunks, begin, stop);
                if read.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                read
            }
        };
        let threads: Vec<_> = (0..readers).map(|reader| scope.spawn(read(reader))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<Result<u64>>| {
            thread.join().unwrap_or_else(|_| Err(Error::runtime("a reader panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    Ok(read?.iter().sum::<u64>() as f64 / begin.elapsed().as_secs_f64())
}

/// Reads chunk after chunk from `first` on, around the file's end, until the time is over.
fn read_around(
    path: &Path,
    chunks: u64,
    first: u64,
    begin: Instant,
    stop: &AtomicBool,
) -> Result<u64> {
    let refuse = |error: std::io::Error| {
        let why = match error.raw_os_error() {
            Some(libc::EINVAL) => "its file system does not read past the page cache".into(),
            _ => error.to_string(),
        };
        Error::runtime(format!("{}: {why}", path.display()))
    };
    let file: File =
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).map_err(refuse)?;
    let mut room = vec![0u8; CHUNK + ALIGNED];
    let skip = room.as_ptr().align_offset(ALIGNED);
    let chunk = &mut room[skip..skip + CHUNK];
    let mut read = 0;
    for turn in 0.. {
        if begin.elapsed() >= TIME || stop.load(Ordering::Relaxed) {
            break;
        }
        let at = (first + turn) % chunks * CHUNK as u64;
        read += match file.read_at(chunk, at) {
            Ok(bytes) => bytes as u64,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(refuse(error)),
        };
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_without_shards_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), Path::new("/nowhere/at/all")] {
            assert!(measure(path).is_err());
        }
        std::fs::write(folder.path().join("small.safetensors"), [0; 100]).unwrap();
        let error = measure(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no shard"), "{error}");
    }

    #[test]
    fn readers_stay_in_their_files() {
        // On a disk, or in a file system without direct reads: then it says so.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("a.safetensors");
        std::fs::write(&path, vec![1; 3 * CHUNK + 5]).unwrap();
        let begin = Instant::now() - TIME + Duration::from_millis(50);
        match read_around(&path, 3, 2, begin, &AtomicBool::new(false)) {
            Ok(bytes) => assert!(bytes >= CHUNK as u64 && bytes.is_multiple_of(CHUNK as u64)),
            Err(error) => assert!(error.to_string().contains("page cache"), "{error}"),
        }
    }
}
