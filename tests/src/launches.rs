//! How many kernels a decode step launches. Each costs a GPU some microseconds, whatever it computes.

use std::collections::BTreeMap;

use kiln::{
    DtypeChoice, ModelBuilder, Plan,
    device::{DeviceClass, Opened},
    expert::kernels::launches_of,
};

use crate::support::{Llama, greedy};

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
    let sizes = Llama { layers: LAYERS, hidden: 256, heads: 4, kv_heads: 4, intermediate: 48, vocab: 1024 };
    let model = ModelBuilder::random(sizes.config()).opened(opened.clone()).dtype(dtype).load().unwrap();
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
