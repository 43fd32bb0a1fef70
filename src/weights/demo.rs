//! The demo model inside the binary: a really trained, tiny GLM-5 and its EAGLE-3 head
//! (demo/README.md tells its origin and licences).

use super::source::{EmbeddedFile, Source};

macro_rules! embedded {
    ($folder:literal: $($name:literal),+ $(,)?) => {
        &[$(EmbeddedFile {
            name: $name,
            bytes: include_bytes!(concat!("../../demo/", $folder, "/", $name)),
        }),+]
    };
}

static MODEL: &[EmbeddedFile] = embedded!(
    "glm-demo":
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
);

static EAGLE3: &[EmbeddedFile] = embedded!("glm-demo-eagle3": "config.json", "model.safetensors");

/// The demo checkpoint.
pub fn demo() -> Source {
    Source::Embedded("demo", MODEL)
}

/// The EAGLE-3 head that came with the demo checkpoint.
pub fn demo_eagle3() -> Source {
    Source::Embedded("demo/eagle3", EAGLE3)
}
