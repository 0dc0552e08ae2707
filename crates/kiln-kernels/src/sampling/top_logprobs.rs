//! The likeliest tokens of each row and their log-probabilities, from which a beam search continues.

use burn::tensor::{DType, Int, Tensor, TensorData};

use crate::{
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    sampling::sample::finite,
    testing::{
        case::{Case, Rounding},
        checked::Checked,
        cut::{Extent, cut_rows},
        numbers::{Layout, Plain, Swapped},
    },
};

/// The `most` likeliest tokens of each row in descending order, with the logarithms of their probabilities
/// (`softmax`), in float32. Ties go to the first in the order of the vocabulary.
///
/// # Shapes
/// Tokens `[rows, most]`, int32, and their log-probabilities `[rows, most]`. Tokens are -1 if the logits of a
/// row are not a distribution: one of them is NaN or infinite, or all are -inf.
#[derive(Clone, Debug)]
pub struct TopLogprobs {
    /// `[rows, 1, vocab]`
    pub logits: Tensor<3>,
    /// From 1 to the size of the vocabulary.
    pub most: usize,
}

impl Kernel for TopLogprobs {
    const NAME: &'static str = "top_logprobs";
    type Output = (Tensor<2, Int>, Tensor<2>);

    fn checked(self) -> Self {
        let [_, tokens, vocab] = self.logits.dims();
        assert!(tokens == 1, "top_logprobs: logits {:?}", self.logits.dims());
        assert!((1..=vocab).contains(&self.most), "top_logprobs: {} of {vocab} tokens", self.most);
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.logits.dims().into()
    }

