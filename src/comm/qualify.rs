//! What a start finds out about the links between GPUs: which ways of moving bytes are true, which
//! variants sum right, and which of those is fastest for each number of rows.
//!
//! Links lie: copies that report success and move nothing, bits that flip, packets that never come.
//! So everything that is used is tried with known values first, and what fails is named and left out.

use super::{Choice, Variant};
use crate::error::{Error, Result};

/// A way to move bytes from one rank's memory to another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The driver's copy.
    Copy,
    /// Loads of a kernel on the receiving device.
    Load,
    /// Stores of a kernel on the sending device.
    Store,
}

impl Way {
    /// All ways.
    pub const ALL: [Self; 3] = [Self::Copy, Self::Load, Self::Store];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Load => "load",
            Self::Store => "store",
        }
    }
}

/// How long an exchange takes, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Of all exchanges.
    pub median: f64,
    /// The slowest.
    pub worst: f64,
}

/// The links between ranks, as a qualification uses them.
pub trait Links {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Whether kernels of one rank's device can touch another's memory, as the driver says.
    fn reaches(&self, from: usize, to: usize) -> bool;

    /// Moves words from one rank's memory to another's, where something else lay before; what lies
    /// there afterwards.
    ///
    /// # Errors
    /// If it reports a failure.
    fn carry(&mut self, way: Way, from: usize, to: usize, words: &[u32]) -> Result<Vec<u32>>;

    /// One exchange of the ranks' partial sums, `rows` rows of each; what each rank then has.
    ///
    /// # Errors
    /// If a wait times out.
    fn reduce(
        &mut self,
        variant: Variant,
        rows: usize,
        partials: &[Vec<f32>],
    ) -> Result<Vec<Vec<f32>>>;

    /// Times of `count` exchanges, one behind the other.
    ///
    /// # Errors
    /// If a wait times out.
    fn time(&mut self, variant: Variant, rows: usize, count: usize) -> Result<Times>;

    /// Begins anew after an exchange that failed.
    ///
    /// # Errors
    /// If the devices do not answer any more.
    fn reset(&mut self) -> Result<()>;
}

/// What to try.
#[derive(Debug, Clone, Copy)]
pub struct Plan<'a> {
    /// Numbers of rows, which rise.
    pub rows: &'a [usize],
    /// Values of a row.
    pub hidden: usize,
    /// Exchanges of each size with known sums.
    pub known_sums: usize,
    /// Exchanges of each size that are timed.
    pub timed: usize,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Qualified {
    /// The fastest right variant for each number of rows.
    pub choice: Choice,
    /// What is wrong, and therefore not used.
    pub faults: Vec<String>,
    /// Of the right variants: rows, variant, times.
    pub times: Vec<(usize, Variant, Times)>,
}

/// Words of a copy that is compared.
const CARRIED: usize = 64 << 10;

/// Tries all links and variants; `tell` is called with each fault as it is found.
///
/// # Errors
/// Runtime error if no variant is right, with what is wrong with each.
pub fn qualify(
    links: &mut dyn Links,
    plan: &Plan,
    tell: &mut dyn FnMut(&str),
) -> Result<Qualified> {
    let mut faults = Vec::new();
    let mut found = |fault: String, faults: &mut Vec<String>| {
        tell(&fault);
        faults.push(fault);
    };
    let carried = check_links(links);
    let no_peers = carried.is_some();
    if let Some(fault) = carried {
        found(fault, &mut faults);
    }
    let mut right = Vec::new();
    for variant in Variant::ALL {
        if no_peers && variant.needs_peer_access() {
            continue;
        }
        match check_sums(links, variant, plan) {
            Ok(()) => right.push(variant),
            Err(error) => {
                found(format!("{variant}: {error}"), &mut faults);
                links.reset()?;
            }
        }
    }
    let mut times = Vec::new();
    // In turn, so that what changes with time changes for all.
    for rows in plan.rows {
        for variant in right.clone() {
            match links.time(variant, *rows, plan.timed) {
                Ok(time) => times.push((*rows, variant, time)),
                Err(error) => {
                    found(format!("{variant}: {error}"), &mut faults);
                    right.retain(|other| *other != variant);
                    links.reset()?;
                }
            }
        }
    }
    times.retain(|(_, variant, _)| right.contains(variant));
    let fastest = |rows: usize| {
        let of_rows = times.iter().filter(|(of, _, _)| *of == rows);
        let by_time = |a: &&(usize, Variant, Times), b: &&(usize, Variant, Times)| {
            a.2.median.total_cmp(&b.2.median)
        };
        of_rows.min_by(by_time).map(|(rows, variant, _)| (*rows, *variant))
    };
    let steps = plan.rows.iter().filter_map(|rows| fastest(*rows)).collect();
    let Some(choice) = Choice::of(steps) else {
        return Err(Error::runtime(format!(
            "the GPUs cannot exchange anything: {}; check the cards with nvidia-smi and dmesg",
            faults.join("; ")
        )));
    };
    Ok(Qualified { choice, faults, times })
}

