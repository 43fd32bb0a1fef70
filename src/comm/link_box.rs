//! What decides how fast the links of a box are, in one line: choices and times are kept with it.

/// A box, as far as its links go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkBox {
    /// Version and commit of talon.
    pub talon: String,
    /// The driver, such as "CUDA 13.0, 8 devices".
    pub driver: String,
    /// The kernel's release.
    pub kernel: String,
    /// Of each rank, in their order: identifier and address of its GPU.
    pub gpus: Vec<String>,
    /// Values of a row that is exchanged.
    pub hidden: usize,
}

impl LinkBox {
    /// In one line.
    pub fn text(&self) -> String {
        let Self { talon, driver, kernel, gpus, hidden } = self;
        let gpus: String = gpus.iter().map(|gpu| format!(" | {gpu}")).collect();
        format!("{talon} | {driver} | {kernel}{gpus} | {hidden}")
    }

    /// Reads such a line; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split(" | ").collect();
        let [talon, driver, kernel, gpus @ .., hidden] = parts.as_slice() else { return None };
        Some(Self {
            talon: (*talon).to_owned(),
            driver: (*driver).to_owned(),
            kernel: (*kernel).to_owned(),
            gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
            hidden: hidden.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_back() {
        for gpus in [vec![], vec!["GPU-1 0000:17:00.0".to_owned(), "GPU-2 0000:2a:00.0".into()]] {
            let link_box = LinkBox {
                talon: "0.1.0 abc".into(),
                driver: "CUDA 13.0, 2 devices".into(),
                kernel: "6.8.0-31-generic".into(),
                gpus,
                hidden: 6144,
            };
            assert_eq!(LinkBox::parse(&link_box.text()), Some(link_box));
        }
        for text in ["", "x", " | ", "a | b | c", "a | b | c | d"] {
            assert_eq!(LinkBox::parse(text), None, "{text}");
        }
    }
}
