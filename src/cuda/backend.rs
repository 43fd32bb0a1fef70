//! The backend: one rank, all ranks in lock-step on one device, or a thread for each rank.

use std::sync::Arc;
use std::time::Duration;

use super::fabric::{Fabric, FabricShape, Mischief};
use super::group::RankGroup;
use super::layout::MAX_ROWS;
use super::links::DeviceLinks;
use super::rank::{CudaOptions, CudaRank, RankComm};
use super::rank_thread::{Loaded, Task};
use super::runner::{BUCKETS, RowOutcome, Runner};
use super::{Device, MemoryPlan, driver_summary};
use crate::comm::{
    Breadcrumb, Choice, LinkBox, Plan, Qualified, Variant, check_choice, load_choice, qualify,
    store_choice,
};
use crate::error::{Error, Result};
use crate::model::{
    Backend, Draft, Drafted, FEATURE_POSITIONS, ModelConfig, ModelParams, RowResult, Step,
};

/// How ranks that share a device run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// In turn, on one stream: nothing ever waits.
    #[default]
    LockStep,
    /// As on devices of their own.
    Concurrent,
}

/// How the ranks of a model exchange.
#[derive(Debug, Clone)]
pub struct RanksOptions {
    /// The ranks' devices, in rank order; one may be there several times. None means those that the
    /// engine chooses.
    pub devices: Vec<usize>,
    /// How ranks on one device run.
    pub sharing: Sharing,
    /// The variant to use; `None` for the fastest of each size.
    pub reduce: Option<Variant>,
    /// Qualify the links though an earlier start on this box has.
    pub requalify: bool,
    /// How long a rank waits for another.
    pub timeout: Duration,
    /// Number of the first collective.
    pub first_epoch: u64,
    /// What tests make go wrong, while links are qualified and while the model runs.
    pub mischief: Option<Mischief>,
    /// Whether the driver's copies between devices do nothing and report success: for tests.
    pub copies_lie: bool,
}

impl Default for RanksOptions {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            sharing: Sharing::default(),
            reduce: None,
            requalify: false,
            timeout: Duration::from_secs(3),
            first_epoch: 1,
            mischief: None,
            copies_lie: false,
        }
    }
}

/// Exchanges with known sums, and timed ones, of each size at a start.
const KNOWN_SUMS: usize = 4;
const TIMED: usize = 500;

enum Drive {
    Here(Box<Runner>),
    Group(RankGroup),
}

/// The ranks as one backend.
pub struct CudaBackend {
    drive: Drive,
    loaded: Loaded,
    choice: Option<Arc<Choice>>,
}

impl CudaBackend {
    /// Loads one rank that runs without others, and captures all graphs; nothing is allocated on the
    /// device afterwards.
    ///
    /// # Errors
    /// Input error if the model does not fit, or this box or build cannot run it.
    pub fn start(
        config: &Arc<ModelConfig>,
        params: &ModelParams,
        options: &CudaOptions,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        let rank = CudaRank::load(config, params, options, None, progress)?;
        let runner = Box::new(Runner::new(vec![rank], 1)?);
        Ok(Self { loaded: Loaded::of(&runner)?, drive: Drive::Here(runner), choice: None })
    }