/// Tries the known sums of a choice again: what a start does that goes by an earlier qualification.
///
/// # Errors
/// Runtime error that says what is wrong.
pub fn check_choice(links: &mut dyn Links, choice: &Choice, plan: &Plan) -> Result<()> {
    if choice.needs_peer_access()
        && let Some(fault) = check_links(links)
    {
        return Err(Error::runtime(fault));
    }
    for variant in Variant::ALL {
        let rows: Vec<usize> =
            plan.rows.iter().copied().filter(|rows| choice.variant(*rows) == variant).collect();
        check_sums(links, variant, &Plan { rows: &rows, ..*plan })
            .map_err(|error| Error::runtime(format!("{variant}: {error}")))?;
    }
    Ok(())
}

/// The first link that is not true, if any.
fn check_links(links: &mut dyn Links) -> Option<String> {
    let ranks = links.ranks();
    let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
    for (from, to) in pairs.filter(|(from, to)| from != to) {
        if !links.reaches(from, to) {
            return Some(format!(
                "rank {from}'s GPU cannot reach rank {to}'s memory (no peer access, says the driver)"
            ));
        }
        for way in Way::ALL {
            let words = pattern(from * 64 + to * 8 + way as usize, CARRIED);
            let name = way.name();
            let arrived = match links.carry(way, from, to, &words) {
                Ok(arrived) => arrived,
                Err(error) => return Some(format!("{name} from rank {from} to {to}: {error}")),
            };
            let wrong = words.iter().zip(&arrived).filter(|(a, b)| a != b).count();
            if arrived.len() != CARRIED || wrong == CARRIED {
                return Some(format!(
                    "{name} from rank {from} to {to} reported success and moved nothing"
                ));
            }
            if wrong > 0 {
                return Some(format!(
                    "{name} from rank {from} to {to}: {wrong} of {CARRIED} words arrived damaged"
                ));
            }
        }
    }
    None
}

/// Known sums of every size, each with other values.
fn check_sums(links: &mut dyn Links, variant: Variant, plan: &Plan) -> Result<()> {
    for rows in plan.rows {
        for turn in 0..plan.known_sums {
            let partials: Vec<Vec<f32>> = (0..links.ranks())
                .map(|rank| {
                    let seed = (turn * 64 + rank) * 64 + rows;
                    pattern(seed, rows * plan.hidden).into_iter().map(to_value).collect()
                })
                .collect();
            let expected = sum(&partials);
            let sums = links.reduce(variant, *rows, &partials)?;
            for (rank, sum) in sums.iter().enumerate() {
                let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
                let at = sum.iter().zip(&expected).position(differs);
                let at = at.or((sum.len() != expected.len()).then_some(0));
                if let Some(at) = at {
                    return Err(Error::runtime(format!(
                        "rank {rank} has a wrong sum in row {} of {rows}, column {}: expected {}, \
                         found {}",
                        at / plan.hidden,
                        at % plan.hidden,
                        expected[at],
                        sum.get(at).copied().unwrap_or(f32::NAN)
                    )));
                }
            }
        }
    }
    Ok(())
}

