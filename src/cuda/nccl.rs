//! NCCL's all-reduce between the same GPUs: the yardstick that `talon kernels --comm` puts beside
//! talon's own exchanges. The library is loaded where there is one, and nothing else uses it.

use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUstream, cuLaunchHostFunc};

use super::backend::shares_a_device;
use super::check::check;
use super::library::Library;
use super::links::{LinkTime, SIZES, times_of};
use super::{Device, DeviceMemory, Event, Stream};
use crate::error::{Error, Result};

/// All-reduces of a size that are timed at most: a yardstick needs no rare cases.
const MOST_TIMED: usize = 2000;
/// All-reduces that are queued before the first may run, so that no launch is timed with them. The
/// first of them waits for the last rank's launch, and does not count. Streams hold about 1024 calls.
const CHAIN: usize = 51;
/// All-reduces of each size that come before: NCCL connects and loads its kernels in the first.
const WARM_UP: usize = 20;
/// How long one size may take, and the start. NCCL itself would wait for ever for a link that is broken.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to give everything back.
const LEAVING: Duration = Duration::from_secs(10);
/// A gate opens by itself after this, lest a launch that waits for the queue waits for ever.
const GATE_OPENS: Duration = Duration::from_secs(2);

/// `ncclFloat32` of `ncclDataType_t` in nccl.h.
const FLOAT32: c_int = 7;
/// `ncclSum` of `ncclRedOp_t`.
const SUM: c_int = 0;
/// `ncclSuccess` of `ncclResult_t`.
const SUCCESS: c_int = 0;

/// How long NCCL's all-reduces take.
#[derive(Debug, Clone, PartialEq)]
pub struct NcclTimes {
    /// The library's version, such as "2.27.5".
    pub version: String,
    /// One of each size, named `nccl`.
    pub times: Vec<LinkTime>,
}

/// Times `count` (but at most 2000) of NCCL's all-reduces of f32 at each size that talon's exchanges
/// are timed at, between these devices: the sum alone, as rank 0's stream sees it. `progress` is told
/// how many sizes were done, and of how many.
///
/// # Errors
/// Runtime error if two ranks share a device, if the library cannot be loaded, if a call of it fails
/// (by name, with its result), and if it does not come back: then its thread is left to itself.
pub fn measure_nccl(
    devices: &[usize],
    count: usize,
    progress: &dyn Fn(usize, usize),
) -> Result<NcclTimes> {
    if shares_a_device(devices) {
        return Err(Error::runtime("several ranks share a GPU, and NCCL takes each GPU once"));
    }
    let nccl = Functions::load(&library_name())?;
    let version = nccl.version()?;
    let devices = devices.to_vec();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let tell = |result| drop(sender.send(result)); // nobody listens after a time-out
        match Ranks::start(&nccl, &devices) {
            Ok(ranks) => ranks.measure(count.clamp(1, MOST_TIMED), &tell),
            Err(error) => tell(Err(error)),
        }
    });
    Ok(NcclTimes { version, times: collect(&receiver, PATIENCE, progress)? })
}

/// Takes the sizes' times until the thread that measures them has ended.
fn collect(
    receiver: &Receiver<Result<LinkTime>>,
    patience: Duration,
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<LinkTime>> {
    let (mut times, mut failure) = (Vec::new(), None);
    loop {
        let is_over = failure.is_some() || times.len() == SIZES.len();
        match receiver.recv_timeout(if is_over { LEAVING.min(patience) } else { patience }) {
            Ok(Ok(time)) => {
                times.push(time);
                progress(1, SIZES.len());
            }
            Ok(Err(error)) => failure = Some(error),
            Err(_) if is_over => return failure.map_or(Ok(times), Err),
            Err(RecvTimeoutError::Timeout) => {
                return Err(Error::runtime(format!(
                    "it did not come back within {} s, after {} of {} sizes",
                    patience.as_secs(),
                    times.len(),
                    SIZES.len()
                )));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::runtime("its thread ended early"));
            }
        }
    }
}

/// What the environment says, or the library's own name, which the loader looks for.
fn library_name() -> OsString {
    let named = std::env::var_os("TALON_NCCL").filter(|name| !name.is_empty());
    named.unwrap_or_else(|| "libnccl.so.2".into())
}

