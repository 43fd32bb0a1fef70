//! How far a stage's output may be from that of the CPU backend, and whether it is.

use std::fmt::Write;

use crate::cuda::{Buffer, Route, Stored, decode_routes};

/// How far the outputs of a stage may be from the CPU's.
pub struct Bound {
    /// The stage.
    pub stage: &'static str,
    /// Relative RMS error of each row of outputs that the device keeps as f16, and as f32.
    pub half: f64,
    pub single: f64,
}

/// Both sides get the same inputs, and products of weights and f16 vectors are exact before they
/// are summed in f32. So what is left is:
/// - the order of f32 sums, and of the additions inside an mma: about 1e-6 for these lengths;
/// - fast exponentials: about 1e-6;
/// - one rounding of an output to f16: 1.9e-4 RMS over many values, never more than 2^-11; [`ONCE`];
/// - where f16 values lie between two sums of a stage, as much again: [`TWICE`].
const ONCE: f64 = 5e-4;
const TWICE: f64 = 1e-3;
/// Far from one rounding to f16, which would be a fault in what is summed in f32.
const SUM: f64 = 1e-4;

const BOUNDS: [Bound; 15] = [
    // Copies of BF16 values, and zeros.
    Bound { stage: "embed", half: 0.0, single: 0.0 },
    // The residual is one addition in f32.
    Bound { stage: "reduce_norm", half: ONCE, single: 0.0 },
    Bound { stage: "project_latents", half: ONCE, single: SUM },
    // The query is an f16 before W_UK is folded in, and W_UK is rounded to f16 where it is not BF16.
    Bound { stage: "project_queries", half: TWICE, single: SUM },
    Bound { stage: "score_keys", half: 0.0, single: SUM },
    // Lists of positions, from the same scores.
    Bound { stage: "select_keys", half: 0.0, single: 0.0 },
    // Probabilities are f16 before they weight the latents.
    Bound { stage: "attend", half: TWICE, single: SUM },
    // The merged parts are f16 before W_UV, which is rounded as W_UK.
    Bound { stage: "project_values", half: TWICE, single: SUM },
    Bound { stage: "project_output", half: 0.0, single: SUM },
    Bound { stage: "route", half: ONCE, single: SUM },
    Bound { stage: "expert_gate_up", half: ONCE, single: SUM },
    Bound { stage: "expert_down", half: 0.0, single: SUM },
    Bound { stage: "dense_gate_up", half: ONCE, single: SUM },
    Bound { stage: "dense_down", half: 0.0, single: SUM },
    Bound { stage: "head", half: 0.0, single: SUM },
];
/// A single value may be this many bounds away, counted from the RMS of the output and from itself.
const SINGLE_VALUE: f64 = 10.0;

/// The bound of a stage; nothing may differ in one that is not in the table.
pub fn bound_of(stage: &str) -> Bound {
    BOUNDS.into_iter().find(|bound| bound.stage == stage).unwrap_or(Bound {
        stage: "",
        half: 0.0,
        single: 0.0,
    })
}

/// What a stage has to leave in one buffer.
pub enum Wanted {
    /// The values of each row.
    Values(Buffer, Vec<Vec<f32>>),
    /// Experts of each row, and what each expert of the layer was chosen by.
    Routes { routes: Vec<Route>, choices: Vec<Vec<f64>>, used: usize },
    /// The arg-max of each row among the ids below `limit`; its logits are another output.
    Best { logits: Vec<Vec<f32>>, limit: usize },
}

/// How an output differs from the CPU's.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Judgement {
    /// Root of the squared errors over that of the squared values.
    pub relative_rms: f64,
    /// Largest absolute error.
    pub largest: f64,
    /// Choices that differ between candidates which the bound cannot tell apart.
    pub ties: usize,
    /// What is wrong, in a few words.
    pub fault: Option<String>,
}

impl Judgement {
    fn fault(text: String) -> Self {
        Self { fault: Some(text), ..Self::default() }
    }
}

