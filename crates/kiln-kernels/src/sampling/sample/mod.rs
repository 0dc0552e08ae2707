//! Chooses the next token of each row from its logits, on the device.
//!
//! Scores are changed in the order and by the formulas of transformers' `logits_process.py`, with
//! `min_tokens_to_keep` 1: repetition penalty, temperature, top_k, top_p, min_p. Then with weights
//! `exp(score - largest score)`, the token is the first in the order of the vocabulary whose cumulative
//! weight exceeds `word / 2^24` times the sum of all. Numbers are float32, whatever the type of the logits.
//!
//! Implementations sum in different orders, so they may draw different tokens if a draw falls within a
//! rounding of the border between two tokens. One implementation on one device is reproducible bit for bit.

mod cases;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cube")]
mod sharing;
#[cfg(feature = "wgpu")]
mod wgsl;

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, IntDType, Tensor};
use kiln_core::read_back::{self, ReadBack};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, updates, writes},
    },
    testing::{
        case::{Case, Read},
        checked::Checked,
        cut::{Extent, cut_rows},
    },
};

/// The next token of each row, `[rows, 1]`, int32, from transformers' processors and a draw. It is -1 if the
/// scores are not a distribution: one of them is NaN or infinite, or none is left. The output also has the
/// draws after this step.
///
/// Writes in place if `draws` holds the only handles of its memory: a captured step continues from the
/// previous one.
#[derive(Clone, Debug)]
pub struct Sample {
    /// `[rows, 1, vocab]`
    pub logits: Tensor<3>,
    pub draws: Draws,
    pub sampling: Sampling,
}

/// The operations on the scores of a row before a token is chosen, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// `s < 0 ? s * penalty : s / penalty` for every token that occurred.
    pub repetition_penalty: f32,
    pub temperature: f32,
    /// Scores below the k-th largest are removed; 0 removes none.
    pub top_k: usize,
    /// `1 - top_p`: the least likely tokens, which together have at most this probability, are removed; 0
    /// removes none. Among equals the first go first; the last token of all is never removed.
    pub tail: f32,
    /// Tokens less likely than this times the likeliest are removed.
    pub min_p: f32,
    /// Whether the token is drawn. Otherwise it is the likeliest; ties go to the first.
    pub draws: bool,
}

impl Sampling {
    /// The setting that changes no score and takes the likeliest token.
    pub const NEUTRAL: Self =
        Self { repetition_penalty: 1.0, temperature: 1.0, top_k: 0, tail: 0.0, min_p: 0.0, draws: false };
}

/// The state from earlier steps that the choice of a token depends on, on the device.
#[derive(Clone, Debug)]
pub struct Draws {
    /// `[rows, steps]`: a random number of 24 bits for each step.
    pub words: Tensor<2, Int>,
    /// `[rows]`: number of steps so far.
    pub used: Tensor<1, Int>,
    /// `[rows, vocab]`: not 0 for tokens that occurred. With `None`, no token is penalized.
    pub occurred: Option<Tensor<2, Int>>,
}

impl Draws {
    /// Cuts the state to some rows.
    fn of_rows(self, rows: &Range<usize>) -> Self {
        Self {
            words: cut_rows(self.words, rows),
            used: cut_rows(self.used, rows),
            occurred: self.occurred.map(|occurred| cut_rows(occurred, rows)),
        }
    }
}

impl Kernel for Sample {
    const NAME: &'static str = "sample";
    type Output = (Tensor<2, Int>, Draws);

    fn checked(self) -> Self {
        let Self { logits, mut draws, mut sampling } = self;
        let [rows, tokens, vocab] = logits.dims();
        if sampling.top_k >= vocab {
            sampling.top_k = 0;
        }
        assert!(tokens == 1 && vocab > 0, "sample: logits {:?}", logits.dims());
        assert!(draws.words.dims()[0] == rows && draws.words.dims()[1] > 0, "sample: words");
        assert_eq!(draws.used.dims(), [rows], "sample: steps of each row");
        draws.words = draws.words.cast(IntDType::I32);
        draws.used = draws.used.cast(IntDType::I32);
        draws.occurred = draws.occurred.map(|occurred| {
            assert_eq!(occurred.dims(), [rows, vocab], "sample: tokens that occurred");
            occurred.cast(IntDType::I32)
        });
        Self { logits, draws, sampling }
    }

    fn shape(&self) -> Vec<usize> {
        self.logits.dims().into()
    }

