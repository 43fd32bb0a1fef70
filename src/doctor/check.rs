//! What a check says.

use serde_json::{Value, json};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// The box is slow or unsafe.
    Fail,
    /// It may be.
    Warn,
    /// It could not be told; its value says why.
    Unknown,
    /// As it should be.
    Ok,
}

impl Status {
    /// In a report.
    pub fn word(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Warn => "warn",
            Self::Unknown => "unknown",
            Self::Ok => "ok",
        }
    }
}

/// What is always true of a check.
#[derive(Debug, Clone, Copy)]
pub struct Subject {
    pub name: &'static str,
    /// What a good box has.
    pub expected: &'static str,
    /// What it costs if it is otherwise.
    pub cost: &'static str,
    /// What to do then.
    pub fix: &'static str,
    /// Whether somebody can who rents the box: a user of a container, without BIOS and kernel.
    pub renter: bool,
}

/// What a check has found.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was looked at.
    pub subject: Subject,
    /// How it is.
    pub status: Status,
    /// What was found, in one line.
    pub value: String,
    /// Instead of the subject's, where it can be said better.
    pub fix: Option<String>,
}

impl Subject {
    pub fn ok(self, value: impl Into<String>) -> Check {
        self.found(Status::Ok, value)
    }

    pub fn warn(self, value: impl Into<String>) -> Check {
        self.found(Status::Warn, value)
    }

    pub fn fail(self, value: impl Into<String>) -> Check {
        self.found(Status::Fail, value)
    }

    /// It cannot be told, and why.
    pub fn unknown(self, why: impl Into<String>) -> Check {
        self.found(Status::Unknown, why)
    }

    pub fn found(self, status: Status, value: impl Into<String>) -> Check {
        Check { subject: self, status, value: crate::error::one_line(value.into()), fix: None }
    }
}

impl Check {
    /// With another fix than the subject's.
    pub fn by(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// What to do.
    pub fn fix(&self) -> &str {
        self.fix.as_deref().unwrap_or(self.subject.fix)
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "name": self.subject.name,
            "status": self.status.word(),
            "value": self.value,
            "expected": self.subject.expected,
            "cost": self.subject.cost,
            "fix": self.fix(),
            "renter_can_fix": self.subject.renter,
        })
    }
}

/// "0, 3 and 5".
pub fn list<T: ToString>(items: &[T]) -> String {
    let words: Vec<String> = items.iter().map(ToString::to_string).collect();
    match words.as_slice() {
        [] => "none".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