impl Wanted {
    /// Where it is.
    pub fn buffer(&self) -> Buffer {
        match self {
            Wanted::Values(buffer, _) => *buffer,
            Wanted::Routes { .. } => Buffer::Routing,
            Wanted::Best { .. } => Buffer::Best,
        }
    }

    /// Compares `found`, as the device stores it for the first `rows` rows.
    pub fn judge(&self, found: &[u8], rows: usize, bound: &Bound) -> Judgement {
        let mut judged = match self {
            Wanted::Values(buffer, values) => {
                let bound = match buffer.stored() {
                    Stored::F16 | Stored::Activation => bound.half,
                    Stored::F32 => bound.single,
                    Stored::I32 => 0.0,
                };
                values_differ(&buffer.stored().decode(found), &values[..rows], bound)
            }
            Wanted::Routes { routes, choices, used } => {
                let experts = choices.first().map_or(0, Vec::len);
                match decode_routes(found, rows, experts, *used) {
                    Ok(found) => routes_differ(&found, &routes[..rows], choices, bound.single),
                    Err(fault) => Judgement::fault(fault),
                }
            }
            Wanted::Best { logits, limit } => best_differ(found, &logits[..rows], *limit, bound),
        };
        judged.fault = judged.fault.map(|fault| format!("{}: {fault}", self.buffer().name()));
        judged
    }
}

/// Compares values with those of each row. The bound holds for every row, as rows of attention
/// differ in size.
pub fn values_differ(found: &[f32], wanted: &[Vec<f32>], bound: f64) -> Judgement {
    let count: usize = wanted.iter().map(Vec::len).sum();
    if found.len() != count {
        return Judgement::fault(format!("{} values where the CPU has {count}", found.len()));
    }
    let mut judged = Judgement::default();
    let (mut errors, mut squares, mut lost) = (0.0, 0.0, 0);
    let mut rest = found;
    for (row, wanted) in wanted.iter().enumerate() {
        let (found, behind) = rest.split_at(wanted.len());
        rest = behind;
        let pairs = || found.iter().zip(wanted).map(|(f, w)| (f64::from(*f), f64::from(*w)));
        if let Some(at) = wanted.iter().position(|value| !value.is_finite()) {
            return Judgement::fault(format!("the CPU's value {at} of row {row} is not finite"));
        }
        if let Some(at) = found.iter().position(|value| !value.is_finite()) {
            lost += found.iter().filter(|value| !value.is_finite()).count();
            judged.fault.get_or_insert_with(|| format!("first value {at} of row {row}"));
            continue;
        }
        let of_row: f64 = pairs().map(|(found, wanted)| (found - wanted).powi(2)).sum();
        let size: f64 = pairs().map(|(_, wanted)| wanted * wanted).sum();
        errors += of_row;
        squares += size;
        let largest = pairs().map(|(found, wanted)| (found - wanted).abs()).fold(0.0, f64::max);
        judged.largest = judged.largest.max(largest);
        let rms = (size / wanted.len().max(1) as f64).sqrt();
        let far = pairs().position(|(found, wanted)| {
            (found - wanted).abs() > SINGLE_VALUE * bound * (rms + wanted.abs())
        });
        let relative = ratio(of_row, size);
        if (far.is_none() && relative <= bound) || judged.fault.is_some() {
            continue;
        }
        let mut fault =
            format!("relative RMS error {relative:.1e} in row {row}, at most {bound:.0e}");
        if let Some(at) = far {
            let (found, wanted) = (found[at], wanted[at]);
            let _ = write!(fault, "; value {at} is {found:.6e}, the CPU's {wanted:.6e}");
        }
        judged.fault = Some(fault);
    }
    judged.relative_rms = ratio(errors, squares);
    if lost > 0 {
        let first = judged.fault.unwrap_or_default();
        judged.fault =
            Some(format!("{lost} of {count} values were not written or are not finite; {first}"));
    }
    judged
}

