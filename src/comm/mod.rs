//! The transport of `reduce_norm` and of the vocabulary-parallel head: every rank publishes a
//! vector, every rank reads all of them in rank order.

mod shared_memory;

pub use shared_memory::SharedMemory;
