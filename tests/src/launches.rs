//! The number of kernel launches in a decode step. Each costs a GPU some microseconds, whatever it computes.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use kiln::{
    DtypeChoice, Mixture, Model, ModelBuilder, Plan,
    device::{DeviceClass, DeviceName, Opened},
    expert::{Batch, ConfigFile, Logits, ModelCache, kernels::launches_of},
};
use serde_json::json;

use crate::support::{Llama, folder, greedy};

const LAYERS: usize = 32;

/// Held by each test here: only one count of launches runs at a time.
static COUNTING: Mutex<()> = Mutex::new(());

fn is_fused(opened: &Opened) -> bool {
    opened.info.class != DeviceClass::Software || std::env::var_os("KILN_SHARE_AS_A_GPU").is_some()
}

/// Returns the maximum number of launches per token: five per layer, and some for the whole model. Where
/// workgroups share the keys, another launch combines their parts, except on CUDA. On a software GPU, steps
/// are not fused.
fn most(opened: &Opened, layers: usize, are_shared: bool) -> usize {
    let each = if is_fused(opened) { 5 } else { 9 };
    let combines = are_shared && !matches!(opened.info.name, DeviceName::Cuda(_));
    (each + usize::from(combines)) * layers + 16
}

/// A model whose heads begin at multiples of 512 bytes: CUDA copies those that do not.
const SIZES: Llama =
    Llama { layers: LAYERS, hidden: 256, heads: 4, kv_heads: 4, intermediate: 256, vocab: 1024 };

/// Returns the launches per token, as the difference between generations of `n` tokens and of half as many.
fn a_token(model: &Model, cache: &str, n: usize, sample: bool) -> f64 {
    let plan = Plan::named(cache).unwrap();
    let launches = |n| {
        let config = greedy(n).do_sample(sample).seed(7).top_k(50);
        let request = model.generate(vec![vec![3, 1, 4]]).plan(plan.clone()).config(config);
        let (steps, launches) =
            launches_of(|| request.compile(Some(false)).steps().unwrap().map(Result::unwrap).count());
        assert_eq!(steps, n);
        launches
    };
    let (few, many) = (launches(n / 2), launches(n));
    let each = |launches: &BTreeMap<&str, usize>| launches.values().sum::<usize>() as f64;
    let a_token = (each(&many) - each(&few)) / (n / 2) as f64;
    for (name, count) in &many {
        println!("{count:6} {name}");
    }
    println!("{a_token} launches a token: {cache}, sampled {sample}");
    a_token
}

#[test]
fn launches_per_token_stay_within_their_limit() {
    let _only = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    for (device, opened) in kiln_testkit::devices::opened() {
        if opened.info.class == DeviceClass::Cpu {
            continue;
        }
        for dtype in [DtypeChoice::F32, DtypeChoice::F16] {
            if dtype == DtypeChoice::F16 && !opened.info.f16 {
                continue;
            }
            let load =
                |config| ModelBuilder::random(config).opened(opened.clone()).dtype(dtype).load().unwrap();
            let mut windowed = SIZES.config().json().clone();
            windowed["model_type"] = json!("mistral");
            windowed["sliding_window"] = json!(64);
            let (model, windowed) = (load(SIZES.config()), load(ConfigFile::from_json(windowed)));
            // Many slots, so that they are shared among workgroups, whose results are combined.
            for (model, cache, sample, are_shared) in [
                (&model, "dynamic", false, false),
                (&model, "static:len=4096", true, true),
                (&windowed, "sliding", false, false),
            ] {
                let launches = a_token(model, cache, 16, sample);
                assert!(launches > 0.0, "{device}: launches are counted");
                let most = most(opened, LAYERS, are_shared) as f64;
                assert!(
                    launches <= most,
                    "{device}, {dtype:?}, {cache}: {launches} launches a token, {most} allowed"
                );
            }
        }
    }
}

#[test]
fn packed_weights_take_no_more_launches() {
    let _only = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes = Llama { layers: 8, ..SIZES };
    let folder = folder(sizes.config().json(), &sizes.tensors());
    for (device, opened) in kiln_testkit::devices::opened() {
        if opened.info.class == DeviceClass::Cpu {
            continue;
        }
        // In Q4_K_M, the values of half of the layers have a format of their own.
        for (mixture, mixed) in [(Mixture::Q8_0, 0), (Mixture::Q4_0, 0), (Mixture::Q4KM, sizes.layers / 2)] {
            let model = Model::builder(folder.path()).opened(opened.clone()).quant(mixture).load().unwrap();
            let launches = a_token(&model, "dynamic", 16, false);
            assert!(launches > 0.0, "{device}: launches are counted");
            // Values are a product of their own, joined with queries and keys if steps are not fused. Rows of
            // embeddings are selected, then unpacked.
            let mixed = if is_fused(opened) { mixed } else { 3 * mixed };
            let most = (most(opened, sizes.layers, false) + mixed + 1) as f64;
            assert!(launches <= most, "{device}, {mixture:?}: {launches} launches a token, {most} allowed");
        }
    }
}

/// Returns the launches of a step of one cache whose rows have these lengths.
fn a_step(model: &Model, plan: &Plan, lens: &[usize]) -> usize {
    let tokens = |len: usize| (0..len as u32).map(|i| (7 * i + 3) % 1000).collect::<Vec<_>>();
    let feed = |rows: &[Vec<u32>], cache: &mut ModelCache| {
        let batch = Batch::from_rows(rows, model.device()).unwrap();
        drop(model.causal().forward(&batch, Logits::Last, cache).unwrap());
    };
    let mut cache = model.cache(plan).unwrap();
    // Rows of equal length are fed together.
    for rows in lens.chunk_by(PartialEq::eq) {
        let mut own = model.cache(plan).unwrap();
        feed(&rows.iter().map(|&len| tokens(len)).collect::<Vec<_>>(), &mut own);
        cache.join(own).unwrap();
    }
    let next = vec![vec![1]; lens.len()];
    // The first step moves rows into shared buffers.
    feed(&next, &mut cache);
    let ((), launches) = launches_of(|| feed(&next, &mut cache));
    launches.values().sum()
}

#[test]
fn rows_of_different_lengths_share_launches() {
    let _only = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    for (device, opened) in kiln_testkit::devices::opened() {
        if opened.info.class == DeviceClass::Cpu {
            continue;
        }
        let model = ModelBuilder::random(SIZES.config())
            .opened(opened.clone())
            .dtype(DtypeChoice::F32)
            .load()
            .unwrap();
        let lens: Vec<usize> = (0..16).map(|row| 3 + 7 * row).collect();
        for cache in ["dynamic", "static:len=128"] {
            let plan = Plan::named(cache).unwrap();
            let [even, uneven] = [&[9; 16][..], &lens].map(|lens| a_step(&model, &plan, lens));
            println!("{cache}: {even} launches for 16 rows of one length, {uneven} for 16 lengths");
            assert!(2 * uneven <= 3 * even, "{device}, {cache}: {uneven} launches, {even} for one length");
        }
        // Rows that do not share buffers take one launch per length: the ratio for comparison.
        let apart = a_step(&model, &Plan::named("sink:window=512,sinks=4").unwrap(), &lens);
        println!("sink: {apart} launches for 16 lengths");
    }
}
