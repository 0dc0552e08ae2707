//! Mutation of inputs: by the structure of their format, and by bytes.

mod bytes;
mod jinja;
mod json;
pub(crate) mod tensors;
mod words;

pub(crate) mod smaller;

use json::Values;

/// The format of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    /// Safetensors, and its index, which is JSON
    Tensors,
    Jinja,
    Words,
    Bytes,
}

/// Random numbers (SplitMix64) that are the same on every machine.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a random number below `n`, or 0 if `n` is 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }

    /// Returns the number of mutations: mostly 1, rarely many.
    fn rounds(&mut self) -> usize {
        1 + [0, 0, 0, 0, 0, 1, 2, 5][self.below(8)]
    }
}

/// Seeds, and their combined parts, for mutations that mix them.
#[derive(Debug)]
pub(crate) struct Pool {
    format: Format,
    seeds: Vec<Vec<u8>>,
    values: Values,
    tokens: Vec<String>,
}

impl Pool {
    pub(crate) fn new(format: Format, seeds: Vec<Vec<u8>>) -> Self {
        let text = |seed: &Vec<u8>| String::from_utf8_lossy(seed).into_owned();
        let tokens = match format {
            Format::Json | Format::Tensors | Format::Bytes => Vec::new(),
            Format::Jinja => seeds.iter().flat_map(|seed| jinja::tokens(&text(seed))).collect(),
            Format::Words => seeds.iter().flat_map(|seed| words::tokens(&text(seed))).collect(),
        };
        let values = Values::of(seeds.iter().filter_map(|seed| match format {
            Format::Json | Format::Tensors => {
                serde_json::from_slice(seed).ok().or_else(|| tensors::header(seed))
            }
            Format::Jinja | Format::Words | Format::Bytes => None,
        }));
        Self { format, seeds, values, tokens }
    }

    pub(crate) fn seeds(&self) -> &[Vec<u8>] {
        &self.seeds
    }

    /// Returns a mutation of a random seed.
    pub(crate) fn mutated(&self, random: &mut Random) -> Vec<u8> {
        let seed = &self.seeds[random.below(self.seeds.len())];
        if random.one_in(10) {
            return bytes::mutated(seed, &self.seeds, random);
        }
        let text = || String::from_utf8_lossy(seed);
        let changed = match self.format {
            Format::Tensors if !seed.starts_with(b"{") => tensors::mutated(seed, &self.values, random),
            Format::Json | Format::Tensors => json::mutated(seed, &self.values, random),
            Format::Jinja => jinja::mutated(&text(), &self.tokens, random).into_bytes(),
            Format::Words => words::mutated(&text(), &self.tokens, random).into_bytes(),
            Format::Bytes => bytes::mutated(seed, &self.seeds, random),
        };
        match random.one_in(20) {
            true => bytes::mutated(&changed, &self.seeds, random),
            false => changed,
        }
    }
}
