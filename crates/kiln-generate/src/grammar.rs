//! Structured output: text that matches a JSON schema, a regular expression or a grammar.
//!
//! Before each token, a grammar determines which tokens may follow (a [`Mask`]), and the others are removed
//! from the scores. So whatever the model chooses, a text that ends matches. A text that is cut off, by
//! `max_new_tokens` for example, is the beginning of one that matches. Masks come from the crate llguidance:
//! a lexer of derivatives below an Earley parser, run over a trie of the vocabulary.
//!
//! # Costs
//! A [`TokenTable`] is built once per model (0.2 s for 50,000 tokens), and a grammar is compiled once per
//! request (milliseconds). A mask takes about 10 µs to compute, and up to 5 ms when a pattern is met for the
//! first time; [`Masks`] computes it while the device computes. But a token has to be known on the host
//! before the mask of the next one can be computed, so the device cannot run ahead.
//!
//! # Limitations
//! - Keys of an object come in the order in which `properties` of the schema lists them, then those that it
//!   does not list. `{"b": 1, "a": 2}` is never generated for a schema that lists `a` first. Names that are
//!   not listed may be repeated.
//! - Any whitespace is allowed between the parts of JSON, which some small models use to continue forever. A
//!   schema with `"x-guidance": {"whitespace_flexible": false}` allows none.
//! - Characters are not escaped as `\uXXXX`, except control characters.
//! - A date may be the 29th of any February, and any minute may have a leap second.
//! - A tokenizer may split the same text in many ways. Text that must follow is split as the tokenizer splits
//!   it.
//!
//! Schemas and grammars may come from strangers: their size, the time to compile them and the work of each
//! mask are bounded. Exceeding a bound is an error.

mod dead_ends;
mod limits;
mod mask;
mod masks;
mod matcher;
mod patterns;
mod schema;
mod sentence;
mod token_table;

use std::sync::Arc;

use kiln_core::{Error, Result};
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

pub use mask::Mask;
pub use masks::{Advance, Masks, Nexts};
pub use matcher::{Matcher, Next};
pub use token_table::TokenTable;

/// The grammar that the text of a row must match.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar(Arc<Source>);

#[derive(Clone, Debug, PartialEq)]
enum Source {
    JsonSchema(Value),
    Regex(String),
    Lark(String),
}

impl Grammar {
    /// A grammar for JSON that a JSON schema accepts. Drafts 4 to 2020-12 are supported.
    ///
    /// These keywords are not supported, and an error: `contains`, `dependentRequired`, `dependentSchemas`,
    /// `if` (with `then` and `else`), `minContains`, `maxContains`, `not`, `propertyNames`,
    /// `unevaluatedItems`, `unevaluatedProperties`, `uniqueItems`, `$dynamicRef`. So are an `oneOf` whose
    /// alternatives may match the same text, a `$ref` to another file, a `format` other than `date`,
    /// `date-time`, `time`, `duration`, `email`, `hostname`, `ipv4`, `ipv6`, `uri` and `uuid`, and
    /// `minProperties` or `maxProperties` together with properties that are not required. A schema that leads
    /// to a place where nothing can follow is an error, too.
    ///
    /// # Errors
    /// [`Error::Setting`] for text that is not JSON, is too long or is nested too deeply.
    pub fn json_schema(text: &str) -> Result<Self> {
        let name = "json_schema";
        sized(name, text)?;
        let schema: Value = serde_json::from_str(text).map_err(|e| {
            let why = match e.to_string() {
                deep if deep.starts_with("recursion limit") => {
                    "it is nested more than 127 levels deep".into()
                }
                why => format!("it is not JSON: {why}"),
            };
            Error::Setting { name, why }
        })?;
        let checked = match schema {
            Value::Object(_) | Value::Bool(_) => schema::check(&schema, text.len()),
            _ => Err("it is neither an object nor true or false".into()),
        };
        checked.map_err(|why| Error::Setting { name, why })?;
        Ok(Self(Arc::new(Source::JsonSchema(schema))))
    }

    /// A grammar for any JSON object.
    pub fn json_object() -> Self {
        Self(Arc::new(Source::JsonSchema(json!({"type": "object"}))))
    }

    /// A grammar for text that a regular expression matches from its first to its last character.
    ///
    /// The syntax is that of the Rust crate regex, without look-arounds, word boundaries and lazy repetition.
    ///
    /// # Errors
    /// [`Error::Setting`] for an expression that is too long.
    pub fn regex(text: &str) -> Result<Self> {
        sized("regex", text)?;
        Ok(Self(Arc::new(Source::Regex(text.to_owned()))))
    }

    /// A grammar in llguidance's variant of the Lark syntax; its first rule is `start`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a grammar that is too long.
    pub fn lark(text: &str) -> Result<Self> {
        sized("grammar", text)?;
        Ok(Self(Arc::new(Source::Lark(text.to_owned()))))
    }

    /// The name of its setting: `json_schema`, `regex` or `grammar`.
    pub fn name(&self) -> &'static str {
        match *self.0 {
            Source::JsonSchema(_) => "json_schema",
            Source::Regex(_) => "regex",
            Source::Lark(_) => "grammar",
        }
    }

    /// Compiles the grammar for a vocabulary. The result is at the beginning of a text; clone it for each
    /// row.
    ///
    /// # Errors
    /// [`Error::Setting`] for a schema, an expression or a grammar that is invalid, is not supported, or is
    /// too complex.
    pub fn compile(&self, table: &Arc<TokenTable>) -> Result<Matcher> {
        let (source, shared) = (self.0.clone(), table.clone());
        let compiled = limits::within_time(move || {
            let grammar = match &*source {
                Source::JsonSchema(schema) => {
                    let mut schema = schema.clone();
                    patterns::resolve(&mut schema);
                    TopLevelGrammar::from_json_schema(schema)
                }
                Source::Regex(text) => TopLevelGrammar::from_regex(text),
                Source::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            };
            let parser =
                shared.factory().create_parser(grammar).map_err(|e| sentence::of(&format!("{e:#}")))?;
            // Authors of custom grammars may share the beginnings of rules.
            dead_ends::check(parser.parser.grammar(), matches!(*source, Source::JsonSchema(_)))?;
            Ok(parser)
        });
        let wrong = |why| Error::Setting { name: self.name(), why };
        let parser = compiled.and_then(|parser| parser).map_err(wrong)?;
        Ok(Matcher::new(parser, table.clone(), self.name()))
    }
}

fn sized(name: &'static str, text: &str) -> Result<()> {
    let most = limits::MOST_SOURCE;
    match text.len() {
        bytes if bytes > most => {
            Err(Error::Setting { name, why: format!("it has {bytes} bytes, at most {most} are taken") })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
