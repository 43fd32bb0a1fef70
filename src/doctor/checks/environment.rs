//! Variables that another program's recipe has left behind.

use crate::doctor::check::{Check, Status, Subject};
use crate::doctor::facts::Facts;

pub fn environment(facts: &Facts) -> Check {
    const IS: Subject = Subject {
        name: "environment",
        expected: "no variable that changes how CUDA runs",
        cost: "one of them explains many a slow box",
        fix: "unset them (also in ~/.bashrc, /etc/environment and the unit or compose file)",
        renter: true,
    };
    let found: Vec<(Status, String)> = facts
        .view
        .variables()
        .filter_map(|(name, value)| Some((judge(name, value)?, name, value)))
        .map(|(status, name, value)| (status, format!("{name}={value}")))
        .collect();
    let worst = found.iter().map(|(status, _)| *status).min();
    let of = |wanted: Status| -> Vec<&str> {
        found
            .iter()
            .filter(|(status, _)| *status == wanted)
            .map(|(_, text)| text.as_str())
            .collect()
    };
    match worst {
        None => IS.ok("nothing left over"),
        Some(Status::Ok) => IS.ok(format!("harmless: {}", of(Status::Ok).join(" "))),
        Some(worst) => {
            let names: Vec<&str> =
                of(worst).iter().filter_map(|text| Some(text.split_once('=')?.0)).collect();
            IS.found(worst, of(worst).join(" ")).by(format!(
                "unset {} (also in ~/.bashrc, /etc/environment and the unit or compose file)",
                names.join(" ")
            ))
        }
    }
}

/// What a variable does; `None` for one of no concern.
fn judge(name: &str, value: &str) -> Option<Status> {
    let is_set = !matches!(value, "" | "0");
    match name {
        // Each launch waits for its end; profilers' and debuggers' hooks.
        "CUDA_LAUNCH_BLOCKING" | "CUDA_FORCE_PTX_JIT" | "CUDA_ENABLE_COREDUMP_ON_EXCEPTION" => {
            is_set.then_some(Status::Fail)
        }
        "CUDA_INJECTION64_PATH" => is_set.then_some(Status::Fail),
        // An older or newer libcuda than the module's, as toolkits bring along.
        "LD_LIBRARY_PATH" => {
            value.split(':').any(|folder| folder.contains("compat")).then_some(Status::Fail)
        }
        "CUDA_VISIBLE_DEVICES" | "NVIDIA_VISIBLE_DEVICES" if value == "void" => Some(Status::Fail),
        // It is meant, most of the time: but it should be seen.
        "CUDA_VISIBLE_DEVICES" => Some(if value.is_empty() { Status::Fail } else { Status::Ok }),
        "CUDA_DEVICE_ORDER" => Some(match value {
            "PCI_BUS_ID" => Status::Ok,
            _ => Status::Warn,
        }),
        "CUDA_MODULE_LOADING" => Some(if value == "LAZY" { Status::Ok } else { Status::Warn }),
        "LD_PRELOAD" => is_set.then_some(Status::Warn),
        // The one controlled test (128 against none) found 0.3 % less.
        "CUDA_DEVICE_MAX_CONNECTIONS" => Some(Status::Ok),
        // talon reads none of them, but its yardstick and every other engine does; an empty file name
        // breaks NCCL.
        "NCCL_GRAPH_FILE" if value.is_empty() => Some(Status::Warn),
        "NCCL_P2P_DISABLE" | "NCCL_P2P_LEVEL" | "NCCL_SHM_DISABLE" | "NCCL_IB_DISABLE"
        | "NCCL_ALGO" | "NCCL_PROTO" | "NCCL_GRAPH_FILE" => is_set.then_some(Status::Warn),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_judged_by_what_they_do() {
        for (name, value, expected) in [
            ("CUDA_LAUNCH_BLOCKING", "1", Some(Status::Fail)),
            ("CUDA_LAUNCH_BLOCKING", "0", None),
            ("LD_LIBRARY_PATH", "/a:/usr/local/cuda/compat", Some(Status::Fail)),
            ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64", None),
            ("CUDA_VISIBLE_DEVICES", "0,1", Some(Status::Ok)),
            ("CUDA_VISIBLE_DEVICES", "", Some(Status::Fail)),
            ("CUDA_DEVICE_MAX_CONNECTIONS", "32", Some(Status::Ok)),
            ("NCCL_P2P_DISABLE", "1", Some(Status::Warn)),
            ("NCCL_GRAPH_FILE", "", Some(Status::Warn)),
            ("HOME", "/root", None),
        ] {
            assert_eq!(judge(name, value), expected, "{name}={value}");
        }
    }
}
