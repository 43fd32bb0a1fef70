//! `/metrics`: Prometheus text under the names that vLLM's tools and dashboards read.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::engine::{Limits, Status};

/// Upper bounds of times to the first token, of whole requests and of the queue, in seconds.
const LONG: [f64; 16] = [
    0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0,
];
/// Upper bounds of times between tokens.
const SHORT: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0];

/// What is counted beside the engine's own counters.
#[derive(Debug)]
pub struct Metrics {
    /// From a request's arrival to its first token.
    pub first_token: Histogram,
    /// Between one step's tokens and the next one's, which is one time for several tokens where
    /// guesses were right.
    pub between_tokens: Histogram,
    /// From arrival to the end.
    pub whole: Histogram,
    /// From arrival to a slot.
    pub queue: Histogram,
    finished: Mutex<BTreeMap<&'static str, u64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            first_token: Histogram::new(&LONG),
            between_tokens: Histogram::new(&SHORT),
            whole: Histogram::new(&LONG),
            queue: Histogram::new(&LONG),
            finished: Mutex::new(["abort", "error", "length", "stop"].map(|r| (r, 0)).into()),
        }
    }
}

/// Counts of times below bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// (counts by bucket, the last one without a bound; sum of seconds)
    counts: Mutex<(Vec<u64>, f64)>,
}

/// Counts stay usable whatever happened to a thread that held them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: Mutex::new((vec![0; bounds.len() + 1], 0.0)) }
    }

    /// Adds a time.
    pub fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let mut counts = lock(&self.counts);
        counts.0[self.bounds.partition_point(|bound| *bound < seconds)] += 1;
        counts.1 += seconds;
    }

    fn write(&self, out: &mut String, name: &str, help: &str, label: &str) {
        head(out, name, "histogram", help);
        let counts = lock(&self.counts);
        let mut total = 0;
        let bounds = self.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&counts.0) {
            total += count;
            let _ = writeln!(out, "{name}_bucket{{{label},le=\"{bound}\"}} {total}");
        }
        let _ = writeln!(out, "{name}_sum{{{label}}} {}", counts.1);
        let _ = writeln!(out, "{name}_count{{{label}}} {total}");
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

impl Metrics {
    /// Counts an ended request: stop, length, abort or error.
    pub fn count_end(&self, reason: &'static str) {
        *lock(&self.finished).entry(reason).or_default() += 1;
    }

    /// The page.
    pub fn text(&self, model: &str, status: &Status, limits: Limits) -> String {
        let mut out = String::new();
        let quoted = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = format!("model_name=\"{quoted}\"");
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            head(&mut out, name, kind, help);
            let _ = writeln!(out, "{name}{{{label}}} {value}");
        };
        let running = status.running.load(Ordering::Relaxed) as f64;
        let waiting = status.waiting.load(Ordering::Relaxed) as f64;
        let used = status.cache_used.load(Ordering::Relaxed) as f64;
        let entries = (limits.context * limits.parallel).max(1) as f64;
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed) as f64;
        one("vllm:num_requests_running", "gauge", "Requests with a slot.", running);
        one("vllm:num_requests_waiting", "gauge", "Requests in the queue.", waiting);
        one("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use.", used / entries);
        let prompt = count(&status.prompt_tokens);
        one("vllm:prompt_tokens_total", "counter", "Prompt tokens.", prompt);
        let help = "Prompt tokens that were looked for in the cache.";
        one("vllm:prefix_cache_queries_total", "counter", help, prompt);
        let help = "Prompt tokens that were found in the cache.";
        one("vllm:prefix_cache_hits_total", "counter", help, count(&status.cached_tokens));
        let help = "Tokens generated.";
        one("vllm:generation_tokens_total", "counter", help, count(&status.generated_tokens));
        one("talon:steps_total", "counter", "Forward passes.", count(&status.steps));
        let stats = status.speculation().clone();
        let drafts = stats.drafted.first().copied().unwrap_or(0) as f64;
        let help = "Rounds with a guess.";
        one("vllm:spec_decode_num_drafts_total", "counter", help, drafts);
        let drafted = stats.drafted.iter().sum::<usize>() as f64;
        one("vllm:spec_decode_num_draft_tokens_total", "counter", "Guesses.", drafted);
        let accepted = stats.accepted.iter().sum::<usize>() as f64;
        let help = "Guesses that were right.";
        one("vllm:spec_decode_num_accepted_tokens_total", "counter", help, accepted);
        let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
        head(&mut out, name, "counter", "Guesses that were right, by their place in the chain.");
        for (place, count) in stats.accepted.iter().enumerate() {
            let _ = writeln!(out, "{name}{{{label},position=\"{place}\"}} {count}");
        }
        let name = "vllm:request_success_total";
        head(&mut out, name, "counter", "Requests that ended, by the reason.");
        for (reason, count) in &*lock(&self.finished) {
            let _ = writeln!(out, "{name}{{{label},finished_reason=\"{reason}\"}} {count}");
        }
        for (histogram, name, help) in [
            (&self.first_token, "vllm:time_to_first_token_seconds", "Time to the first token."),
            (&self.between_tokens, "vllm:inter_token_latency_seconds", "Time between steps."),
            (&self.whole, "vllm:e2e_request_latency_seconds", "Time of a whole request."),
            (&self.queue, "vllm:request_queue_time_seconds", "Time in the queue."),
        ] {
            histogram.write(&mut out, name, help, &label);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_count_up() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for seconds in [0.05, 0.1, 0.5, 7.0] {
            histogram.add(Duration::from_secs_f64(seconds));
        }
        let mut out = String::new();
        histogram.write(&mut out, "t", "h", "m=\"x\"");
        for line in [
            "t_bucket{m=\"x\",le=\"0.1\"} 2",
            "le=\"1\"} 3",
            "le=\"+Inf\"} 4",
            "t_count{m=\"x\"} 4",
        ] {
            assert!(out.contains(line), "{line}: {out}");
        }
    }
}
