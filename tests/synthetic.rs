//! Promise: a published model's true shapes can be measured without a download
//! (`--model synthetic:glm-5.2`).

mod common;

use common::{assert_one_line, talon};

#[test]
fn the_synthetic_model_is_the_published_one_by_its_totals() {
    let outcome = talon(&["verify", "--model", "synthetic:glm-5.2", "--json", "-"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let report = outcome.json();
    assert_eq!(report["tensors"], 232_385);
    assert_eq!(report["bytes"], 464_795_267_072u64);
    assert_eq!(report["layout"], "experts nvfp4, rest bf16");
    assert_eq!(report["mtp"], "complete");
}

/// One dense layer of the true width: the smallest run that reads weights of the true shapes.
#[test]
fn its_first_layers_run_and_speculate_with_simulated_acceptance() {
    let outcome = talon(&[
        "bench",
        "--model",
        "synthetic:glm-5.2",
        "--layers",
        "1",
        "--draft",
        "none",
        "--draft-tokens",
        "1",
        "--simulate-acceptance",
        "2",
        "--runs",
        "1",
        "--max-tokens",
        "4",
        "--tp",
        "2",
        "--json",
        "-",
    ]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let report = outcome.json();
    assert_eq!(report["model"]["layers"], 1);
    // Every guess is right: one token at first, then two a step and the rest.
    assert_eq!(report["summary"]["speculative"]["acceptance_length"], 1.5);
    assert_eq!(report["summary"]["identical"], true);
}

#[test]
fn unknown_models_and_layers_are_refused() {
    assert_one_line(&talon(&["bench", "--model", "synthetic:glm-9"]), &["glm-9", "glm-5.2"]);
    let args = ["bench", "--model", "synthetic:glm-5.2", "--layers", "79"];
    assert_one_line(&talon(&args), &["--layers 79", "1 to 78"]);
    assert_one_line(&talon(&["bench", "--layers", "2"]), &["--layers 2", "synthetic"]);
}
