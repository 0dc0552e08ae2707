//! Inputs for comparing the implementations.

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{Draws, Sample, Sampling};
use crate::testing::{
    case::Case,
    numbers::{Layout, Plain, Swapped},
};

pub(super) fn all() -> Vec<Case<Sample>> {
    let all = Sampling { draws: true, ..Sampling::NEUTRAL };
    let samplings = [
        Sampling::NEUTRAL,
        Sampling { draws: false, repetition_penalty: 1.7, ..all },
        all,
        Sampling { temperature: 0.3, ..all },
        Sampling { top_k: 3, ..all },
        Sampling { tail: 0.1, ..all },
        Sampling { top_k: 300, tail: 0.1, ..all },
        Sampling { min_p: 0.1, ..all },
        Sampling {
            repetition_penalty: 1.7,
            temperature: 0.8,
            top_k: 40,
            tail: 0.13,
            min_p: 0.03,
            draws: true,
        },
    ];
    let case = |sampling: Sampling, vocab: usize, layout: Layout| {
        let case = Case::new((sampling, vocab, layout), move |numbers| {
            let rows = 3;
            let logits = numbers.tensor([rows, 1, vocab], layout) * 4.0;
            let device = numbers.device();
            let integers = |n: usize, number: fn(usize) -> i32| {
                let numbers: Vec<i32> = (0..n).map(number).collect();
                Tensor::<1, Int>::from_data(TensorData::new(numbers, [n]), (device, DType::I32))
            };
            let occurred = integers(rows * vocab, |i| i32::from(i % 3 == 0)).reshape([rows, vocab]);
            let draws = Draws {
                words: integers(rows, |row| 0x2f_1b3d * (row as i32 + 1)).reshape([rows, 1]),
                used: integers(rows, |_| 0),
                occurred: (sampling.repetition_penalty != 1.0).then_some(occurred),
            };
            Sample { logits, draws, sampling }
        });
        case.without_native()
    };
    let layouts =
        [(1, Plain), (7, Swapped(0, 2)), (257, Plain), (2048, Swapped(0, 2)), (3001, Plain), (20011, Plain)];
    let of = |sampling| layouts.map(|(vocab, layout)| case(sampling, vocab, layout));
    samplings.into_iter().flat_map(of).collect()
}
