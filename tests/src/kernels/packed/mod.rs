//! Packed keys and values: the words, the numbers they stand for, and attention over them.

mod attention;
mod words;
