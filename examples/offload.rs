//! A cache in host memory: the same text, with two layers on the device.
//! `cargo run --release --example offload [MODEL_FOLDER]`

use kiln::{GenerationConfig, LoadOptions, Model, Offload, Plan, RunOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&kiln_examples::model_folder(), LoadOptions::new("auto".parse()?)?)?;
    let prompt = model.encode("The Constitution")?;
    let wanted = GenerationConfig::new().max_new_tokens(60).do_sample(false);
    let mut texts = Vec::new();
    // `offloaded(..)` goes around any plan; `AllBut(2)` keeps the last two layers on the device.
    let dynamic = Plan::dynamic();
    for plan in
        [dynamic.clone(), dynamic.clone().offloaded(Offload::AllBut(2)), dynamic.offloaded(Offload::All)]
    {
        let mut cache = model.cache(&plan)?;
        let pieces = model.generate_text(&mut cache, prompt.clone(), &wanted, RunOptions::default())?;
        texts.push(pieces.collect::<Result<String, _>>()?);
        println!(
            "{:<40} {:>8} bytes on the device, {:>8} on the host, {:>9} moved up, {:>7} down",
            plan.label(&model.causal().needs()),
            cache.device_bytes(),
            cache.host_bytes(),
            cache.moved().up,
            cache.moved().down,
        );
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "where a cache is kept changes nothing");
    println!("\nThe Constitution{}", texts[0]);
    Ok(())
}
