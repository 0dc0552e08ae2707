//! A grammar of whole answers, in which each call of a tool matches its schema and the rest is free.

use std::fmt::Write;

use kiln_core::{Result, model::TokenId};
use serde_json::Value;

use super::AnswerFormat;
use crate::Grammar;

/// The JSON between the marks of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Json {
    /// One call.
    One,
    /// A list of calls.
    List,
}

impl AnswerFormat {
    /// The name that the model's calls have for the arguments.
    pub fn arguments_key(&self) -> &'static str {
        match self.calls {
            Some(calls) if calls.open == "<|python_tag|>" => "parameters",
            _ => "arguments",
        }
    }

    /// A grammar of answers in which each call matches `schema`, the JSON schema of one call; `None` if calls
    /// of this model are no JSON. `parallel`: whether there may be several. `special`: the id of a special
    /// token.
    ///
    /// An answer that begins with a brace is a call, where the family leaves out marks.
    ///
    /// # Errors
    /// As [`Grammar::lark`].
    pub fn strict_grammar(
        &self,
        schema: &Value,
        parallel: bool,
        special: impl Fn(&str) -> Option<TokenId>,
    ) -> Result<Option<Grammar>> {
        let (Some(calls), Some(json)) = (self.calls, self.json) else { return Ok(None) };
        let mark = |mark: &str| match special(mark) {
            Some(id) => format!("<[{id}]>"),
            None => format!("{mark:?}"),
        };
        let (open, close) = (mark(calls.open), calls.close.map_or_else(String::new, mark));
        let literal = escaped(calls.open);
        let is_text = special(calls.open).is_none();
        // Without a mark that is text, any text is free of it.
        let without = |text: &str| match is_text {
            true => format!("{text} & ~/(?s:.*){literal}(?s:.*)/"),
            false => text.to_owned(),
        };
        let any = "/(?s:.*)/";
        let begin = if calls.bare { "/(?s:.*)/ & ~/[ \\n]*\\{(?s:.*)/" } else { any };
        let mut lark = String::new();
        let reasoning = self.reasoning.and_then(|[open, close]| Some((special(open), special(close)?)));
        if let Some((open, close)) = reasoning {
            // A special token is no part of a text.
            let open = open.map_or_else(String::new, |open| format!("<[{open}]>? "));
            _ = writeln!(
                lark,
                "start: ({open}thought <[{close}]>)? answer\nthought: THOUGHT\nTHOUGHT: {any}"
            );
        } else {
            lark.push_str("start: answer\n");
        }
        lark.push_str(if calls.bare { "answer: marked | bare\n" } else { "answer: marked\n" });
        if calls.bare {
            let more = if parallel { "(/[;,]?[ \\n]{0,2}/ call)*" } else { "" };
            _ = writeln!(lark, "bare: /[ \\n]{{0,2}}/ call {more}");
        }
        lark.push_str("marked: FREE | begin calls\n");
        if is_text {
            // The text ends where the mark is whole.
            _ = writeln!(lark, "begin[suffix={open}]: BEGIN\nBEGIN: {begin}");
            _ = writeln!(lark, "between[suffix={open}]: ANY\nANY: {any}");
        } else {
            _ = writeln!(lark, "begin: BEGIN {open}\nBEGIN: {begin}");
            _ = writeln!(lark, "between: ANY {open}\nANY: {any}");
        }
        _ = writeln!(lark, "FREE: {}\nREST: {}", without(begin), without(any));
        let rest = if parallel { "(REST | between calls)" } else { "REST" };
        let after = match calls.close {
            Some(_) => format!("{close} {rest}"),
            None => String::new(),
        };
        let body = match (json, parallel) {
            (Json::One, _) => "call",
            (Json::List, true) => "\"[\" call (/,[ \\n]{0,2}/ call)* \"]\"",
            (Json::List, false) => "\"[\" call \"]\"",
        };
        // Small models go on with white space, where any is allowed.
        let white = "/[ \\n]{0,2}/";
        let white_after = if calls.close.is_some() { white } else { "" };
        _ = writeln!(lark, "calls: {white} {body} {white_after} {after}\ncall: %json {schema}");
        Grammar::lark(&lark).map(Some)
    }
}

/// A text in a regular expression.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if r"\/.+*?()|[]{}^$".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
