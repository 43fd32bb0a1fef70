//! Reads the driver's management library (NVML): no GPU needs to be free, or is made to work.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

use super::gpu_state::{GpuProcess, GpuState, GpuStates, PeerState, Sample};
use super::library::Library;

/// Comes with the driver, beside libcuda.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// `NVML_SUCCESS` of nvml.h, and results that are no failure of a whole read.
const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;

/// A GPU's handle.
type Handle = *mut c_void;
type OfGpu<T> = unsafe extern "C" fn(Handle, *mut T) -> c_int;
type OfGpuByKind<T> = unsafe extern "C" fn(Handle, c_uint, *mut T) -> c_int;
type OfGpuTwo<A, B> = unsafe extern "C" fn(Handle, *mut A, *mut B) -> c_int;
type TextOfGpu = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_int;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    address: [u8; 32],
}

/// `nvmlMemory_t` and `nvmlBAR1Memory_t`, which differ in the order of what is not used here.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessInfo_t` of the third version of its function.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Process {
    pid: c_uint,
    memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The library, started.
pub struct Nvml(Library);

impl Nvml {
    /// Loads and starts it.
    ///
    /// # Errors
    /// Why it cannot be: it is not there, or not of the module's version.
    pub fn start() -> Result<Self, String> {
        let nvml = Self(Library::load(OsStr::new(LIBRARY))?);
        // SAFETY: the type of nvmlInit_v2; it may be called again.
        let start = unsafe { nvml.0.function::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")? };
        // SAFETY: as above.
        match unsafe { start() } {
            SUCCESS => Ok(nvml),
            result => Err(nvml.words(result)),
        }
    }

    /// All that it tells.
    pub fn read(&self) -> GpuStates {
        let handles = self.handles();
        let pairs = (0..handles.len()).flat_map(|a| (0..handles.len()).map(move |b| (a, b)));
        GpuStates {
            error: None,
            driver_version: self.system_text(c"nvmlSystemGetDriverVersion"),
            cuda_version: self.cuda_version(),
            gpus: handles.iter().map(|handle| self.gpu(*handle)).collect(),
            peers: pairs
                .filter(|(from, to)| from != to)
                .map(|(from, to)| PeerState {
                    from,
                    to,
                    read: self.peer(handles[from], handles[to], 0),
                    write: self.peer(handles[from], handles[to], 1),
                })
                .collect(),
        }
    }

    /// What changes from moment to moment, of all GPUs, with their addresses on the bus.
    pub fn samples(&self) -> Vec<(String, Sample)> {
        let of = |gpu: Handle| {
            let pci = self.one::<PciInfo>(gpu, c"nvmlDeviceGetPciInfo_v3")?;
            Some((address(&pci), self.sample(gpu)))
        };
        self.handles().into_iter().filter_map(of).collect()
    }

    fn handles(&self) -> Vec<Handle> {
        type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
        type ByIndex = unsafe extern "C" fn(c_uint, *mut Handle) -> c_int;
        // SAFETY: the types of these functions.
        let functions = unsafe {
            let count = self.0.function::<Count>(c"nvmlDeviceGetCount_v2");
            count.and_then(|count| {
                Ok((count, self.0.function::<ByIndex>(c"nvmlDeviceGetHandleByIndex_v2")?))
            })
        };
        let Ok((count, by_index)) = functions else { return Vec::new() };
        let mut gpus = 0;
        // SAFETY: writes one number to a valid address.
        if unsafe { count(&mut gpus) } != SUCCESS {
            return Vec::new();
        }
        let handle = |index| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: writes one handle to a valid address.
            (unsafe { by_index(index, &mut handle) } == SUCCESS).then_some(handle)
        };
        (0..gpus).filter_map(handle).collect()
    }

