//! The benchmark: prompts in classes, measured generations with and without speculation, statistics
//! over them, and the report as a value that `cli` prints.

mod diff;
mod diff_table;
mod html;
mod measure;
mod plots;
mod projection;
mod report;
mod simulate;
mod statistics;
mod svg;
mod table;
mod verdict;
mod workload;

pub use diff::diff;
pub use diff_table::diff_table;
pub use html::html;
pub use measure::{Divergence, Measured, Mode, Plan, Run, measure, run_count};
pub use projection::Cards;
pub use report::{RunContext, Settings, report};
pub use simulate::SimulatedDrafter;
pub use statistics::{Interval, median_interval, percentile};
pub use table::table;
pub use workload::{CLASSES, Prompt, PromptText, built_in_prompts, read_prompts};
