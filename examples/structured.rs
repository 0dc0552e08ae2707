//! Structured output: JSON that conforms to a schema, and text that matches a regular expression.
//! `cargo run --release --example structured [MODEL_FOLDER]`

use kiln::{Grammar, Model};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(kiln_examples::model_folder())?;
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"enum": ["Romeo", "Juliet", "Mercutio"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "friends": {"type": "array", "items": {"enum": ["Benvolio", "Tybalt"]}, "maxItems": 2}
        },
        "required": ["name", "age", "friends"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}
    });
    let schema = Grammar::json_schema(&schema.to_string())?;
    let mut pieces = model.generate("A person of the play: ").grammar(schema).seed(1).stream()?;
    let text = pieces.by_ref().collect::<kiln::Result<String>>()?;
    let person: Value = serde_json::from_str(&text)?;
    println!("{} is {} years old: {text}", person["name"], person["age"]);
    println!("{} of {} tokens were forced", pieces.stats().forced, pieces.stats().generated);

    let date = Grammar::regex("1[5-7][0-9]{2}-(0[1-9]|1[0-2])")?;
    let text = model.generate("The play was written in ").grammar(date).seed(1).text()?;
    let (year, month) = text.split_once('-').ok_or("the date has no month")?;
    println!("year {}, month {}", year.parse::<u16>()?, month.parse::<u8>()?);
    Ok(())
}
