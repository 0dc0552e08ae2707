//! Python's operators, where they differ from minijinja's.

use minijinja::{
    Environment, State, Value,
    formatting::{FormatStyle, format},
    value::{Tuple, ValueKind},
};

use super::{
    meter::{Meter, is_namespace, wrong},
    python,
};

type Made<T> = Result<T, minijinja::Error>;

/// Attributes that are methods of every dict in Python, whatever its keys are.
pub(super) const DICT_METHODS: [&str; 11] =
    ["items", "keys", "values", "get", "pop", "update", "copy", "clear", "setdefault", "popitem", "fromkeys"];

/// Adds the filters that stand in for operators, and those that count other new values.
pub(super) fn add(env: &mut Environment<'_>) {
    env.add_filter("_made", |state: &mut State, value: Value| Meter::of(state).made(value));
    env.add_filter("_sum", |state: &mut State, left: Value, right: Value| {
        Meter::of(state).made(sum(left, right)?)
    });
    env.add_filter("_concat", |state: &mut State, left: Value, right: Value| {
        let text = python::text(&left)?.into_owned() + &python::text(&right)?;
        Meter::of(state).made(Value::from(text))
    });
    env.add_filter("_remainder", |state: &mut State, left: Value, right: Value| {
        Meter::of(state).made(remainder(left, right)?)
    });
    env.add_filter("_in_time", |state: &mut State, value: Value| {
        Meter::of(state).started.in_time().map(|()| value)
    });
    // A repeated list is a list.
    env.add_filter("_product", |state: &mut State, value: Value| match Meter::of(state).made(value)? {
        items if items.kind() == ValueKind::Iterable => Ok(items.try_iter()?.collect()),
        value => Ok::<_, minijinja::Error>(value),
    });
    env.add_filter("_slice", |state: &mut State, value: Value, start: Value, stop: Value, step: Value| {
        Meter::of(state).made(slice(value, start, stop, step)?)
    });
    // `value['items']`: if a dict has no such key, Jinja looks for such a method next.
    env.add_filter("_item", |value: Value, name: &str| {
        let item = value.get_item(&Value::from(name))?;
        let method = dict_method(&value, name).filter(|_| item.is_undefined());
        Ok::<_, minijinja::Error>(method.unwrap_or(item))
    });
    // `value.items`
    env.add_filter("_method", |value: Value, name: &str| match dict_method(&value, name) {
        Some(method) => Ok(method),
        None => value.get_attr(name),
    });
    // The new value of an attribute of a namespace.
    env.add_filter("_stored", |state: &mut State, value: Value| Meter::of(state).stored(value));
    env.add_filter("_loop", looped);
}

/// Iterates over the items of a loop, and checks the clock before each of them.
fn looped(state: &mut State, value: Value) -> Made<Value> {
    let started = Meter::of(state).started;
    let items = match value.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None if value.is_none() => return Err(wrong("it goes through a value that is none")),
        None => value,
    };
    items.try_iter()?;
    let in_time = move |item| started.in_time().map_or_else(Value::from, |()| item);
    Ok(Value::make_object_iterable(items, move |items| match items.try_iter() {
        Ok(items) => Box::new(items.map(in_time)),
        Err(error) => Box::new(std::iter::once(Value::from(error))),
    }))
}

/// Looks up `value.name`, if that is a method of a dict.
pub(super) fn dict_method(value: &Value, name: &str) -> Option<Value> {
    let is_dict = value.kind() == ValueKind::Map && !is_namespace(value);
    (is_dict && DICT_METHODS.contains(&name))
        .then(|| Value::from(format!("<built-in method {name} of dict object>")))
}

