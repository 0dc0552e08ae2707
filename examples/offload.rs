//! A cache in host memory: the text is the same with all, two or none of the layers on the device.
//! `cargo run --release --example offload [MODEL_FOLDER]`

use kiln::{Model, Offload, Plan};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let prompt = "The Constitution";
    let mut texts = Vec::new();
    // `offloaded(..)` wraps any plan; `AllBut(2)` keeps the last two layers on the device.
    let dynamic = Plan::dynamic();
    for plan in
        [dynamic.clone(), dynamic.clone().offloaded(Offload::AllBut(2)), dynamic.offloaded(Offload::All)]
    {
        let mut cache = model.cache(&plan)?;
        texts.push(model.generate(prompt).max_new_tokens(60).temperature(0.0).cache(&mut cache).text()?);
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
    println!("\n{prompt}{}", texts[0]);
    Ok(())
}
