//! Mutations of Jinja: of tokens and of whole tags.

use super::Random;

/// Template fragments that take long, grow, or fail.
const PIECES: [&str; 40] = [
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ [1] * 99999999 }}",
    "{{ raise_exception('\x1b[31m\n') }}",
    "{{ 10 ** 1000 }}",
    "{{ 9223372036854775807 + 1 }}",
    "{{ -9223372036854775807 - 2 }}",
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ 1 / 0 }}",
    "{{ (-9223372036854775807 - 1) // -1 }}",
    "{{ (-9223372036854775807 - 1) % -1 }}",
    "{{ 'a'[1:0:-1] }}",
    "{{ 'aé'[::-1] }}",
    "{{ messages[99999999999999999999] }}",
    "{{ messages[-1:][::0] }}",
    "{{ messages | tojson(indent=99999999) }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ 'é'.center(99999999) }}",
    "{{ 'a'.ljust(9999999999, 'é') }}",
    "{{ 'x'.join(messages) }}",
    "{{ 'a'.replace('', 'b', -1) }}",
    "{{ 'aaa'.split('') }}",
    "{{ 'a'.split(none, 9223372036854775807) }}",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '%099999999d' % 1 }}",
    "{{ strftime_now('%Y %Q %') }}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns }}",
    "{% set x = [] %}{{ x.append(x) }}{{ x }}",
    "{{ messages | map(attribute='content') | list | sort | join }}",
    "{{ messages | groupby('role') }}",
    "{{ messages | batch(0) | list }}",
    "{{ messages | slice(0) | list }}",
    "{{ 'a' | indent(99999999) }}",
    "{{ range(0, 10, 0) | list }}",
    "{{ messages[0].content | wordwrap(0) }}",
    "{% break %}",
];

/// Splits a template into tags, words, numbers, strings, punctuation and the text between them.
pub(super) fn tokens(source: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let len = match first {
            '{' | '%' | '}' | '#' | '-' | '|' | '=' | '!' | '<' | '>' | '*' | '/'
                if ["{{", "{%", "{#", "%}", "}}", "#}", "==", "!=", "<=", ">=", "**", "//", "-%", "-}"]
                    .contains(&rest.get(..2).unwrap_or_default()) =>
            {
                // With the dash that strips white space.
                if rest.get(2..3) == Some("-") && rest.starts_with('{') || rest.starts_with("-") {
                    3
                } else {
                    2
                }
            }
            '\'' | '"' => rest[1..].find(first).map_or(1, |end| end + 2),
            c if word(c) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            c if c.is_whitespace() => rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (token, behind) = rest.split_at_checked(len).unwrap_or((rest, ""));
        tokens.push(token.to_owned());
        rest = behind;
    }
    tokens
}

pub(super) fn mutated(source: &str, others: &[String], random: &mut Random) -> String {
    let mut tokens = tokens(source);
    for _ in 0..random.rounds() {
        let (at, to) = (random.below(tokens.len()), random.below(tokens.len()));
        let most = if random.one_in(3) { 40 } else { 4 };
        let len = 1 + random.below(most);
        let end = (at + len).min(tokens.len());
        let from = random.below(others.len());
        let other = || others[from..(from + len).min(others.len())].to_vec();
        match random.below(8) {
            0 => drop(tokens.drain(at..end)),
            1 => {
                let copy = tokens[at..end].to_vec();
                tokens.splice(to..to, copy);
            }
            2 if !tokens.is_empty() => tokens.swap(at, to),
            3 => drop(tokens.splice(at..end, other())),
            4 => drop(tokens.splice(at..at, other())),
            5 => tokens.insert(at, random.pick(&PIECES).to_owned()),
            // The content of a fragment replaces an expression or a statement.
            6 => {
                let piece = random.pick(&PIECES);
                let within = piece.trim_matches(|c| "{}% ".contains(c)).to_owned();
                tokens.splice(at..end.min(at + 1), [within]);
            }
            _ => tokens.truncate(at),
        }
    }
    tokens.concat()
}