/// Root of the errors over the squares, both summed.
fn ratio(errors: f64, squares: f64) -> f64 {
    if errors == 0.0 { 0.0 } else { (errors / squares).sqrt() }
}

/// Compares experts: the same ones, but for those whose choices are within `bound`, and in rows
/// with the same ones the weights.
fn routes_differ(found: &[Route], wanted: &[Route], choices: &[Vec<f64>], bound: f64) -> Judgement {
    let experts = |route: &Route| route.iter().map(|(expert, _)| *expert).collect::<Vec<usize>>();
    let weights = |route: &Route| route.iter().map(|(_, weight)| *weight).collect::<Vec<f32>>();
    let (mut ties, mut fault) = (0, None);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for (row, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        let (found_experts, wanted_experts) = (experts(found), experts(wanted));
        if found_experts == wanted_experts {
            ours.extend(weights(found));
            theirs.push(weights(wanted));
            continue;
        }
        let choice = |expert: &&usize| choices[row][**expert];
        let missing = wanted_experts.iter().filter(|e| !found_experts.contains(e));
        let best_missing = missing.clone().map(|e| choice(&e)).fold(f64::NEG_INFINITY, f64::max);
        let added = found_experts.iter().filter(|e| !wanted_experts.contains(e));
        let worst_added = added.map(|e| choice(&e)).fold(f64::INFINITY, f64::min);
        ties += missing.count();
        if best_missing - worst_added > bound && fault.is_none() {
            fault = Some(format!(
                "row {row} uses {found_experts:?}, the CPU {wanted_experts:?}, {:.1e} apart",
                best_missing - worst_added
            ));
        }
    }
    let mut judged = values_differ(&ours, &theirs, bound);
    judged.ties = ties;
    judged.fault = fault.or(judged.fault);
    judged
}

