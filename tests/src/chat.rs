//! Chat templates compared with transformers, hostile templates, and a conversation with the demo model.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use kiln::{
    Chat, ChatTemplate, Conversation, Error, GenerationConfig, Message, Model, Plan,
    expert::{Data, RenderOptions, STRATEGIES},
};
use serde::Deserialize;
use serde_json::json;

use crate::support::float32;

fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/chat_templates")
}

fn read<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    serde_json::from_str(&fs::read_to_string(data().join(name)).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Recorded {
    /// Seconds since 1970
    now: u64,
    special_tokens: BTreeMap<String, String>,
    conversations: BTreeMap<String, Told>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Told {
    #[serde(flatten)]
    conversation: Conversation,
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: bool,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    conversation: String,
    /// Expected text; `None` if transformers fails.
    expected: Option<String>,
}

#[test]
fn templates_give_the_text_that_they_give_in_transformers() {
    let recorded: Recorded = read("cases.json");
    let mut templates = BTreeMap::new();
    for case in &recorded.cases {
        let source = fs::read_to_string(data().join(format!("{}.jinja", case.template))).unwrap();
        templates.insert(case.template.as_str(), ());
        let told = &recorded.conversations[&case.conversation];
        let options = RenderOptions {
            add_generation_prompt: told.add_generation_prompt.unwrap_or(true),
            continue_final: told.continue_final_message.then(|| "content".to_owned()),
            now: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(recorded.now)),
        };
        let made = ChatTemplate::new(&source)
            .and_then(|template| template.render(&told.conversation, &recorded.special_tokens, &options));
        let what = format!("{} of {}", case.conversation, case.template);
        match (&case.expected, made) {
            (Some(expected), made) => assert_eq!(made.as_ref(), Ok(expected), "{what}"),
            (None, made) => assert!(matches!(made, Err(Error::ChatTemplate { .. })), "{what}: {made:?}"),
        }
    }
    assert!(templates.len() >= 17 && recorded.cases.len() >= 180, "all of them ran");
}

#[derive(Deserialize)]
struct Expressions {
    variables: Variables,
    cases: Vec<Expression>,
}

#[derive(Deserialize)]
struct Variables {
    messages: Vec<Message>,
    #[serde(flatten)]
    others: BTreeMap<String, Data>,
}

#[derive(Deserialize)]
struct Expression {
    template: String,
    expected: Option<String>,
}

#[test]
fn expressions_mean_what_they_mean_in_jinja() {
    let Expressions { mut variables, cases } = read("expressions.json");
    // Variables that are passed to `render` by other means, and that it sets itself.
    variables
        .others
        .retain(|name, _| !["tools", "documents", "add_generation_prompt"].contains(&name.as_str()));
    let conversation =
        Conversation { messages: variables.messages, variables: variables.others, ..Conversation::default() };
    for case in &cases {
        let made = rendered(&case.template, &conversation);
        match &case.expected {
            Some(expected) => assert_eq!(made.as_ref(), Ok(expected), "{}", case.template),
            None => assert!(made.is_err(), "{}: {made:?}", case.template),
        }
    }
    assert!(cases.len() >= 230, "all of them ran");
}

fn rendered(source: &str, conversation: &Conversation) -> kiln::Result<String> {
    ChatTemplate::new(source)?.render(conversation, &BTreeMap::new(), &RenderOptions::default())
}

fn hello() -> Conversation {
    Conversation { messages: vec![Message::new("user", "hello")], ..Conversation::default() }
}

/// Returns the error of a template, which must be found in bounded time.
fn refused(source: &str) -> String {
    let started = Instant::now();
    let error = rendered(source, &hello()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30), "{:.100} took {:?}", source, started.elapsed());
    let Error::ChatTemplate { why } = error else { panic!("{error}") };
    assert!(why.len() < 2000, "{why}");
    why
}

