//! Models from the hub, which is a server on this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{refused, run, stderr, stdout};

#[path = "../../../kiln-hub/tests/hub/server.rs"]
#[allow(dead_code, reason = "the tests of kiln-hub use all of it")]
mod server;

use server::{Reply, Server, sha256};

/// The files of the demo model.
fn demo() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

fn borrowed(files: &[(String, Vec<u8>)]) -> Vec<(&str, &[u8])> {
    files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect()
}

/// The binary, with the address of the hub and a home folder for its cache.
fn command(endpoint: &str, home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    for variable in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE"] {
        command.env_remove(variable);
    }
    command.env("HF_ENDPOINT", endpoint).env("HF_HOME", home);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn kiln(endpoint: &str, home: &Path, args: &[&str]) -> Output {
    command(endpoint, home, args).output().unwrap()
}

const RUN: [&str; 8] = ["run", "--device", "cpu", "--greedy", "-n", "8", "--model", "org/demo"];

/// An address without a server.
const NOBODY: &str = "http://127.0.0.1:1";

#[test]
fn a_model_from_the_hub_gives_the_text_of_its_local_folder() {
    let (home, files) = (tempfile::tempdir().unwrap(), demo());
    let server = Server::new("org/demo", &borrowed(&files));
    let output = kiln(&server.endpoint, home.path(), &[&RUN[..], &["ROMEO:"]].concat());
    assert_eq!(stdout(&output), stdout(&run(&["ROMEO:"])), "{}", stderr(&output));
    assert_eq!(stderr(&output), "", "no bar is drawn where nobody watches");
    assert!(!server.requests().is_empty());

    let offline = command(NOBODY, home.path(), &[&RUN[..], &["--json", "ROMEO:"]].concat())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let report: Value = serde_json::from_str(&stdout(&offline)).unwrap();
    assert_eq!(report["model"], "org/demo", "and not the commit");
    // Without a connection and without the variable, a note says so.
    let output = kiln(NOBODY, home.path(), &[&RUN[..], &["ROMEO:"]].concat());
    assert_eq!(stdout(&output), stdout(&run(&["ROMEO:"])));
    assert!(stderr(&output).contains("cannot be reached: the connection is refused"), "{}", stderr(&output));
    let output = kiln(&server.endpoint, home.path(), &["inspect", "org/demo", "--memory", "1GiB"]);
    assert!(stdout(&output).contains("architecture   llama"), "{}", stderr(&output));
}

#[test]
fn a_local_folder_is_not_looked_up_on_the_hub() {
    let (home, files) = (tempfile::tempdir().unwrap(), demo());
    let server = Server::new("org/demo", &[]);
    let folder = home.path().join("org/demo");
    fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in &files {
        fs::write(folder.join(name), bytes).unwrap();
    }
    let mut command = command(&server.endpoint, home.path(), &[&RUN[..], &["ROMEO:"]].concat());
    let output = command.current_dir(home.path()).output().unwrap();
    assert_eq!(stdout(&output), stdout(&run(&["ROMEO:"])), "{}", stderr(&output));
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn models_are_pulled_listed_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::new("org/name", &[("m-Q4_K_M.gguf", b"four bits"), ("m-Q8_0.gguf", b"eight")]);
    let kiln = |args: &[&str]| kiln(&server.endpoint, home.path(), args);
    assert!(stderr(&kiln(&["list"])).contains("there are no models in"));
    for spec in ["org/name", "org/name:q8_0"] {
        let output = kiln(&["pull", spec]);
        let path = PathBuf::from(stdout(&output).trim_end());
        assert!(path.starts_with(home.path().join("hub")) && path.is_file(), "{}", stderr(&output));
    }
    let expected = "model     weights       size  last used\norg/name  Q4_K_M, Q8_0  14 B  today\n";
    assert_eq!(stdout(&kiln(&["list"])), expected);
    let list: Value = serde_json::from_str(&stdout(&kiln(&["list", "--json"]))).unwrap();
    assert_eq!((&list[0]["model"], &list[0]["bytes"]), (&Value::from("org/name"), &Value::from(14)));

    refused(&kiln(&["remove", "org/name:Q8_0"]), "--yes: is needed");
    let output = kiln(&["remove", "--yes", "org/name:Q8_0"]);
    assert_eq!(stderr(&output), "removed org/name:Q8_0: 1 file, 5 B\n");
    assert!(stdout(&kiln(&["list"])).contains("org/name  Q4_K_M   9 B"));
    assert!(kiln(&["remove", "-y", "org/name"]).status.success());
    refused(&kiln(&["remove", "-y", "org/name"]), "org/name is not in the cache");
    assert_eq!(stdout(&kiln(&["list"])), "");
}

