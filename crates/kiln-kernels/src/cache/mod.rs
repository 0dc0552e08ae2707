//! Writing, reading and permuting the buffers of KV caches.

pub(crate) mod float8_unpack;
pub(crate) mod kv_append;
pub(crate) mod kv_pack;
pub(crate) mod kv_reorder;
pub(crate) mod kv_unpack;