/// Compares the arg-max of each row, whose logit may be `bound` below the CPU's best.
fn best_differ(found: &[u8], logits: &[Vec<f32>], limit: usize, bound: &Bound) -> Judgement {
    let mut judged = Judgement::default();
    for (row, (found, logits)) in found.as_chunks::<8>().0.iter().zip(logits).enumerate() {
        let id = i32::from_ne_bytes([found[0], found[1], found[2], found[3]]);
        let logit = f32::from_ne_bytes([found[4], found[5], found[6], found[7]]);
        let counted = &logits[..limit];
        // Ties: the lower id.
        let best = (0..limit).rev().max_by(|a, b| counted[*a].total_cmp(&counted[*b]));
        let (Some(best), Some(chosen)) = (best, usize::try_from(id).ok().filter(|id| *id < limit))
        else {
            return Judgement::fault(format!("row {row} has id {id} of {limit}"));
        };
        let squares: f64 = logits.iter().map(|logit| f64::from(*logit).powi(2)).sum();
        let allowed = SINGLE_VALUE * bound.single * (squares / logits.len() as f64).sqrt();
        let below = f64::from(counted[best]) - f64::from(counted[chosen]);
        let error = (f64::from(logit) - f64::from(counted[chosen])).abs();
        if below > allowed || error.is_nan() || error > allowed {
            return Judgement::fault(format!(
                "row {row} has id {id} with {logit:.6e}, the CPU {best} with {:.6e}",
                counted[best]
            ));
        }
        judged.ties += usize::from(chosen != best);
        judged.largest = judged.largest.max(error);
    }
    judged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::encode_routes;

    fn judged(found: &[f32], wanted: &[f32], bound: f64) -> Judgement {
        values_differ(found, &[wanted.to_vec()], bound)
    }

    #[test]
    fn equal_values_have_no_error() {
        assert_eq!(judged(&[1.0, 0.0], &[1.0, 0.0], 0.0), Judgement::default());
        assert_eq!(judged(&[0.0], &[0.0], 0.0), Judgement::default());
    }

    #[test]
    fn errors_are_relative_to_the_whole_output() {
        let judgement = judged(&[3.0, 4.5], &[3.0, 4.0], 0.1);
        assert_eq!((judgement.relative_rms, judgement.largest), (0.1, 0.5));
        assert_eq!(judgement.fault, None);
        let fault = judged(&[3.0, 4.5], &[3.0, 4.0], 0.09).fault.expect("above the bound");
        assert_eq!(fault, "relative RMS error 1.0e-1 in row 0, at most 9e-2");
    }

    #[test]
    fn one_wrong_value_among_many_is_found() {
        let wanted = vec![1.0; 100_000];
        let mut found = wanted.clone();
        found[70_000] = 1.1;
        let judgement = judged(&found, &wanted, 1e-3);
        assert!(judgement.relative_rms < 1e-3, "{judgement:?}");
        assert!(
            judgement.fault.expect("a fault").contains("row 0, at most 1e-3; value 70000 is 1.1")
        );
    }

    #[test]
    fn a_wrong_row_of_small_values_is_found() {
        let wanted = vec![vec![100.0; 8], vec![0.01; 8]];
        let found = [[100.0; 8], [0.0101; 8]].concat();
        let judgement = values_differ(&found, &wanted, 1e-3);
        assert!(judgement.relative_rms < 1e-5, "{judgement:?}");
        let fault = judgement.fault.expect("a fault");
        assert!(fault.starts_with("relative RMS error 1.0e-2 in row 1"), "{fault}");
    }

    #[test]
    fn what_was_not_written_is_found() {
        let fault = judged(&[1.0, f32::NAN], &[1.0, 2.0], 1.0).fault.expect("a fault");
        assert!(fault.starts_with("1 of 2 values were not written"), "{fault}");
        let fault = values_differ(&[1.0], &[vec![1.0], vec![2.0]], 1.0).fault;
        assert_eq!(fault.as_deref(), Some("1 values where the CPU has 2"));
        let fault = judged(&[1.0], &[f32::INFINITY], 1.0).fault.expect("a fault");
        assert!(fault.contains("the CPU's value 0 of row 0"), "{fault}");
    }

    #[test]
    fn experts_may_differ_in_near_ties_only() {
        let wanted = vec![vec![(0, 0.5), (2, 0.5)]];
        let found = vec![vec![(0, 0.5), (1, 0.5)]];
        let judge = |choice: f64, found: &[Route]| {
            let choices = vec![vec![0.9, choice, 0.5, 0.1]];
            let wanted = Wanted::Routes { routes: wanted.clone(), choices, used: 2 };
            wanted.judge(&encode_routes(found, 4), 1, &bound_of("route"))
        };
        let near = judge(0.49999, &found);
        assert_eq!((near.ties, near.fault), (1, None));
        let fault = judge(0.4, &found).fault.expect("a fault");
        assert!(fault.starts_with("routing: row 0 uses [0, 1], the CPU [0, 2]"), "{fault}");
        assert_eq!(judge(0.4, &wanted), Judgement::default());
        let fault = judge(0.4, &[vec![(0, 0.5), (2, 0.51)]]).fault.expect("a wrong weight");
        assert!(fault.contains("row 0, at most 1e-4; value 1 is"), "{fault}");
    }

    #[test]
    fn the_arg_max_may_differ_in_near_ties_only() {
        let wanted = Wanted::Best { logits: vec![vec![1.0, 2.0, 2.0, 9.0]], limit: 3 };
        let judge = |id: i32, logit: f32| {
            let bytes = [id.to_ne_bytes(), logit.to_ne_bytes()].concat();
            wanted.judge(&bytes, 1, &bound_of("head"))
        };
        assert_eq!(judge(1, 2.0), Judgement::default());
        assert_eq!((judge(2, 2.0).ties, judge(2, 2.0).fault), (1, None));
        for (id, logit) in [(0, 1.0), (3, 9.0), (-1, f32::NAN), (1, 2.1), (1, f32::NAN)] {
            assert!(judge(id, logit).fault.is_some(), "{id} {logit}");
        }
    }
}
