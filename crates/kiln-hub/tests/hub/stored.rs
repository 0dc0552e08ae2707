//! Listing and removing models in the cache.

use std::fs;

use super::{COMMIT, Cache, FOLDER, GGUF, fetch, names, server::Server, spec};

const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba98";

#[test]
fn models_in_the_cache_are_listed() {
    let cache = Cache::new();
    let nowhere = cache.hub_at("http://localhost");
    assert_eq!(nowhere.list().unwrap(), []);
    fetch(&cache.hub(&Server::new("org/name", &GGUF)), "org/name:Q8_0").unwrap();
    fetch(&cache.hub(&Server::new("a/folder", &FOLDER)), "a/folder").unwrap();
    for other in ["models--a--b--c", "datasets--a--b", "models--..--x", "models--x", "version.txt"] {
        fs::create_dir(cache.path().join(other)).unwrap();
    }
    let models = nowhere.list().unwrap();
    let facts: Vec<_> =
        models.iter().map(|m| (m.repo.as_str(), m.weights.join(" "), m.bytes, m.unfinished)).collect();
    let folder: usize = [1, 2, 3, 6, 7].map(|file| FOLDER[file].1.len()).iter().sum();
    assert_eq!(
        facts,
        [
            ("a/folder", "safetensors".to_owned(), folder as u64, false),
            ("org/name", "Q8_0".to_owned(), 10, false)
        ]
    );
    assert!(
        models.iter().all(|model| model.last_used.is_some_and(|at| at.elapsed().unwrap().as_secs() < 600))
    );
    fs::write(cache.path().join("models--org--name/blobs/x.incomplete"), b"123").unwrap();
    let model = &nowhere.list().unwrap()[1];
    assert_eq!((model.bytes, model.unfinished), (13, true));
}

#[test]
fn a_repository_is_removed_and_nothing_else() {
    let cache = Cache::new();
    fetch(&cache.hub(&Server::new("org/name", &GGUF)), "org/name").unwrap();
    let hub = cache.hub(&Server::new("a/folder", &FOLDER));
    let folder = fetch(&hub, "a/folder").unwrap();
    let removal = hub.removal(&spec("org/name")).unwrap();
    assert_eq!(removal.bytes, 9);
    removal.run().unwrap();
    assert_eq!(names(&cache.path()), [".locks", "models--a--folder"]);
    assert_eq!(names(&cache.path().join(".locks")), ["models--a--folder"]);
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"weights of a model");
    for text in ["org/name", "org/name:Q8_0", "a/folder@v1", &format!("a/folder@{OTHER}")] {
        let message = hub.removal(&spec(text)).unwrap_err().to_string();
        assert!(message.contains(&format!("{text} is not in the cache")), "{message}");
    }
    assert!(hub.removal(&spec("a/folder:Q8_0")).unwrap_err().to_string().contains("has no GGUF files"));
}

#[test]
fn a_quant_is_removed_without_other_files() {
    let cache = Cache::new();
    let hub = cache.hub(&Server::new("org/name", &GGUF));
    let small = fetch(&hub, "org/name").unwrap();
    let split = fetch(&hub, "org/name:Q8_0").unwrap();
    fs::remove_file(split.with_file_name("m-Q8_0-00002-of-00002.gguf")).unwrap();
    let removal = hub.removal(&spec("org/name:q8_0")).unwrap();
    assert_eq!(
        (removal.bytes, removal.files.as_slice()),
        (6, &["m-Q8_0-00001-of-00002.gguf".to_owned()][..])
    );
    removal.run().unwrap();
    assert!(small.exists() && !split.exists());
    hub.removal(&spec("org/name:Q4_K_M")).unwrap().run().unwrap();
    assert_eq!(names(&cache.path()), [".locks"], "the last one takes the folder along");
}

#[cfg(unix)]
#[test]
fn blobs_of_another_revision_are_not_removed() {
    let cache = Cache::new();
    let hub = cache.hub(&Server::new("org/name", &FOLDER));
    let folder = fetch(&hub, "org/name").unwrap();
    // Another revision with the same weights, as after an update of the README.
    let (other, root) = (folder.with_file_name(OTHER), cache.path().join("models--org--name"));
    fs::create_dir(&other).unwrap();
    let weights = fs::read_link(folder.join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink(weights, other.join("model.safetensors")).unwrap();
    fs::write(root.join("refs/v2"), OTHER).unwrap();

    let removal = hub.removal(&spec("org/name@main")).unwrap();
    let texts: usize = [1, 2, 6, 7].map(|file| FOLDER[file].1.len()).iter().sum();
    // The ref is removed, too.
    assert_eq!(removal.bytes, (texts + COMMIT.len()) as u64);
    removal.run().unwrap();
    assert_eq!(names(&root.join("snapshots")), [OTHER]);
    assert_eq!(names(&root.join("refs")), ["v2"]);
    assert_eq!(fs::read(other.join("model.safetensors")).unwrap(), b"weights of a model");
    assert_eq!(names(&root.join("blobs")).len(), 1);
}

#[cfg(unix)]
#[test]
fn targets_of_links_outside_the_cache_are_not_removed() {
    let cache = Cache::new();
    let hub = cache.hub(&Server::new("org/name", &GGUF));
    let path = fetch(&hub, "org/name").unwrap();
    let precious = cache.around.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), b"mine").unwrap();
    std::os::unix::fs::symlink(&precious, path.with_file_name("folder")).unwrap();
    std::os::unix::fs::symlink(precious.join("file"), path.with_file_name("other.gguf")).unwrap();
    hub.removal(&spec("org/name:other.gguf")).unwrap().run().unwrap();
    hub.removal(&spec("org/name")).unwrap().run().unwrap();
    assert_eq!(fs::read(precious.join("file")).unwrap(), b"mine");
}
