//! Promise: what is sampled has the target's law, with and without drafts, and a seeded run gives
//! the same tokens either way.
//!
//! The law is known where the target is a Markov chain: a backend whose logits are a table, indexed
//! by the last token, under the same decode loop as the real one.

#[path = "common/engines.rs"]
mod engines;

use engines::{Guesser, Random, demo_engine, golden, greedy, run, run_plain, soak};
use talon::engine::{DraftChoice, Flow, Generation, Limits, Request, Sampling, generate_on};
use talon::error::Result;
use talon::model::{Backend, Draft, Drafted, Output, RowResult, Step};
use talon::spec::{History, ModelDrafter, Policy, Proposer};

const STATES: usize = 8;
const DRAWS: usize = 200_000;

/// The logits after each token. Every row has its own order of likeliness.
fn table() -> Vec<Vec<f32>> {
    let logit = |from: usize, to: usize| ((from * 3 + to * 5) % STATES) as f32 * 0.4;
    (0..STATES).map(|from| (0..STATES).map(|to| logit(from, to)).collect()).collect()
}

struct Markov(Vec<Vec<f32>>);

impl Backend for Markov {
    fn step(&mut self, step: Step) -> Result<Vec<RowResult>> {
        let wanted = step.rows.iter().enumerate().filter(|(_, row)| row.output != Output::None);
        let result = |(row, token): (usize, u32)| {
            let logits = self.0[token as usize].clone();
            RowResult { row, argmax: likeliest(&logits), logits }
        };
        Ok(wanted.map(|(i, row)| result((i, row.token))).collect())
    }

    fn draft(&mut self, _draft: Draft) -> Result<Vec<Drafted>> {
        unreachable!("the proposers of this file guess themselves")
    }

    fn feature_positions(&self) -> usize {
        0
    }
}

fn likeliest(logits: &[f32]) -> u32 {
    (0..STATES).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a state") as u32
}

/// The exact law after each token, filters applied as their definitions say.
fn law(sampling: &Sampling) -> Vec<Vec<f64>> {
    let row = |logits: &Vec<f32>| {
        let weights: Vec<f64> =
            logits.iter().map(|logit| f64::from(*logit / sampling.temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut probabilities: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let mut order: Vec<usize> = (0..STATES).collect();
        order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]));
        if sampling.top_k > 0 {
            order.drain(sampling.top_k..).for_each(|id| probabilities[id] = 0.0);
        }
        let kept: f64 = probabilities.iter().sum();
        let mut before = 0.0;
        for id in order {
            let probability = probabilities[id];
            if before >= f64::from(sampling.top_p) * kept {
                probabilities[id] = 0.0;
            }
            before += probability;
        }
        let best = probabilities.iter().copied().fold(0.0, f64::max);
        let least = f64::from(sampling.min_p) * best;
        probabilities.iter_mut().filter(|p| **p < least).for_each(|p| *p = 0.0);
        let kept: f64 = probabilities.iter().sum();
        probabilities.into_iter().map(|p| p / kept).collect()
    };
    table().iter().map(row).collect()
}

/// χ² of counts against probabilities, one multinomial a row, with its degrees of freedom.
fn chi_square(counts: &[Vec<usize>], law: &[Vec<f64>]) -> (f64, f64) {
    let (mut statistic, mut degrees) = (0.0, 0.0);
    for (counts, law) in counts.iter().zip(law) {
        let total: usize = counts.iter().sum();
        let possible = law.iter().filter(|p| **p > 0.0).count();
        degrees += possible as f64 - 1.0;
        for (count, p) in counts.iter().zip(law) {
            if *p == 0.0 {
                assert_eq!(*count, 0, "a token was drawn that the filter leaves out");
                continue;
            }
            let expected = total as f64 * p;
            assert!(expected > 20.0, "too few draws for a χ² test: {expected}");
            statistic += (*count as f64 - expected).powi(2) / expected;
        }
    }
    (statistic, degrees)
}

/// What χ² exceeds once in a million times (Wilson and Hilferty's approximation).
fn bound(degrees: f64) -> f64 {
    let spread = 2.0 / (9.0 * degrees);
    degrees * (1.0 - spread + 4.753 * spread.sqrt()).powi(3)
}

fn assert_law(counts: &[Vec<usize>], law: &[Vec<f64>], what: &str) {
    let (statistic, degrees) = chi_square(counts, law);
    println!("{what}: χ² {statistic:.1} with {degrees} degrees of freedom");
    assert!(statistic < bound(degrees), "{what}: χ² {statistic}, {degrees} degrees of freedom");
}

fn generate(
    sampling: Sampling,
    tokens: usize,
    proposer: &mut dyn Proposer,
    guesses: usize,
) -> Generation {
    let limits =
        Limits { context: tokens + 1, parallel: 1, prefill_chunk: 64, tp: 1, vocab_limit: STATES };
    let request = Request { sampling, ..greedy(&[0], tokens) };
    let mut policy = Policy::Fixed(guesses);
    let markov = &mut Markov(table());
    generate_on(markov, &limits, 0, &request, proposer, &mut policy, |_| Ok(Flow::Continue))
        .expect("the chain runs")
}

fn transitions(tokens: &[u32], counts: &mut [Vec<usize>]) {
    let mut from = 0;
    for to in tokens {
        counts[from][*to as usize] += 1;
        from = *to as usize;
    }
}

fn no_counts() -> Vec<Vec<usize>> {
    vec![vec![0; STATES]; STATES]
}