/// Slices `value[start:stop:step]` by Python's rules.
fn slice(value: Value, start: Value, stop: Value, step: Value) -> Made<Value> {
    let bound = |bound: &Value| match bound.is_none() || bound.is_undefined() {
        true => Ok(None),
        false => bound.as_i64().map(Some).ok_or_else(|| wrong("the bounds of a slice must be whole numbers")),
    };
    let (start, stop, step) = (bound(&start)?, bound(&stop)?, bound(&step)?.unwrap_or(1));
    if step == 0 {
        return Err(wrong("a slice cannot go on in steps of 0"));
    }
    let indices = |len: usize| {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let end = |at: Option<i64>, default: i64| {
            at.map_or(default, |at| if at < 0 { at.saturating_add(len) } else { at }.clamp(low, high))
        };
        let (from, to) =
            if step > 0 { (end(start, 0), end(stop, len)) } else { (end(start, len - 1), end(stop, -1)) };
        let inside = move |at: &i64| if step > 0 { *at < to } else { *at > to };
        std::iter::successors(Some(from), move |at| at.checked_add(step))
            .take_while(inside)
            .filter_map(|at| usize::try_from(at).ok())
    };
    if let Some(text) = value.as_str() {
        let chars: Vec<char> = text.chars().collect();
        return Ok(Value::from(indices(chars.len()).filter_map(|at| chars.get(at)).collect::<String>()));
    }
    if value.kind() != ValueKind::Seq && value.kind() != ValueKind::Iterable {
        return Err(wrong(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let items: Vec<Value> = value.try_iter()?.collect();
    let taken: Vec<Value> = indices(items.len()).filter_map(|at| items.get(at).cloned()).collect();
    Ok(if value.is_tuple() { Value::from(Tuple::from(taken)) } else { Value::from(taken) })
}

/// The operator `+`, by Python's rules: numbers, texts, lists. A text that is added to one marked `safe` is
/// escaped.
pub(super) fn sum(left: Value, right: Value) -> Made<Value> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        if !left.is_safe() && !right.is_safe() {
            return Ok(Value::from([a, b].concat()));
        }
        let escaped =
            |value: &Value, text: &str| if value.is_safe() { text.to_owned() } else { python::escaped(text) };
        return Ok(Value::from_safe_string(escaped(&left, a) + &escaped(&right, b)));
    }
    if left.kind() == ValueKind::Seq && right.kind() == ValueKind::Seq && left.is_tuple() == right.is_tuple()
    {
        let items: Vec<Value> = left.try_iter()?.chain(right.try_iter()?).collect();
        return Ok(if left.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) });
    }
    if let (Some(a), Some(b)) = (whole(&left), whole(&right)) {
        return a.checked_add(b).map(Value::from).ok_or_else(|| wrong("it adds numbers that are too large"));
    }
    match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
        (Ok(a), Ok(b)) => Ok(Value::from(a + b)),
        _ => Err(wrong(format!("it adds a value of type {} to one of type {}", right.kind(), left.kind()))),
    }
}

/// An integer; True is 1, as in Python.
fn whole(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// The operator `%`, which also formats strings in Python.
fn remainder(left: Value, right: Value) -> Made<Value> {
    if let Some(pattern) = left.as_str() {
        let right = match right.is_tuple() {
            true => right.try_iter()?.collect(),
            false => vec![right],
        };
        return formatted(FormatStyle::Printf, pattern, &right);
    }
    match (whole(&left), whole(&right)) {
        (_, Some(0)) => return Err(wrong("it divides by zero")),
        (Some(a), Some(b)) => return Ok(Value::from(a.wrapping_rem(b).wrapping_add(b).wrapping_rem(b))),
        _ => {}
    }
    match (f64::try_from(left), f64::try_from(right)) {
        (Ok(_), Ok(0.0)) => Err(wrong("it divides by zero")),
        (Ok(a), Ok(b)) => {
            let rest = a % b;
            Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }))
        }
        _ => Err(wrong("`%` takes two numbers, or a text and what to format with it")),
    }
}

/// Python's string formatting, with a limit on widths.
pub(super) fn formatted(style: FormatStyle, pattern: &str, args: &[Value]) -> Made<Value> {
    let wide = |digits: &str| digits.len() > 4;
    if pattern.split(|c: char| !c.is_ascii_digit()).any(wide)
        || (style == FormatStyle::Printf && pattern.contains('*'))
    {
        return Err(wrong("it formats with a width over 9999, or with `*`"));
    }
    let text = |arg: &Value| if arg.is_undefined() { Value::from("") } else { arg.clone() };
    format(style, pattern, &args.iter().map(text).collect::<Vec<_>>()).map(Value::from)
}
