//! The tools that an answer may call.

use kiln::{AnswerFormat, ChatTemplate, Grammar};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// Most tools of a request.
const MOST_TOOLS: usize = 128;

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
            let function = tools.function(at)?;
            if function.strict == Some(true) && tools.calls == Calls::Auto {
                let why = "holds only if a call is certain: set `tool_choice` to `required` or to the function, or leave \
                           it out";
                return Err(ApiError::field(&format!("tools[{at}].function.strict"), why));
            }
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

    /// The grammar of an answer that must call a tool. The whole answer is JSON, whatever the form of the
    /// model's own calls: the arguments of a named tool, else a list of calls.
    pub(super) fn grammar(&self) -> Result<Option<Grammar>, ApiError> {
        let functions: Vec<Function> =
            (0..self.list.len()).map(|at| self.function(at)).collect::<Result<_, _>>()?;
        let schema_of = |function: &Function| match &function.parameters {
            Some(parameters) => Value::Object(parameters.clone()),
            None => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        };
        let mut schema = match &self.calls {
            Calls::None | Calls::Auto => return Ok(None),
            Calls::Named(name) => match functions.iter().find(|function| function.name == *name) {
                Some(function) => schema_of(function),
                None => {
                    return Err(ApiError::field(
                        "tool_choice",
                        format!("there is no tool `{name}` in `tools`"),
                    ));
                }
            },
            Calls::Required => {
                let mut shared = Map::new();
                let call = |function: &Function| {
                    let mut arguments = schema_of(function);
                    // References begin at the root.
                    for key in ["$defs", "definitions"] {
                        if let Some(Value::Object(own)) =
                            arguments.as_object_mut().and_then(|own| own.remove(key))
                        {
                            let all = shared.entry(key).or_insert_with(|| json!({}));
                            all.as_object_mut().into_iter().for_each(|all| all.extend(own.clone()));
                        }
                    }
                    json!({
                        "type": "object",
                        "properties": { "name": { "const": function.name }, "arguments": arguments },
                        "required": ["name", "arguments"],
                        "additionalProperties": false,
                    })
                };
                let any: Vec<Value> = functions.iter().map(call).collect();
                let most = if self.parallel { MOST_TOOLS } else { 1 };
                let mut list =
                    json!({ "type": "array", "items": { "anyOf": any }, "minItems": 1, "maxItems": most });
                list.as_object_mut().into_iter().for_each(|list| list.extend(shared.clone()));
                list
            }
        };
        // White space could go on without end.
        schema["x-guidance"] =
            json!({ "whitespace_flexible": false, "key_separator": ": ", "item_separator": ", " });
        let wrong = |error: kiln::Error| {
            ApiError::field(
                "tools",
                format!("a schema cannot be used: {}", kiln::expert::plain(&error.to_string())),
            )
        };
        Grammar::json_schema(&schema.to_string()).map(Some).map_err(wrong)
    }
}
