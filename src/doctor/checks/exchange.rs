//! The exchanges between GPUs, as they were last qualified and timed on this box.

use super::NO_GPU;
use crate::doctor::check::{Check, Subject};
use crate::doctor::facts::Facts;

/// Microseconds of an exchange of one row. Published: 6 to 12 between 4 and 8 cards
/// (facts/performance.md §2.5); the driver's own way through the host takes ten times that.
const SLOW_US: f64 = 16.0;
const STAGED_US: f64 = 30.0;

pub fn exchange(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "exchange",
        expected: "right sums in every variant, from GPU to GPU, one row in at most 16 us",
        cost: "a step has 157 exchanges: 10 us more in each are 1.6 ms more in a step of 7",
        fix: "see acs, iommu, link and peer-settings; then talon bench --requalify measures again",
        renter: false,
    };
    match facts.gpus() {
        0 => return IS.unknown(if facts.has_gpu() { "no GPU is shown" } else { NO_GPU }),
        1 => return IS.ok("one GPU, which exchanges nothing"),
        _ => {}
    }
    let Some(links) = &facts.measured.links else {
        return IS.unknown(match &facts.measured.links_elsewhere {
            Some(why) => format!("not measured since this box has changed ({why})"),
            None => "not measured yet: talon doctor --deep does it, and a first talon bench".into(),
        });
    };
    if let Some(fault) = links.faults.first() {
        return IS.fail(fault);
    }
    let variant = links.variant(1).unwrap_or("?");
    if variant == "staged" {
        return IS.fail("through the host's memory (staged)");
    }
    match links.microseconds(1) {
        None => IS.unknown(format!("{variant}, and no time was kept")),
        Some(us) if us > STAGED_US => IS.fail(format!(
            "{variant}, {us:.1} us: so slow is only a driver that carries it through the host's memory"
        )),
        Some(us) if us > SLOW_US => IS.warn(format!("{variant}, {us:.1} us")),
        Some(us) => IS.ok(format!("{variant}, {us:.1} us")),
    }
}

pub fn unfinished(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "earlier-run",
        expected: "no measurement that never came back",
        cost: "measuring it again may hang or restart the box again",
        fix: "look at acs and iommu, and at power and risers of the GPUs",
        renter: false,
    };
    match &facts.measured.unfinished {
        None => IS.ok("none"),
        Some((what, again)) => {
            let fix =
                format!("{}; {again} tries it again, and forgets this if it ends well", IS.fix);
            IS.fail(format!("talon never came back from {what}")).by(fix)
        }
    }
}
