//! talon runs GLM-5 from memory-mapped NVFP4 weights. ARCHITECTURE.md maps the rooms.
pub mod error;
pub mod text;
