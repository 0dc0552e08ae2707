//! Several models in one server.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kiln::{Error, Model};
use kiln_serve::{ServeOptions, ServedModel};
use serde_json::{Value, json};

use crate::{MODEL, Running, alone, completion};

fn named(name: &str) -> Value {
    let mut body = completion("ROMEO:", 3, &json!({}));
    body["model"] = json!(name);
    body
}

/// A model on demand, and the number of times that it was loaded.
fn counted(name: &str) -> (ServedModel, Arc<AtomicUsize>) {
    let loads = Arc::new(AtomicUsize::new(0));
    let count = loads.clone();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let load = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Model::builder(&folder).opened(MODEL.opened().clone()).load()
    };
    (ServedModel::on_demand(name, load), loads)
}

#[test]
fn models_are_loaded_when_asked_for_and_unloaded_when_idle() {
    let ((first, first_loads), (second, second_loads)) = (counted("first"), counted("second"));
    let models = vec![first, second, ServedModel::loaded("third", MODEL.clone())];
    // The third stays loaded, so there is room for one of the others.
    let server = Running::offering(models, |options| ServeOptions { most_loaded: 2, ..options });
    let ask = |name: &str| {
        let (status, answer) = server.post("/v1/completions", &named(name));
        assert_eq!(
            (status, answer["choices"][0]["text"].as_str(), &answer["model"]),
            (200, Some(alone("ROMEO:", 3).as_str()), &json!(name)),
            "{answer}"
        );
    };
    let names = server.get("/v1/models").1["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].clone())
        .collect::<Vec<_>>();
    assert_eq!(names, ["first", "second", "third"]);
    assert_eq!(server.get("/api/ps").1["models"].as_array().unwrap().len(), 1);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| ask("first"));
            scope.spawn(|| ask("third"));
        }
    });
    assert_eq!(first_loads.load(Ordering::Relaxed), 1);
    ask("second");
    ask("first");
    assert_eq!((first_loads.load(Ordering::Relaxed), second_loads.load(Ordering::Relaxed)), (2, 1));
    assert_eq!(server.get("/props?model=third").1["model"], "third");
    // Asking for its state loads nothing.
    assert_eq!(server.get("/props?model=second").1["loaded"], false);
    assert_eq!(server.post("/v1/completions", &named("fourth")).0, 404);

    // ollama's way to unload a model, at once and after a time.
    assert_eq!(
        server.post("/api/generate", &json!({ "model": "first", "keep_alive": 0 })).1["done_reason"],
        "unload"
    );
    let loaded = || server.get("/api/ps").1["models"].as_array().unwrap().len();
    assert_eq!(loaded(), 1);
    assert_eq!(
        server.post("/api/generate", &json!({ "model": "first", "keep_alive": 0.5 })).1["done_reason"],
        "load"
    );
    assert_eq!(loaded(), 2);
    let begun = Instant::now();
    while loaded() > 1 {
        assert!(begun.elapsed() < Duration::from_secs(30), "the model is not unloaded");
        thread::sleep(Duration::from_millis(50));
    }
    ask("first");
}

#[test]
fn a_model_that_cannot_be_loaded_is_an_error_of_its_requests_alone() {
    let broken = || Err(Error::File { path: "weights".into(), why: "is damaged".to_owned() });
    let models = vec![ServedModel::loaded("demo", MODEL.clone()), ServedModel::on_demand("broken", broken)];
    let server = Running::offering(models, |options| options);
    let (status, answer) = server.post("/v1/completions", &named("broken"));
    assert!(status == 500 && answer["error"]["message"].as_str().unwrap().contains("is damaged"), "{answer}");
    assert_eq!(server.post("/v1/completions", &named("demo")).0, 200);
    assert_eq!(server.get("/health").0, 200);
}
