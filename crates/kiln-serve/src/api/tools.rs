//! The tools that an answer may call.

use kiln::{AnswerFormat, ChatTemplate, Grammar, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Most tools of a request.
const MOST_TOOLS: usize = 128;

/// Keys of a schema that references lead to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// The tools of a request, and which of them may or must be called.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// As the request has them.
    pub(super) list: Vec<Value>,
    pub(super) calls: Calls,
    /// Whether an answer may have several calls.
    pub(super) parallel: bool,
}

/// The calls that an answer may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    None,
    /// As the model likes.
    Auto,
    /// At least one.
    Required,
    /// One, of the tool of this name.
    Named(String),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Tool {
    Function { function: Function },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    name: String,
    #[serde(rename = "description")]
    _description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be `none`, `auto`, `required` or a function by its name")]
enum Choice {
    Word(String),
    Named(NamedTool),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum NamedTool {
    Function { function: Name },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`, for a model with this template.
    pub(super) fn of(
        list: Vec<Value>,
        choice: Option<Value>,
        parallel: Option<bool>,
        template: &ChatTemplate,
    ) -> Result<Self, ApiError> {
        if list.len() > MOST_TOOLS {
            return Err(ApiError::field(
                "tools",
                format!("are {}, at most {MOST_TOOLS} are taken", list.len()),
            ));
        }
        let choice = choice.map(|choice| {
            serde_json::from_value(choice).map_err(|error| ApiError::field("tool_choice", error))
        });
        let calls = match choice.transpose()? {
            None if list.is_empty() => Calls::None,
            None => Calls::Auto,
            Some(Choice::Named(NamedTool::Function { function })) => Calls::Named(function.name),
            Some(Choice::Word(word)) => match word.as_str() {
                "none" => Calls::None,
                "auto" if list.is_empty() => Calls::None,
                "auto" => Calls::Auto,
                "required" => Calls::Required,
                _ => {
                    let why =
                        format!("is `{word}`, must be `none`, `auto`, `required` or a function by its name");
                    return Err(ApiError::field("tool_choice", why));
                }
            },
        };
        let tools = Self { list, calls, parallel: parallel.unwrap_or(true) };
        for at in 0..tools.list.len() {
            tools.function(at)?;
        }
        if tools.calls == Calls::None {
            return Ok(tools);
        }
        if tools.list.is_empty() {
            return Err(ApiError::field("tool_choice", "goes with `tools`"));
        }
        if !template.reads("tools") {
            return Err(ApiError::field("tools", "the model's chat template does not tell it of tools"));
        }
        if tools.calls == Calls::Auto && !AnswerFormat::of(template).has_calls() {
            let why = "calls are not read in the form of this model; set `tool_choice` to `required` or to a function";
            return Err(ApiError::field("tools", why));
        }
        Ok(tools)
    }

    fn function(&self, at: usize) -> Result<Function, ApiError> {
        let Tool::Function { function } = serde_json::from_value(self.list[at].clone())
            .map_err(|error| ApiError::field(&format!("tools[{at}]"), error))?;
        Ok(function)
    }

    /// Whether an answer may call a tool whose arguments must match its schema.
    pub(super) fn is_strict(&self) -> Result<bool, ApiError> {
        let mut strict = false;
        for at in 0..self.list.len() {
            strict |= self.function(at)?.strict == Some(true);
        }
        Ok(strict && self.calls == Calls::Auto)
    }

    /// The grammar of an answer, unless each is allowed. Where a tool must be called, the whole answer
    /// is JSON, whatever the form of the model's own calls: the arguments of a named tool, else a list of
    /// calls. `special`: the id of a special token.
    pub(super) fn grammar(
        &self,
        format: &AnswerFormat,
        special: impl Fn(&str) -> Option<TokenId>,
    ) -> Result<Option<Grammar>, ApiError> {
        let wrong = |error: kiln::Error| {
            let why = kiln::expert::plain(&error.to_string());
            ApiError::field("tools", format!("a schema cannot be used: {why}"))
        };
        let schema = match &self.calls {
            Calls::Auto if self.is_strict()? => {
                let schema = compact(self.call_schema(format.arguments_key(), true)?);
                let grammar = format.strict_grammar(&schema, self.parallel, special).map_err(wrong)?;
                return match grammar {
                    Some(grammar) => Ok(Some(grammar)),
                    None => {
                        let why = "hold only if a call is certain, with this model: set `tool_choice` to `required` or to \
                                   the function, or leave `strict` out";
                        Err(ApiError::field("tools", why))
                    }
                };
            }
            Calls::None | Calls::Auto => return Ok(None),
            Calls::Named(name) => {
                let functions = (0..self.list.len()).map(|at| self.function(at));
                let functions: Vec<Function> = functions.collect::<Result<_, _>>()?;
                let named = functions.iter().find(|function| function.name == *name);
                let unknown =
                    || ApiError::field("tool_choice", format!("there is no tool `{name}` in `tools`"));
                named.ok_or_else(unknown)?.schema()
            }
            Calls::Required => {
                let most = if self.parallel { MOST_TOOLS } else { 1 };
                let mut call = self.call_schema("arguments", false)?;
                let mut list = json!({ "type": "array", "minItems": 1, "maxItems": most });
                // References begin at the root.
                for key in DEFINITIONS {
                    if let Some(own) = call.as_object_mut().and_then(|call| call.remove(key)) {
                        list[key] = own;
                    }
                }
                list["items"] = call;
                list
            }
        };
        Grammar::json_schema(&compact(schema).to_string()).map(Some).map_err(wrong)
    }

    /// The JSON schema of a call of any tool. `key`: the name of its arguments. `strict`: whether only the
    /// arguments of strict tools must match.
    fn call_schema(&self, key: &str, strict: bool) -> Result<Value, ApiError> {
        let mut shared = Map::new();
        let mut any = Vec::new();
        for at in 0..self.list.len() {
            let function = self.function(at)?;
            let mut arguments = match strict && function.strict != Some(true) {
                true => json!({ "type": "object" }),
                false => function.schema(),
            };
            // References begin at the root.
            for name in DEFINITIONS {
                if let Some(Value::Object(own)) = arguments.as_object_mut().and_then(|own| own.remove(name)) {
                    let all = shared.entry(name).or_insert_with(|| json!({}));
                    all.as_object_mut().into_iter().for_each(|all| all.extend(own.clone()));
                }
            }
            any.push(json!({
                "type": "object",
                "properties": { "name": { "const": function.name }, key: arguments },
                "required": ["name", key],
                "additionalProperties": false,
            }));
        }
        shared.insert("anyOf".to_owned(), json!(any));
        Ok(Value::Object(shared))
    }
}

impl Function {
    /// The JSON schema of the arguments.
    fn schema(&self) -> Value {
        match &self.parameters {
            Some(parameters) => Value::Object(parameters.clone()),
            None => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        }
    }
}

/// A schema without white space between the parts: it could go on without end.
fn compact(mut schema: Value) -> Value {
    schema["x-guidance"] =
        json!({ "whitespace_flexible": false, "key_separator": ": ", "item_separator": ", " });
    schema
}