#[test]
fn templates_that_run_too_long_are_errors() {
    let loops = "{% for a in range(100000) %}".repeat(3) + &"{% endfor %}".repeat(3);
    // On a busy machine the time limit may be reached first.
    let over = |template: &str| {
        let why = refused(template);
        assert!(why.contains("steps") || why.contains("seconds"), "{why}");
    };
    over(&loops);
    // Few steps, each of which takes a long time.
    let find =
        "{% set x = 'a' * 30000000 %}{% for i in range(100000) %}{% set y = x.find('ab') %}{% endfor %}";
    assert!(refused(find).contains("seconds"));
    let compare = "{% set x = 'a' * 30000000 %}{% set y = 'a' * 30000000 %}".to_owned()
        + &"{% if x == y %}{% endif %}".repeat(9000);
    assert!(refused(&compare).contains("seconds"));
    let fork =
        "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(30) }}";
    over(fork);
    for recursion in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ] {
        assert!(refused(recursion).contains("too deeply"), "{recursion}");
    }
}

#[test]
fn templates_that_make_too_much_text_or_data_are_errors() {
    let raw = "x".repeat(100_000);
    for bomb in [
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('abc') }}",
        &format!("{{% for i in range(100000) %}}{raw}{{% endfor %}}"),
        &format!("{{% set y %}}{{% for i in range(100000) %}}{raw}{{% endfor %}}{{% endset %}}"),
        "{{ 'a' * 10**12 }}",
        &"{{ 'a' * 100000000 }}".repeat(9000),
        "{% set x = 'a' * 30000000 %}{{ ([x] * 1000000)|select('eq', 'a' * 30000000)|list|length }}",
        "{{ ([1] * 10**12)|list }}",
        "{% set x = 'a' * 1000000 %}{{ x|replace('a', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x.join(range(100000)) }}",
        "{% set x = 'a' * 1000000 %}{{ range(100000)|join(x) }}",
        "{% set x = 'a' * 1000000 %}{{ ([1] * 100000)|tojson(separators=(x, x)) }}",
        "{% set x = 'a\n' * 1000000 %}{{ x|indent(1000) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ 'a'|center(10**9) }} {{ 'a'.ljust(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999d}'.format(1) }}",
        "{{ [1]|batch(10**9, 0) }}",
        "{{ [1]|slice(10**9) }}",
        "{{ range(10**9)|list }}",
        "{{ strftime_now('%Y' * 10000000) }}",
        "{{ raise_exception('x' * 10000000) }}",
    ] {
        refused(bomb);
    }
}

/// Templates that would overflow the stack: in the parser, or when a value is printed, compared or dropped.
#[test]
fn templates_and_values_that_are_too_deep_are_errors() {
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("{1:", "}"),
        ("not ", ""),
        ("-", ""),
        ("1 + ", ""),
        ("1 ~ ", ""),
        ("1 and ", ""),
        ("1 if 1 else ", ""),
        ("x", ".a"),
        ("x", "()"),
        ("x", "|upper"),
        ("x", "[1]"),
    ] {
        let inside = if open == "x" { "x" } else { "1" };
        let open = if open == "x" { String::new() } else { open.repeat(20_000 / open.len()) };
        let source = format!("{{{{ {open}{inside}{} }}}}", close.repeat(20_000 / close.len().max(1)));
        assert!(refused(&source).contains("tag"), "{source:.40}");
        // Just within the limit: any result is accepted, but no crash.
        let open = open.get(..open.len() / 6).unwrap();
        let source = format!("{{{{ {open}{inside}{} }}}}", close.repeat(3000 / close.len().max(1)));
        let _ = rendered(&source, &hello());
    }
    assert!(refused(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(1000))).contains("elif"));
    refused(&("{% if true %}".repeat(5000) + &"{% endif %}".repeat(5000)));
    refused(&"x".repeat(300_000));
    for deep in [
        "[ns.x]",
        "(ns.x, 1)",
        "{'a': ns.x}",
        "dict(a=ns.x)",
        "ns.x|batch(1)|list",
        "ns",
        "[ns]",
        "namespace(a=ns)",
        "{'a': ns}",
    ] {
        refused(&format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for i in range(100000) %}}{{% set ns.x = {deep} %}}{{% endfor %}}{{{{ ns }}}}"
        ));
    }
}

