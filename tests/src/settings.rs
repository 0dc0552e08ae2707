//! Cache settings: parsed from text, built in Rust, and printed.

use kiln::{
    Error, Offload, Plan, QuantizedSettings,
    expert::{
        Compat, Flush, Rotate, STRATEGIES, SinkSettings,
        quantizers::{self, Optimizer},
    },
};

/// Returns the samples, alone and combined with other caches for layers with a window, on the device and
/// offloaded.
fn plans() -> Vec<Plan> {
    let samples: Vec<Plan> = kiln::expert::cache_samples().map(|text| Plan::named(&text).unwrap()).collect();
    let with_windows = samples.iter().map(|plan| plan.clone().windowed(Plan::dynamic()));
    let offloads = [None, Some(Offload::All), Some(Offload::AllBut(2)), Some(Offload::AsNeeded)];
    let all = samples.iter().cloned().chain(with_windows);
    all.flat_map(|plan| offloads.map(|offload| Plan { offload, ..plan.clone() })).collect()
}

#[test]
fn a_plan_is_read_from_what_it_prints() {
    for plan in plans() {
        assert_eq!(Plan::named(&plan.to_string()), Ok(plan));
    }
}

/// Help texts list the fields of the settings and their aliases.
#[test]
fn known_settings_are_those_that_the_help_lists() {
    for strategy in STRATEGIES {
        let mut listed: Vec<&str> = strategy.settings.iter().map(|(key, _)| *key).collect();
        let refused = (strategy.read)("?=?").unwrap_err();
        let Error::Unknown { what: "cache setting", mut known, .. } = refused else {
            assert!(listed.is_empty() && refused.to_string().contains("no settings"), "{refused}");
            continue;
        };
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(known, listed, "{}", strategy.name);
    }
}

#[test]
fn plans_built_in_rust_equal_plans_parsed_from_text() {
    let quantized = QuantizedSettings::default();
    let hqq = quantized.clone().format(quantizers::format("hqq").unwrap()).nbits(3);
    for (plan, text) in [
        (Plan::dynamic(), "dynamic"),
        (Plan::sliding(), "sliding_window"),
        (Plan::none(), "none"),
        (Plan::static_cache(None).unwrap(), "static"),
        (Plan::static_cache(Some(40)).unwrap(), "fixed:len=40"),
        (Plan::sink(1024, 4).unwrap(), "sink"),
        (Plan::sink(12, 0).unwrap(), "sink:sinks=0,window=12"),
        (Plan::of(SinkSettings::default().compat(Compat::V4_47)).unwrap(), "sink:compat=4.47"),
        (Plan::quantized(quantized.clone()).unwrap(), "quantized:nbits=4,group=64,residual_length=128"),
        (Plan::quantized(quantized.k(8).rotate(Rotate::Auto)).unwrap(), "quantized:rotate=auto,k=8"),
        (
            Plan::quantized(hqq.optimize(Optimizer::Legacy).flush(Flush::Requantize)).unwrap(),
            "quantized:backend=hqq,nbits=3,optimize=0.2.2,flush=requantize",
        ),
        (Plan::dynamic().windowed(Plan::dynamic()), "dynamic + dynamic"),
        (Plan::dynamic().windowed(Plan::sliding()), "dynamic"),
        (Plan::dynamic().offloaded(Offload::All), "offloaded"),
        (
            Plan::dynamic().windowed(Plan::none().offloaded(Offload::AllBut(3))),
            "hybrid + none + offload=layers=3",
        ),
    ] {
        assert_eq!(Plan::named(text), Ok(plan));
    }
}

#[test]
fn impossible_plans_give_the_same_error_in_rust_and_in_text() {
    let quantized = QuantizedSettings::default();
    for (plan, text) in [
        (Plan::sink(1, 4), "sink:window=1"),
        (Plan::sink(0, 0), "sink:window=0,sinks=0"),
        (Plan::static_cache(Some(0)), "static:len=0"),
        (Plan::static_cache(Some(1 << 40)), "static:len=1099511627776"),
        (Plan::quantized(quantized.clone().nbits(5)), "quantized:nbits=5"),
        (Plan::quantized(quantized.clone().axis_key(7)), "quantized:axis_key=7"),
        (Plan::quantized(quantized.compat(Compat::V4_47)), "quantized:compat=4.47"),
    ] {
        let error = plan.unwrap_err();
        assert!(matches!(error, Error::Setting { name: "cache", .. }), "{text}: {error}");
        assert_eq!(Plan::named(text), Err(error));
    }
}

#[test]
fn invalid_plans_are_errors_that_say_what_is_wrong() {
    for (text, said) in [
        (
            "elastic",
            "unknown cache strategy `elastic`; known: dynamic, static, sliding, sink, quantized, none",
        ),
        ("dynamic + ", "unknown cache strategy ``"),
        ("dynamic + sink + none", "unknown cache strategy `sink + none`"),
        ("dynamic + offload=half", "unknown way to offload `half`"),
        ("dynamic:len=4", "cache: dynamic: has no settings, so `len` does not apply"),
        ("sink:window", "cache: sink: `window` is not of the form key=value"),
        ("sink:windows=9", "unknown cache setting `sink:windows`; known: window, sinks, compat"),
        ("sink:window=9,window=9", "cache: sink: `window` is given twice"),
        ("sink:window=many", "cache: sink: `window=many` is not a whole number"),
        ("sink:window=-1", "cache: sink: `window=-1` is not a whole number"),
        ("sink:compat=4.48", "cache: sink: `compat=4.48` is unknown; known: 4.47"),
        ("quantized:backend=quanto,format=hqq", "cache: quantized: `format` is given by two of its names"),
        ("quantized:axis_key=x", "cache: quantized: `axis_key=x` is not a whole number"),
        ("quantized:flush=never", "`flush=never` is unknown; known: append, requantize"),
        ("quantized:format=gguf", "cache: quantized: unknown number format `gguf`; known: kivi, quanto, hqq"),
    ] {
        let error = Plan::named(text).unwrap_err().to_string();
        assert!(error.starts_with(said) || error.contains(&format!(": {said}")), "{text}: {error}");
    }
}