/// A communicator's handle.
type Comm = *mut c_void;

/// The functions that are used, as nccl.h declares them.
struct Functions {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    comm_init_all: unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int,
    comm_destroy: unsafe extern "C" fn(Comm) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        CUstream,
    ) -> c_int,
}

impl Functions {
    /// Loads the library of this name, or of this path, for as long as the process lives: NCCL keeps
    /// threads.
    ///
    /// # Errors
    /// Runtime error if it is not there, or lacks a function.
    fn load(name: &OsStr) -> Result<Self> {
        let library = Library::load(name).map_err(|why| {
            Error::runtime(format!(
                "its library cannot be loaded: {why}; LD_LIBRARY_PATH may hold its folder, or \
                 TALON_NCCL name the file"
            ))
        })?;
        let gap = |why: String| Error::runtime(format!("its library has a gap: {why}"));
        // SAFETY: each field has the type of its function.
        let functions = unsafe {
            Self {
                get_version: library.function(c"ncclGetVersion").map_err(gap)?,
                get_error_string: library.function(c"ncclGetErrorString").map_err(gap)?,
                comm_init_all: library.function(c"ncclCommInitAll").map_err(gap)?,
                comm_destroy: library.function(c"ncclCommDestroy").map_err(gap)?,
                group_start: library.function(c"ncclGroupStart").map_err(gap)?,
                group_end: library.function(c"ncclGroupEnd").map_err(gap)?,
                all_reduce: library.function(c"ncclAllReduce").map_err(gap)?,
            }
        };
        Ok(functions)
    }

    fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: writes one integer to a valid address.
        self.check(unsafe { (self.get_version)(&mut version) }, "ncclGetVersion")?;
        Ok(dotted(version))
    }

    /// Turns the result of the function `call` into ours.
    fn check(&self, result: c_int, call: &str) -> Result<()> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes any number; the texts are constants that end in NUL.
        let text = unsafe { (self.get_error_string)(result) };
        let text = if text.is_null() {
            "no description".into()
        } else {
            // SAFETY: as above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::runtime(format!("{call}: {text} (result {result})")))
    }
}

/// `version` as people write it: 22705 is "2.27.5", and 2804, as it was counted before 2.9, "2.8.4".
fn dotted(version: c_int) -> String {
    let major = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// One rank: values that are all 1, and where their sums go.
struct Rank {
    stream: Stream,
    ones: u64,
    sums: u64,
    _memory: DeviceMemory,
}

impl Rank {
    fn new(device: usize) -> Result<Self> {
        let device = Device::open(device)?;
        let ones: Vec<u8> = (0..most_values()).flat_map(|_| 1.0f32.to_ne_bytes()).collect();
        let memory = DeviceMemory::alloc(&device, 2 * ones.len())?;
        let stream = Stream::new(&device)?;
        let (start, sums) = (memory.address(), memory.address() + ones.len() as u64);
        stream.upload(start, &ones)?;
        Ok(Self { stream, ones: start, sums, _memory: memory })
    }
}

/// Values of the largest size.
fn most_values() -> usize {
    SIZES.iter().map(|(rows, hidden)| rows * hidden).max().unwrap_or(0)
}

/// All ranks, driven by one thread.
struct Ranks<'a> {
    nccl: &'a Functions,
    comms: Vec<Comm>,
    ranks: Vec<Rank>,
}

impl<'a> Ranks<'a> {
    fn start(nccl: &'a Functions, devices: &[usize]) -> Result<Self> {
        let ranks = devices.iter().map(|device| Rank::new(*device)).collect::<Result<Vec<_>>>()?;
        // They fit: the driver has opened them.
        let ordinals: Vec<c_int> = devices.iter().map(|device| *device as c_int).collect();
        let mut comms = vec![std::ptr::null_mut(); ordinals.len()];
        // SAFETY: reads as many numbers and writes as many handles as there are.
        let result = unsafe {
            (nccl.comm_init_all)(comms.as_mut_ptr(), ordinals.len() as c_int, ordinals.as_ptr())
        };
        nccl.check(result, "ncclCommInitAll")?;
        Ok(Self { nccl, comms, ranks })
    }