    /// Qualifies the links, loads all ranks and captures their graphs. `params` gives a rank's
    /// tensors; the device and rank of `options` are not looked at.
    ///
    /// # Errors
    /// As [`CudaBackend::start`]; runtime error that names the rank if one fails or stalls.
    pub fn start_ranks(
        config: &Arc<ModelConfig>,
        params: &dyn Fn(usize) -> Result<ModelParams>,
        options: &CudaOptions,
        ranks: &RanksOptions,
        progress: &dyn Fn(usize, usize),
    ) -> Result<Self> {
        let devices: Vec<Arc<Device>> =
            ranks.devices.iter().map(|device| Device::open(*device)).collect::<Result<_>>()?;
        let lock_step = shares_a_device(&ranks.devices) && ranks.sharing == Sharing::LockStep;
        if lock_step && ranks.devices.iter().any(|device| *device != ranks.devices[0]) {
            return Err(Error::input(format!(
                "--devices {:?}: ranks in lock-step are all on one GPU; use --shared-gpu concurrent",
                ranks.devices
            )));
        }
        let shape = FabricShape { rows: MAX_ROWS, hidden: config.hidden_size };
        let mut fabric = Fabric::new(&devices, shape, ranks.timeout, ranks.mischief)?;
        let choice = match ranks.reduce {
            Some(variant) => known_to_work(&mut fabric, variant, ranks, lock_step)?,
            // Nothing waits there, so there is nothing to time; both protocols are worth a run.
            None if lock_step => Choice::of(vec![(3, Variant::Push), (MAX_ROWS, Variant::Owner)])
                .unwrap_or_else(|| Choice::only(Variant::Push)),
            None => qualified(&mut fabric, ranks)?,
        };
        fabric.reset()?;
        let (fabric, choice) = (Arc::new(fabric), Arc::new(choice));
        let of_rank = |rank: usize| CudaOptions {
            device: ranks.devices[rank],
            rank,
            ranks: ranks.devices.len(),
            ..*options
        };
        let comm = |rank: usize| RankComm {
            fabric: Arc::clone(&fabric),
            rank,
            choice: Arc::clone(&choice),
        };
        let all = 0..ranks.devices.len();
        if lock_step {
            let of_one = ranks.devices.len();
            let load = |rank: usize| {
                let all = |bytes: usize, total: usize| progress(bytes, total * of_one);
                let (options, comm) = (of_rank(rank), Some(comm(rank)));
                CudaRank::load(config, &params(rank)?, &options, comm, &all)
            };
            let loaded = all.map(load).collect::<Result<Vec<_>>>()?;
            let runner = Box::new(Runner::new(loaded, ranks.first_epoch)?);
            let loaded = Loaded::of(&runner)?;
            return Ok(Self { drive: Drive::Here(runner), loaded, choice: Some(choice) });
        }
        let shares = all.map(|rank| Ok((params(rank)?, of_rank(rank), comm(rank))));
        let shares = shares.collect::<Result<Vec<_>>>()?;
        let (group, loaded) =
            RankGroup::start(config, shares, ranks.first_epoch, ranks.timeout, progress)?;
        Ok(Self { drive: Drive::Group(group), loaded, choice: Some(choice) })
    }

    /// What the memory of a rank's device is used for.
    pub fn plan(&self) -> MemoryPlan {
        self.loaded.plan
    }

    /// Bytes of weights that a step of one row reads on a rank.
    pub fn step_bytes(&self) -> usize {
        self.loaded.step_bytes
    }

    /// What one more routed expert adds to [`CudaBackend::step_bytes`], in all layers.
    pub fn expert_bytes(&self) -> usize {
        self.loaded.expert_bytes
    }

    /// Bytes a second of plain reads on the first rank's device, where the model is large enough to
    /// tell.
    pub fn read_roof(&self) -> Option<f64> {
        self.loaded.read_roof
    }

    /// Launches of a step of one row in a short context.
    pub fn launches(&self) -> usize {
        self.loaded.launches
    }

    /// How the ranks exchange, in words; `None` for one that is alone.
    pub fn reduce_summary(&self) -> Option<String> {
        self.choice.as_ref().map(|choice| choice.summary())
    }
}

/// Whether two ranks are on one device.
pub fn shares_a_device(devices: &[usize]) -> bool {
    devices.iter().enumerate().any(|(rank, device)| devices[..rank].contains(device))
}

/// A variant that was asked for, if its sums are right.
fn known_to_work(
    fabric: &mut Fabric,
    variant: Variant,
    ranks: &RanksOptions,
    lock_step: bool,
) -> Result<Choice> {
    let choice = Choice::only(variant);
    if !lock_step {
        let plan = Plan { rows: &BUCKETS, hidden: fabric.shape().hidden, known_sums: 1, timed: 0 };
        let mut links = DeviceLinks::new(fabric, ranks.copies_lie)?;
        check_choice(&mut links, &choice, &plan).map_err(|error| {
            Error::runtime(format!("--reduce {variant}: {error}; --reduce auto finds another way"))
        })?;
    }
    Ok(choice)
}

