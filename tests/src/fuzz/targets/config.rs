//! `config.json` of every architecture, with its recorded weights.

use std::{collections::BTreeMap, fs, path::Path};

use kiln::expert::{ConfigFile, models::configure};
use serde_json::Value;

use super::{copied, cpu, used};
use crate::{
    fuzz::{Run, Target, mutate::Format, put},
    support::{architectures, fixtures},
};

pub(in crate::fuzz) const TARGET: Target = Target { name: "config", format: Format::Json, seeds, prepare };

fn seeds() -> Vec<Vec<u8>> {
    let models = |version| fs::read_dir(fixtures(version).join("models")).unwrap();
    let folders = ["5.23.0", "5.23.0-rope", "4.47.1"].into_iter().flat_map(models);
    let mut paths: Vec<_> = folders.map(|entry| entry.unwrap().path().join("config.json")).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn prepare(folder: &Path) -> Run {
    let folders: BTreeMap<&str, _> = architectures().map(|name| (name, copied(name, folder, name))).collect();
    let device = cpu();
    Box::new(move |input| {
        let json: Value = serde_json::from_slice(input).unwrap_or_default();
        let folder = json["model_type"].as_str().and_then(|name| folders.get(name));
        let folder = folder.unwrap_or(&folders["llama"]);
        if let Ok(configured) = configure(&ConfigFile::from_json(json)) {
            _ = (configured.sizes(), configured.needs(), configured.ropes());
        }
        put(&folder.join("config.json"), input);
        used(folder, &device)
    })
}
