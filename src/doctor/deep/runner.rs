//! Measurements that may never come back: each leaves word on the disk first, and is waited for only so
//! long.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::comm::Breadcrumb;
use crate::error::{Error, Result};

/// How often an interruption is looked for.
const TICK: Duration = Duration::from_millis(50);

/// Who looks on while things are measured.
pub struct Watch<'a> {
    /// Is told what is about to be measured.
    pub tell: &'a dyn Fn(&str),
    /// Whether somebody wants it to end.
    pub is_interrupted: &'a dyn Fn() -> bool,
}

/// Runs one measurement after the other.
pub struct Runner<'a> {
    watch: &'a Watch<'a>,
    /// The box, for the word that is left; without one none is.
    place: Option<String>,
    hangs: Option<String>,
}

impl<'a> Runner<'a> {
    pub fn new(place: Option<String>, watch: &'a Watch<'a>) -> Self {
        Self { watch, place, hangs: None }
    }

    /// What has not come back.
    pub fn hangs(&self) -> Option<&str> {
        self.hangs.as_deref()
    }

    /// Runs `work` and waits for it until `limit`; the inner error says why there is no result. After
    /// one that has not come back nothing is run, since it may hold the driver.
    ///
    /// # Errors
    /// Interrupted, if somebody wants it.
    pub fn run<T: Send + 'static>(
        &mut self,
        what: &str,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<std::result::Result<T, String>> {
        if let Some(hangs) = &self.hangs {
            return Ok(Err(format!("{hangs} has not come back")));
        }
        (self.watch.tell)(what);
        let leave = |place: &String| Breadcrumb::leave(Breadcrumb::DOCTOR, place, what);
        let crumb = self.place.as_ref().and_then(leave);
        if crumb.is_none() && self.place.take().is_some() {
            log::warn!(
                "~/.cache/talon cannot be written, so after a hang the next doctor will not know what was \
                 measured; set XDG_CACHE_HOME to a folder that can"
            );
        }
        let (sender, receiver) = mpsc::channel();
        let started = std::thread::Builder::new().name("measure".into()).spawn(move || {
            // Nobody listens any more if it took too long.
            let _ = sender.send(work());
        });
        if let Err(error) = started {
            return Ok(Err(format!("no thread for it: {error}")));
        }
        let deadline = Instant::now() + limit;
        loop {
            match receiver.recv_timeout(TICK) {
                Ok(result) => return Ok(result.map_err(|error| error.to_string())),
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err("it ended in a panic".into()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if (self.watch.is_interrupted)() {
                drop(crumb);
                return Err(Error::runtime("interrupted"));
            }
            if Instant::now() > deadline {
                if let Some(crumb) = crumb {
                    crumb.keep();
                }
                self.hangs = Some(what.to_owned());
                return Ok(Err(format!("did not come back within {} s", limit.as_secs())));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_errors_and_panics_come_back() {
        let watch = Watch { tell: &|_| {}, is_interrupted: &|| false };
        let mut runner = Runner::new(None, &watch);
        let limit = Duration::from_secs(60);
        assert_eq!(runner.run("a", limit, || Ok(7)).unwrap(), Ok(7));
        let failed = runner.run("a", limit, || Err::<(), _>(Error::runtime("x"))).unwrap();
        assert_eq!(failed, Err("x".into()));
        let ended = runner.run::<()>("a", limit, || panic!("on purpose")).unwrap();
        assert!(ended.unwrap_err().contains("panic"));
        assert_eq!(runner.hangs(), None);
    }

    #[test]
    fn what_hangs_is_left_and_nothing_runs_behind_it() {
        let watch = Watch { tell: &|_| {}, is_interrupted: &|| false };
        let mut runner = Runner::new(None, &watch);
        let hang = || {
            std::thread::sleep(Duration::from_secs(3));
            Ok(())
        };
        assert!(runner.run("the first", Duration::ZERO, hang).unwrap().is_err());
        let next = runner.run("the next", Duration::from_secs(9), || Ok(())).unwrap();
        assert!(next.unwrap_err().contains("the first"), "{:?}", runner.hangs());
        let watch = Watch { tell: &|_| {}, is_interrupted: &|| true };
        let mut runner = Runner::new(None, &watch);
        assert!(runner.run("a", Duration::from_secs(9), hang).is_err());
    }
}
