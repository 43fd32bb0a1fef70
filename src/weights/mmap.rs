//! Read-only bytes: a mapped file or a slice inside the binary.
//!
//! A mapped file that shrinks under us raises SIGBUS on the next touch of a lost page. The handler
//! installed here ends the process with one line that names the file and exit code 1.

use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use crate::error::{Error, Result};

/// Bytes that the page cache takes and gives at a time.
pub(super) const PAGE: usize = 4096;
/// Bytes of one request to read ahead. The kernel cuts a longer one, without a word, to what the disk
/// is set to read ahead, which is 128 KiB where nobody has changed it.
const AHEAD: usize = 128 << 10;

/// A cheap, cloneable view of read-only bytes.
#[derive(Clone)]
pub struct Bytes {
    backing: Backing,
    range: Range<usize>,
}

#[derive(Clone)]
enum Backing {
    Mapped(Arc<Mapping>),
    Embedded(&'static [u8]),
    Owned(Arc<Vec<u8>>),
}

impl Bytes {
    /// Bytes that are part of the binary.
    pub fn embedded(bytes: &'static [u8]) -> Self {
        Self { range: 0..bytes.len(), backing: Backing::Embedded(bytes) }
    }

    /// Bytes that were made.
    pub fn owned(bytes: Vec<u8>) -> Self {
        Self { range: 0..bytes.len(), backing: Backing::Owned(Arc::new(bytes)) }
    }

    /// Maps a whole file read-only.
    ///
    /// # Errors
    /// Input error when `path` is not a readable regular file (a pipe would hang).
    pub fn map(path: &Path) -> Result<Self> {
        let fail = |what: String| {
            Error::input(format!("{}: {what}; check the path and its permissions", path.display()))
        };
        let metadata = std::fs::metadata(path).map_err(|e| fail(format!("cannot open: {e}")))?;
        if !metadata.is_file() {
            return Err(fail("not a regular file".into()));
        }
        let file = File::open(path).map_err(|e| fail(format!("cannot open: {e}")))?;
        let mapping =
            Mapping::new(&file, path).map_err(|e| fail(format!("cannot map into memory: {e}")))?;
        let range = 0..mapping.map.len();
        Ok(Self { backing: Backing::Mapped(Arc::new(mapping)), range })
    }

    /// A part of these bytes; `None` if `range` leaves them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        self.get(range.clone())?;
        let start = self.range.start + range.start;
        Some(Self { backing: self.backing.clone(), range: start..start + range.len() })
    }
}

/// Mapped bytes and the page cache. Bytes that are not mapped are in memory anyway.
impl Bytes {
    /// Whether they are a part of a file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Mapped(_))
    }

    /// How many of them the page cache holds. The kernel tells it to who owns the file or may write to
    /// it; for others it says all.
    pub(super) fn resident(&self) -> usize {
        let Backing::Mapped(mapping) = &self.backing else {
            return self.range.len();
        };
        let start = self.range.start / PAGE * PAGE;
        let len = self.range.end - start;
        let mut pages = vec![0u8; len.div_ceil(PAGE)];
        // SAFETY: `start` lies in the mapping and on a page, `len` does not leave it, and `pages` has a
        // byte for each page of it.
        let failed = unsafe {
            let from = mapping.map.as_ptr().add(start).cast_mut().cast();
            libc::mincore(from, len, pages.as_mut_ptr()) != 0
        };
        if failed || pages.is_empty() {
            return 0;
        }
        let resident = pages.iter().filter(|page| **page & 1 == 1).count();
        self.range.len() * resident / pages.len()
    }

    /// Whether a page that is not in memory is read alone, or with what lies around it.
    pub(super) fn read_exactly(&self, exactly: bool) {
        if let Backing::Mapped(mapping) = &self.backing {
            let advice = if exactly { memmap2::Advice::Random } else { memmap2::Advice::Normal };
            // Only advice: where the kernel does not take it, more is read than asked for.
            let _ = mapping.map.advise(advice);
        }
    }

    /// Brings them into the page cache, all requests to the disk at once, and into this process. They
    /// are not copied. `ahead`: they may not be there yet.
    ///
    /// # Errors
    /// Runtime error that names the file if the disk fails or the file has become shorter.
    pub(super) fn read_in(&self, ahead: bool) -> Result<()> {
        let Backing::Mapped(mapping) = &self.backing else {
            return Ok(());
        };
        let advise = |advice, range: Range<usize>| {
            mapping.map.advise_range(advice, range.start, range.len())
        };
        if ahead {
            for start in self.range.clone().step_by(AHEAD) {
                let range = start..(start + AHEAD).min(self.range.end);
                // What cannot be had fails below.
                let _ = advise(memmap2::Advice::WillNeed, range);
            }
        }
        loop {
            match advise(memmap2::Advice::PopulateRead, self.range.clone()) {
                Ok(()) => return Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // Linux before 5.14 has no such call.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    self.iter().step_by(PAGE).for_each(|byte| {
                        std::hint::black_box(byte);
                    });
                    return Ok(());
                }
                Err(e) => {
                    return Err(self
                        .changed()
                        .unwrap_or_else(|| mapping.unreadable(&self.range, &e)));
                }
            }
        }
    }

    /// An error if the file is no longer as long as it was when it was mapped.
    pub(super) fn changed(&self) -> Option<Error> {
        let Backing::Mapped(mapping) = &self.backing else {
            return None;
        };
        let file = mapping.path.display();
        let len = std::fs::metadata(&mapping.path).ok()?.len();
        (len != mapping.map.len() as u64).then(|| {
            Error::runtime(format!(
                "{file}: has {len} bytes and had {} when the load began; restore the file and start \
                 again",
                mapping.map.len()
            ))
        })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.backing {
            Backing::Mapped(mapping) => &mapping.map[self.range.clone()],
            Backing::Embedded(bytes) => &bytes[self.range.clone()],
            Backing::Owned(bytes) => &bytes[self.range.clone()],
        }
    }
}