    /// Tells each size's times, or the first failure.
    fn measure(&self, count: usize, tell: &dyn Fn(Result<LinkTime>)) {
        for (rows, hidden) in SIZES {
            let time = self.time(rows * hidden, count);
            let failed = time.is_err();
            tell(time);
            if failed {
                break;
            }
        }
    }

    /// The times of `count` all-reduces of so many values.
    fn time(&self, values: usize, count: usize) -> Result<LinkTime> {
        let first = self.ranks[0].stream.device();
        let marks = (0..CHAIN).map(|_| Event::new(first)).collect::<Result<Vec<_>>>()?;
        for _ in 0..WARM_UP {
            self.all_reduce(values)?;
        }
        self.synchronize()?;
        self.check_sums(values)?;
        let mut durations = Vec::with_capacity(count + CHAIN);
        while durations.len() < count {
            self.chain(values, &marks, &mut durations)?;
        }
        durations.truncate(count);
        let bytes = values * size_of::<f32>();
        Ok(LinkTime { name: "nccl", bytes, count, times: times_of(durations) })
    }

    /// Runs an all-reduce before each mark on rank 0's stream, and adds the microseconds between the
    /// marks.
    fn chain(&self, values: usize, marks: &[Event], durations: &mut Vec<f64>) -> Result<()> {
        let stream = &self.ranks[0].stream;
        let gate = Gate::close(stream)?;
        for mark in marks {
            self.all_reduce(values)?;
            mark.record(stream)?;
        }
        gate.open();
        self.synchronize()?;
        for pair in marks.windows(2) {
            durations.push(f64::from(pair[1].milliseconds_since(&pair[0])?) * 1e3);
        }
        Ok(())
    }

    /// Puts one all-reduce into the streams of all ranks.
    fn all_reduce(&self, values: usize) -> Result<()> {
        // SAFETY: no arguments; the group ends below, whatever fails between.
        self.nccl.check(unsafe { (self.nccl.group_start)() }, "ncclGroupStart")?;
        let put_in = self.put_in(values);
        // SAFETY: a group has begun on this thread; all that its calls were given lives on.
        let ended = self.nccl.check(unsafe { (self.nccl.group_end)() }, "ncclGroupEnd");
        put_in.and(ended)
    }

    fn put_in(&self, values: usize) -> Result<()> {
        for (rank, comm) in self.ranks.iter().zip(&self.comms) {
            // SAFETY: both addresses have room for the largest size on the communicator's device,
            // and the stream is that device's.
            let result = unsafe {
                (self.nccl.all_reduce)(
                    rank.ones as *const c_void,
                    rank.sums as *mut c_void,
                    values,
                    FLOAT32,
                    SUM,
                    *comm,
                    rank.stream.handle(),
                )
            };
            self.nccl.check(result, "ncclAllReduce")?;
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.ranks.iter().try_for_each(|rank| rank.stream.synchronize())
    }

    /// The time of a wrong sum would be no yardstick.
    fn check_sums(&self, values: usize) -> Result<()> {
        let expected = self.ranks.len() as f32;
        let mut bytes = vec![0; values * size_of::<f32>()];
        for (index, rank) in self.ranks.iter().enumerate() {
            rank.stream.download(rank.sums, &mut bytes)?;
            let mut sums = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b));
            if let Some(sum) = sums.find(|sum| *sum != expected) {
                return Err(Error::runtime(format!(
                    "ncclAllReduce of {values} values: rank {index} has {sum} as the sum of {expected} \
                     ones"
                )));
            }
        }
        Ok(())
    }
}

impl Drop for Ranks<'_> {
    fn drop(&mut self) {
        for comm in &self.comms {
            // SAFETY: made in `start` and destroyed only here; streams and buffers go after it.
            let result = unsafe { (self.nccl.comm_destroy)(*comm) };
            if let Err(error) = self.nccl.check(result, "ncclCommDestroy") {
                log::debug!("{error}");
            }
        }
    }
}

