//! The PCI tree as /sys shows it: GPUs, the bridges above them, links, windows, access control.

use super::root::View;

const NVIDIA: u32 = 0x10de;
/// Base class of displays and accelerators of that kind, and class of bridges to other buses.
const DISPLAY: u32 = 0x03;
const BRIDGE: u32 = 0x0604;
/// Number of the capability "access control services", and its control register's place in it.
const ACS: u16 = 0x000d;
const ACS_CONTROL: usize = 6;
/// Bits of that register that send what goes from one device to another up to the host: redirection
/// of requests and of completions. (Egress control only forbids, source validation only checks.)
const REDIRECTS: u16 = 0b1100;

/// A device.
#[derive(Debug, Clone, PartialEq)]
pub struct PciDevice {
    /// Such as "0000:17:00.0".
    pub address: String,
    /// Of everything above it, the root port first.
    pub above: Vec<String>,
    vendor: u32,
    class: u32,
}

/// All devices.
#[derive(Debug, Default)]
pub struct PciTree {
    devices: Vec<PciDevice>,
}

/// A link's state. Speeds as generations of PCIe: 5 is 32 GT/s.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Link {
    pub generation: Option<u32>,
    pub width: Option<u32>,
    pub max_generation: Option<u32>,
    pub max_width: Option<u32>,
}

/// Whether a port redirects what passes between the devices below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redirection {
    /// Its registers cannot be read without being root.
    Unreadable,
    Off,
    On,
}

impl PciTree {
    pub fn read(view: &View) -> Self {
        let addresses = view.names("sys/bus/pci/devices").into_iter().filter(|a| is_address(a));
        let device = |address: String| {
            let place = place(&address);
            let hex = |name: &str| hex(&view.text(&format!("{place}/{name}"))?);
            let path = view.resolve(&place).unwrap_or_default();
            let above = path.split('/').filter(|part| is_address(part) && *part != address);
            Some(PciDevice {
                above: above.map(str::to_owned).collect(),
                vendor: hex("vendor")?,
                class: hex("class")?,
                address,
            })
        };
        Self { devices: addresses.filter_map(device).collect() }
    }

    /// NVIDIA's GPUs, in the order of the bus.
    pub fn gpus(&self) -> Vec<&PciDevice> {
        let is_gpu = |device: &&PciDevice| device.vendor == NVIDIA && device.class >> 16 == DISPLAY;
        self.devices.iter().filter(is_gpu).collect()
    }

    /// The bridge of this address.
    pub fn bridge(&self, address: &str) -> Option<&PciDevice> {
        self.devices.iter().find(|device| device.address == address && device.class >> 8 == BRIDGE)
    }
}

impl PciDevice {
    /// The device's root port, or itself.
    pub fn root_port(&self) -> &str {
        self.above.first().unwrap_or(&self.address)
    }

    /// What lies above it and has another device of `others` below it too: where they meet. `None`
    /// where that is the host.
    pub fn meets(&self, other: &Self) -> Option<&str> {
        let pairs = self.above.iter().zip(&other.above);
        pairs.take_while(|(a, b)| a == b).last().map(|(a, _)| a.as_str())
    }

    /// Maker of the chip, as far as it matters here.
    pub fn maker(&self) -> String {
        match self.vendor {
            0x1000 | 0x10b5 => "Broadcom".into(),
            0x11f8 | 0x1055 => "Microchip".into(),
            0x1b21 => "ASMedia".into(),
            0x1022 => "AMD".into(),
            0x8086 => "Intel".into(),
            NVIDIA => "NVIDIA".into(),
            other => format!("vendor {other:04x}"),
        }
    }
}

/// The link above a device.
pub fn link(view: &View, address: &str) -> Link {
    let place = place(address);
    let text = |name: &str| view.text(&format!("{place}/{name}"));
    let width = |name: &str| text(name)?.parse().ok().filter(|width| (1..=32).contains(width));
    Link {
        generation: text("current_link_speed").and_then(|text| generation(&text)),
        width: width("current_link_width"),
        max_generation: text("max_link_speed").and_then(|text| generation(&text)),
        max_width: width("max_link_width"),
    }
}

/// "32.0 GT/s PCIe" is 5.
fn generation(text: &str) -> Option<u32> {
    let rates = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0];
    let rate: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(rates.iter().position(|known| *known == rate)? as u32 + 1)
}

/// Whether a port redirects.
pub fn redirection(view: &View, address: &str) -> Redirection {
    match view.bytes(&format!("{}/config", place(address))) {
        Some(config) => redirection_of(&config),
        None => Redirection::Unreadable,
    }
}

