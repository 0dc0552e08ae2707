//! Runs a template: minijinja, with Python's words, and with limits.
//!
//! A template is a program from a stranger. It sees plain data and no object of the host; it may take so many steps, call
//! itself so deeply, and make so much text.

use std::time::SystemTime;

use kiln_core::{Error, Result};
use minijinja::{Environment, ErrorKind, Output, State, Template, Value};

use super::{
    filters,
    meter::{LONGEST, Meter, too_much, wrong},
    methods, operators, python, source,
};

/// Instructions of a rendering; Qwen 3 with a conversation of 2,000 messages takes under 200,000.
const STEPS: u64 = 20_000_000;
/// Calls within calls, in minijinja's units: a macro costs 4.
const DEPTH: usize = 200;
/// Bytes of the template itself; the longest known one has 17,000.
const SOURCE: usize = 1 << 18;
/// Characters of an error; a template may write its own.
const LONGEST_ERROR: usize = 1000;

/// The template's text as the engine takes it.
///
/// # Errors
/// [`Error::ChatTemplate`] where it is too long or too intricate, or no template.
pub(super) fn prepared(source: &str) -> Result<String> {
    if source.len() > SOURCE {
        let why = format!("it has {} bytes, and templates of more than {SOURCE} are not run", source.len());
        return Err(Error::ChatTemplate { why });
    }
    let prepared = source::respelled(source).map_err(|e| told(&e))?;
    compiled(&Environment::empty(), &prepared)?;
    Ok(prepared)
}

/// The text that `source` makes of `variables`, a map. `source` is [`prepared`]; `now`: `None` for what the clock says.
///
/// # Errors
/// [`Error::ChatTemplate`] for what the template refuses, gets wrong, or does too much of.
pub(super) fn rendered(source: &str, variables: Value, now: Option<SystemTime>) -> Result<String> {
    let env = environment(now);
    let text = compiled(&env, source)?.render(variables).map_err(|e| told(&e))?;
    match text.len() {
        ..=LONGEST => Ok(text),
        _ => Err(told(&too_much())),
    }
}

fn compiled<'s>(env: &'s Environment<'s>, source: &'s str) -> Result<Template<'s, 's>, Error> {
    env.template_from_named_str("chat template", source).map_err(|e| told(&e))
}

/// What one rendering runs in.
fn environment(now: Option<SystemTime>) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_fuel(Some(STEPS));
    env.set_recursion_limit(DEPTH);
    env.set_unknown_method_callback(methods::call);
    filters::add(&mut env);
    operators::add(&mut env);
    env.set_formatter(|out: &mut Output, state: &mut State, value: &Value| {
        let text = python::text(value)?;
        Meter::of(state).writes(text.len())?;
        out.write_str(&text).map_err(minijinja::Error::from)
    });
    env.add_function("raise_exception", |why: String| Err::<Value, _>(wrong(why)));
    env.add_function("strftime_now", move |format: &str| {
        let now = now.or_else(clock).ok_or_else(|| wrong("strftime_now: there is no clock here"))?;
        let local = jiff::Timestamp::try_from(now).map(|now| now.to_zoned(jiff::tz::TimeZone::system()));
        let text = local.and_then(|local| jiff::fmt::strtime::format(format, &local));
        text.map_err(|e| wrong(format!("strftime_now: {e}")))
    });
    env
}

/// The time, where the platform has a clock: asking for it panics in a browser.
fn clock() -> Option<SystemTime> {
    (!cfg!(target_family = "wasm")).then(SystemTime::now)
}

/// minijinja's error in a sentence.
fn told(error: &minijinja::Error) -> Error {
    let why = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it takes more than {STEPS} steps"),
        (_, Some("recursion limit exceeded")) => "it calls itself too deeply".to_owned(),
        (_, Some(detail)) => detail.chars().take(LONGEST_ERROR).collect(),
        (kind, None) => kind.to_string(),
    };
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    Error::ChatTemplate { why: format!("{why}{line}") }
}