struct Mapping {
    map: memmap2::Mmap,
    path: PathBuf,
    region: Option<usize>,
}

impl Mapping {
    fn new(file: &File, path: &Path) -> std::io::Result<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install_sigbus_handler);
        // SAFETY: the mapping is read-only and private. If another process changes the file the
        // bytes change, which every reader tolerates (all bit patterns of u8 are valid); if it
        // shrinks, the SIGBUS handler above ends the process.
        let map = unsafe { memmap2::Mmap::map(file)? };
        let region = register(map.as_ptr() as usize, map.len(), path);
        Ok(Self { map, path: path.to_owned(), region })
    }

    fn unreadable(&self, range: &Range<usize>, error: &std::io::Error) -> Error {
        Error::runtime(format!(
            "{}: cannot read bytes {} to {}: {error}; the disk may be failing (dmesg says more), so \
             copy the file to another one",
            self.path.display(),
            range.start,
            range.end
        ))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(region) = self.region {
            REGIONS[region].len.store(0, Ordering::Release);
        }
    }
}

/// One mapped file, readable from a signal handler: no locks and no allocation.
struct Region {
    /// Length of the mapping in bytes; 0 marks a free slot.
    len: AtomicUsize,
    start: AtomicUsize,
    name: AtomicPtr<String>,
}

/// Enough for every shard of a 282-shard checkpoint beside a drafter; files beyond it are mapped
/// all the same and only lose their name in the SIGBUS message.
const MAX_REGIONS: usize = 512;
static REGIONS: [Region; MAX_REGIONS] = [const {
    Region {
        len: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        name: AtomicPtr::new(std::ptr::null_mut()),
    }
}; MAX_REGIONS];

fn register(start: usize, len: usize, path: &Path) -> Option<usize> {
    // The slot is claimed with a length that no address can match before start and name are set.
    let slot = REGIONS.iter().position(|region| {
        region.len.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    let region = &REGIONS[slot];
    region.start.store(start, Ordering::Relaxed);
    // The name is leaked: the handler may read it at any time.
    let name = Box::leak(Box::new(path.display().to_string()));
    region.name.store(name, Ordering::Relaxed);
    region.len.store(len.max(1), Ordering::Release);
    Some(slot)
}

fn install_sigbus_handler() {
    // SAFETY: `action` is fully initialised (zeroed is a valid sigaction), the handler has the
    // SA_SIGINFO signature and only calls async-signal-safe functions.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

extern "C" fn on_sigbus(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo_t to an SA_SIGINFO handler of SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let hit = REGIONS.iter().find(|region| {
        let len = region.len.load(Ordering::Acquire);
        let start = region.start.load(Ordering::Relaxed);
        // A mapping covers whole pages, so its end is rounded up.
        len > 0 && address >= start && address < start + len.next_multiple_of(4096)
    });
    let Some(region) = hit else {
        // Not one of our files: let the default action report it.
        // SAFETY: signal() is async-signal-safe; returning re-runs the faulting instruction.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    };
    // Ranks read on threads of their own: the first to fault reports, the others wait for the end.
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if REPORTED.swap(true, Ordering::AcqRel) {
        loop {
            // SAFETY: pause() is async-signal-safe.
            unsafe { libc::pause() };
        }
    }
    let name = region.name.load(Ordering::Relaxed);
    // SAFETY: names are leaked Strings that are never freed or changed.
    let name: &[u8] = unsafe { name.as_ref() }.map_or(b"a mapped file", |name| name.as_bytes());
    for part in [
        b"talon: ".as_slice(),
        name,
        b": shrank or became unreadable while it was in use; restore the file and start again\n",
    ] {
        // SAFETY: write() is async-signal-safe and the slice is valid for its length.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: _exit() is async-signal-safe.
    unsafe { libc::_exit(1) };
}