    fn reference(self) -> (Tensor<2, Int>, Draws) {
        let Self { logits, draws, sampling } = self;
        let [rows, _, vocab] = logits.dims();
        let mut scores = logits.reshape([rows, vocab]).cast(DType::F32);
        if let Some(occurred) = &draws.occurred {
            let negative = scores.clone().lower_elem(0.0);
            let penalized = (scores.clone() / sampling.repetition_penalty)
                .mask_where(negative, scores.clone() * sampling.repetition_penalty);
            scores = scores.mask_where(occurred.clone().not_equal_elem(0), penalized);
        }
        let scores = scores / sampling.temperature;
        let chosen = match sampling.draws {
            true => {
                let step = draws.used.clone().reshape([rows, 1]);
                draw(scores, draws.words.clone().gather(1, step), &sampling)
            }
            false => likeliest(scores),
        };
        let chosen = chosen.cast(DType::I32);
        let occurred = draws.occurred.map(|occurred| {
            let tokens = Tensor::<2, Int>::ones([1, vocab], (&occurred.device(), DType::I32)).cumsum(1) - 1;
            let now = tokens.expand([rows, vocab]).equal(chosen.clone().expand([rows, vocab]));
            occurred.mask_fill(now, 1)
        });
        (chosen, Draws { words: draws.words, used: draws.used + 1, occurred })
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<(Tensor<2, Int>, Draws), Self> {
        Ok(wgsl::launch(self))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<(Tensor<2, Int>, Draws), Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for Sample {
    fn extent(&self) -> [usize; 2] {
        [self.logits.dims()[0], 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        Self { logits: cut_rows(self.logits, &rows), draws: self.draws.of_rows(&rows), ..self }
    }

    fn part_of((tokens, draws): (Tensor<2, Int>, Draws), [rows, _]: Extent) -> (Tensor<2, Int>, Draws) {
        (cut_rows(tokens, &rows), draws.of_rows(&rows))
    }

    fn shaders() -> &'static [Shader] {
        &[SCORES, CANDIDATES, CHOICE]
    }

    fn cases() -> Vec<Case<Self>> {
        cases::all()
    }
}

impl Read for (Tensor<2, Int>, Draws) {
    fn read(self) -> Vec<ReadBack> {
        let (tokens, Draws { used, occurred, .. }) = self;
        let mut all = vec![read_back::start(tokens), read_back::start(used)];
        all.extend(occurred.map(read_back::start));
        all
    }
}

/// Returns the likeliest token of each row of scores `[rows, vocab]`, the first among equals; -1 if the
/// scores are not a distribution.
pub fn likeliest(scores: Tensor<2>) -> Tensor<2, Int> {
    let (scores, _, is_one) = finite(scores);
    scores.argmax(1).mask_fill(is_one.bool_not(), -1)
}

/// Returns the scores with NaN replaced by 0, the largest of each row, and whether each row is a
/// distribution: none is NaN, and the largest is finite.
pub(crate) fn finite(scores: Tensor<2>) -> (Tensor<2>, Tensor<2>, Tensor<2, Bool>) {
    let not = scores.clone().is_nan();
    let scores = scores.mask_fill(not.clone(), 0.0);
    let largest = scores.clone().max_dim(1);
    let is_one = not.any_dim(1).bool_not().bool_and(largest.clone().is_inf().bool_not());
    (scores, largest, is_one)
}

/// Draws a token for each row of scores `[rows, vocab]`, or -1 if they are not a distribution. `words` is
/// `[rows, 1]`.
fn draw(scores: Tensor<2>, words: Tensor<2, Int>, sampling: &Sampling) -> Tensor<2, Int> {
    let [rows, vocab] = scores.dims();
    let count = |mask: Tensor<2, Bool>| mask.int().cast(DType::I32).sum_dim(1);
    let (scores, largest, is_one) = finite(scores);
    let mut weights = (scores.clone() - largest).exp();

    if (1..vocab).contains(&sampling.top_k) {
        let threshold = scores.clone().sort(1).narrow(1, vocab - sampling.top_k, 1);
        weights = weights.mask_fill(scores.lower(threshold.expand([rows, vocab])), 0.0);
    }
    if sampling.tail > 0.0 {
        let ascending = weights.clone().sort(1);
        let cumulative = ascending.clone().cumsum(1);
        let limit = cumulative.clone().narrow(1, vocab - 1, 1) * sampling.tail;
        let removed = count(cumulative.lower_equal(limit.expand([rows, vocab]))).clamp_max(vocab as i64 - 1);
        let threshold = ascending.gather(1, removed.clone()).expand([rows, vocab]);
        let below = weights.clone().lower(threshold.clone());
        let equal = weights.clone().equal(threshold);
        let number_of_equal = equal.clone().int().cast(DType::I32).cumsum(1);
        let first = number_of_equal.lower_equal((removed - count(below.clone())).expand([rows, vocab]));
        weights = weights.mask_fill(below.bool_or(equal.bool_and(first)), 0.0);
    }
    weights = weights.clone().mask_fill(weights.lower_elem(sampling.min_p), 0.0);

    let cumulative = weights.cumsum(1);
    let total = cumulative.clone().narrow(1, vocab - 1, 1);
    let limit = total.clone() * (words.float().cast(DType::F32) / (1 << 24) as f32);
    // A product that was rounded up to the total would exceed nothing.
    let last = count(cumulative.clone().lower(total.expand([rows, vocab])));
    let token = count(cumulative.lower_equal(limit.expand([rows, vocab])));
    let beyond = token.clone().greater(last.clone());
    token.mask_where(beyond, last).mask_fill(is_one.bool_not(), -1)
}

/// The shaders of the three steps: the scores of all tokens, the candidates of a draw, and the token.
const SCORES: Shader = Shader {
    name: "sample_scores",
    bindings: &[reads("logits"), reads("occurred"), writes("keys"), writes("tops"), writes("bins")],
    text: concat!(
        include_str!("../../../../../shaders/sample_scores.wgsl"),
        include_str!("../../../../../shaders/order.wgsl")
    ),
    options: &[],
};

const CANDIDATES: Shader = Shader {
    name: "sample_candidates",
    bindings: &[reads("keys"), reads("tops"), reads("bins"), writes("candidates"), writes("found")],
    text: concat!(
        include_str!("../../../../../shaders/sample_candidates.wgsl"),
        include_str!("../../../../../shaders/order.wgsl")
    ),
    options: &[|| &["const LISTED = true;", "const LISTED = false;"]],
};

const CHOICE: Shader = Shader {
    name: "sample",
    bindings: &[
        reads("tops"),
        updates("entries"),
        reads("found"),
        reads("words"),
        updates("used"),
        updates("occurred"),
        writes("chosen"),
    ],
    text: concat!(
        include_str!("../../../../../shaders/sample.wgsl"),
        include_str!("../../../../../shaders/order.wgsl")
    ),
    options: &[|| {
        &["alias entry = vec2<u32>;\nconst LISTED = true;", "alias entry = u32;\nconst LISTED = false;"]
    }],
};
