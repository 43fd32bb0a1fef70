//! What was measured on this box: by a start (the exchanges between GPUs), `talon bench` and `talon doctor --deep`. What was
//! measured on another, whose folder this user shares or took along, does not count.

use serde_json::{Value, json};

use super::date::date;
use super::deep::{DEEP, Deep};
use super::facts::{DEEP_AGAIN, number};
use super::fingerprint;
use super::root::View;
use crate::comm::{self, Breadcrumb, LinkBox, Trial};
use crate::cuda::{self, GpuState, GpuStates};

/// What is known.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// What the last qualification of the links found.
    pub links: Option<Exchanges>,
    /// Why there is one that does not count.
    pub links_elsewhere: Option<String>,
    /// The last result of `talon bench`.
    pub bench: Option<Value>,
    /// Why there is one that does not count.
    pub bench_elsewhere: Option<String>,
    /// What `talon doctor --deep` has measured, now or the last time.
    pub deep: Option<Deep>,
    /// What was tried on this box and never came back: what, and what tries it again.
    pub unfinished: Option<(String, &'static str)>,
}

/// The exchanges between GPUs, as they were qualified.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exchanges {
    /// GPUs between which they were.
    pub gpus: usize,
    /// The variant for each number of rows.
    pub choice: Vec<(u64, String)>,
    /// What was wrong.
    pub faults: Vec<String>,
    /// Rows, variant, microseconds.
    pub times: Vec<(u64, String, f64)>,
}

/// The box that is looked at, as far as measurements depend on it.
struct Here<'a> {
    fingerprint: Value,
    nvml: &'a GpuStates,
}

/// What an earlier run has left on this box, or what was recorded of another.
fn kept(view: &View, name: &str) -> Option<String> {
    if view.is_recorded() { view.text(name) } else { comm::read_cached(name) }
}

impl Measured {
    /// Reads what counts.
    pub fn read(view: &View, nvml: &GpuStates) -> Self {
        let fingerprint = match view.is_recorded() {
            true => fingerprint::recorded(view, nvml),
            false => fingerprint::fingerprint(),
        };
        let here = Here { fingerprint, nvml };
        let json = |name: &str| serde_json::from_str::<Value>(&kept(view, name)?).ok();
        let mut found = Self::default();
        if let Some(stored) = json("links.json") {
            let place = stored["box"].as_str().unwrap_or_default();
            let gpus = LinkBox::parse(place).map_or(0, |of| of.gpus.len());
            match here.is_not(place) {
                Some(why) => found.links_elsewhere = Some(why),
                None => found.links = Exchanges::of(gpus, &stored),
            }
        }
        if let Some(bench) = json(LAST_BENCH) {
            match here.has_not_run(&bench) {
                Some(why) => found.bench_elsewhere = Some(why),
                None => found.bench = Some(bench),
            }
        }
        if let Some(deep) =
            json(DEEP).and_then(|stored| serde_json::from_value::<Deep>(stored).ok())
            && here.is_not(&deep.place).is_none()
        {
            found.take(deep);
        }
        let again =
            [(Breadcrumb::LINKS, "talon bench --requalify"), (Breadcrumb::DOCTOR, DEEP_AGAIN)];
        let left = again.into_iter().find_map(|(name, again)| {
            let trial = Trial::parse(&kept(view, name)?);
            let stat = view.text(&format!("proc/{}/stat", trial.pid));
            let is_elsewhere =
                LinkBox::parse(&trial.place).is_some_and(|of| here.differs(&of).is_some());
            (!trial.is_running(stat.as_deref()) && !is_elsewhere).then_some((trial.what, again))
        });
        found.unfinished = left;
        found
    }

    /// The cards, as they are projected to.
    fn cards(&self, cards: usize) -> OwnCards {
        let links = self.links.iter().filter(|links| links.gpus == cards);
        let exchanges = links.flat_map(|links| {
            let mut rows: Vec<u64> = links.times.iter().map(|(rows, _, _)| *rows).collect();
            rows.sort_unstable();
            rows.dedup();
            rows.into_iter().filter_map(|rows| Some((rows as f64, links.microseconds(rows)?)))
        });
        OwnCards {
            bandwidth: self.deep.as_ref().and_then(|deep| deep.read_rate()),
            exchanges: exchanges.collect(),
        }
    }

    /// Takes what was measured as what is known.
    pub fn take(&mut self, deep: Deep) {
        self.links = deep.exchanges().or(self.links.take());
        self.deep = Some(deep);
    }
}

/// This box in comm's line, for what is kept with it.
pub fn place(view: &View, nvml: &GpuStates) -> String {
    let gpus = nvml.gpus.iter();
    LinkBox {
        talon: format!("{} {}", env!("CARGO_PKG_VERSION"), env!("TALON_COMMIT")),
        driver: format!("CUDA {}", nvml.cuda_version.as_deref().unwrap_or("?")),
        kernel: view.text("proc/sys/kernel/osrelease").unwrap_or_default(),
        gpus: gpus.filter_map(in_words).collect(),
        hidden: 0,
    }
    .text()
}

/// A GPU as comm's line has it.
fn in_words(gpu: &GpuState) -> Option<String> {
    Some(format!("{} {}", gpu.uuid.as_ref()?, gpu.pci.as_ref()?))
}

