#!/usr/bin/env python3
"""Record what Hugging Face Transformers makes of chat templates, for the tests of Kiln's own.

    python tools/chat_template_cases.py [tests/data/chat_templates]

Renders every *.jinja of the folder with every conversation below, and every line of expressions.txt as a template of
its own, and writes cases.json and expressions.json there. Needs transformers >= 5 and jinja2.
"""
import copy, datetime, json, pathlib, sys

import jinja2, transformers
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

NOW = datetime.datetime(2025, 7, 26, 12, tzinfo=datetime.timezone.utc)


class Noon(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def user(content): return {"role": "user", "content": content}
def system(content): return {"role": "system", "content": content}
def assistant(content, **more): return {"role": "assistant", "content": content, **more}


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The <weather> of a city & more.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "City, e.g. \"Zürich\""},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "more": {"type": ["object", "null"], "default": None, "properties": {}}}}}},
    {"type": "function", "function": {
        "name": "add", "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}},
]
CALL = [{"id": "call12345", "type": "function",
         "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.5], "ok": True, "none": None}}}]

CONVERSATIONS = {
    "one": {"messages": [user("Hello, who are you?")]},
    "system": {"messages": [system("You are a helpful pirate."), user("Hi!")]},
    "several_turns": {"messages": [
        system(" Be brief. \n"), user("  What is 2+2? "), assistant("4."), user("And\n\n3+3?\n"), assistant(" 6 "),
        user("Thanks <|im_end|> & 'bye' \"q\" ü 😀")]},
    "answered": {"messages": [user("a"), assistant("b")], "add_generation_prompt": False},
    "continued": {"messages": [user("tell"), assistant("Once upon a ")], "continue_final_message": True,
                  "add_generation_prompt": False},
    "two_users": {"messages": [user("a"), user("b")]},
    "thoughts": {"messages": [
        user("q1"), assistant("<think>\nhmm\n</think>\n\nanswer"), user("q2"), assistant("two", reasoning="because"),
        user("q3")]},
    "parts": {"messages": [user([{"type": "text", "text": " look "}, {"type": "image"}, {"type": "text", "text": "here"}])]},
    "tools": {"messages": [system("Sys."), user("Weather in Paris?")], "tools": TOOLS},
    "tool_call": {"messages": [
        user("Weather in Paris?"), assistant(None, tool_calls=CALL),
        {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "22 °C"},
        assistant("It is 22 °C."), user("thanks")], "tools": TOOLS},
    "documents": {"messages": [user("what?")], "documents": [{"title": "T1", "text": "one"}, {"title": "T2", "text": "two\nmore"}]},
    "variables": {"messages": [user("hey")], "variables": {
        "enable_thinking": False, "thinking": True, "date_string": "1 Jan 2024", "builtin_tools": ["brave_search"]}},
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# What an expression sees.
VARIABLES = {
    "d": {"a": 1, "b": {"c": [1, 2.5, None, True, "x'y"]}, "é": "ü"},
    "e": {"type": "array", "items": {"type": "string"}, "values": 3},
    "messages": [system("You are <b>\n"), user(" hi </think>\n\nthere "), assistant("ok")],
    "tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>",
}


def render(source, conversation):
    arguments = copy.deepcopy(conversation)
    # As apply_chat_template does.
    messages = [{k: v for k, v in message.items() if v is not None} for message in arguments.pop("messages")]
    arguments.setdefault("add_generation_prompt", True)
    variables = {**SPECIAL_TOKENS, **arguments.pop("variables", {})}
    return render_jinja_template(conversations=[messages], chat_template=source, **variables, **arguments)[0][0]


def outcome(render):
    """The text; where transformers fails, only that it does: errors are worded anew."""
    try:
        return {"expected": render()}
    except Exception:
        return {"refused": True}


def write(path, data):
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main():
    chat_template_utils.datetime = Noon
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/chat_templates")
    made_by = f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}"
    cases = []
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        seen = set()
        for name, conversation in CONVERSATIONS.items():
            case = outcome(lambda: render(source, conversation))
            # Templates that know no tools make the same of a conversation with them.
            if case.get("expected") not in seen:
                cases.append({"template": path.stem, "conversation": name, **case})
                seen.add(case.get("expected"))
    write(folder / "cases.json", {
        "made_by": made_by, "now": int(NOW.timestamp()), "special_tokens": SPECIAL_TOKENS,
        "conversations": CONVERSATIONS, "cases": cases})
    lines = (folder / "expressions.txt").read_text(encoding="utf-8").splitlines()
    # A line break inside a template is written as ⏎ there.
    sources = [line.replace("⏎", "\n") for line in lines if line and not line.startswith("#!")]
    expressions = [
        {"template": source, **outcome(lambda: _compile_jinja_template(source).render(**VARIABLES))} for source in sources]
    write(folder / "expressions.json", {"made_by": made_by, "variables": VARIABLES, "cases": expressions})
    print(f"{len(cases)} cases, {len(expressions)} expressions")


if __name__ == "__main__":
    main()