    fn gpu(&self, gpu: Handle) -> GpuState {
        let number = |name| self.one::<c_uint>(gpu, name);
        let is_set = |name| self.one::<c_int>(gpu, name).map(|value| value != 0);
        let watts = |name| number(name).map(|milliwatts| f64::from(milliwatts) / 1e3);
        let by_kind = |name, kind| self.by_kind::<c_uint>(gpu, name, kind);
        let memory = self.one::<Memory>(gpu, c"nvmlDeviceGetMemoryInfo");
        let bar1 = self.one::<Memory>(gpu, c"nvmlDeviceGetBAR1MemoryInfo");
        let remapped = self.remapped(gpu);
        GpuState {
            pci: self.one::<PciInfo>(gpu, c"nvmlDeviceGetPciInfo_v3").map(|pci| address(&pci)),
            name: self.text(gpu, c"nvmlDeviceGetName"),
            uuid: self.text(gpu, c"nvmlDeviceGetUUID"),
            vbios: self.text(gpu, c"nvmlDeviceGetVbiosVersion"),
            gsp_firmware: self.gsp_firmware(gpu),
            compute_capability: self
                .two::<c_int, c_int>(gpu, c"nvmlDeviceGetCudaComputeCapability")
                .map(|(major, minor)| (major.unsigned_abs(), minor.unsigned_abs())),
            memory_total_mib: memory.map(|memory| memory.total >> 20),
            memory_used_mib: memory.map(|memory| memory.used >> 20),
            bar1_total_mib: bar1.map(|bar1| bar1.total >> 20),
            ecc: self.two::<c_int, c_int>(gpu, c"nvmlDeviceGetEccMode").map(|(now, _)| now != 0),
            persistence: is_set(c"nvmlDeviceGetPersistenceMode"),
            mig: self.two::<c_uint, c_uint>(gpu, c"nvmlDeviceGetMigMode").map(|(now, _)| now != 0),
            compute_mode: self.one::<c_int>(gpu, c"nvmlDeviceGetComputeMode").map(compute_mode),
            pcie_gen_max: number(c"nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width_max: number(c"nvmlDeviceGetMaxPcieLinkWidth"),
            power_default_w: watts(c"nvmlDeviceGetPowerManagementDefaultLimit"),
            power_limit_w: watts(c"nvmlDeviceGetPowerManagementLimit"),
            power_enforced_w: watts(c"nvmlDeviceGetEnforcedPowerLimit"),
            sm_max_mhz: by_kind(c"nvmlDeviceGetMaxClockInfo", SM),
            memory_max_mhz: by_kind(c"nvmlDeviceGetMaxClockInfo", MEMORY),
            sm_offset_mhz: self.one::<c_int>(gpu, c"nvmlDeviceGetGpcClkVfOffset"),
            memory_offset_mhz: self.one::<c_int>(gpu, c"nvmlDeviceGetMemClkVfOffset"),
            ecc_uncorrected: self.uncorrected(gpu),
            retired_pages_pending: is_set(c"nvmlDeviceGetRetiredPagesPendingStatus"),
            remap_pending: remapped.map(|(pending, _)| pending),
            remap_failure: remapped.map(|(_, failure)| failure),
            processes: self.processes(gpu),
            now: self.sample(gpu),
            load: None,
        }
    }

    fn sample(&self, gpu: Handle) -> Sample {
        let number = |name| self.one::<c_uint>(gpu, name);
        let by_kind = |name, kind| self.by_kind::<c_uint>(gpu, name, kind);
        let busy = self.one::<Utilization>(gpu, c"nvmlDeviceGetUtilizationRates");
        Sample {
            pcie_gen: number(c"nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_width: number(c"nvmlDeviceGetCurrPcieLinkWidth"),
            replays: number(c"nvmlDeviceGetPcieReplayCounter").map(u64::from),
            power_w: number(c"nvmlDeviceGetPowerUsage").map(|mw| f64::from(mw) / 1e3),
            temperature_c: by_kind(c"nvmlDeviceGetTemperature", 0),
            sm_mhz: by_kind(c"nvmlDeviceGetClockInfo", SM),
            memory_mhz: by_kind(c"nvmlDeviceGetClockInfo", MEMORY),
            busy_percent: busy.map(|busy| busy.gpu),
            throttle: self
                .one::<u64>(gpu, c"nvmlDeviceGetCurrentClocksThrottleReasons")
                .map(throttle_reasons),
        }
    }

    /// One value of a GPU; `None` where the library or the GPU has none.
    fn one<T: Default>(&self, gpu: Handle, name: &CStr) -> Option<T> {
        let mut value = T::default();
        // SAFETY: nvml.h declares each name that is asked for with a handle and an address of `T`.
        let result = unsafe { self.0.function::<OfGpu<T>>(name).ok()?(gpu, &mut value) };
        (result == SUCCESS).then_some(value)
    }

    /// As [`Nvml::one`], of a kind of clock or sensor.
    fn by_kind<T: Default>(&self, gpu: Handle, name: &CStr, kind: c_uint) -> Option<T> {
        let mut value = T::default();
        // SAFETY: as above, with a number between, which may be any.
        let result =
            unsafe { self.0.function::<OfGpuByKind<T>>(name).ok()?(gpu, kind, &mut value) };
        (result == SUCCESS).then_some(value)
    }

    /// Two values of a GPU.
    fn two<A: Default, B: Default>(&self, gpu: Handle, name: &CStr) -> Option<(A, B)> {
        let (mut a, mut b) = (A::default(), B::default());
        // SAFETY: as above, with two addresses.
        let result = unsafe { self.0.function::<OfGpuTwo<A, B>>(name).ok()?(gpu, &mut a, &mut b) };
        (result == SUCCESS).then_some((a, b))
    }

    fn text(&self, gpu: Handle, name: &CStr) -> Option<String> {
        let mut bytes = [0u8; 128];
        // SAFETY: writes at most 127 bytes and a NUL into 128, the last of which stays NUL.
        let result = unsafe {
            self.0.function::<TextOfGpu>(name).ok()?(gpu, bytes.as_mut_ptr().cast(), 127)
        };
        (result == SUCCESS).then(|| until_nul(&bytes))
    }

    fn gsp_firmware(&self, gpu: Handle) -> Option<String> {
        // nvml.h promises at most 64 bytes.
        let mut bytes = [0u8; 256];
        type Version = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
        // SAFETY: writes at most 64 bytes, NUL included, into 256.
        let result = unsafe {
            let version = self.0.function::<Version>(c"nvmlDeviceGetGspFirmwareVersion").ok()?;
            version(gpu, bytes.as_mut_ptr().cast())
        };
        (result == SUCCESS).then(|| until_nul(&bytes))
    }

    fn system_text(&self, name: &CStr) -> Option<String> {
        let mut bytes = [0u8; 128];
        type Text = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        // SAFETY: writes at most 127 bytes and a NUL into 128, the last of which stays NUL.
        let result = unsafe { self.0.function::<Text>(name).ok()?(bytes.as_mut_ptr().cast(), 127) };
        (result == SUCCESS).then(|| until_nul(&bytes))
    }

    fn cuda_version(&self) -> Option<String> {
        let mut version = 0;
        type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: writes one number to a valid address.
        let result = unsafe {
            self.0.function::<Version>(c"nvmlSystemGetCudaDriverVersion_v2").ok()?(&mut version)
        };
        (result == SUCCESS).then(|| super::driver::dotted(version.unsigned_abs()))
    }

    /// Whether rows of memory wait to be replaced, and whether that has failed.
    fn remapped(&self, gpu: Handle) -> Option<(bool, bool)> {
        type Rows = unsafe extern "C" fn(
            Handle,
            *mut c_uint,
            *mut c_uint,
            *mut c_uint,
            *mut c_uint,
        ) -> c_int;
        let (mut correctable, mut uncorrectable, mut pending, mut failure) = (0, 0, 0, 0);
        // SAFETY: writes four numbers to valid addresses.
        let result = unsafe {
            let rows = self.0.function::<Rows>(c"nvmlDeviceGetRemappedRows").ok()?;
            rows(gpu, &mut correctable, &mut uncorrectable, &mut pending, &mut failure)
        };
        (result == SUCCESS).then_some((pending != 0, failure != 0))
    }

    /// Uncorrected errors (type 1) since the driver started (counter 0).
    fn uncorrected(&self, gpu: Handle) -> Option<u64> {
        type Errors = unsafe extern "C" fn(Handle, c_uint, c_uint, *mut u64) -> c_int;
        let mut count = 0;
        // SAFETY: writes one number to a valid address.
        let result = unsafe {
            self.0.function::<Errors>(c"nvmlDeviceGetTotalEccErrors").ok()?(gpu, 1, 0, &mut count)
        };
        (result == SUCCESS).then_some(count)
    }

    fn processes(&self, gpu: Handle) -> Option<Vec<GpuProcess>> {
        type Processes = unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_int;
        let mut found = [Process::default(); 256];
        let mut count = found.len() as c_uint;
        // SAFETY: writes at most as many processes as there is room for, and their number.
        let result = unsafe {
            let name = c"nvmlDeviceGetComputeRunningProcesses_v3";
            self.0.function::<Processes>(name).ok()?(gpu, &mut count, found.as_mut_ptr())
        };
        // u64::MAX is "not available", as in a container.
        let known = |bytes: u64| (bytes != u64::MAX).then_some(bytes >> 20);
        let process =
            |process: &Process| GpuProcess { pid: process.pid, memory_mib: known(process.memory) };
        let count = found.len().min(count as usize);
        matches!(result, SUCCESS | INSUFFICIENT_SIZE)
            .then(|| found[..count].iter().map(process).collect())
    }

    /// Whether `from` may read (kind 0) or write (kind 1) the memory of `to`.
    fn peer(&self, from: Handle, to: Handle, kind: c_uint) -> Option<String> {
        type Status = unsafe extern "C" fn(Handle, Handle, c_uint, *mut c_int) -> c_int;
        let mut status = 0;
        // SAFETY: writes one number to a valid address.
        let result = unsafe {
            self.0.function::<Status>(c"nvmlDeviceGetP2PStatus").ok()?(from, to, kind, &mut status)
        };
        (result == SUCCESS).then(|| peer_status(status).to_owned())
    }

    fn words(&self, result: c_int) -> String {
        type Words = unsafe extern "C" fn(c_int) -> *const c_char;
        // SAFETY: takes any number; the texts are constants that end in NUL.
        let text =
            unsafe { self.0.function::<Words>(c"nvmlErrorString").map(|words| words(result)) };
        match text {
            Ok(text) if !text.is_null() => {
                // SAFETY: as above.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
            _ => format!("result {result}"),
        }
    }
}

/// What the library tells of this box; its `error` says why it tells nothing.
pub fn gpu_states() -> GpuStates {
    match Nvml::start() {
        Ok(nvml) => nvml.read(),
        Err(error) => GpuStates { error: Some(error), ..GpuStates::default() },
    }
}

/// `NVML_CLOCK_SM` and `NVML_CLOCK_MEM`.
const SM: c_uint = 1;
const MEMORY: c_uint = 2;

/// "0000:17:00.0": /sys has four digits of the domain where this library has eight.
fn address(pci: &PciInfo) -> String {
    let text = until_nul(&pci.address);
    let function = text.rsplit_once('.').map_or("0", |(_, function)| function);
    format!("{:04x}:{:02x}:{:02x}.{function}", pci.domain, pci.bus, pci.device)
}

fn until_nul(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// `nvmlComputeMode_t`.
fn compute_mode(mode: c_int) -> String {
    match mode {
        0 => "default",
        1 | 3 => "exclusive",
        2 => "prohibited",
        _ => "unknown",
    }
    .to_owned()
}

/// `nvmlGpuP2PStatus_t`.
fn peer_status(status: c_int) -> &'static str {
    match status {
        0 => "ok",
        1 => "chipset not supported",
        2 => "GPU not supported",
        3 => "topology not supported",
        4 => "disabled by a registry key",
        5 => "not supported",
        _ => "unknown",
    }
}

/// `nvmlClocksEventReasons` by their bits.
fn throttle_reasons(bits: u64) -> Vec<String> {
    const NAMES: [&str; 9] = [
        "idle",
        "clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal",
        "hw_thermal",
        "hw_power_brake",
        "display_clocks",
    ];
    let is_set = |(bit, _): &(usize, &&str)| bits >> bit & 1 == 1;
    NAMES.iter().enumerate().filter(is_set).map(|(_, name)| (*name).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<PciInfo>(), 68);
        assert_eq!(size_of::<Memory>(), 24);
        assert_eq!(size_of::<Process>(), 24);
    }

    #[test]
    fn addresses_are_those_of_sys() {
        let mut pci = PciInfo { domain: 0, bus: 0xc1, device: 0, ..PciInfo::default() };
        pci.address[..16].copy_from_slice(b"00000000:C1:00.0");
        assert_eq!(address(&pci), "0000:c1:00.0");
        assert_eq!(address(&PciInfo { address: [b'x'; 32], ..pci }), "0000:c1:00.0");
    }

    #[test]
    fn bits_have_names() {
        assert_eq!(throttle_reasons(0x81), ["idle", "hw_power_brake"]);
        assert!(throttle_reasons(0).is_empty());
        assert_eq!(peer_status(0), "ok");
    }

    #[test]
    fn a_box_without_the_library_says_why() {
        let states = gpu_states();
        assert!(states.error.is_some() || states.driver_version.is_some(), "{states:?}");
    }
}
