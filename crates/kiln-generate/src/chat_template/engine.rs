//! The template engine: minijinja with Python's methods and filters, and with limits.
//!
//! A template is a program from a stranger. It sees plain data and no objects of the host. The number of its
//! steps, the depth of its calls and the size of its output are limited.

use std::time::SystemTime;

use kiln_core::{Error, Result};
use minijinja::{Environment, ErrorKind, Output, State, Template, Value};

use super::{
    filters,
    meter::{LONGEST, Meter, too_much, wrong},
    methods, operators, python, source,
};

/// Maximum number of instructions per rendering; Qwen 3 takes under 200,000 for a conversation of 2,000
/// messages.
const STEPS: u64 = 20_000_000;
/// Maximum depth of calls, in minijinja's units: a macro costs 4.
const DEPTH: usize = 200;
/// Maximum size of a template in bytes; the longest known one has 17,000.
const SOURCE: usize = 1 << 18;
/// Maximum length of an error message in characters, since a template may write its own.
const LONGEST_ERROR: usize = 1000;

/// Rewrites the template's text for the engine.
///
/// # Errors
/// [`Error::ChatTemplate`] if it is too long, too complex, or not a template.
pub(super) fn prepared(source: &str) -> Result<String> {
    if source.len() > SOURCE {
        let why = format!("it has {} bytes, and templates of more than {SOURCE} are not run", source.len());
        return Err(Error::ChatTemplate { why });
    }
    let prepared = source::respelled(source).map_err(|e| told(&e))?;
    compiled(&Environment::empty(), &prepared)?;
    Ok(prepared)
}

/// Renders `source`, which is [`prepared`], with `variables`, a map. `now`: `None` for the time of the clock.
///
/// # Errors
/// [`Error::ChatTemplate`] if the template rejects its input, has a fault, or exceeds a limit.
pub(super) fn rendered(source: &str, variables: Value, now: Option<SystemTime>) -> Result<String> {
    let env = environment(now);
    let text = compiled(&env, source)?.render(variables).map_err(|e| told(&e))?;
    match text.len() {
        ..=LONGEST => Ok(text),
        _ => Err(told(&too_much())),
    }
}

/// Whether `source`, which is [`prepared`], reads a variable of this name.
pub(super) fn reads(source: &str, name: &str) -> bool {
    compiled(&Environment::empty(), source)
        .is_ok_and(|template| template.undeclared_variables(false).contains(name))
}

fn compiled<'s>(env: &'s Environment<'s>, source: &'s str) -> Result<Template<'s, 's>, Error> {
    env.template_from_named_str("chat template", source).map_err(|e| told(&e))
}

/// Creates the environment of one rendering.
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
        let now = now.unwrap_or_else(clock);
        let local = jiff::Timestamp::try_from(now).map(|now| now.to_zoned(jiff::tz::TimeZone::system()));
        let text = local.and_then(|local| jiff::fmt::strtime::format(format, &local));
        text.map_err(|e| wrong(format!("strftime_now: {e}")))
    });
    env
}

/// The time. A browser has another type for it.
fn clock() -> SystemTime {
    let since = web_time::SystemTime::now().duration_since(web_time::UNIX_EPOCH);
    SystemTime::UNIX_EPOCH + since.unwrap_or_default()
}

/// Converts minijinja's error into one sentence.
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
