//! What this box is. (What is wrong with it, and what it should reach, are checks of their own.)

mod fingerprint;

pub use fingerprint::fingerprint;