/// Walks the list of extended capabilities, which begins at byte 256 of a device's registers.
fn redirection_of(config: &[u8]) -> Redirection {
    // Without being root there are 64 bytes; a device of plain PCI has 256, and no such capability.
    if config.len() < 256 {
        return Redirection::Unreadable;
    }
    let word = |at: usize| Some(u16::from_le_bytes([*config.get(at)?, *config.get(at + 1)?]));
    let mut at = 256;
    // A list has no room for more, whatever it says.
    for _ in 0..(4096 - 256) / 4 {
        let (Some(id), Some(next)) = (word(at), word(at + 2)) else { break };
        if id == ACS {
            return match word(at + ACS_CONTROL) {
                Some(control) if control & REDIRECTS != 0 => Redirection::On,
                Some(_) => Redirection::Off,
                None => Redirection::Unreadable,
            };
        }
        at = usize::from(next >> 4);
        if at < 256 {
            break;
        }
    }
    Redirection::Off
}

/// Bytes of a device's windows, in the order of its registers; the second of an NVIDIA GPU (BAR1) is
/// the one to its memory.
pub fn windows(view: &View, address: &str) -> Option<Vec<u64>> {
    let text = view.text(&format!("{}/resource", place(address)))?;
    let window = |line: &str| {
        let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
        let mut words = line.split_whitespace();
        let (start, end) = (number(words.next()?)?, number(words.next()?)?);
        Some(if end > start { (end - start).saturating_add(1) } else { 0 })
    };
    text.lines().map(window).collect()
}

/// Errors that a port or device has counted since the box started: corrected, not fatal, fatal.
pub fn error_counts(view: &View, address: &str) -> Option<[u64; 3]> {
    let total = |file: &str, name: &str| {
        let text = view.text(&format!("{}/{file}", place(address)))?;
        text.lines().find_map(|line| line.trim().strip_prefix(name)?.trim().parse().ok())
    };
    Some([
        total("aer_dev_correctable", "TOTAL_ERR_COR")?,
        total("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL")?,
        total("aer_dev_fatal", "TOTAL_ERR_FATAL")?,
    ])
}

/// A device's folder.
pub fn place(address: &str) -> String {
    format!("sys/bus/pci/devices/{address}")
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// "0000:17:00.0", with four or more digits of the domain.
fn is_address(text: &str) -> bool {
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let is_hex = |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.len() == 4
        && text.rfind(':') < text.find('.')
        && parts.iter().all(is_hex)
        && parts[0].len() >= 4
        && [parts[1].len(), parts[2].len(), parts[3].len()] == [2, 2, 1]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(control: u16) -> Vec<u8> {
        let mut config = vec![0; 4096];
        // Error reporting at 0x100, then access control at 0x148, the last.
        config[0x100..0x104].copy_from_slice(&0x1482_0001u32.to_le_bytes());
        config[0x148..0x14c].copy_from_slice(&0x0001_000du32.to_le_bytes());
        config[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
        config
    }

    #[test]
    fn redirection_is_read_from_the_registers() {
        assert_eq!(redirection_of(&config(0x1d)), Redirection::On);
        assert_eq!(redirection_of(&config(0x04)), Redirection::On);
        assert_eq!(redirection_of(&config(0x11)), Redirection::Off);
        assert_eq!(redirection_of(&config(0)), Redirection::Off);
        assert_eq!(redirection_of(&config(0x1d)[..64]), Redirection::Unreadable);
        assert_eq!(redirection_of(&config(0x1d)[..256]), Redirection::Off);
        assert_eq!(redirection_of(&config(0x1d)[..0x14f]), Redirection::Unreadable);
        // A list that leads to itself.
        let mut circle = config(0x1d);
        circle[0x100..0x104].copy_from_slice(&0x1002_0001u32.to_le_bytes());
        assert_eq!(redirection_of(&circle), Redirection::Off);
    }

    #[test]
    fn speeds_are_generations() {
        let found = ["2.5 GT/s PCIe", "32.0 GT/s PCIe", "32 GT/s", "Unknown", ""].map(generation);
        assert_eq!(found, [Some(1), Some(5), Some(5), None, None]);
    }

    #[test]
    fn addresses_are_told_from_other_names() {
        assert!(is_address("0000:17:00.0") && is_address("10000:e1:00.0"));
        for name in ["pci0000:00", "0000:17:00", "0000:17.00:0", "0000:17:00.0:pcie001", ""] {
            assert!(!is_address(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_registers_are_read(config in proptest::collection::vec(any::<u8>(), 0..4200)) {
            redirection_of(&config);
        }
    }
}
