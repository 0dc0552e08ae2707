//! Rewriting of the expressions in tags with filters (`operators.rs`).
//!
//! minijinja counts the steps of a template, but not the size of their results: forty steps can double a
//! string to terabytes. In addition, some of its operators differ from Python's. So `a ~ b` becomes
//! `a|_concat(b)`, and every other new value passes through `_made`, which counts it. A template cannot
//! replace a filter.

use std::{collections::VecDeque, fmt::Write};

use super::{meter::wrong, operators::DICT_METHODS};

type Made<T> = Result<T, minijinja::Error>;

/// Operators that bind more tightly than comparisons, in ascending order.
const OPERATORS: [&[&str]; 4] = [&["+", "-"], &["~"], &["*", "/", "//", "%"], &["**"]];
/// Comparisons, which take long if their operands are long.
const COMPARISONS: [&str; 7] = ["==", "!=", "<", "<=", ">", ">=", "in"];
/// Words between operands.
const BETWEEN: [&str; 7] = ["and", "else", "if", "in", "is", "not", "or"];
/// Maximum nesting of brackets.
const DEPTH: usize = 100;

/// A tag that is being rewritten.
pub(super) struct Respelling<'s> {
    tokens: VecDeque<&'s str>,
    depth: usize,
}

impl<'s> Respelling<'s> {
    pub(super) fn new(tokens: Vec<&'s str>) -> Self {
        Self { tokens: tokens.into(), depth: 0 }
    }

    /// Rewrites the tag.
    ///
    /// # Errors
    /// For brackets that do not match, or are nested too deeply.
    pub(super) fn tag(mut self, is_statement: bool) -> Made<String> {
        let start = if is_statement { self.statement()? } else { String::new() };
        let rest = self.operands(&[])?;
        match self.next() {
            None => Ok(start + &rest),
            Some(token) => Err(unexpected(token)),
        }
    }

    /// Rewrites a statement up to the beginning of its expressions, if they need no rewriting as a whole.
    fn statement(&mut self) -> Made<String> {
        let word = self.next().unwrap_or_default();
        let mut out = format!("{word} ");
        match word {
            // `generation` marks the model's words for training, and is a scope.
            "generation" => return Ok("with ".to_owned()),
            "endgeneration" => return Ok("endwith ".to_owned()),
            "for" => {
                let target = self.copied(&["in"]);
                self.expect("in")?;
                let items = self.some(&["if", "recursive"])?;
                _ = write!(out, "{target} in ({items})|_loop ");
                if self.skip("if") {
                    let condition = self.some(&["recursive"])?;
                    _ = write!(out, "if {condition}");
                }
                if self.skip("recursive") {
                    out.push_str("recursive ");
                }
            }
            "set" => {
                let target = self.copied(&["=", "|"]);
                out.push_str(&target);
                if self.skip("=") {
                    let value = self.some(&[])?;
                    let filter = if target.contains('.') { "_stored" } else { "_made" };
                    _ = write!(out, " = ({value})|{filter}");
                }
                out.push_str(&self.filters()?);
            }
            "filter" => {
                self.tokens.push_front("|");
                out.push_str(self.filters()?.trim_start_matches('|'));
            }
            "macro" => {
                out.push_str(self.next().unwrap_or_default());
                out.push_str(&self.arguments()?);
            }
            // The statement takes a call without changes.
            "call" => {
                if self.peek() == Some("(") {
                    out.push_str(&self.arguments()?);
                }
                let call = self.postfix()?;
                let bare = call.strip_prefix('(').and_then(|call| call.strip_suffix("|_made)"));
                out.push_str(bare.unwrap_or(&call));
            }
            _ => {}
        }
        Ok(out)
    }

