//! Promise: the published config.json files of GLM-5, 5.1, 5.2 and 5.3 are read right, by every way
//! in which such a file may say which layers own an indexer, and with the family's defaults.

mod common;

use common::{TINY, read_json, repository};
use serde_json::{Value, json};
use talon::model::ModelConfig;

fn published(name: &str) -> Value {
    read_json(&repository(&format!("weights-manifest/configs/{name}.json")))
}

fn read(config: &Value) -> ModelConfig {
    ModelConfig::from_json("config.json", config.to_string().as_bytes()).unwrap()
}

/// Layers that own an indexer.
fn indexers(config: &ModelConfig) -> Vec<usize> {
    (0..config.layers.len()).filter(|layer| config.layers[*layer].indexer).collect()
}

/// 0, 1, 2, 6, 10, …, 74, and the MTP layer.
fn indexers_of_5_2() -> Vec<usize> {
    [0, 1, 2].into_iter().chain((6..=74).step_by(4)).chain([78]).collect()
}

fn without(mut config: Value, keys: &[&str]) -> Value {
    let map = config.as_object_mut().unwrap();
    keys.iter().for_each(|key| drop(map.remove(*key)));
    config
}

#[test]
fn published_configs() {
    let cases = [
        ("glm-5", 1e6, 202_752, (0..79).collect()),
        ("glm-5.1", 1e6, 202_752, (0..79).collect()),
        ("glm-5.2", 8e6, 1_048_576, indexers_of_5_2()),
        ("glm-5.3", 8e6, 1_048_576, indexers_of_5_2()),
    ];
    for (name, theta, positions, expected) in cases {
        let config = read(&published(name));
        assert_eq!(config.rope_theta, theta, "{name}");
        assert_eq!(config.max_position_embeddings, positions, "{name}");
        assert_eq!(indexers(&config), expected, "{name}");
        assert_eq!(config.unhandled, [""; 0], "{name}");

        assert_eq!(config.layers.len(), 79, "{name}");
        for (index, layer) in config.layers.iter().enumerate() {
            assert_eq!((layer.moe, layer.mtp), (index >= 3, index == 78), "{name}: {index}");
        }
        assert_eq!(config.eos_token_id, [154_820, 154_827, 154_829], "{name}");
        assert_eq!((config.rms_norm_eps, config.latent_norm_eps), (1e-5, 1e-5), "{name}");
        assert_eq!((config.routed_scaling_factor, config.norm_topk_prob), (2.5, true), "{name}");
        assert_eq!((config.qk_nope_head_dim, config.qk_rope_head_dim), (192, 64), "{name}");
        assert_eq!((config.n_routed_experts, config.num_experts_per_tok), (256, 8), "{name}");
    }
    assert_eq!(indexers_of_5_2().len(), 22);
}

#[test]
fn indexer_layers_by_the_rule() {
    let config = without(published("glm-5.2"), &["indexer_types", "index_topk_pattern"]);
    assert_eq!(indexers(&read(&config)), indexers_of_5_2());
    // layer i is full iff max(i - offset + 1, 0) mod freq = 0
    for (freq, offset) in [(1, 3), (2, 0), (3, 1), (4, 2), (5, 7), (78, 3)] {
        let mut config = config.clone();
        config["index_topk_freq"] = freq.into();
        config["index_skip_topk_offset"] = offset.into();
        let by_rule = |layer: &i64| (layer - offset + 1).max(0) % freq == 0;
        if !by_rule(&0) {
            continue;
        }
        let expected: Vec<usize> =
            (0..78).filter(by_rule).chain([78]).map(|layer| layer as usize).collect();
        assert_eq!(indexers(&read(&config)), expected, "freq {freq} offset {offset}");
    }
    let config = without(config, &["index_topk_freq", "index_skip_topk_offset"]);
    assert_eq!(indexers(&read(&config)).len(), 79, "all of them without a rule");
}

#[test]
fn indexer_layers_by_a_pattern() {
    let owns = indexers_of_5_2();
    let pattern: String = (0..78).map(|i| if owns.contains(&i) { 'F' } else { 'S' }).collect();
    let mut config = without(published("glm-5.2"), &["indexer_types"]);
    config["index_topk_pattern"] = pattern.into();
    // The pattern wins over the rule.
    config["index_topk_freq"] = 1.into();
    assert_eq!(indexers(&read(&config)), owns);
    // The list wins over the pattern.
    config["indexer_types"] = json!(vec!["full"; 78]);
    assert_eq!(indexers(&read(&config)).len(), 79);
}

#[test]
fn layer_0_has_no_earlier_list_to_share() {
    let mut config = published("glm-5.2");
    config["indexer_types"][0] = "shared".into();
    let text = config.to_string();
    let error = ModelConfig::from_json("config.json", text.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("layer 0"), "{error}");
}

/// transformers leaves keys out that only repeat its defaults.
#[test]
fn absent_keys_take_the_familys_values() {
    let tiny = read_json(&repository(TINY).join("config.json"));
    for key in ["scoring_func", "topk_method", "num_nextn_predict_layers", "index_topk_freq"] {
        assert!(tiny.get(key).is_none(), "the fixture is here for the lack of {key}");
    }
    let tiny = read(&tiny);
    assert_eq!((tiny.num_nextn_predict_layers, tiny.layers.len()), (0, 6));
    assert_eq!(indexers(&tiny), [0, 1, 2, 5]);
    assert_eq!(tiny.unhandled, [""; 0]);

    let full = published("glm-5.2");
    let bare = without(
        full.clone(),
        &[
            "first_k_dense_replace",
            "mlp_layer_types",
            "n_group",
            "topk_group",
            "n_shared_experts",
            "norm_topk_prob",
            "rms_norm_eps",
            "routed_scaling_factor",
            "scoring_func",
            "topk_method",
            "rope_interleave",
            "indexer_rope_interleave",
            "hidden_act",
            "moe_layer_freq",
        ],
    );
    assert_eq!(read(&bare), read(&full));
}

#[test]
fn theta_at_the_top_or_nested() {
    let mut config = published("glm-5.2");
    config["rope_theta"] = 5e5.into();
    assert_eq!(read(&config).rope_theta, 8e6, "the nested one is the model's own");
    let config = without(config, &["rope_parameters"]);
    assert_eq!(read(&config).rope_theta, 5e5);
}

#[test]
fn one_end_token_may_stand_without_a_list() {
    let mut config = published("glm-5");
    config["eos_token_id"] = 7.into();
    assert_eq!(read(&config).eos_token_id, [7]);
    assert_eq!(read(&without(config, &["eos_token_id"])).eos_token_id, [0; 0]);
}