/// Holds a stream until it is opened, or [`GATE_OPENS`] has passed. Otherwise the CPU, which launches
/// for all ranks in turn, would be timed instead of the GPUs.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    /// Puts a closed gate into the stream.
    fn close(stream: &Stream) -> Result<Arc<Self>> {
        let gate = Arc::new(Self::default());
        stream.device().make_current()?;
        let passed = Arc::into_raw(Arc::clone(&gate)).cast_mut().cast();
        // SAFETY: the function gets a gate that it owns, once; if it never runs, the gate leaks.
        let result = unsafe { cuLaunchHostFunc(stream.handle(), Some(wait_at_gate), passed) };
        check(result, "cuLaunchHostFunc", || stream.device().to_string())?;
        Ok(gate)
    }

    fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    /// Waits until it is open, but no longer than `most`.
    fn wait(&self, most: Duration) {
        let is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_timeout_while(is_open, most, |is_open| !*is_open));
    }
}

/// Runs on a thread of the driver; it may call nothing of CUDA.
///
/// # Safety
/// `gate` comes from `Arc::<Gate>::into_raw`, and nobody else takes it back.
unsafe extern "C" fn wait_at_gate(gate: *mut c_void) {
    // SAFETY: as the caller promises.
    let gate = unsafe { Arc::from_raw(gate.cast_const().cast::<Gate>()) };
    gate.wait(GATE_OPENS);
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn time(bytes: usize) -> LinkTime {
        LinkTime { name: "nccl", bytes, count: 1, times: times_of(vec![1.0]) }
    }

    /// What is made of these messages by a thread that ends after them.
    fn collected(messages: Vec<Result<LinkTime>>) -> Result<Vec<LinkTime>> {
        let (sender, receiver) = mpsc::channel();
        messages.into_iter().for_each(|message| sender.send(message).expect("a receiver"));
        drop(sender);
        collect(&receiver, SHORT, &|_, _| {})
    }

    #[test]
    fn ranks_that_share_a_gpu_are_refused_before_anything_is_loaded() {
        let error = measure_nccl(&[0, 1, 0], 10, &|_, _| {}).expect_err("GPU 0 twice");
        assert_eq!(error.to_string(), "several ranks share a GPU, and NCCL takes each GPU once");
    }

    #[test]
    fn a_library_that_is_not_there_is_a_plain_message() {
        let error = Functions::load(OsStr::new("libno-such-nccl.so.2")).err().expect("no library");
        let text = error.to_string();
        assert!(text.contains("cannot be loaded: libno-such-nccl.so.2: "), "{text}");
        assert!(text.contains("TALON_NCCL"), "{text}");
        assert!(Functions::load(OsStr::new("a\0b")).is_err());
    }

    #[test]
    fn a_library_that_is_not_nccl_is_a_plain_message() {
        let error = Functions::load(OsStr::new("libc.so.6")).err().expect("not NCCL");
        assert!(error.to_string().contains("ncclGetVersion"), "{error}");
    }

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(dotted(22705), "2.27.5");
        assert_eq!(dotted(20903), "2.9.3");
        assert_eq!(dotted(2804), "2.8.4");
    }

    #[test]
    fn a_failure_a_silent_thread_and_one_that_ends_early_are_messages() {
        let all: Vec<_> = (0..SIZES.len()).map(|size| Ok(time(size))).collect();
        assert_eq!(collected(all).map(|times| times.len()), Ok(SIZES.len()));
        let failure = Error::runtime("ncclAllReduce: x (result 1)");
        assert_eq!(collected(vec![Ok(time(0)), Err(failure.clone())]), Err(failure));
        assert_eq!(collected(vec![Ok(time(0))]), Err(Error::runtime("its thread ended early")));
        let (_sender, receiver) = mpsc::channel();
        let error = collect(&receiver, SHORT, &|_, _| {}).expect_err("silence");
        assert!(error.to_string().ends_with("after 0 of 9 sizes"), "{error}");
    }

    #[test]
    fn a_gate_waits_until_it_is_opened_or_its_time_is_up() {
        let gate = Arc::new(Gate::default());
        let began = Instant::now();
        gate.wait(SHORT);
        assert!(began.elapsed() >= SHORT);
        gate.open();
        let began = Instant::now();
        // SAFETY: the gate was made into a pointer for this call.
        unsafe { wait_at_gate(Arc::into_raw(Arc::clone(&gate)).cast_mut().cast()) };
        assert!(began.elapsed() < GATE_OPENS);
        assert_eq!(Arc::strong_count(&gate), 1);
    }
}
