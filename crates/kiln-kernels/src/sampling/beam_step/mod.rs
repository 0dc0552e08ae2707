//! A step of a beam search: selects the continuations of the beams.

#[cfg(feature = "cube")]
mod cube;
mod reference;

use burn::tensor::{DType, Int, IntDType, Tensor, TensorData};
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
        numbers::Numbers,
    },
};

/// Most beams per prompt for which a step is computed on the device.
pub const MOST_BEAMS: usize = 64;

/// Selects, for each group of beams, the best continuations by the sum of log-probabilities, and the beams
/// that go on: the first of these that do not end. (transformers' `_beam_search`, and for groups
/// `_group_beam_search` of 4.47)
///
/// The sum of a continuation is the sum of its beam plus the log-probability of its token, less a penalty for
/// each beam in earlier groups that chose the same token in this step. Ties go to the lower beam, and then to
/// the lower token.
#[derive(Clone, Debug)]
pub struct BeamStep {
    /// `[rows, most]`: the likeliest tokens of each row, as [`TopLogprobs`](crate::TopLogprobs) returns them.
    /// At least [`candidates`](BeamShape::candidates), and with a penalty one more for each beam in earlier
    /// groups.
    pub tokens: Tensor<2, Int>,
    /// `[rows, most]`
    pub log_probs: Tensor<2>,
    /// `[rows]`: the sum of each beam. Written in place.
    pub sums: Tensor<1>,
    /// `[n]`, at least one: tokens that end a sequence. -1 stands for none.
    pub ends: Tensor<1, Int>,
    /// `[prompts · groups]`: 0 for groups that go on.
    pub done: Tensor<1, Int>,
    pub shape: BeamShape,
}

/// The parameters that are the same in all steps of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamShape {
    /// Beams per prompt, up to [`MOST_BEAMS`]. They are consecutive rows.
    pub beams: usize,
    /// Groups per prompt, all of the same size.
    pub groups: usize,
    /// Continuations that are considered per group.
    pub candidates: usize,
    pub diversity_penalty: f32,
    /// The token that is fed to beams of a group that is done.
    pub padding: u32,
}

/// The result of a [`BeamStep`].
#[derive(Clone, Debug)]
pub struct Beams {
    /// `[prompts, groups · candidates, 4]`: for each group, its best continuations in descending order: the
    /// row that is continued, counted within the prompt, the token, its log-probability and the sum. The
    /// token is -1 if the group is done, or if one of its rows is not a distribution.
    pub candidates: Tensor<3>,
    /// `[rows, 1]`: the next token of each beam.
    pub next: Tensor<2, Int>,
    /// `[rows]`: the row that each beam continues, counted within its prompt.
    pub parents: Tensor<1, Int>,
    /// `[rows]`
    pub sums: Tensor<1>,
}

impl BeamShape {
    fn of_group(&self) -> usize {
        self.beams / self.groups.max(1)
    }
}

impl Kernel for BeamStep {
    const NAME: &'static str = "beam_step";
    type Output = Beams;

    fn checked(self) -> Self {
        let ([rows, most], BeamShape { beams, groups, candidates, .. }) = (self.tokens.dims(), self.shape);
        assert_eq!(self.log_probs.dims(), [rows, most], "beam_step: log-probabilities");
        assert_eq!(self.sums.dims(), [rows], "beam_step: sums");
        assert!(
            (1..=MOST_BEAMS).contains(&beams) && rows.is_multiple_of(beams),
            "beam_step: {beams} beams, {rows} rows"
        );
        assert!(groups > 0 && beams.is_multiple_of(groups), "beam_step: {groups} groups of {beams} beams");
        assert_eq!(self.done.dims(), [rows / beams * groups], "beam_step: groups that are done");
        assert!(
            (self.shape.of_group()..=most).contains(&candidates),
            "beam_step: {candidates} candidates of {most} tokens"
        );
        let cast = |ints: Tensor<1, Int>| ints.cast(IntDType::I32);
        Self {
            tokens: self.tokens.cast(IntDType::I32),
            log_probs: self.log_probs.cast(DType::F32),
            sums: self.sums.cast(DType::F32),
            ends: cast(self.ends),
            done: cast(self.done),
            ..self
        }
    }

    fn shape(&self) -> Vec<usize> {
        self.tokens.dims().into()
    }

    fn reference(self) -> Beams {
        reference::step(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Beams, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, empty, in_order, to_write},
            shaders::beam_step::Info,
        };