/// Follows the likeliest token of each state.
fn good() -> impl Proposer {
    let table = table();
    Guesser(move |history: History, count: usize| {
        let next = |token: &u32| Some(likeliest(&table[*token as usize]));
        std::iter::successors(next(&history.tokens[history.tokens.len() - 1]), next)
            .take(count)
            .collect()
    })
}

/// Follows what can follow least.
fn bad() -> impl Proposer {
    let table = table();
    Guesser(move |history: History, count: usize| {
        let logits = &table[history.tokens[history.tokens.len() - 1] as usize];
        let least = (0..STATES).min_by(|a, b| logits[*a].total_cmp(&logits[*b]));
        vec![least.expect("a state") as u32; count]
    })
}

fn random() -> impl Proposer {
    let mut random = Random(5);
    Guesser(move |_: History, count: usize| {
        (0..count).map(|_| random.below(STATES) as u32).collect()
    })
}

fn samplings() -> [(&'static str, Sampling); 4] {
    let hot = Sampling { temperature: 1.0, seed: 11, ..Sampling::GREEDY };
    [
        ("temperature 1", hot),
        ("temperature 0.7, top_p 0.9", Sampling { temperature: 0.7, top_p: 0.9, ..hot }),
        ("top_k 3", Sampling { top_k: 3, ..hot }),
        ("min_p 0.1, top_p 0.95", Sampling { min_p: 0.1, top_p: 0.95, ..hot }),
    ]
}

#[test]
fn a_long_output_has_the_targets_law_with_and_without_drafts() {
    for (name, sampling) in samplings() {
        let draws = DRAWS * soak();
        let plain = generate(sampling, draws, &mut bad(), 0).tokens;
        let mut counts = no_counts();
        transitions(&plain, &mut counts);
        assert_law(&counts, &law(&sampling), &format!("{name}, no drafts"));
        let drafters: [(&str, &mut dyn Proposer); 3] =
            [("good", &mut good()), ("bad", &mut bad()), ("random", &mut random())];
        for (drafter, proposer) in drafters {
            let generation = generate(sampling, draws, proposer, 4);
            let mut counts = no_counts();
            transitions(&generation.tokens, &mut counts);
            let length = generation.stats().acceptance_length().expect("rounds");
            let what = format!("{name}, {drafter} drafts ({length:.2} tokens a step)");
            assert_law(&counts, &law(&sampling), &what);
            assert!(generation.tokens == plain, "{what}: other tokens than without drafts");
            if drafter == "good" {
                assert!(length > 1.3, "{what}");
            }
        }
    }
}

/// Many short outputs: neighbouring seeds must not give related streams.
#[test]
fn many_seeds_have_the_targets_law() {
    let (name, sampling) = samplings()[0];
    let law = law(&sampling);
    let mut counts = no_counts();
    let mut neighbours = no_counts();
    let mut last = None;
    for seed in 0..(DRAWS / 4 * soak()) as u64 {
        let sampling = Sampling { seed, ..sampling };
        let tokens = generate(sampling, 4, &mut good(), 3).tokens;
        transitions(&tokens, &mut counts);
        if let Some(last) = last.replace(tokens[0]) {
            neighbours[last as usize][tokens[0] as usize] += 1;
        }
    }
    assert_law(&counts, &law, &format!("{name}, many seeds"));
    // Whatever the last seed drew, the next draws from the law after the prompt.
    let same = vec![law[0].clone(); STATES];
    assert_law(&neighbours, &same, &format!("{name}, first tokens of neighbouring seeds"));
}

/// The test's own test: a law that is off by a hundredth is noticed.
#[test]
fn a_wrong_law_is_noticed() {
    let (_, sampling) = samplings()[0];
    let mut counts = no_counts();
    transitions(&generate(sampling, DRAWS, &mut good(), 4).tokens, &mut counts);
    let mut wrong = law(&sampling);
    for law in &mut wrong {
        law[0] += 0.01;
        law.iter_mut().for_each(|p| *p /= 1.01);
    }
    let (statistic, degrees) = chi_square(&counts, &wrong);
    assert!(statistic > bound(degrees), "χ² {statistic}, {degrees} degrees of freedom");
}

fn seeded_run_is_the_same(draft: DraftChoice) {
    let mut engine = demo_engine(draft, 1);
    let prompt = golden("text-2").prompt;
    let hot = Sampling { temperature: 0.8, seed: 3, ..Sampling::GREEDY };
    let penalised = Sampling {
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        frequency_penalty: 0.1,
        top_p: 0.95,
        ..hot
    };
    let penalised_greedy = Sampling { temperature: 0.0, ..penalised };
    let mut accepted = 0;
    for sampling in [hot, penalised, penalised_greedy] {
        let request = Request { sampling, ..greedy(&prompt, 40 * soak()) };
        let plain = run_plain(&mut engine, &request);
        let drafted = run(&mut engine, &request, &mut ModelDrafter::default(), 4);
        assert_eq!(drafted.tokens, plain.tokens, "{sampling:?}");
        accepted += engines::accepted(&drafted).iter().sum::<usize>();
    }
    assert!(accepted > 0, "no guess was right");
}

#[test]
fn a_seeded_run_is_the_same_with_eagle3() {
    seeded_run_is_the_same(DraftChoice::Auto);
}

#[test]
fn a_seeded_run_is_the_same_with_mtp() {
    seeded_run_is_the_same(DraftChoice::Mtp);
}
