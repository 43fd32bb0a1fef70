//! Ctrl-C and SIGTERM.

use std::sync::Mutex;
use std::sync::mpsc::Sender;

use nix::sys::signal::{SigSet, Signal};

/// Exit code of a command that was interrupted.
const INTERRUPTED: i32 = 130;

/// Who wants to be told instead of the process ending.
static LISTENER: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

/// Lets Ctrl-C end the process at once: nothing here leaves a file half written that matters.
/// `with_sigterm`: SIGTERM as well, through the same door. To be called before any other thread
/// exists, since each would have to leave the signal to the one that waits for it.
pub fn install(with_sigterm: bool) {
    if with_sigterm {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGTERM);
        let waiting = signals.thread_block().map_err(std::io::Error::from).and_then(|()| {
            std::thread::Builder::new().name("sigterm".into()).spawn(move || {
                while signals.wait().is_ok() {
                    interrupt();
                }
            })
        });
        if let Err(error) = waiting {
            log::warn!("SIGTERM will not be heard: {error}");
        }
    }
    if let Err(error) = ctrlc::set_handler(interrupt) {
        log::warn!("Ctrl-C will not give exit code 130: {error}");
    }
}

/// From now on interruptions are sent to `listener`.
pub fn listen<T: Send + 'static>(listener: Sender<T>, message: impl Fn() -> T + Send + 'static) {
    let tell = move || {
        if listener.send(message()).is_err() {
            std::process::exit(INTERRUPTED);
        }
    };
    if let Ok(mut slot) = LISTENER.lock() {
        *slot = Some(Box::new(tell));
    }
}

fn interrupt() {
    match LISTENER.lock() {
        Ok(slot) if slot.is_some() => {
            if let Some(tell) = slot.as_ref() {
                tell();
            }
        }
        _ => std::process::exit(INTERRUPTED),
    }
}