        let Self { tokens, log_probs, sums, ends, done, shape } = self;
        let ([rows, most], [ends_len]) = (tokens.dims(), ends.dims());
        let BeamShape { beams, groups, candidates, diversity_penalty, padding } = shape;
        let sums = to_write(in_order(sums));
        let tokens = in_order(tokens);
        let found = empty(&sums, [rows / beams, groups * candidates, 4], DType::F32);
        let next = empty(&tokens, [rows, 1], DType::I32);
        let parents = empty(&tokens, [rows], DType::I32);
        let [log_probs, ends, done] = [in_order(log_probs), in_order(ends), in_order(done)];
        let info = Info {
            prompts: (rows / beams) as u32,
            beams: beams as u32,
            of_group: shape.of_group() as u32,
            most: most as u32,
            candidates: candidates as u32,
            ends: ends_len as u32,
            penalty: diversity_penalty,
            padding: padding.cast_signed(),
        };
        let tensors = [&tokens, &log_probs, &sums, &ends, &done, &found, &next, &parents];
        Launch::new(&SHADER, DType::F32, &sums.client).run(rows / beams, tensors, info);
        Ok(Beams {
            candidates: Tensor::from_primitive::<Cube>(found),
            next: Tensor::from_primitive::<Cube>(next),
            parents: Tensor::from_primitive::<Cube>(parents),
            sums: Tensor::from_primitive::<Cube>(sums),
        })
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Beams, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for BeamStep {
    /// Number of prompts.
    fn extent(&self) -> [usize; 2] {
        [self.tokens.dims()[0] / self.shape.beams, 1]
    }

    fn part(self, [prompts, _]: Extent) -> Self {
        let BeamShape { beams, groups, .. } = self.shape;
        let rows = prompts.start * beams..prompts.end * beams;
        Self {
            tokens: cut_rows(self.tokens, &rows),
            log_probs: cut_rows(self.log_probs, &rows),
            sums: cut_rows(self.sums, &rows),
            done: cut_rows(self.done, &(prompts.start * groups..prompts.end * groups)),
            ..self
        }
    }

    fn part_of(whole: Beams, [prompts, _]: Extent) -> Beams {
        let Beams { candidates, next, parents, sums } = whole;
        let beams = next.dims()[0] / candidates.dims()[0];
        let rows = prompts.start * beams..prompts.end * beams;
        Beams {
            candidates: cut_rows(candidates, &prompts),
            next: cut_rows(next, &rows),
            parents: cut_rows(parents, &rows),
            sums: cut_rows(sums, &rows),
        }
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let plain =
            Given { prompts: 1, beams: 1, groups: 1, most: 2, penalty: 0.0, ends: 1, state: State::Usual };
        let given = [
            plain,
            Given { beams: 4, most: 8, ends: 2, ..plain },
            Given { prompts: 3, beams: 4, most: 9, ..plain },
            Given { prompts: 2, beams: 5, most: 10, ends: 30, ..plain },
            Given { beams: 4, most: 8, state: State::First, ..plain },
            Given { prompts: 2, beams: 4, most: 8, state: State::Ties, ..plain },
            Given { prompts: 2, beams: 3, most: 6, state: State::NoDistribution, ..plain },
            Given { beams: MOST_BEAMS, most: 2 * MOST_BEAMS, ..plain },
            Given { prompts: 2, beams: 6, groups: 3, most: 8, penalty: 0.75, ..plain },
            Given { prompts: 2, beams: 6, groups: 3, most: 8, penalty: 0.75, state: State::Done, ..plain },
            Given { beams: 40, groups: 40, most: 41, penalty: 1.0, state: State::Ties, ..plain },
        ];
        // Sums and differences of two numbers are rounded the same everywhere.
        let case = |given: Given| Case::new(given, move |numbers| given.inputs(numbers)).without_native();
        given.into_iter().map(case).collect()
    }
}

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    prompts: usize,
    beams: usize,
    groups: usize,
    most: usize,
    penalty: f32,
    ends: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Usual,
    /// All beams of a group are equal, and one counts.
    First,
    /// Many sums are equal.
    Ties,
    /// A row of the last prompt is not a distribution.
    NoDistribution,
    /// Some groups are done.
    Done,
}

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> BeamStep {
        let Self { prompts, beams, groups, most, penalty, ends, state } = *self;
        let rows = prompts * beams;
        let device = (&numbers.device().clone(), DType::I32);
        let ints = |ints: Vec<i32>| {
            let len = ints.len();
            Tensor::<1, Int>::from_data(TensorData::new(ints, [len]), device)
        };
        let mut tokens: Vec<i32> =
            (0..rows * most).map(|i| ((i % most * 7 + i / most * 3) % (4 * most + 1)) as i32).collect();
        if state == State::NoDistribution {
            tokens[(rows - 1) * most..].fill(-1);
        }
        let mut log_probs = numbers.float32([rows, most]) * 2.0 - 3.0;
        let mut sums = numbers.float32([rows]);
        if state == State::Ties {
            (log_probs, sums) = (log_probs.round(), sums.round());
        }
        if state == State::First {
            let first = |row: usize| if row.is_multiple_of(beams / groups) { 0.0f32 } else { -1e9 };
            let all: Vec<f32> = (0..rows).map(first).collect();
            sums = Tensor::from_data(TensorData::new(all, [rows]), (numbers.device(), DType::F32));
        }
        let done = (0..prompts * groups).map(|group| i32::from(state == State::Done && group % 3 == 1));
        BeamStep {
            tokens: ints(tokens).reshape([rows, most]),
            log_probs,
            sums,
            ends: ints((0..ends as i32).map(|end| 5 * end - 1).collect()),
            done: ints(done.collect()),
            shape: BeamShape {
                beams,
                groups,
                candidates: 2 * beams / groups,
                diversity_penalty: penalty,
                padding: 7,
            },
        }
    }
}

impl Read for Beams {
    fn read(self) -> Vec<ReadBack> {
        let Self { candidates, next, parents, sums } = self;
        let tokens = [read_back::start(candidates), read_back::start(next)];
        tokens.into_iter().chain([read_back::start(parents), read_back::start(sums)]).collect()
    }
}

const SHADER: Shader = Shader {
    name: "beam_step",
    bindings: &[
        reads("tokens"),
        reads("log_probs"),
        updates("sums"),
        reads("ends"),
        reads("done"),
        writes("candidates"),
        writes("next"),
        writes("parents"),
    ],
    text: concat!(
        include_str!("../../../../../shaders/beam_step.wgsl"),
        include_str!("../../../../../shaders/order.wgsl")
    ),
    options: &[],
};
