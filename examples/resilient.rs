//! The guide's `resilient_generate`: memory runs out, and the generation resumes at the same token.
//! `cargo run --release --example resilient [MODEL_FOLDER]`

use kiln::{Model, OnOutOfMemory};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let generate = |on_oom| {
        let mut cache = model.cache(model.plan())?;
        let request = model.generate("The Constitution").max_new_tokens(100).temperature(0.0);
        let text = request.cache(&mut cache).on_oom(on_oom).text()?;
        Ok::<_, kiln::Error>((text, cache.host_bytes()))
    };

    let (text, _) = generate(OnOutOfMemory::Fail)?;
    // Simulates a device that runs out of memory in the middle of the text.
    let somewhere = 50;
    model.budget().fail_allocation(somewhere);
    match generate(OnOutOfMemory::Fail) {
        Err(error) => println!("on_oom = fail:    {error}"),
        Ok(_) => println!("on_oom = fail:    fewer than {somewhere} allocations, nothing failed"),
    }
    model.budget().fail_allocation(somewhere);
    let (same, on_the_host) = generate(OnOutOfMemory::Offload)?;
    println!("on_oom = offload: {on_the_host} bytes of the cache are in host memory now\n\n{same}");
    assert_eq!(text, same, "the text is the same");
    Ok(())
}
