//! The checks, one function each, cheapest first.

mod container;
mod driver;
mod environment;
mod exchange;
mod gpus;
mod health;
mod host;
mod links;
mod paths;
mod speed;
mod storage;

use super::check::Check;
use super::facts::Facts;

type CheckFn = fn(&Facts) -> Check;

/// All of them, in the order of the report.
const CHECKS: [CheckFn; 45] = [
    driver::driver,
    driver::driver_match,
    driver::registry,
    paths::topology,
    paths::acs,
    paths::iommu,
    links::link,
    links::link_errors,
    links::bar1,
    gpus::gpus,
    gpus::partition,
    gpus::peer_access,
    gpus::users,
    gpus::room,
    gpus::persistence,
    health::power,
    health::throttle,
    health::clocks,
    health::temperature,
    health::memory_errors,
    health::kernel_log,
    speed::read_rate,
    speed::host_copies,
    speed::peer_copies,
    exchange::exchange,
    exchange::unfinished,
    host::power_saving,
    host::uvm,
    host::memory,
    host::memory_policy,
    host::huge_pages,
    host::governor,
    host::sleep_states,
    host::virtual_machine,
    storage::disk,
    storage::free_space,
    storage::page_cache,
    speed::disk_rate,
    container::memory_limit,
    container::cores,
    container::locked_memory,
    container::open_files,
    container::shared_memory,
    container::container,
    environment::environment,
];

/// What all of them say.
pub fn run(facts: &Facts) -> Vec<Check> {
    CHECKS.iter().map(|check| check(facts)).collect()
}

/// Why a check of GPUs has nothing to look at.
const NO_GPU: &str = "no NVIDIA GPU here";

/// MiB as GiB for people.
fn gib(mib: u64) -> String {
    format!("{:.0} GiB", mib as f64 / 1024.0)
}