#[test]
fn environment_variables_mean_what_they_do_in_the_python_library() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::new("org/name", &[("m.gguf", b"x")]);
    let pulled = |variables: &[(&str, &str)]| {
        let mut command = command(&server.endpoint, home.path(), &["pull", "org/name"]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let token = server.requests().first().and_then(|request| request.token.clone());
        (PathBuf::from(stdout(&output).trim_end()), token)
    };
    assert_eq!(pulled(&[]).1, None);
    fs::write(home.path().join("token"), "hf_file\n").unwrap();
    assert_eq!(pulled(&[]).1.as_deref(), Some("Bearer hf_file"));
    assert_eq!(pulled(&[("HF_TOKEN", "hf_set")]).1.as_deref(), Some("Bearer hf_set"));
    let other = home.path().join("other");
    fs::write(&other, "hf_other").unwrap();
    assert_eq!(pulled(&[("HF_TOKEN_PATH", other.to_str().unwrap())]).1.as_deref(), Some("Bearer hf_other"));
    let cache = home.path().join("elsewhere");
    assert!(pulled(&[("HF_HUB_CACHE", cache.to_str().unwrap())]).0.starts_with(&cache));
    fs::write(home.path().join("token"), "two words").unwrap();
    refused(
        &kiln(&server.endpoint, home.path(), &["pull", "org/name"]),
        "token: holds characters that no token has",
    );
}

#[test]
fn a_trace_log_does_not_contain_the_token() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::new("org/name", &[("m.gguf", b"x")]);
    for filter in ["trace", "ureq_proto=trace,ureq_proto::util=trace"] {
        let mut command = command(&server.endpoint, home.path(), &["pull", "org/name"]);
        let output = command.env("KILN_LOG", filter).env("HF_TOKEN", "hf_secret").output().unwrap();
        let log = stderr(&output);
        assert!(output.status.success() && log.contains("ureq_proto"), "{log}");
        assert_eq!(server.requests()[0].token.as_deref(), Some("Bearer hf_secret"));
        // Log lines have several bytes each, followed by their letters.
        assert!(!log.contains("ureq_proto::util") && !log.contains("hf_secret"), "{log}");
        fs::remove_dir_all(home.path().join("hub")).unwrap();
    }
}

#[test]
fn models_that_cannot_be_fetched_are_errors_of_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::with_faults("org/name", &[("m.gguf", b"x")], |request, reply| {
        match request.path.contains("/gated/") {
            true => Reply::status(403).header("X-Error-Code", "GatedRepo"),
            false => reply,
        }
    });
    let run = |endpoint: &str, model: &str| kiln(endpoint, home.path(), &["run", "--model", model, "x"]);
    refused(
        &run(&server.endpoint, "org/nome"),
        "error: no folder or file here is called org/nome, and 127.0.0.1",
    );
    refused(
        &run(&server.endpoint, "org/nome"),
        "has no model org/nome; the nearest is org/name; if it is private",
    );
    refused(
        &run(&server.endpoint, "org/gated"),
        "error: org/gated is gated: accept its licence at http://127.0.0.1",
    );
    refused(&run(&server.endpoint, "org/name:Q8_0"), "error: org/name has no GGUF file of `Q8_0`; it has m");
    refused(
        &run(&server.endpoint, "org/name:../x"),
        "error: `org/name:../x` names a file that cannot be one",
    );
    refused(
        &run(NOBODY, "org/name"),
        "error: no folder or file here is called org/name, and 127.0.0.1 cannot be reached",
    );
    refused(&run("nonsense", "org/name"), "error: HF_ENDPOINT is `nonsense`, which is no address");
    let output =
        command(NOBODY, home.path(), &["pull", "org/name"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    refused(&output, "error: org/name is not in the cache");
    refused(&kiln(NOBODY, home.path(), &["pull", "name"]), "`name` does not name a model on the hub");
    // A name that does not look like a model on the hub is a path.
    for path in ["./org/name", "a/b/c", "org/name.gguf", "/org/name"] {
        let message = stderr(&run(&server.endpoint, path));
        assert!(message.contains("there is no such"), "{message}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_download_is_resumed() {
    let (home, bytes) = (tempfile::tempdir().unwrap(), vec![7; 500_000]);
    let server = Server::with_faults("org/name", &[("m.gguf", &bytes)], |request, reply| match request.cdn {
        true => Reply { cut: Some(200_000), stall: true, ..reply },
        false => reply,
    });
    let mut child = command(&server.endpoint, home.path(), &["pull", "org/name"]).spawn().unwrap();
    let partial =
        home.path().join("hub/models--org--name/blobs").join(format!("{}.incomplete", sha256(&bytes)));
    let written = || fs::metadata(&partial).map_or(0, |metadata| metadata.len());
    let started = Instant::now();
    while written() < 200_000 && started.elapsed() < Duration::from_secs(30) {
        thread::sleep(Duration::from_millis(10));
    }
    // Not SIGINT: a shell makes jobs in the background ignore it, tests among them.
    let interrupt = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    assert!(!child.wait().unwrap().success());
    assert_eq!(written(), 200_000, "what came is kept");

    let server = Server::new("org/name", &[("m.gguf", &bytes)]);
    let list = stdout(&kiln(NOBODY, home.path(), &["list"]));
    assert!(list.contains("none, unfinished"), "{list}");
    let output = kiln(&server.endpoint, home.path(), &["pull", "org/name"]);
    assert!(fs::read(stdout(&output).trim_end()).unwrap() == bytes, "{}", stderr(&output));
    let from: Vec<_> = server.requests().into_iter().filter(|request| request.cdn).map(|r| r.from).collect();
    assert_eq!(from, [Some(200_000)]);
}