#[test]
fn a_namespace_may_be_in_a_list() {
    for (source, want) in [
        ("{% set ns = namespace(x=1) %}{% set l = [ns, 2] %}{% set ns.x = 3 %}{{ l[0].x }}{{ l[1] }}", "32"),
        (
            "{% set a = namespace(x=1) %}{% set b = namespace(x=2) %}{% for n in [a, b] %}{% set n.x = n.x * 10 %}{% endfor %}{{ a.x }} {{ b.x }}",
            "10 20",
        ),
        ("{% set ns = namespace(x=[1]) %}{% set d = {'n': ns} %}{{ d.n.x|length }}", "1"),
        ("{% set ns = namespace(x=1) %}{{ [ns] }}", "[<Namespace {'x': 1}>]"),
        ("{% set ns = namespace(x=1) %}{% set outer = namespace(a=ns) %}{{ outer.a.x }}", "1"),
    ] {
        assert_eq!(rendered(source, &hello()).unwrap(), want, "{source}");
    }
    for source in [
        // A list that would contain itself, and lists that grow after they were counted.
        "{% set ns = namespace(x=1) %}{% set l = [ns] %}{% set ns.x = l %}{{ l }}",
        "{% set ns = namespace(x=1) %}{% set l = [ns] * 100000 %}{{ l|length }}",
        "{% set ns = namespace(x=1) %}{% set l = [ns] * 200 %}{% set ns.x = range(5000)|list %}{{ l }}",
        "{% set ns = namespace(x=range(5000)|list) %}{% set l = [ns] * 200 %}{{ l }}",
        "{% set a = namespace(x=1) %}{% set b = namespace(x=a) %}{{ [b] }}",
        "{{ [namespace(x=1)]|tojson }}",
    ] {
        refused(source);
    }
}

#[test]
fn a_template_sees_nothing_but_its_variables() {
    for source in [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'chat template' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__ }}",
        "{{ open('/etc/passwd') }}",
        "{{ env('HOME') }}",
        "{{ [1].append(2) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ] {
        refused(source);
    }
    let all = "{{ namespace }}{{ range }}{{ dict }}{{ self }}{{ debug is defined }}";
    let made = rendered(all, &hello()).unwrap();
    assert!(!made.contains("hello") && !made.contains('/'), "{made}");
}

/// No text of a template may reach the engine with another meaning, which the limits would not count.
#[test]
fn templates_that_the_limits_cannot_count_are_errors() {
    for source in [
        "{{ range (3) (1) }}",
        "{{ 'a' 1 }}",
        "{% set else = dict %}{{ else (a=1) }}",
        "{{ x|_made", // No end.
        "{{ [1, 2) }}",
        "{{ (1 }}) }}",
        "{% set x = %}",
        "{% if 1 %}{{ '{% endif %}",
        "{% raw %}{{ x }}",
        "{# x",
    ] {
        refused(source);
    }
    let quoted = r#"a"b\{'c'} {{ "{{ 1 }}" }}{{ '%}' }}{% raw %}{{ x }}{% endraw %}{# {{ #}"#;
    assert_eq!(rendered(quoted, &hello()).unwrap(), r#"a"b\{'c'} {{ 1 }}%}{{ x }}"#);
}

#[test]
fn errors_of_templates_have_their_own_words_and_line() {
    assert_eq!(refused("{{ raise_exception('roles must alternate') }}"), "roles must alternate (line 1)");
    assert!(refused("a\n\n{{ messages | nothing }}").ends_with("(line 3)"));
    assert!(refused("{% for x in [1] %}").contains("end"));
    let lines = "{%- if 1 -%}\n\n{# \n #}{{ 'a\n' }}\n{% endif\n%}\n";
    assert!(refused(&format!("{lines}{{{{ 1 / 0 }}}}")).ends_with("(line 8)"));
    assert!(refused(&format!("{lines}{{{{ 1 1 }}}}")).ends_with("(line 8)"));
    let nobody = rendered("{{ messages }}", &Conversation::default()).unwrap_err();
    assert!(nobody.to_string().contains("needs a message"));
}

#[test]
fn the_last_message_can_be_continued() {
    let conversation = Conversation {
        messages: vec![Message::new("user", "tell"), Message::new("assistant", "Once upon a ")],
        ..Conversation::default()
    };
    let with = |source: &str, field: &str, add_generation_prompt| {
        let options = RenderOptions {
            continue_final: Some(field.to_owned()),
            add_generation_prompt,
            ..RenderOptions::default()
        };
        ChatTemplate::new(source).unwrap().render(&conversation, &BTreeMap::new(), &options)
    };
    let keeps = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    let trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}";
    assert_eq!(with(keeps, "content", false).unwrap(), "<tell><Once upon a ");
    assert_eq!(with(trims, "content", false).unwrap(), "<tell><Once upon a");
    assert!(with(keeps, "content", true).is_err(), "nobody continues a message and begins another");
    assert!(with(keeps, "reasoning_content", false).is_err(), "the message has none");
    let hides = "{% for m in messages %}{{ m.content | length }}{% endfor %}";
    assert!(with(hides, "content", false).unwrap_err().to_string().contains("does not repeat"));
}

