//! Detection of grammars that lead to a place where nothing may follow.
//!
//! A parser accepts whatever a rule begins with. If later parts of the rule match no text, this is only found
//! out there, in the middle of a text.

use std::collections::HashSet;

use llguidance::earley::{CGrammar, CSymIdx, regexvec::LexemeSet};

use super::limits;

/// The error for a grammar that matches nothing.
pub(super) const NOTHING: &str = "no text can match it";
/// The error for a schema in which some part matches nothing.
const NO_END: &str = "a text may come to a place where nothing can follow, because a part of an object or a list matches no text: leave out \
                      `patternProperties` that `properties`, also of another part of an `allOf`, leave no name for, and a `$ref` without end";

/// The symbols of a compiled grammar: whether each can be reached, and whether it can be completed.
struct Symbols<'a> {
    grammar: &'a CGrammar,
    /// Symbols that a text begins with or leads to.
    reached: Vec<CSymIdx>,
    /// Symbols that match some text.
    matched: HashSet<usize>,
    /// Symbols that match some text that is not empty.
    filled: HashSet<usize>,
}

/// Rejects a grammar that matches nothing. `follows`: also rejects one with a rule that cannot be completed
/// after its beginning.
///
/// # Errors
/// A sentence about the grammar.
pub(super) fn check(grammar: &CGrammar, follows: bool) -> Result<(), String> {
    // The rules do not show what depends on parameters.
    if grammar.parametric() {
        return Ok(());
    }
    let mut lexer = grammar.lexer_spec().to_regex_vec(&mut limits::parser()).map_err(|e| e.to_string())?;
    let begun = lexer.initial_state(&grammar.lexer_spec().all_lexemes());
    let symbols = Symbols::of(grammar, &lexer.state_desc(begun).possible);
    if !symbols.matched.contains(&grammar.start().as_index()) {
        return Err(NOTHING.to_owned());
    }
    match follows && symbols.breaks_off() {
        true => Err(NO_END.to_owned()),
        false => Ok(()),
    }
}

impl<'a> Symbols<'a> {
    /// Analyzes a grammar. `possible`: lexemes that match some text.
    fn of(grammar: &'a CGrammar, possible: &LexemeSet) -> Self {
        let mut symbols =
            Self { grammar, reached: Vec::new(), matched: HashSet::new(), filled: HashSet::new() };
        let (mut seen, mut open) = (HashSet::from([grammar.start().as_index()]), vec![grammar.start()]);
        while let Some(symbol) = open.pop() {
            symbols.reached.push(symbol);
            let parts = symbols.rules(symbol).flat_map(|rule| rule.iter().copied());
            open.extend(parts.filter(|part| seen.insert(part.as_index())));
        }
        for symbol in &symbols.reached {
            let data = grammar.sym_data(*symbol);
            // A rule of another grammar, or one for special tokens, is assumed to match.
            let is_lexeme = data.lexeme.is_some_and(|lexeme| possible.contains(lexeme));
            let is_other = data.lexeme.is_none() && (data.is_terminal || data.gen_grammar.is_some());
            if is_lexeme || is_other {
                symbols.filled.insert(symbol.as_index());
            }
            if is_lexeme || is_other || data.is_nullable {
                symbols.matched.insert(symbol.as_index());
            }
        }
        while symbols.goes_on() {}
        symbols
    }

    /// Looks through all rules for symbols that follow from the known ones. Returns `false` if there are
    /// none.
    fn goes_on(&mut self) -> bool {
        let before = (self.matched.len(), self.filled.len());
        // Parts come after the rules that contain them, so one pass is nearly enough.
        for at in (0..self.reached.len()).rev() {
            let Some(symbol) = self.reached.get(at).copied() else { continue };
            for rule in self.rules(symbol) {
                if rule.iter().all(|part| self.matched.contains(&part.as_index())) {
                    self.matched.insert(symbol.as_index());
                    if rule.iter().any(|part| self.filled.contains(&part.as_index())) {
                        self.filled.insert(symbol.as_index());
                    }
                }
            }
        }
        (self.matched.len(), self.filled.len()) != before
    }

    /// Whether text may match the first parts of a rule, but none its next one.
    fn breaks_off(&self) -> bool {
        let breaks = |rule: &[CSymIdx]| {
            let end = rule.iter().position(|part| !self.matched.contains(&part.as_index()));
            let begun = end.and_then(|end| rule.get(..end)).unwrap_or_default();
            begun.iter().any(|part| self.filled.contains(&part.as_index()))
        };
        self.reached.iter().any(|symbol| self.rules(*symbol).any(breaks))
    }

    fn rules(&self, symbol: CSymIdx) -> impl Iterator<Item = &'a [CSymIdx]> + use<'a> {
        let grammar = self.grammar;
        grammar.rules_of(symbol).iter().map(|rule| grammar.rule_rhs(*rule).0)
    }
}
