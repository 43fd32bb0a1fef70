//! What the checks go by: the files, the PCI tree, what NVML tells, and what was measured.

use std::path::PathBuf;

use serde_json::Value;

use super::deep::{self, Asked, DEEP, Watch};
use super::measured::{self, Measured};
use super::pci::{PciDevice, PciTree};
use super::root::View;
use super::{Model, Room};
use crate::comm;
use crate::cuda::{self, GpuStates};
use crate::error::{Error, Result};

/// What measures again.
pub const DEEP_AGAIN: &str = "talon doctor --deep";

/// What a check may look at.
pub struct Facts {
    pub view: View,
    pub pci: PciTree,
    pub nvml: GpuStates,
    pub measured: Measured,
    /// The checkpoint that was asked about.
    pub model: Option<ModelFacts>,
}

/// A checkpoint, as far as checks look at it.
pub struct ModelFacts {
    pub folder: String,
    /// Of its tensors.
    pub bytes: u64,
    /// Share of it that is in memory; `None` if it is no files.
    pub resident: Option<f64>,
    /// What each of that many ranks' GPUs must have free for it, or why it cannot be shared so; `None`
    /// without GPUs.
    pub room: Option<(usize, std::result::Result<Room, String>)>,
}

/// What the published NVFP4 checkpoints of GLM-5.2 hold, in bytes: what a box is judged by unless
/// another model is named.
pub const FULL_MODEL_BYTES: u64 = 464_795_267_072;

impl Facts {
    /// Reads this box or a recorded one.
    pub fn read(view: View, model: Option<Model>) -> Self {
        let nvml = if view.is_recorded() { recorded_gpus(&view) } else { cuda::gpu_states() };
        let measured = Measured::read(&view, &nvml);
        let ranks = [8, 4, 2, 1].into_iter().find(|ranks| *ranks <= nvml.gpus.len());
        let model = model.map(|model| ModelFacts {
            room: ranks.map(|ranks| (ranks, (model.room)(ranks))),
            folder: model.folder,
            bytes: model.bytes,
            resident: model.resident,
        });
        let mut facts = Self { pci: PciTree::read(&view), nvml, measured, view, model };
        // On this box the load was some time ago; of a recorded one all is of one time.
        if facts.view.is_recorded() {
            facts.show_load();
        }
        facts
    }

    /// Measures this box, and takes what comes of it as what is known. What has not come back is told
    /// as of an earlier run, and is the result.
    ///
    /// # Errors
    /// Input error for a recorded box; interrupted, if somebody wants it.
    pub fn measure(&mut self, watch: &Watch) -> Result<Option<String>> {
        if self.view.is_recorded() {
            return Err(Error::input(
                "--deep measures this box and --root shows another: leave one of them out",
            ));
        }
        let folder = self.model.as_ref().map(|model| PathBuf::from(&model.folder));
        let asked = Asked {
            place: measured::place(&self.view, &self.nvml),
            model: folder.filter(|folder| folder.is_dir()),
        };
        let deep::Outcome { deep, hangs } = deep::measure(asked, watch)?;
        if let Ok(text) = serde_json::to_string(&deep) {
            comm::write_cached(DEEP, &text);
        }
        self.measured.take(deep);
        self.show_load();
        match &hangs {
            Some(what) => self.measured.unfinished = Some((what.clone(), DEEP_AGAIN)),
            None => {
                self.measured.unfinished.take_if(|(_, again)| *again == DEEP_AGAIN);
            }
        }
        Ok(hangs)
    }

    /// Gives each GPU the load under which it was looked at.
    fn show_load(&mut self) {
        for speed in self.measured.deep.iter().flat_map(|deep| &deep.gpus) {
            let is_it = |gpu: &&mut cuda::GpuState| gpu.pci.as_ref() == Some(&speed.pci);
            if let Some(gpu) = self.nvml.gpus.iter_mut().find(is_it)
                && speed.load.is_some()
            {
                gpu.load.clone_from(&speed.load);
            }
        }
    }

    /// NVIDIA's GPUs on the bus; only those that NVML shows where it shows any, since a container sees
    /// the whole bus.
    pub fn pci_gpus(&self) -> Vec<&PciDevice> {
        let all = self.pci.gpus();
        let shown = |device: &&PciDevice| {
            self.nvml.gpus.iter().any(|gpu| gpu.pci.as_ref() == Some(&device.address))
        };
        let some: Vec<&PciDevice> = all.iter().copied().filter(shown).collect();
        if some.is_empty() { all } else { some }
    }

    /// The number of GPUs.
    pub fn gpus(&self) -> usize {
        match self.nvml.gpus.len() {
            0 => self.pci.gpus().len(),
            shown => shown,
        }
    }

    /// Whether there is a GPU or a driver: else most checks have nothing to look at.
    pub fn has_gpu(&self) -> bool {
        self.gpus() > 0 || self.view.exists("proc/driver/nvidia")
    }

    /// Why NVML tells nothing.
    pub fn no_nvml(&self) -> String {
        match &self.nvml.error {
            Some(error) => format!("NVML tells nothing: {error}"),
            None => "NVML shows no GPU".into(),
        }
    }

    /// Bytes of weights that the box is judged by; `None` on a box without GPUs that was asked about
    /// no model.
    pub fn weight_bytes(&self) -> Option<u64> {
        let named = self.model.as_ref().map(|model| model.bytes);
        named.or_else(|| (self.gpus() > 0).then_some(FULL_MODEL_BYTES))
    }

    /// "GPU 3" for the GPU of an address, or the address.
    pub fn gpu_name(&self, address: &str) -> String {
        let is_it = |gpu: &cuda::GpuState| gpu.pci.as_deref() == Some(address);
        let found = self.nvml.gpus.iter().position(is_it);
        found.map_or_else(|| address.to_owned(), |index| format!("GPU {index}"))
    }
}

/// What a recorded box has in nvml.json.
fn recorded_gpus(view: &View) -> GpuStates {
    let unread = |error: String| GpuStates { error: Some(error), ..GpuStates::default() };
    match view.bytes("nvml.json") {
        None => unread("not recorded (nvml.json)".into()),
        Some(bytes) => serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| unread(format!("nvml.json: {error}"))),
    }
}

/// A finite number of a JSON value.
pub fn number(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite())
}