    fn reference(self) -> (Tensor<2, Int>, Tensor<2>) {
        let Self { logits, most } = self;
        let [rows, _, vocab] = logits.dims();
        let (logits, largest, is_one) = finite(logits.reshape([rows, vocab]).cast(DType::F32));
        let below = logits - largest;
        let log_sum = below.clone().exp().sum_dim(1).log();
        // Scores that were taken become -inf. Scores of -inf are raised above that, because they may be
        // wanted, too.
        let mut left = below.clone().clamp_min(f32::MIN);
        let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
        for _ in 0..most {
            let best = left.clone().argmax(1);
            log_probs.push(below.clone().gather(1, best.clone()));
            let at = Tensor::<2, Int>::ones([1, vocab], (&best.device(), best.dtype())).cumsum(1) - 1;
            let taken = at.expand([rows, vocab]).equal(best.clone().expand([rows, vocab]));
            left = left.mask_fill(taken, f32::NEG_INFINITY);
            tokens.push(best);
        }
        let not_one = is_one.bool_not().expand([rows, most]);
        let tokens = Tensor::cat(tokens, 1).cast(DType::I32).mask_fill(not_one, -1);
        (tokens, Tensor::cat(log_probs, 1) - log_sum)
    }
    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<(Tensor<2, Int>, Tensor<2>), Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, empty, primitive, strides},
            shaders::top_logprobs::Info,
        };

        let Self { logits, most } = self;
        let [rows, _, vocab] = logits.dims();
        let logits = primitive(logits);
        let tokens = empty(&logits, [rows, most], DType::I32);
        let log_probs = empty(&logits, [rows, most], DType::F32);
        let [row, _, token] = strides(&logits);
        let info = Info { rows: rows as u32, vocab: vocab as u32, most: most as u32, strides: [row, token] };
        let launch = Launch::new(&SHADER, logits.dtype, &tokens.client);
        launch.run(rows, [&logits, &tokens, &log_probs], info);
        Ok((Tensor::from_primitive::<Cube>(tokens), Tensor::from_primitive::<Cube>(log_probs)))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<(Tensor<2, Int>, Tensor<2>), Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for TopLogprobs {
    fn extent(&self) -> [usize; 2] {
        [self.logits.dims()[0], 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        Self { logits: cut_rows(self.logits, &rows), ..self }
    }

    fn part_of(
        (tokens, log_probs): (Tensor<2, Int>, Tensor<2>),
        [rows, _]: Extent,
    ) -> (Tensor<2, Int>, Tensor<2>) {
        (cut_rows(tokens, &rows), cut_rows(log_probs, &rows))
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |vocab: usize, most: usize, layout: Layout, scores: Scores| {
            let case = Case::new((vocab, most, layout, scores), move |numbers| {
                let logits = numbers.tensor([3, 1, vocab], layout) * 4.0;
                let logits = match scores {
                    Scores::Usual => logits,
                    Scores::Ties => logits.round(),
                    Scores::Removed => {
                        let every = Tensor::<1, Int>::from_data(
                            TensorData::new((0..vocab as i32).map(|i| i % 5).collect::<Vec<_>>(), [vocab]),
                            (numbers.device(), DType::I32),
                        );
                        let removed = every.not_equal_elem(2).reshape([1, 1, vocab]).expand([3, 1, vocab]);
                        logits.mask_fill(removed, f32::NEG_INFINITY)
                    }
                };
                Self { logits, most }
            });
            // The logarithm of a sum of exponentials in another order, each of which GPUs round a few times;
            // WGSL allows logarithms near 1 an error of 2^-21.
            case.without_native().within(move |want, Rounding { single, .. }| {
                want.abs() * single * 4.0 + single * ((vocab as f64).sqrt() + 16.0)
            })
        };
        vec![
            case(1, 1, Plain, Scores::Usual),
            case(7, 7, Swapped(0, 2), Scores::Usual),
            case(257, 1, Plain, Scores::Usual),
            case(257, 16, Plain, Scores::Usual),
            case(257, 257, Plain, Scores::Ties),
            case(300, 80, Plain, Scores::Removed),
            case(2048, 16, Swapped(0, 2), Scores::Ties),
            case(30_000, 5, Plain, Scores::Usual),
        ]
    }
}

/// The distribution of the logits in a case.
#[derive(Clone, Copy, Debug)]
enum Scores {
    Usual,
    /// Many are equal.
    Ties,
    /// Four of five are -inf.
    Removed,
}

const SHADER: Shader = Shader {
    name: "top_logprobs",
    bindings: &[reads("logits"), writes("tokens"), writes("log_probs")],
    text: concat!(
        include_str!("../../../../shaders/top_logprobs.wgsl"),
        include_str!("../../../../shaders/order.wgsl")
    ),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::{
        backend::{Cube, cubecl::dtype_to_storage_type},
        tensor::{DType, Int as IntKind, Tensor as BurnTensor},
    };
    use cubecl::prelude::*;

    use super::TopLogprobs;
    use crate::{
        runtime::launch::{LANES, address_type, count, empty, primitive},
        sampling::order::{HIGHEST, LOWEST, is_better, key_of, score_of},
    };

    #[cube]
    fn logit<E: Float>(logits: &Tensor<E>, row: usize, token: usize) -> f32 {
        f32::cast_from(logits[row * logits.stride(0) + token * logits.stride(2)])
    }

    #[cube(launch, address_type = "dynamic")]
    fn top_logprobs<E: Float>(
        logits: &Tensor<E>,
        tokens: &mut Tensor<i32>,
        log_probs: &mut Tensor<f32>,
        rows: usize,
        most: usize,
        #[define(E)] _elem: ElemType,
    ) {
        let row = CUBE_POS;
        if row >= rows {
            terminate!();
        }
        let lane = UNIT_POS as usize;
        let vocab = logits.shape(2);
        let mut keys = Shared::<[u32]>::new_slice(LANES);
        let mut own_tokens = Shared::<[u32]>::new_slice(LANES);
        let mut sums = Shared::<[f32]>::new_slice(LANES);

        let mut own_key = 0u32;
        let mut own_token = u32::cast_from(vocab);
        let mut token = lane;
        while token < vocab {
            let key = key_of(logit(logits, row, token));
            if key > own_key {
                own_key = key;
                own_token = u32::cast_from(token);
            }
            token += LANES;
        }
        let mut largest = 0u32;
        let mut log_sum = f32::new(0.0);
        for i in 0..most {
            keys[lane] = own_key;
            own_tokens[lane] = own_token;
            let mut left = CUBE_DIM as usize / 2;
            while left > 0 {
                sync_cube();
                if lane < left {
                    let key = keys[lane + left];
                    let token = own_tokens[lane + left];
                    if is_better(key, token, keys[lane], own_tokens[lane]) {
                        keys[lane] = key;
                        own_tokens[lane] = token;
                    }
                }
                left /= 2;
            }
            sync_cube();
            let best_key = keys[0];
            let best_token = own_tokens[0];
            if i == 0 {
                largest = best_key;
                let mut sum = f32::new(0.0);
                let mut token = lane;
                while token < vocab {
                    sum += f32::exp(logit(logits, row, token) - score_of(largest));
                    token += LANES;
                }
                sums[lane] = sum;
                let mut left = CUBE_DIM as usize / 2;
                while left > 0 {
                    sync_cube();
                    if lane < left {
                        sums[lane] += sums[lane + left];
                    }
                    left /= 2;
                }
                sync_cube();
                log_sum = f32::ln(sums[0]);
            }
            if lane == 0 {
                let is_one = largest > LOWEST && largest < HIGHEST;
                tokens[row * most + i] = select(is_one, i32::cast_from(best_token), -1);
                log_probs[row * most + i] = score_of(best_key) - score_of(largest) - log_sum;
            }
            if usize::cast_from(best_token) % LANES == lane {
                own_key = 0u32;
                own_token = u32::cast_from(vocab);
                let mut token = lane;
                while token < vocab {
                    let key = key_of(logit(logits, row, token));
                    let is_left = is_better(best_key, best_token, key, u32::cast_from(token));
                    if is_left && key > own_key {
                        own_key = key;
                        own_token = u32::cast_from(token);
                    }
                    token += LANES;
                }
            }
            sync_cube();
        }
    }

    pub(super) fn launch(
        TopLogprobs { logits, most }: TopLogprobs,
    ) -> (BurnTensor<2, IntKind>, BurnTensor<2>) {
        let [rows, _, _] = logits.dims();
        let logits = primitive(logits);
        let tokens = empty(&logits, [rows, most], DType::I32);
        let log_probs = empty(&logits, [rows, most], DType::F32);
        let elem = dtype_to_storage_type(logits.dtype);
        top_logprobs::launch(
            &tokens.client,
            count(rows),
            CubeDim::new_1d(LANES as u32),
            address_type([&logits]),
            logits.into_tensor_arg(),
            tokens.clone().into_tensor_arg(),
            log_probs.clone().into_tensor_arg(),
            rows,
            most,
            elem,
        );
        (BurnTensor::from_primitive::<Cube>(tokens), BurnTensor::from_primitive::<Cube>(log_probs))
    }
}
