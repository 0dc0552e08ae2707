//! The cache of a generation.

use std::ops::{Deref, DerefMut};

use kiln_core::model_cache::ModelCache;

/// The cache that a generation writes to: owned by the generation, or borrowed from the caller.
#[derive(Debug)]
pub enum CacheHandle<'a> {
    /// Dropped with the generation.
    Owned(Box<ModelCache>),
    /// Holds the sequence after the generation.
    Borrowed(&'a mut ModelCache),
}

impl From<ModelCache> for CacheHandle<'_> {
    fn from(cache: ModelCache) -> Self {
        Self::Owned(Box::new(cache))
    }
}

impl<'a> From<&'a mut ModelCache> for CacheHandle<'a> {
    fn from(cache: &'a mut ModelCache) -> Self {
        Self::Borrowed(cache)
    }
}

impl Deref for CacheHandle<'_> {
    type Target = ModelCache;

    fn deref(&self) -> &ModelCache {
        match self {
            Self::Owned(cache) => cache,
            Self::Borrowed(cache) => cache,
        }
    }
}

impl DerefMut for CacheHandle<'_> {
    fn deref_mut(&mut self) -> &mut ModelCache {
        match self {
            Self::Owned(cache) => cache,
            Self::Borrowed(cache) => cache,
        }
    }
}
