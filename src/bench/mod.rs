//! The benchmark: prompts in classes, one measured generation each, statistics over them, and the
//! report as a value that `cli` prints.

mod measure;
mod report;
mod statistics;
mod workload;

pub use measure::{Plan, Run, measure};
pub use report::{RunContext, Settings, report, table};
pub use statistics::{Interval, median_interval, percentile};
pub use workload::{CLASSES, Prompt, PromptText, built_in_prompts, read_prompts};
