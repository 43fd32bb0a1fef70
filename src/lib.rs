//! talon runs GLM-5 from memory-mapped NVFP4 weights. ARCHITECTURE.md maps the rooms.

pub mod bench;
pub mod cli;
pub mod comm;
pub mod cpu;
pub mod cuda;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod model;
pub mod serve;
pub mod spec;
pub mod text;
pub mod weights;
