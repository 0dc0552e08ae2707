//! Checks of a stranger's JSON schema before it is compiled.

use serde_json::Value;

/// Maximum size of a schema in bytes times its alternatives: each alternative of an anyOf may be compiled
/// with a copy of all the rest.
const MOST_WORK: usize = 16 << 20;

/// Rejects a schema for which llguidance would take too much memory, or which it would compile incorrectly.
pub(super) fn check(schema: &Value, bytes: usize) -> Result<(), String> {
    let mut found = Found::default();
    found.visit(schema);
    if found.alternatives.saturating_mul(bytes) > MOST_WORK {
        return Err(format!(
            "its anyOf and oneOf have {} alternatives, which is too many for its {bytes} bytes",
            found.alternatives
        ));
    }
    match found.combines && found.overflows() {
        true => Err("its multipleOf are too large to be combined".into()),
        false => Ok(()),
    }
}

#[derive(Default)]
struct Found {
    alternatives: usize,
    /// Whether a value may have to be a multiple of two numbers at once.
    combines: bool,
    multiples: Vec<f64>,
}

impl Found {
    /// Visits `value`, which is nested at most 127 levels deep, the limit of serde_json.
    fn visit(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value) {
                        ("anyOf" | "oneOf", Value::Array(list)) => self.alternatives += list.len(),
                        ("multipleOf", Value::Number(number)) => self.multiples.extend(number.as_f64()),
                        _ => (),
                    }
                    self.combines |= matches!(name.as_str(), "allOf" | "anyOf" | "oneOf" | "$ref");
                    self.visit(value);
                }
            }
            Value::Array(list) => list.iter().for_each(|value| self.visit(value)),
            _ => (),
        }
    }

    /// Whether a common multiple of two numbers has more than 32 bits, which llguidance does not detect.
    fn overflows(&self) -> bool {
        let decimals = |number: &f64| {
            (0..10).find(|places| (number * 10f64.powi(*places)).fract() == 0.0).map_or(10, |places| places)
        };
        let places = self.multiples.iter().map(decimals).max().unwrap_or(0);
        let mut whole: Vec<f64> =
            self.multiples.iter().map(|number| number.abs() * 10f64.powi(places)).collect();
        whole.sort_by(f64::total_cmp);
        whole.dedup();
        matches!(whole[..], [.., a, b] if a * b > f64::from(u32::MAX))
    }
}
