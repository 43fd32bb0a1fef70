//! The transport of `reduce_norm` and of the vocabulary-parallel head: every rank publishes a
//! vector, every rank reads all of them in rank order. On the CPU through shared memory; between
//! GPUs in one of several variants, which a start qualifies and chooses from by measurement.

mod breadcrumb;
mod choice;
mod link_box;
mod qualify;
mod shared_memory;
mod store;
mod variant;

pub use breadcrumb::{Breadcrumb, Trial};
pub use choice::Choice;
pub use link_box::LinkBox;
pub use qualify::{Links, Plan, Qualified, Times, Way, check_choice, qualify};
pub use shared_memory::SharedMemory;
pub use store::{load_choice, read_cached, store_choice, write_cached};
pub use variant::{Phase, Variant};
