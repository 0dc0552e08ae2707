//! Measures products with packed matrices: billions of products a second for some numbers of vectors, and the
//! time of a pass divided by that of one vector.
//!
//! ```sh
//! cargo run --release -p kiln-products --example products -- [Q4_1 ..]
//! ```
//!
//! `KILN_INSTRUCTIONS` and `RAYON_NUM_THREADS` work as in every program.

#![allow(clippy::print_stdout, reason = "a program for the terminal")]

use std::{env, iter, time::Instant};

use kiln_products::{Group, products_of_groups};
use kiln_simd::Instructions;
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

/// Rows and columns: those of a small model's feed-forward, of a large model's, and of a vocabulary.
const SHAPES: [[usize; 2]; 3] = [[1536, 768], [2048, 5632], [49152, 768]];

const VECTORS: [usize; 8] = [1, 2, 4, 8, 12, 16, 32, 128];

/// Bytes of different matrices of a shape, so that none is in a cache when its turn comes again.
const MEMORY: usize = 256 << 20;

const ROUNDS: usize = 5;

fn main() -> Result<(), String> {
    if let Ok(name) = env::var("KILN_INSTRUCTIONS") {
        let known = Instructions::ALL.into_iter().find(|instructions| instructions.name() == name);
        kiln_simd::limit(known.ok_or_else(|| format!("KILN_INSTRUCTIONS: no instructions `{name}`"))?);
    }
    let named = |name: String| {
        let known = Format::ALL.into_iter().find(|format| format.to_string().eq_ignore_ascii_case(&name));
        known.ok_or_else(|| format!("no format `{name}`"))
    };
    let mut formats = env::args().skip(1).map(named).collect::<Result<Vec<_>, _>>()?;
    if formats.is_empty() {
        formats.extend(Format::ALL);
    }
    let best = kiln_simd::best().name();
    println!("{best}: billions of products a second, and the time divided by that of one vector");
    for format in formats {
        for shape in SHAPES {
            if let Some(line) = line(format, shape) {
                println!("{line}");
            }
        }
    }
    Ok(())
}

/// Measures a format and a shape; `None` if the format is not packed by sixteen rows of this shape.
fn line(format: Format, [rows, columns]: [usize; 2]) -> Option<String> {
    let numbers: Vec<f32> = (0..rows * columns).map(|i| (i as f32).sin()).collect();
    let mut bytes = vec![0; format.bytes_of(numbers.len())?];
    format.pack(&numbers, &mut bytes).ok()?;
    let mut words = vec![0u32; format.words(Order::Sixteens, rows, columns)?];
    format.arrange(Order::Sixteens, columns, &bytes, bytemuck::cast_slice_mut(&mut words)).ok()?;
    let matrices: Vec<_> =
        iter::repeat_n(&words, MEMORY.div_ceil(size_of_val(&words[..]))).cloned().collect();
    let mut of_one = None;
    let mut line = format!("{:10} {rows:5} x {columns:4}", format.to_string());
    for vectors in VECTORS {
        let x = &numbers[..vectors * columns];
        let mut y = vec![0.0; vectors * rows];
        let mut pass = || {
            let start = Instant::now();
            for words in &matrices {
                let group = Group { vectors: 0..vectors, words, y: y.chunks_mut(rows).collect() };
                products_of_groups(x, columns, format, Arithmetic::Integers, vec![group])?;
            }
            Some(start.elapsed().as_secs_f64() / matrices.len() as f64)
        };
        let seconds =
            (0..ROUNDS).map(|_| pass()).collect::<Option<Vec<_>>>()?.into_iter().fold(f64::MAX, f64::min);
        let of_one = *of_one.get_or_insert(seconds);
        let rate = (vectors * rows * columns) as f64 / seconds / 1e9;
        line += &format!(" | {vectors:3}: {rate:4.0}, {:5.2}", seconds / of_one);
    }
    Some(line)
}