/// Copies the demo model and adds these files.
pub(crate) fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn load(folder: &Path) -> kiln::Result<Model> {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    float32(Model::builder(folder), opened).load()
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let names = |files: &[(&str, &str)]| {
        let templates = load(folder(files).path()).unwrap().chat_templates().clone();
        let sources: Vec<_> =
            templates.by_name.into_iter().map(|(name, source)| format!("{name}={source}")).collect();
        (sources.join(" "), templates.special_tokens)
    };
    let config = json!({
        "chat_template": "config", "bos_token": {"content": "<b>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
    });
    let config = ("tokenizer_config.json", &*config.to_string());
    let map = ("special_tokens_map.json", r#"{"eos_token": "<e>", "unk_token": {"content": "<u>"}}"#);
    let token = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let (sources, tokens) = names(&[config, map]);
    assert_eq!(sources, "default=config");
    let want = [token("bos_token", "<b>"), token("eos_token", "<e>"), token("unk_token", "<u>")];
    assert_eq!(tokens, want.into());
    assert_eq!(names(&[config, ("chat_template.jinja", "file")]).0, "default=file", "the file wins");
    let both =
        names(&[config, ("chat_template.jinja", "file"), ("additional_chat_templates/rag.jinja", "more")]);
    assert_eq!(both.0, "default=file rag=more");
    let list =
        r#"{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}"#;
    assert_eq!(names(&[("tokenizer_config.json", list)]).0, "default=a tool_use=b");
    assert_eq!(names(&[]).0, "");
    let newer = r#"{"added_tokens_decoder": {}, "eos_token": "</s>"}"#;
    assert_eq!(names(&[("tokenizer_config.json", newer), map]).1, [token("eos_token", "</s>")].into());
    let own = r#"{"think_token": "</s>", "extra_special_tokens": {"image": "<i>"}}"#;
    let want = [token("image", "<i>"), token("think_token", "</s>")];
    assert_eq!(names(&[("tokenizer_config.json", own)]).1, want.into());

    let broken = load(folder(&[("tokenizer_config.json", "{")]).path()).unwrap_err().to_string();
    assert!(broken.contains("tokenizer_config.json: is not valid JSON"), "{broken}");
}

#[test]
fn a_template_is_chosen_as_transformers_chooses() {
    let templates = |names: &[&str]| kiln::expert::ChatTemplates {
        by_name: names
            .iter()
            .map(|name| ((*name).to_owned(), format!("{name} {{{{ bos_token }}}}")))
            .collect(),
        special_tokens: [("bos_token".to_owned(), "<s>".to_owned())].into(),
    };
    let made = |templates: &kiln::expert::ChatTemplates, tools| {
        let template = templates.choose(tools)?;
        template.render(&hello(), &templates.special_tokens, &RenderOptions::default())
    };
    let several = templates(&["default", "tool_use", "rag"]);
    assert_eq!(made(&several, false).unwrap(), "default <s>");
    assert_eq!(made(&several, true).unwrap(), "tool_use <s>");
    assert_eq!(made(&templates(&["default"]), true).unwrap(), "default <s>");
    assert!(made(&templates(&["a", "b"]), false).unwrap_err().to_string().contains("name one of a, b"));
    assert!(made(&templates(&[]), false).unwrap_err().to_string().contains("none"));
    assert!(several.named("rag").is_ok());
    assert!(matches!(several.named("x").unwrap_err(), Error::Unknown { known, .. } if known.len() == 3));
}

fn demo() -> Model {
    load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo")).unwrap()
}

fn greedy(n: usize) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n).do_sample(false)
}

