//! OpenAI's API for a model, from a program of your own. `cargo run --release --example serve [MODEL_FOLDER]`

use kiln::Model;
use kiln_serve::{ServeOptions, ServedModel, Server};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let options = ServeOptions { rows: Some(8), ..ServeOptions::default() };
    let server = Server::new(vec![ServedModel::loaded("example", model)], options, "127.0.0.1:8080")?;
    println!("curl http://{}/v1/models", server.address());
    // Until it returns true.
    server.run(|| false)?;
    Ok(())
}