impl Here<'_> {
    /// Why the box that links were tried on, in comm's line, is not this one.
    fn is_not(&self, line: &str) -> Option<String> {
        match LinkBox::parse(line) {
            None => Some("it does not say on which box".into()),
            Some(of) => self.differs(&of),
        }
    }

    fn differs(&self, of: &LinkBox) -> Option<String> {
        let kernel = self.fingerprint["kernel"].as_str().unwrap_or_default();
        if of.kernel != kernel {
            return Some(format!("kernel was {}, is {kernel}", of.kernel));
        }
        // Without NVML nothing is known of the GPUs.
        let version = self.nvml.cuda_version.as_ref()?;
        let driver = format!("CUDA {version}");
        if of.driver.split(',').next() != Some(driver.as_str()) {
            return Some(format!("driver was {}, is {driver}", of.driver));
        }
        let gpus: Vec<String> = self.nvml.gpus.iter().filter_map(in_words).collect();
        let missing = of.gpus.iter().find(|gpu| !gpus.contains(gpu))?;
        Some(format!("{missing} is not here"))
    }

    /// Why a bench was not on this box.
    fn has_not_run(&self, bench: &Value) -> Option<String> {
        if let Some(why) = fingerprint::difference(&bench["box"], &self.fingerprint) {
            return Some(why);
        }
        let is_here = |uuid: &&Value| {
            self.nvml
                .gpus
                .iter()
                .any(|gpu| gpu.uuid.is_some() && gpu.uuid.as_deref() == uuid.as_str())
        };
        let missing = bench["gpus"].as_array()?.iter().find(|uuid| !is_here(uuid))?;
        Some(format!("{} is not here", missing.as_str().unwrap_or("a GPU")))
    }
}

impl Exchanges {
    /// From what a qualification of so many GPUs stores.
    fn of(gpus: usize, stored: &Value) -> Option<Self> {
        let step = |step: &Value| Some((step[0].as_u64()?, step[1].as_str()?.to_owned()));
        let time = |time: &Value| {
            let variant = time["variant"].as_str()?.to_owned();
            Some((time["rows"].as_u64()?, variant, number(&time["median_us"])?))
        };
        let found = Self {
            gpus,
            choice: stored["choice"].as_array()?.iter().filter_map(step).collect(),
            faults: stored["faults"]
                .as_array()?
                .iter()
                .filter_map(|fault| Some(fault.as_str()?.to_owned()))
                .collect(),
            times: stored["times"].as_array()?.iter().filter_map(time).collect(),
        };
        (!found.choice.is_empty()).then_some(found)
    }

    /// The variant that `rows` rows take.
    pub fn variant(&self, rows: u64) -> Option<&str> {
        let step = self.choice.iter().find(|(up_to, _)| rows <= *up_to);
        step.or(self.choice.last()).map(|(_, variant)| variant.as_str())
    }

    /// Microseconds of an exchange of `rows` rows in the variant that was chosen for it.
    pub fn microseconds(&self, rows: u64) -> Option<f64> {
        let variant = self.variant(rows)?;
        let is_it = |(of, other, _): &&(u64, String, f64)| *of == rows && other == variant;
        self.times.iter().find(is_it).map(|(_, _, us)| *us)
    }
}

/// What is known of this box's cards by measurement, for a projection to as many.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OwnCards {
    /// Bytes a second of plain reads of the slowest.
    pub bandwidth: Option<f64>,
    /// Microseconds of an exchange of all of them, by rising numbers of rows.
    pub exchanges: Vec<(f64, f64)>,
}

/// What was measured of this box, if it has `cards` GPUs, and more than one.
pub fn own_cards(cards: usize) -> Option<OwnCards> {
    let nvml = cuda::gpu_states();
    let is_such_a_box = cards > 1 && nvml.gpus.len() == cards;
    is_such_a_box.then(|| Measured::read(&View::of_this_box(), &nvml).cards(cards))
}

/// The name under which the last bench's result is kept.
const LAST_BENCH: &str = "last-bench.json";

/// Keeps what a bench report says in short, for later diagnoses.
pub fn keep_bench(report: &Value) {
    let summary = &report["summary"];
    let gpus: Vec<String> = match report["settings"]["backend"] == "cuda" {
        true => cuda::gpu_states().gpus.into_iter().filter_map(|gpu| gpu.uuid).collect(),
        false => Vec::new(),
    };
    let kept = json!({
        "schema": 1,
        "date": date(std::time::SystemTime::now()),
        "box": report["box"],
        "gpus": gpus,
        "model": report["model"],
        "settings": report["settings"],
        "tokens_per_second": summary["baseline"]["output_throughput"]["median"],
        "speculative_tokens_per_second": summary["speculative"]["output_throughput"]["median"],
        "step_ms": summary["baseline"]["step_ms"]["p50"],
    });
    comm::write_cached(LAST_BENCH, &kept.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_as_measured_and_exchanges_of_fewer_do_not_count() {
        let times = [(1, "push", 9.0), (1, "owner", 8.0), (4, "push", 12.0), (4, "owner", 14.0)];
        let links = Exchanges {
            gpus: 8,
            choice: vec![(2, "owner".into()), (16, "push".into())],
            faults: Vec::new(),
            times: times.map(|(rows, variant, us)| (rows, variant.to_owned(), us)).to_vec(),
        };
        let deep =
            serde_json::from_value(json!({ "gpus": [{ "read": 1.7e12 }, { "read": 1.6e12 }] }));
        let measured = Measured { links: Some(links), deep: deep.ok(), ..Measured::default() };
        let cards = measured.cards(8);
        assert_eq!(cards.exchanges, [(1.0, 8.0), (4.0, 12.0)]);
        assert_eq!(cards.bandwidth, Some(1.6e12));
        assert!(measured.cards(4).exchanges.is_empty());
        assert_eq!(Measured::default().cards(8), OwnCards::default());
    }
}
