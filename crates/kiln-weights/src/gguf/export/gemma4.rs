//! Gemma 4, whose blocks differ in the sizes of their heads and feed-forwards.

use serde_json::Value as Json;

use super::config::{Folder, wrong};
use crate::{
    Error,
    gguf::{Array, Value},
};

/// Divisor of the frequencies of pairs that are not rotated.
const NEVER: f32 = 1e30;

pub(super) fn gemma4(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&["gelu_pytorch_tanh"])?;
    let blocks = folder.blocks()? as usize;
    let mut full = folder.blocks_of("full_attention", |i| (i + 1).is_multiple_of(6))?;
    // As in Transformers, the last block sees all.
    if let Some(last) = full.last_mut() {
        *last = true;
    }
    let [of_windows, of_full] = folder.head_dims(&full)?;
    let kv_heads = folder.kv_heads_of_blocks(&full)?;
    let width = folder.needed("intermediate_size")?;
    let shared = folder.unsigned("num_kv_shared_layers")?.unwrap_or(0);
    let first_shared = (blocks as u64).saturating_sub(shared);
    let is_wide = folder.boolean("use_double_wide_mlp")?.unwrap_or(false);
    let of_block = |i: u64| if is_wide && i >= first_shared { width.saturating_mul(2) } else { width };
    folder.of_blocks("feed_forward_length", (0..blocks as u64).map(of_block).collect())?;
    folder.of_blocks("attention.head_count_kv", kv_heads)?;
    for (key, number) in [
        ("block_count", blocks as u64),
        ("context_length", folder.positions()?),
        ("embedding_length", folder.needed("hidden_size")?),
        ("attention.head_count", folder.needed("num_attention_heads")?),
        ("attention.key_length", of_full),
        ("attention.value_length", of_full),
        ("attention.key_length_swa", of_windows),
        ("attention.value_length_swa", of_windows),
        ("attention.sliding_window", folder.unsigned("sliding_window")?.unwrap_or(512)),
        ("attention.shared_kv_layers", shared),
        ("embedding_length_per_layer_input", folder.unsigned("hidden_size_per_layer_input")?.unwrap_or(256)),
        ("rope.dimension_count", of_full),
        ("rope.dimension_count_swa", of_windows),
    ] {
        folder.count(key, number)?;
    }
    folder.rms_eps("rms_norm_eps")?;
    if let Some(cap) = folder.number("final_logit_softcapping")? {
        folder.real("final_logit_softcapping", cap);
    }
    let slides = full.iter().map(|full| !full).collect();
    folder.set("attention.sliding_window_pattern", Value::Array(Array::Bool(slides)));
    folder.ropes(of_full)?;
    if folder.boolean("enable_moe_block")? != Some(true) {
        return Ok(());
    }
    for (field, key) in [
        ("num_experts", "expert_count"),
        ("top_k_experts", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
    ] {
        let number = folder.needed(field)?;
        folder.count(key, number)?;
    }
    Ok(())
}

impl Folder<'_> {
    /// Sets a key to a list with a number for each block, or to one number if all are equal.
    fn of_blocks(&mut self, key: &str, numbers: Vec<u64>) -> Result<(), Error> {
        if numbers.iter().all(|number| numbers.first() == Some(number)) {
            return self.count(key, numbers.first().copied().unwrap_or(0));
        }
        let too_large = |_| wrong(format!("`{key}` has a number that is too large"));
        let list = numbers.into_iter().map(i32::try_from).collect::<Result<_, _>>().map_err(too_large)?;
        self.set(key, Value::Array(Array::I32(list)));
        Ok(())
    }

    /// Returns a field of one block, which replaces that of all.
    fn of_block(&self, block: usize, field: &str) -> Option<u64> {
        self.get("per_layer_config")?.get(block.to_string())?.get(field)?.as_u64()
    }

    /// Returns the sizes of heads of blocks with a window, and of the others.
    fn head_dims(&self, full: &[bool]) -> Result<[u64; 2], Error> {
        let of_windows = self.head_dim()?;
        let first = full.iter().position(|full| *full).unwrap_or(0);
        let of_full = match self.get("per_layer_config") {
            Some(_) => self.of_block(first, "head_dim").unwrap_or(of_windows),
            None => self.unsigned("global_head_dim")?.unwrap_or(512),
        };
        Ok([of_windows, of_full])
    }

    fn kv_heads_of_blocks(&self, full: &[bool]) -> Result<Vec<u64>, Error> {
        let usual = self.kv_heads()?;
        let is_keys = self.boolean("attention_k_eq_v")?.unwrap_or(false);
        let of_full = self.unsigned("num_global_key_value_heads")?.filter(|_| is_keys).unwrap_or(usual);
        let of_block = |(i, full): (usize, &bool)| match self.get("per_layer_config") {
            Some(_) => self.of_block(i, "num_key_value_heads").unwrap_or(usual),
            None if *full => of_full,
            None => usual,
        };
        Ok(full.iter().enumerate().map(of_block).collect())
    }

    /// Writes the rotary positions of both kinds of blocks.
    fn ropes(&mut self, of_full: u64) -> Result<(), Error> {
        let section = |kind: &str| self.get("rope_parameters").and_then(|ropes| ropes.get(kind));
        let number = |kind: &str, key: &str, default: f64| {
            section(kind).and_then(|rope| rope.get(key)).and_then(Json::as_f64).unwrap_or(default)
        };
        let [full, sliding] = ["full_attention", "sliding_attention"];
        for (kind, usual) in [(full, "proportional"), (sliding, "default")] {
            let stated = section(kind).and_then(|rope| rope.get("rope_type")).and_then(Json::as_str);
            if stated.is_some_and(|stated| stated != usual) {
                return Err(wrong(format!(
                    "the rope type of `{kind}` is not {usual}, which GGUF cannot say"
                )));
            }
        }
        if number(sliding, "partial_rotary_factor", 1.0) != 1.0 {
            return Err(wrong("blocks with a window rotate a part of each head, which GGUF cannot say"));
        }
        let bases = [number(full, "rope_theta", 1e6), number(sliding, "rope_theta", 1e4)];
        let rotated = (number(full, "partial_rotary_factor", 0.25) * of_full as f64 / 2.0) as usize;
        let factors = (0..of_full as usize / 2).map(|pair| if pair < rotated { 1.0 } else { NEVER });
        self.described.factors.push(("rope_freqs.weight", factors.collect()));
        self.real("rope.freq_base", bases[0]);
        self.real("rope.freq_base_swa", bases[1]);
        Ok(())
    }
}