fn says(chat: &mut Chat, text: &str, n: usize) -> (String, kiln::Reuse) {
    let mut answer = chat.say(text).unwrap().config(greedy(n)).stream().unwrap();
    let said: String = answer.by_ref().map(Result::unwrap).collect();
    (said, answer.reuse())
}

#[test]
fn every_turn_feeds_only_new_tokens() {
    let model = demo();
    let template = model.chat_templates().choose(false).unwrap();
    let questions = ["What news from Rome?", "Who told you so?", "And when was that, my lord?"];
    let talk = |plan: &Plan| -> Vec<(String, kiln::Reuse)> {
        let mut chat = Chat::new(&model, template.clone(), plan).unwrap();
        questions.iter().map(|question| says(&mut chat, question, 16)).collect()
    };
    let plain = talk(&Plan::named("none").unwrap());
    for strategy in STRATEGIES {
        let plan = Plan::named(strategy.name).unwrap();
        // The demo model has no sliding windows.
        if plan.check(&model.causal().needs()).is_err() {
            continue;
        }
        let turns = talk(&plan);
        for (turn, ((said, reuse), (want, whole))) in turns.iter().zip(&plain).enumerate() {
            let what = format!("turn {turn} with {}", strategy.name);
            if plan.global.factory.exact() {
                assert_eq!(said, want, "{what}");
                assert_eq!(reuse.reused + reuse.fed, whole.fed, "{what}");
            }
            if turn > 0 && plan.global.factory.remembers() && !reuse.reset {
                assert!(reuse.reused > 16 && reuse.fed < 30, "{what}: {reuse:?}");
            }
        }
    }
}

/// Tokenizers begin a text with a special token; templates write the token themselves.
#[test]
fn a_conversation_begins_with_one_special_token() {
    let folder = folder(&[]);
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    let model = load(folder.path()).unwrap();
    let template = ChatTemplate::new("<s>{{ messages[0].content }}").unwrap();
    let ids = model.encode_chat(&template, &hello(), &RenderOptions::default()).unwrap();
    assert_eq!(ids, model.encode("hello").unwrap());
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1, "{ids:?}");
}

#[test]
fn a_dropped_answer_is_stored_as_far_as_it_was_read() {
    let model = demo();
    let template = model.chat_templates().choose(false).unwrap();
    let mut chat = Chat::new(&model, template, &Plan::dynamic()).unwrap();
    let mut answer = chat.say("What news?").unwrap().config(greedy(30)).stream().unwrap();
    let said: String = answer.by_ref().take(3).map(Result::unwrap).collect();
    drop(answer);
    let last = chat.conversation().messages.last().unwrap();
    assert_eq!((last.role(), last.content()), ("assistant".to_owned(), Some(said)));
    let (_, reuse) = says(&mut chat, "Go on.", 4);
    assert!(reuse.reused > 10, "{reuse:?}");
    assert_eq!(chat.conversation().messages.len(), 4);

    // No text was generated, so the question is not recorded.
    drop(chat.say("Well?").unwrap().config(greedy(30)).stream().unwrap());
    assert_eq!(chat.conversation().messages.len(), 4);
    let long = "word ".repeat(600);
    assert!(chat.say(&long).unwrap().config(greedy(1)).stream().is_err());
    assert_eq!(chat.conversation().messages.len(), 4, "nor after an error");
}

#[test]
fn an_answer_ends_at_the_end_marker_of_its_template() {
    let model = demo();
    let said = |source: &str| {
        let template = ChatTemplate::new(source).unwrap();
        let mut chat = Chat::new(&model, template, &Plan::dynamic()).unwrap();
        says(&mut chat, "What news?", 40).0
    };
    let with = |end: &str| {
        said(&format!(
            "{{% for m in messages %}}{{{{ m.content }}}}{end}\n{{% endfor %}}{{% if add_generation_prompt %}}PLAYER:\n{{% endif %}}"
        ))
    };
    let whole = with("");
    // A word of the answer becomes the end marker of every message.
    let word = whole.split_whitespace().nth(3).unwrap();
    let cut = with(word);
    assert!(!cut.contains(word) && cut.len() < whole.len(), "{cut:?} of {whole:?}");
}
