//! Metadata from untrusted sources: arbitrary values for the keys that are read.

use proptest::prelude::*;

use super::*;

fn any_value() -> impl Strategy<Value = Stored> {
    prop_oneof![
        prop_oneof![0..9_u64, any::<u64>()].prop_map(Stored::U64),
        any::<i32>().prop_map(Stored::I32),
        any::<f32>().prop_map(Stored::F32),
        any::<bool>().prop_map(Stored::Bool),
        prop_oneof![Just("yarn"), Just("linear"), Just("x")].prop_map(|text| Stored::String(text.to_owned())),
        prop::collection::vec(0..3, 0..9).prop_map(|list| Stored::Array(Array::I32(list))),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(|list| Stored::Array(Array::Bool(list))),
    ]
}

const KEYS: [&str; 24] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.dt_b_c_rms",
    "final_logit_softcapping",
];

proptest! {
    #[test]
    fn random_metadata_never_panics(
        architecture in 0..ARCHITECTURES.len(),
        changes in prop::collection::vec((0..24_usize, any_value()), 1..6),
        factors in prop::collection::vec(any::<f32>(), 0..9),
    ) {
        let mut model = mixers(ARCHITECTURES[architecture].0).vector("rope_freqs.weight", factors);
        for (key, value) in changes {
            model = model.set(KEYS[key], value);
        }
        let _ = config_json(&model.metadata, &mut model.tensors);
    }
}
