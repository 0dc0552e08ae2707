//! How many kernels a decode step launches. Each costs a GPU some microseconds, whatever it computes.

use std::collections::BTreeMap;

use kiln::{
    DtypeChoice, ModelBuilder, Plan, RandomLlama,
    device::{DeviceClass, Opened},
    kernels::launches_of,
};

use crate::support::greedy;

const LAYERS: usize = 32;

/// The most that a token may take: seven launches a layer, and some for all of them. Where a GPU is imitated on the CPU, steps are not fused.
fn most(opened: &Opened) -> usize {
    let is_fused =
        opened.info.class != DeviceClass::Software || std::env::var_os("KILN_SHARE_AS_A_GPU").is_some();
    if is_fused { 7 * LAYERS + 16 } else { 11 * LAYERS + 16 }
}

/// Launches of each token that a generation of `n` tokens takes more than one of half as many.
fn a_token(opened: &Opened, dtype: DtypeChoice, cache: &str, n: usize, sample: bool) -> f64 {
    // Heads begin at multiples of 512 bytes: CUDA makes copies of those that do not.
    let sizes =
        RandomLlama { layers: LAYERS, hidden: 256, heads: 4, kv_heads: 4, intermediate: 48, vocab: 1024 };
    let model = ModelBuilder::random(&sizes).opened(opened.clone()).dtype(dtype).load().unwrap();
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
    println!("{a_token} launches a token: {dtype:?}, {cache}, sampled {sample}");
    a_token
}

#[test]
fn a_token_takes_few_launches() {
    for (device, opened) in kiln_testkit::devices::opened() {
        if opened.info.class == DeviceClass::Cpu {
            continue;
        }
        for dtype in [DtypeChoice::F32, DtypeChoice::F16] {
            if dtype == DtypeChoice::F16 && !opened.info.f16 {
                continue;
            }
            // Many slots, so that workgroups share them, and their results are combined.
            for (cache, sample) in [("dynamic", false), ("static:len=4096", true)] {
                let launches = a_token(opened, dtype, cache, 16, sample);
                assert!(launches > 0.0, "{device}: launches are counted");
                let most = most(opened) as f64;
                assert!(
                    launches <= most,
                    "{device}, {dtype:?}, {cache}: {launches} launches a token, {most} allowed"
                );
            }
        }
    }
}

/// Launches of a decode step of rows with these lengths.
fn a_step(opened: &Opened, lens: impl Iterator<Item = usize>) -> f64 {
    let sizes =
        RandomLlama { layers: LAYERS, hidden: 256, heads: 4, kv_heads: 4, intermediate: 48, vocab: 1024 };
    let model = ModelBuilder::random(&sizes).opened(opened.clone()).dtype(DtypeChoice::F32).load().unwrap();
    let prompts: Vec<Vec<u32>> =
        lens.map(|len| (0..len as u32).map(|i| (7 * i + 3) % 1000).collect()).collect();
    let launches = |n| {
        let request = model.generate(prompts.clone()).config(greedy(n)).compile(Some(false));
        let (steps, launches) = launches_of(|| request.steps().unwrap().map(Result::unwrap).count());
        assert_eq!(steps, n);
        launches
    };
    // Behind the first steps, in which rows come to share buffers.
    let (few, many) = (launches(4), launches(12));
    for (name, count) in &many {
        println!("{:6} {name}", count - few.get(name).unwrap_or(&0));
    }
    (many.values().sum::<usize>() - few.values().sum::<usize>()) as f64 / 8.0
}

#[test]
fn rows_of_different_lengths_share_launches() {
    for (device, opened) in kiln_testkit::devices::opened() {
        if opened.info.class == DeviceClass::Cpu {
            continue;
        }
        let (even, uneven) =
            (a_step(opened, [9; 16].into_iter()), a_step(opened, (0..16).map(|row| 3 + 7 * row)));
        println!("{even} launches a step of 16 rows of one length, {uneven} of 16 lengths");
        assert!(uneven <= 1.5 * even, "{device}: {uneven} launches, and {even} where rows are of one length");
    }
}
