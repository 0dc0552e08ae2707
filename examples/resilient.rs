//! The guide's `resilient_generate`: memory runs out, and the generation goes on from the same token.
//! `cargo run --release --example resilient [MODEL_FOLDER]`

use kiln::{GenerationConfig, LoadOptions, Model, OnOutOfMemory, Plan, RunOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&kiln_examples::model_folder(), LoadOptions::new("auto".parse()?)?)?;
    let prompt = model.encode("The Constitution")?;
    let wanted = GenerationConfig::new().max_new_tokens(100).do_sample(false);
    let generate = |on_oom| {
        let mut cache = model.cache(&Plan::dynamic())?;
        let options = RunOptions { on_oom, ..RunOptions::default() };
        let steps = model.generate(&mut cache, vec![prompt.clone()], &wanted, options)?.steps();
        let tokens = steps.map(|step| step.map(|step| step.tokens)).collect::<kiln::Result<Vec<_>>>()?;
        Ok::<_, kiln::Error>((tokens, cache.host_bytes()))
    };

    let (tokens, _) = generate(OnOutOfMemory::Fail)?;
    // As if the device had no more room in the middle of the text.
    let somewhere = 50;
    model.budget().fail_allocation(somewhere);
    match generate(OnOutOfMemory::Fail) {
        Err(error) => println!("on_oom = fail:    {error}"),
        Ok(_) => println!("on_oom = fail:    fewer than {somewhere} allocations, nothing failed"),
    }
    model.budget().fail_allocation(somewhere);
    let (same, on_the_host) = generate(OnOutOfMemory::Offload)?;
    println!(
        "on_oom = offload: {} tokens, {on_the_host} bytes of the cache are in host memory now",
        same.len()
    );
    assert_eq!(tokens, same, "the tokens are the same");
    Ok(())
}
