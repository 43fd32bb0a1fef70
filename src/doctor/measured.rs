//! What was measured on this box: by a start (the exchanges between GPUs) and by `talon bench`.

use serde_json::Value;

use super::facts::number;
use super::root::View;
use crate::comm;

/// What is known.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// What the last qualification of the links found.
    pub links: Option<Exchanges>,
    /// The last result of `talon bench`.
    pub bench: Option<Value>,
    /// What an earlier start left that never came back from trying the links.
    pub unfinished: Option<String>,
}

/// The exchanges between GPUs, as they were qualified.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exchanges {
    /// The variant for each number of rows.
    pub choice: Vec<(u64, String)>,
    /// What was wrong.
    pub faults: Vec<String>,
    /// Rows, variant, microseconds.
    pub times: Vec<(u64, String, f64)>,
}

impl Measured {
    /// What earlier runs have left on this box, or what was recorded of another.
    pub fn read(view: &View) -> Self {
        let recorded = |file: &str| serde_json::from_slice(&view.bytes(file)?).ok();
        let (links, bench, unfinished) = if view.is_recorded() {
            (recorded("links.json"), recorded("last-bench.json"), view.text("links.trying"))
        } else {
            let text = |name| comm::read_cached(name);
            let json = |name| serde_json::from_str(&text(name)?).ok();
            (json("links.json"), json("last-bench.json"), text("links.trying"))
        };
        Self { links: links.as_ref().and_then(Exchanges::of), bench, unfinished }
    }
}

impl Exchanges {
    /// From what a qualification stores.
    fn of(stored: &Value) -> Option<Self> {
        let step = |step: &Value| Some((step[0].as_u64()?, step[1].as_str()?.to_owned()));
        let time = |time: &Value| {
            let variant = time["variant"].as_str()?.to_owned();
            Some((time["rows"].as_u64()?, variant, number(&time["median_us"])?))
        };
        let found = Self {
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
