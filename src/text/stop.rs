//! Ending a stream of text at a stop string.

use crate::error::{Error, Result};

/// What a push gave: text that may be shown, and whether a stop string has ended the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Text before any stop string.
    pub text: String,
    /// Whether a stop string has been found; from then on no more text comes.
    pub stopped: bool,
}

/// Looks for stop strings in text that arrives in pieces.
///
/// The text ends at the stop string that is complete first; of several that end at one place it is
/// the longest. The result does not depend on how the text is cut into pieces. Text that may be the
/// start of a stop string is held back until it is known not to be.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// No stop string may be empty; the list may be.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if let Some(place) = stops.iter().position(String::is_empty) {
            return Err(Error::input(format!(
                "stop string {} of {}: it is empty, expected at least one character; leave it out",
                place + 1,
                stops.len()
            )));
        }
        Ok(Self { stops, held: String::new(), stopped: false })
    }

    /// Adds the next piece of text.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stopped {
            return Released { text: String::new(), stopped: true };
        }
        self.held.push_str(text);
        let end = match self.first_stop() {
            Some(start) => {
                self.stopped = true;
                start
            }
            None => self.safe_len(),
        };
        let text = self.held.drain(..end).collect();
        Released { text, stopped: self.stopped }
    }

    /// Ends the text and returns what was held back.
    pub fn finish(self) -> String {
        if self.stopped { String::new() } else { self.held }
    }

    /// Where the stop string begins that is complete first.
    fn first_stop(&self) -> Option<usize> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        found.min().map(|(_, start)| start)
    }

    /// How much of the held text cannot be part of a stop string that is yet to be completed.
    fn safe_len(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let begin = self.held.len().saturating_sub(longest);
        (begin..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| self.stops.iter().any(|stop| stop.starts_with(&self.held[start..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(stops: &[&str]) -> StopStrings {
        StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap()
    }

    fn released(text: &str, stopped: bool) -> Released {
        Released { text: text.into(), stopped }
    }

    #[test]
    fn a_possible_start_is_held_back_until_it_is_decided() {
        let mut s = stops(&["END"]);
        assert_eq!(s.push("aE"), released("a", false));
        assert_eq!(s.push("N"), released("", false));
        assert_eq!(s.push("EN"), released("EN", false));
        assert_eq!(s.push("Dz"), released("", true));
        assert_eq!(s.push("more"), released("", true));
        assert_eq!(s.finish(), "");
    }

    #[test]
    fn the_end_releases_what_was_held() {
        let mut s = stops(&["END"]);
        assert_eq!(s.push("the E"), released("the ", false));
        assert_eq!(s.finish(), "E");
    }

    #[test]
    fn the_stop_string_that_is_complete_first_wins() {
        assert_eq!(stops(&["abcd", "bc"]).push("xabcd"), released("xa", true));
        assert_eq!(stops(&["b", "ab"]).push("xab"), released("x", true));
    }

    #[test]
    fn without_stop_strings_text_passes_at_once() {
        assert_eq!(stops(&[]).push("é"), released("é", false));
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let error = StopStrings::new(vec!["a".into(), String::new()]).unwrap_err();
        assert!(error.to_string().starts_with("stop string 2 of 2"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
