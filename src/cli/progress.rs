//! Progress of long work: a bar on a terminal, nothing in a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar that counts bytes; [`Progress::of`] gives the total.
    pub fn bytes(label: &'static str) -> Self {
        Self::new(
            label,
            "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}, {eta} left",
        )
    }

    /// What is being done, and for how long, in words.
    pub fn words() -> Self {
        let progress = Self::new("", "{spinner} {msg}, {elapsed}");
        progress.bar.enable_steady_tick(Duration::from_millis(200));
        progress
    }

    /// Says what is done now.
    pub fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.reset_elapsed();
    }

    /// A bar that counts to `total`.
    pub fn count(label: &'static str, total: u64) -> Self {
        let progress = Self::new(label, "{msg} {wide_bar} {pos}/{len} {eta}");
        progress.bar.set_length(total);
        progress
    }

    /// It is drawn on stderr at most ten times a second, and only if stderr is a terminal.
    fn new(label: &'static str, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label);
        Self { bar }
    }

    /// Sets the bytes that there are.
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

    /// Sets how much a bar that counts goes to, where that is known only when work has begun.
    pub fn up_to(&self, total: u64) {
        self.bar.set_length(total);
    }

    /// Adds what was done.
    pub fn add(&self, done: u64) {
        self.bar.inc(done);
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
