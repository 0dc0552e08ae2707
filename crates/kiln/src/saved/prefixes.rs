//! The beginnings of prompts that an engine keeps, in one file, for an engine in another process.
//!
//! Tensors are named `PREFIX.LAYER.SLOT.NUMBER`.

use kiln_core::{Error, Result, model::TokenId, model_cache::CacheState, tensor_file::TensorFile};
use kiln_generate::{PrefixScope, StoredPrefix};
use serde::{Deserialize, Serialize};

use super::{Contents, LayerHeader, contents, named, not_whole};
use crate::Model;

const FORMAT: &str = "kiln.prefixes/1";

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    model: String,
    dtype: String,
    computed_by: String,
    prefixes: Vec<PrefixHeader>,
}

/// A [`StoredPrefix`] without its tensors.
#[derive(Debug, Serialize, Deserialize)]
struct PrefixHeader {
    scope: String,
    chunk: usize,
    tokens: Vec<TokenId>,
    rewinds: bool,
    is_answer: bool,
    groups: Vec<usize>,
    layers: Vec<LayerHeader>,
}

impl Model {
    /// Copies beginnings of prompts, such as the [`Engine::stored_prefixes`](crate::Engine::stored_prefixes),
    /// into the bytes of a file. `computed_by` names all that their bits depend on beside the model, such as
    /// the device and its driver.
    ///
    /// # Errors
    /// [`Error::Setting`] for a model that was not loaded from a folder.
    pub fn save_prefixes<'a>(
        &self,
        prefixes: impl Iterator<Item = &'a StoredPrefix>,
        computed_by: &str,
    ) -> Result<Vec<u8>> {
        let stored: Vec<&StoredPrefix> = prefixes.collect();
        let prefix_header = |prefix: &&StoredPrefix| PrefixHeader {
            scope: prefix.scope.name.clone(),
            chunk: prefix.scope.chunk,
            tokens: prefix.tokens.clone(),
            rewinds: prefix.rewinds,
            is_answer: prefix.is_answer,
            groups: prefix.state.rows.clone(),
            layers: LayerHeader::of(&prefix.state.layers),
        };
        let header = Header {
            model: self.fingerprint()?.to_owned(),
            dtype: self.dtype().name().to_owned(),
            computed_by: computed_by.to_owned(),
            prefixes: stored.iter().map(prefix_header).collect(),
        };
        let numbers: Vec<String> = (0..header.prefixes.len()).map(|number| format!("{number}.")).collect();
        let tensors = stored.iter().zip(&numbers);
        let tensors = tensors.flat_map(|(prefix, number)| named(number, &prefix.state.layers));
        let (views, metadata) = contents(FORMAT, &header, tensors).map_err(Error::Execution)?;
        safetensors::serialize(views, Some(metadata)).map_err(|e| Error::Execution(e.to_string()))
    }

    /// Reads the beginnings of prompts that [`save_prefixes`](Self::save_prefixes) copied, for
    /// [`Engine::store_prefix`](crate::Engine::store_prefix).
    ///
    /// # Errors
    /// [`Error::File`] for a file that is damaged, or belongs to another model, type or `computed_by`.
    pub fn load_prefixes(&self, file: TensorFile, computed_by: &str) -> Result<Vec<StoredPrefix>> {
        let (mut file, header) = Contents::new(file, FORMAT, "a file of prompts that Kiln saved")?;
        let Header { model, dtype, computed_by: other, prefixes } = header;
        if model != self.fingerprint()? {
            return Err(file.wrong("was saved with another model's weights".to_owned()));
        }
        if dtype != self.dtype().name() || other != computed_by {
            let why = "was computed by another device, driver or version of Kiln, or with other settings";
            return Err(file.wrong(why.to_owned()));
        }
        let mut stored = Vec::new();
        for (number, header) in prefixes.into_iter().enumerate() {
            let PrefixHeader { scope: name, chunk, tokens, rewinds, is_answer, groups: rows, layers } =
                header;
            let layers = file.layers(&format!("{number}."), layers, self.dtype())?;
            if chunk == 0 || tokens.is_empty() {
                return Err(file.wrong(not_whole("a prompt has no tokens")));
            }
            let scope = PrefixScope { name, chunk };
            let state = CacheState { rows, layers };
            stored.push(StoredPrefix { scope, tokens, state, rewinds, is_answer });
        }
        file.check()?;
        Ok(stored)
    }
}