    /// Rewrites operands, their operators, and the words between them, up to a bracket or one of `stops`.
    fn operands(&mut self, stops: &[&str]) -> Made<String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(wrong(format!("it has a tag with more than {DEPTH} brackets within each other")));
        }
        let mut out = String::new();
        let (mut is_behind_operand, mut is_compared) = (false, false);
        while let Some(token) = self.peek().filter(|token| !is_close(token) && !stops.contains(token)) {
            if begins_operand(token) && !is_behind_operand {
                out.push_str(&self.operation(0)?);
                if is_compared && !is_quoted(token) {
                    out.push_str("|_in_time");
                }
                is_behind_operand = true;
            } else if begins_operand(token)
                || (BETWEEN.contains(&token) && token != "not" && !is_behind_operand)
            {
                // The engine would take two operands for a call, and a misplaced word for a name.
                return Err(unexpected(token));
            } else {
                out.push_str(self.next().unwrap_or_default());
                is_behind_operand &= token == "not";
                is_compared = COMPARISONS.contains(&token);
            }
            out.push(' ');
        }
        self.depth -= 1;
        Ok(out)
    }

    /// Same as [`Self::operands`], but at least one is required.
    fn some(&mut self, stops: &[&str]) -> Made<String> {
        let out = self.operands(stops)?;
        if out.is_empty() { Err(wrong("a tag lacks a value")) } else { Ok(out) }
    }

    /// Rewrites operands with operators that bind at least as tightly as those of `level`.
    fn operation(&mut self, level: usize) -> Made<String> {
        let Some(operators) = OPERATORS.get(level) else { return self.operand() };
        let mut left = self.operation(level + 1)?;
        while let Some(operator) = self.tokens.pop_front_if(|token| operators.contains(token)) {
            let right = self.operation(level + 1)?;
            left = match operator {
                "+" => format!("{left}|_sum({right})"),
                "~" => format!("{left}|_concat({right})"),
                "%" => format!("{left}|_remainder({right})"),
                // The first filter keeps the engine from multiplying constants before the template runs.
                "*" => format!("({left}|_made * {right})|_product"),
                _ => format!("({left} {operator} {right})"),
            };
        }
        Ok(left)
    }

    /// Rewrites a value with its sign, filters and tests.
    fn operand(&mut self) -> Made<String> {
        let mut out = self.signed()?;
        loop {
            out.push_str(&self.filters()?);
            if !self.skip("is") {
                return Ok(out);
            }
            let is = if self.skip("not") { "is not" } else { "is" };
            let test = self.next().unwrap_or_default();
            let with = match self.peek() {
                Some("(") => self.arguments()?,
                Some(token) if begins_operand(token) => self.signed()?,
                _ => String::new(),
            };
            let clock = if with.is_empty() { "" } else { "|_in_time" };
            _ = write!(out, "{clock} {is} {test} {with}");
        }
    }

    fn signed(&mut self) -> Made<String> {
        let mut sign = String::new();
        while self.skip("-") {
            sign.push_str("- ");
        }
        Ok(sign + &self.postfix()?)
    }

    /// Rewrites a value with its attributes, items and calls.
    fn postfix(&mut self) -> Made<String> {
        let mut out = self.value()?;
        loop {
            if self.skip(".") {
                let name = self.next().unwrap_or_default();
                match DICT_METHODS.contains(&name) && self.peek() != Some("(") {
                    true => out = format!("({out}|_method('{name}'))"),
                    // The space separates a number from an index.
                    false => out.extend([" .", name]),
                }
            } else if self.skip("[") {
                out = self.item(&out)?;
                self.expect("]")?;
            } else if self.peek() == Some("(") {
                let arguments = self.arguments()?;
                out = match out.as_str() {
                    "loop" => format!("(loop({arguments}|_loop)|_made)"),
                    _ => format!("({out}{arguments}|_made)"),
                };
            } else {
                return Ok(out);
            }
        }
    }

    fn value(&mut self) -> Made<String> {
        let token = self.next().ok_or_else(|| wrong("a tag lacks a value"))?;
        let close = match token {
            "(" => ")",
            "[" => "]",
            "{" => "}",
            _ if !begins_operand(token) => return Err(unexpected(token)),
            _ => {
                let mut out = token.to_owned();
                while let Some(more) = self.tokens.pop_front_if(|more| is_quoted(token) && is_quoted(more)) {
                    out.extend([" ", more]);
                }
                return Ok(out);
            }
        };
        let inside = self.operands(&[])?;
        self.expect(close)?;
        match token == "(" && !inside.contains(',') && !inside.is_empty() {
            true => Ok(format!("({inside})")),
            false => Ok(format!("({token}{inside}{close}|_made)")),
        }
    }

    /// Rewrites the contents of the square brackets after `value`.
    fn item(&mut self, value: &str) -> Made<String> {
        let mut bounds = vec![self.operands(&[":"])?];
        while self.skip(":") {
            bounds.push(self.operands(&[":"])?);
        }
        let bound = |at: usize| bounds.get(at).map_or("", |bound| bound.trim());
        let given = |at: usize| if bound(at).is_empty() { "none" } else { bound(at) };
        match bound(0) {
            _ if bounds.len() > 3 => Err(unexpected(":")),
            _ if bounds.len() > 1 => {
                Ok(format!("({value}|_slice({}, {}, {}))", given(0), given(1), given(2)))
            }
            key if is_quoted(key) && DICT_METHODS.contains(&key.trim_matches(['"', '\''])) => {
                Ok(format!("({value}|_item({key}))"))
            }
            key if !key.is_empty() => Ok(format!("{value}[{key}]")),
            _ => Err(unexpected("]")),
        }
    }

    /// Rewrites filters, each with the bar before it.
    fn filters(&mut self) -> Made<String> {
        let mut out = String::new();
        while self.skip("|") {
            out.extend(["|", self.next().unwrap_or_default()]);
            if self.peek() == Some("(") {
                out.push_str(&self.arguments()?);
            }
            out.push_str("|_made");
        }
        Ok(out)
    }

    /// Rewrites the contents of the brackets after a name, with the brackets.
    fn arguments(&mut self) -> Made<String> {
        self.expect("(")?;
        let inside = self.operands(&[])?;
        self.expect(")")?;
        Ok(format!("({inside})"))
    }

    /// Copies the tokens before one of `stops`.
    fn copied(&mut self, stops: &[&str]) -> String {
        let mut out = String::new();
        while let Some(token) = self.tokens.pop_front_if(|token| !stops.contains(token)) {
            out.extend([token, " "]);
        }
        out
    }

    fn peek(&self) -> Option<&'s str> {
        self.tokens.front().copied()
    }

    fn next(&mut self) -> Option<&'s str> {
        self.tokens.pop_front()
    }

    fn skip(&mut self, token: &str) -> bool {
        self.tokens.pop_front_if(|next| *next == token).is_some()
    }

    fn expect(&mut self, token: &str) -> Made<()> {
        match self.next() {
            Some(next) if next == token => Ok(()),
            Some(next) => Err(unexpected(next)),
            None => Err(wrong(format!("a tag lacks `{token}`"))),
        }
    }
}

fn unexpected(token: &str) -> minijinja::Error {
    wrong(format!("a tag has an unexpected `{token}`"))
}

fn is_close(token: &str) -> bool {
    [")", "]", "}"].contains(&token)
}

fn is_quoted(token: &str) -> bool {
    token.starts_with(['"', '\''])
}

fn begins_operand(token: &str) -> bool {
    let begins = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '"' | '\'' | '(' | '[' | '{' | '-');
    token.starts_with(begins) && !BETWEEN.contains(&token)
}
