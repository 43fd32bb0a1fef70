//! Records what the binary is made from, so that every report can name it, and compiles the CUDA kernels.

#[path = "build/nvcc.rs"]
mod nvcc;
#[path = "build/provenance.rs"]
mod provenance;

fn main() {
    if let Err(message) = provenance::record().and_then(|()| nvcc::embed_kernels()) {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}
