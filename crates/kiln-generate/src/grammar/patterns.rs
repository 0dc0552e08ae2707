//! `patternProperties` that match only names in `properties`.
//!
//! llguidance reserves a property with a pattern for names that are not listed. If the pattern matches no
//! such name, that property would have to follow a comma and could not.

use llguidance::{
    derivre::{RegexAst, RegexBuilder},
    regex_to_lark,
};
use serde_json::{Map, Value, json};

/// Maximum work to analyze one pattern.
const FUEL: u64 = 10_000;
/// Keywords whose values are not schemas.
const VALUES: [&str; 4] = ["const", "enum", "default", "examples"];

/// Adds the schema of a pattern to each property that it matches, and removes patterns that match no other
/// name.
pub(super) fn resolve(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(resolve),
        Value::Object(fields) => {
            resolve_object(fields);
            let schemas = fields.iter_mut().filter(|(name, _)| !VALUES.contains(&name.as_str()));
            schemas.for_each(|(_, schema)| resolve(schema));
        }
        _ => (),
    }
}

fn resolve_object(fields: &mut Map<String, Value>) {
    let Some(Value::Object(patterns)) = fields.get("patternProperties").cloned() else { return };
    let listed = fields.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let required = required.filter_map(Value::as_str).filter(|name| !listed.contains_key(*name));
    let names: Vec<String> = listed.keys().cloned().chain(required.map(str::to_owned)).collect();
    for (pattern, schema) in &patterns {
        let Some(of_pattern) = only(pattern, &names) else { continue };
        let properties = fields.entry("properties").or_insert_with(|| json!({}));
        for name in of_pattern {
            let Some(property) = properties.as_object_mut().map(|all| all.entry(name)) else { return };
            property
                .and_modify(|own| *own = json!({"allOf": [own, schema]}))
                .or_insert_with(|| schema.clone());
        }
        if let Some(patterns) = fields.get_mut("patternProperties").and_then(Value::as_object_mut) {
            patterns.remove(pattern);
        }
    }
}

/// The listed names that a pattern matches; `None` if it matches a name that is not listed.
fn only(pattern: &str, names: &[String]) -> Option<Vec<String>> {
    let mut builder = RegexBuilder::new();
    let all = builder.mk_regex_for_serach(&regex_to_lark(pattern, "dw")).ok()?;
    let listed = RegexAst::Or(names.iter().map(|name| RegexAst::Literal(name.clone())).collect());
    let others = RegexAst::And(vec![RegexAst::ExprRef(all), RegexAst::Not(Box::new(listed))]);
    let others = builder.mk(&others).ok()?;
    if !builder.to_regex_limited(others, FUEL).ok()?.always_empty() {
        return None;
    }
    let mut matches = builder.to_regex_limited(all, FUEL).ok()?;
    Some(names.iter().filter(|name| matches.is_match(name)).cloned().collect())
}
