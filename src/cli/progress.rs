//! Progress of long work: a bar on a terminal, nothing in a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar that counts bytes.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar with a label. It is drawn on stderr at most ten times a second, and only if stderr is
    /// a terminal.
    pub fn bytes(label: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label);
        Self { bar }
    }

    /// Sets what there is to do.
    pub fn of(&self, total: u64) {
        // Short work would only flicker.
        const WORTH_SHOWING: u64 = 64 << 20;
        if total < WORTH_SHOWING {
            self.bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if self.bar.length() != Some(total) {
            self.bar.set_length(total);
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
    }

    /// Adds what was done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