/// The sum in rank order, as the kernels do it, added to a residual of zero.
fn sum(partials: &[Vec<f32>]) -> Vec<f32> {
    let mut sums = partials[0].clone();
    for partial in &partials[1..] {
        sums.iter_mut().zip(partial).for_each(|(sum, value)| *sum += value);
    }
    sums.iter_mut().for_each(|sum| *sum += 0.0);
    sums
}

/// Words that all differ, by seed.
fn pattern(seed: usize, count: usize) -> Vec<u32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    (0..count).map(word).collect()
}

/// A value from -1 to 1, of many magnitudes.
fn to_value(word: u32) -> f32 {
    let fraction = (word >> 8) as f32 / (1 << 23) as f32 - 1.0;
    fraction * (-((word & 15) as f32)).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Links of a box that fails in one way.
    #[derive(Default)]
    struct Box {
        fails: Option<Fails>,
        resets: usize,
    }

    enum Fails {
        NoAccess,
        NoOp(Way),
        Damaged(Way),
        CopyError,
        WrongSum(Variant),
        LastBit(Variant),
        Stalls(Variant),
        StallsWhenTimed(Variant),
        Everything,
    }

    impl Links for Box {
        fn ranks(&self) -> usize {
            4
        }

        fn reaches(&self, from: usize, to: usize) -> bool {
            !matches!(self.fails, Some(Fails::NoAccess) if from == 1 && to == 3)
        }

        fn carry(&mut self, way: Way, from: usize, to: usize, words: &[u32]) -> Result<Vec<u32>> {
            let mut arrived = words.to_vec();
            match &self.fails {
                Some(Fails::NoOp(fails)) if *fails == way && (from, to) == (2, 0) => {
                    arrived.iter_mut().for_each(|word| *word = !*word);
                }
                Some(Fails::Damaged(fails)) if *fails == way && (from, to) == (0, 1) => {
                    arrived[777] ^= 1;
                }
                Some(Fails::CopyError) => return Err(Error::runtime("cuMemcpyPeer: unknown")),
                _ => {}
            }
            Ok(arrived)
        }

        fn reduce(
            &mut self,
            variant: Variant,
            rows: usize,
            partials: &[Vec<f32>],
        ) -> Result<Vec<Vec<f32>>> {
            let mut sums = vec![sum(partials); 4];
            match &self.fails {
                Some(Fails::WrongSum(fails)) if *fails == variant && rows == 4 => sums[2][9] = 7.0,
                Some(Fails::LastBit(fails)) if *fails == variant => {
                    sums[3][0] = f32::from_bits(sums[3][0].to_bits() ^ 1);
                }
                Some(Fails::Stalls(fails)) if *fails == variant => {
                    return Err(Error::runtime("rank 0 waited 1.0 s for rank 2"));
                }
                Some(Fails::Everything) => sums.iter_mut().for_each(|sum| sum[0] += 1.0),
                _ => {}
            }
            Ok(sums)
        }

        fn time(&mut self, variant: Variant, rows: usize, _count: usize) -> Result<Times> {
            if let Some(Fails::StallsWhenTimed(fails)) = &self.fails
                && *fails == variant
                && rows == 4
            {
                return Err(Error::runtime("rank 1 waited 1.0 s for rank 2"));
            }
            // Push is fastest for few rows, owner for many, staged never.
            let rows = rows as f64;
            let median = match variant {
                Variant::Push => 5.0 + 4.0 * rows,
                Variant::Pull => 8.0 + 4.0 * rows,
                Variant::Owner => 9.0 + rows,
                Variant::Staged => 40.0 + rows,
            };
            Ok(Times { median, worst: 2.0 * median })
        }

        fn reset(&mut self) -> Result<()> {
            self.resets += 1;
            Ok(())
        }
    }

    const PLAN: Plan = Plan { rows: &[1, 2, 4], hidden: 16, known_sums: 2, timed: 10 };

    fn try_box(fails: Option<Fails>) -> (Result<Qualified>, usize, Vec<String>) {
        let mut links = Box { fails, resets: 0 };
        let mut told = Vec::new();
        let found = qualify(&mut links, &PLAN, &mut |fault| told.push(fault.to_owned()));
        (found, links.resets, told)
    }

    #[test]
    fn the_fastest_variant_of_each_size_is_chosen() {
        let (found, resets, told) = try_box(None);
        let found = found.expect("nothing is wrong");
        assert_eq!((found.faults.len(), resets, told.len()), (0, 0, 0));
        assert_eq!(found.choice.summary(), "push up to 1 rows, then owner");
        assert_eq!(found.times.len(), 12);
    }

    #[test]
    fn links_that_lie_are_named_and_only_the_host_is_used() {
        let cases = [
            (Fails::NoAccess, "rank 1's GPU cannot reach rank 3's memory"),
            (Fails::NoOp(Way::Copy), "copy from rank 2 to 0 reported success and moved nothing"),
            (Fails::NoOp(Way::Store), "store from rank 2 to 0 reported success and moved nothing"),
            (Fails::Damaged(Way::Load), "load from rank 0 to 1: 1 of 65536 words arrived damaged"),
            (Fails::CopyError, "copy from rank 0 to 1: cuMemcpyPeer: unknown"),
        ];
        for (fails, expected) in cases {
            let (found, _, told) = try_box(Some(fails));
            let found = found.expect("the host's memory works");
            assert_eq!(
                found.choice,
                Choice::of(vec![(1, Variant::Staged), (2, Variant::Staged), (4, Variant::Staged)])
                    .expect("rising")
            );
            assert!(found.faults[0].starts_with(expected), "{:?}", found.faults);
            assert_eq!(told, found.faults);
        }
    }

    #[test]
    fn variants_that_sum_wrong_or_stall_are_named_and_left_out() {
        let cases = [
            (
                Fails::WrongSum(Variant::Owner),
                "owner: rank 2 has a wrong sum in row 0 of 4, column 9",
                "push",
            ),
            (
                Fails::LastBit(Variant::Push),
                "push: rank 3 has a wrong sum in row 0 of 1, column 0",
                "owner",
            ),
            (Fails::Stalls(Variant::Push), "push: rank 0 waited 1.0 s for rank 2", "owner"),
            (Fails::StallsWhenTimed(Variant::Owner), "owner: rank 1 waited", "push"),
        ];
        for (fails, expected, largest) in cases {
            let (found, resets, _) = try_box(Some(fails));
            let found = found.expect("others work");
            assert!(found.faults[0].starts_with(expected), "{:?}", found.faults);
            assert_eq!((found.faults.len(), resets), (1, 1));
            assert_eq!(found.choice.variant(4).name(), largest);
        }
    }

    #[test]
    fn a_box_where_nothing_works_is_refused() {
        let (found, _, _) = try_box(Some(Fails::Everything));
        let error = found.expect_err("all sums are wrong").to_string();
        for variant in Variant::ALL {
            assert!(error.contains(&format!("{variant}: rank 0 has a wrong sum")), "{error}");
        }
    }

    #[test]
    fn an_earlier_choice_is_tried_again() {
        let choice = Choice::of(vec![(1, Variant::Push), (4, Variant::Owner)]).expect("rising");
        let check = |fails| check_choice(&mut Box { fails, resets: 0 }, &choice, &PLAN);
        assert_eq!(check(None), Ok(()));
        // Pull is not used.
        assert_eq!(check(Some(Fails::WrongSum(Variant::Pull))), Ok(()));
        let error = check(Some(Fails::WrongSum(Variant::Owner))).expect_err("owner is used");
        assert!(error.to_string().starts_with("owner: rank 2 has a wrong sum"), "{error}");
        assert!(check(Some(Fails::NoOp(Way::Copy))).is_err());
    }
}