/// What an earlier start on this box has chosen, if it still sums right, else what this one finds.
fn qualified(fabric: &mut Fabric, ranks: &RanksOptions) -> Result<Choice> {
    let hidden = fabric.shape().hidden;
    let plan = Plan { rows: &BUCKETS, hidden, known_sums: KNOWN_SUMS, timed: TIMED };
    let fingerprint = fingerprint(fabric)?;
    let mut links = DeviceLinks::new(fabric, ranks.copies_lie)?;
    if !ranks.requalify && Breadcrumb::is_left(Breadcrumb::LINKS, &fingerprint) {
        log::warn!(
            "an earlier start ended while it tested the links between these GPUs, so nothing goes from \
             GPU to GPU now, which is slow; --requalify tests them again"
        );
        let choice = Choice::only(Variant::Staged);
        check_choice(&mut links, &choice, &Plan { known_sums: 1, ..plan })?;
        return Ok(choice);
    }
    let what = "trying the links between the GPUs";
    let _breadcrumb = Breadcrumb::leave(Breadcrumb::LINKS, &fingerprint, what);
    if !ranks.requalify
        && let Some(choice) = load_choice(&fingerprint)
    {
        let quick = Plan { known_sums: 1, ..plan };
        match check_choice(&mut links, &choice, &quick) {
            Ok(()) => {
                log::info!("links between GPUs, as an earlier start chose: {}", choice.summary());
                return Ok(choice);
            }
            Err(error) => {
                log::warn!("links between GPUs have changed: {error}; qualifying them anew");
                crate::comm::Links::reset(&mut links)?;
            }
        }
    }
    let found: Qualified = qualify(&mut links, &plan, &mut |fault| {
        log::warn!("links between GPUs: {fault}; not used");
    })?;
    for (rows, variant, times) in &found.times {
        log::debug!(
            "reduce_norm, {rows} rows, {variant}: median {:.1} us, worst {:.1} us",
            times.median,
            times.worst
        );
    }
    log::info!("links between GPUs, the fastest of what is right: {}", found.choice.summary());
    store_choice(&fingerprint, &found);
    Ok(found.choice)
}

/// What decides how fast links are: devices in rank order, driver, kernel, and this build.
fn fingerprint(fabric: &Fabric) -> Result<String> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let gpu = |rank: usize| {
        let device = fabric.device(rank);
        Ok(format!("{} {}", device.uuid(), device.pci_address()?))
    };
    let link_box = LinkBox {
        talon: format!("{} {}", env!("CARGO_PKG_VERSION"), env!("TALON_COMMIT")),
        driver: driver_summary(),
        kernel: kernel.trim().to_owned(),
        gpus: (0..fabric.ranks()).map(gpu).collect::<Result<_>>()?,
        hidden: fabric.shape().hidden,
    };
    Ok(link_box.text())
}

impl CudaBackend {
    fn run(&mut self, task: Task) -> Result<Vec<RowOutcome>> {
        match (&mut self.drive, task) {
            (Drive::Group(group), task) => group.run(task),
            (Drive::Here(runner), Task::Step(step)) => runner.step(&step),
            (Drive::Here(runner), Task::Draft(draft)) => runner.draft(&draft),
        }
    }
}

impl Backend for CudaBackend {
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        let result = |outcome: RowOutcome| RowResult {
            row: outcome.row,
            argmax: outcome.id,
            logits: outcome.logits,
        };
        Ok(self.run(Task::Step(step))?.into_iter().map(result).collect())
    }

    fn draft(&mut self, draft: Draft) -> Result<Vec<Drafted>> {
        let drafted = |outcome: RowOutcome| Drafted {
            token: outcome.id,
            probability: outcome.logit,
            logits: outcome.logits,
        };
        Ok(self.run(Task::Draft(draft))?.into_iter().map(drafted).collect())
    }

    fn feature_positions(&self) -> usize {
        FEATURE_POSITIONS
    }
}
