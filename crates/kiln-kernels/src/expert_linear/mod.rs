//! Products of tokens with the matrices of the experts that they go to.
//!
//! `y[b, t, s] = W[experts[b, t, s]] x[b, t, s]` for `[rows, tokens, slots, in]` and a stack of weights `[experts, out, in]`. Which experts these are
//! is on the device, and the host never waits for it. A pair is a token and one of its slots.
//!
//! Of few tokens each pair is multiplied by itself, so that only the weights of chosen experts are read, and a pair does not depend on
//! others. Of many, pairs are sorted by expert first, and those of an expert meet each of its weights together.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;

use burn::tensor::{DType, Int, IntDType, Tensor, TensorData};

use crate::{
    Kernel, MatrixStack,
    cases::{Case, Cut, LARGEST, Layout, Plain, Rounding, Swapped},
    invariance::{Extent, cut},
    kernel::INVARIANT_UP_TO,
    linear::{PACK, SPLITS, products_of_rows},
    shader::Shader,
};
#[cfg(feature = "cube")]
use crate::{linear::Sharing, route::MOST_EXPERTS};

/// Each token times the matrices of its experts: `[rows, tokens, slots, out]`.
///
/// The GPU kernels and the native code read no weight of an expert that no token goes to. The reference reads them all.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    /// `[rows, tokens, 1 or slots, in]`; 1: all slots of a token have the same vector
    pub x: Tensor<4>,
    /// `[experts, out, in]`
    pub weight: MatrixStack,
    /// `[rows, tokens, slots]`, cast to int32: numbers of experts
    pub experts: Tensor<3, Int>,
}

impl Kernel for ExpertLinear {
    const NAME: &'static str = "expert_linear";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let ([rows, tokens, each, input], [_, _, columns]) = (self.x.dims(), self.weight.shape());
        let [of_rows, of_tokens, slots] = self.experts.dims();
        assert_eq!(columns, input, "expert_linear: columns of the weight and x");
        assert_eq!([of_rows, of_tokens], [rows, tokens], "expert_linear: experts and x");
        assert!(each == 1 || each == slots, "expert_linear: {each} vectors for {slots} slots");
        Self { experts: self.experts.cast(IntDType::I32), ..self }
    }

    fn shape(&self) -> Vec<usize> {
        let [rows, tokens, _, input] = self.x.dims();
        vec![rows, tokens, self.experts.dims()[2], input]
    }

    fn reference(self) -> Tensor<4> {
        let Self { x, weight, experts } = self;
        let ([rows, tokens, each, input], slots) = (x.dims(), experts.dims()[2]);
        let ([count, output, _], n) = (weight.shape(), rows * tokens);
        let (x, experts) = (x.reshape([n * each, input]), experts.reshape([n, slots, 1]));
        let shape = [n, slots, output];
        let mut y = Tensor::zeros(shape, (&x.device(), x.dtype()));
        for expert in 0..count {
            let product = |weight| products_of_rows(x.clone(), weight, n <= INVARIANT_UP_TO);
            let product = Tensor::cat(weight.pieces(expert).map(product).collect(), 1);
            let others = experts.clone().not_equal_elem(expert as i64).expand(shape);
            y = product.reshape([n, each, output]).expand(shape).mask_where(others, y);
        }
        y.reshape([rows, tokens, slots, output])
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<4>, Self> {
        native::products_of(&self).ok_or(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<4>, Self> {
        if !self.is_for_gpus() {
            return Err(self);
        }
        Ok(if self.is_for_few_tokens() { wgsl::few(self) } else { wgsl::many(self) })
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<4>, Self> {
        if !self.is_for_gpus() {
            return Err(self);
        }
        Ok(if self.is_for_few_tokens() { cube::few(self) } else { cube::many(self) })
    }

    fn extent(&self) -> [usize; 2] {
        let [rows, tokens, ..] = self.x.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        Self { x: cut(self.x, &part, 1), experts: cut(self.experts, &part, 1), ..self }
    }

    fn part_of(whole: Tensor<4>, part: Extent) -> Tensor<4> {
        cut(whole, &part, 1)
    }

    fn shaders() -> &'static [Shader] {
        &[FEW, GROUPS, TILES]
    }

    fn cases() -> Vec<Case<Self>> {
        // `most`: rows of weights that a block has.
        let case = |[rows, tokens, slots]: [usize; 3],
                    [count, output, input]: [usize; 3],
                    layout: Layout,
                    shared: bool,
                    most: usize| {
            let name = ([rows, tokens, slots], [count, output, input], layout, shared, most);
            let case = Case::new(name, move |numbers| {
                let all = numbers.tensor([count * output, input], Plain);
                let weight = MatrixStack::read([count, output, input], most, |range| {
                    Ok::<_, ()>(all.clone().narrow(0, range.start, range.len()))
                });
                // The first expert has the most, and some have none where there are many.
                let expert = |i: usize| (i * 7 + i / 3) % count.min(9) * (i % 5).min(1);
                let experts = (0..rows * tokens * slots).map(|i| expert(i) as i32).collect::<Vec<_>>();
                let experts = TensorData::new(experts, [rows, tokens, slots]);
                Self {
                    x: numbers.tensor([rows, tokens, if shared { 1 } else { slots }, input], layout),
                    weight: weight.expect("what is there is read"),
                    experts: Tensor::from_data(experts, (numbers.device(), DType::I32)),
                }
            });
            // Sums of n products in another order, some devices' in the type itself; and rounded.
            case.within(move |want, Rounding { single, ulp, .. }| {
                let n = input as f64;
                LARGEST * LARGEST * (n.sqrt() + 1.0) * n.sqrt() * single.max(ulp) + want.abs() * ulp
            })
        };
        let whole = usize::MAX;
        let mut cases = Vec::new();
        for [rows, tokens, slots] in [[1, 1, 1], [1, 1, 2], [2, 3, 3], [4, 4, 2], [2, 20, 2], [1, 70, 3]] {
            let pairs = [rows, tokens, slots];
            cases.push(case(pairs, [1, 3, 7], Plain, true, whole));
            cases.push(case(pairs, [4, 96, 80], Plain, false, whole));
            cases.push(case(pairs, [8, 41, 257], Plain, true, whole));
            // Several experts a block, and several blocks an expert.
            cases.push(case(pairs, [5, 70, 96], Plain, true, 160));
            cases.push(case(pairs, [3, 70, 96], Cut(1), false, 32));
            cases.push(case(pairs, [3, 70, 96], Swapped(0, 1), true, whole));
        }
        cases.push(case([1, 1, 2], [3, 300, 1030], Plain, true, whole));
        cases.push(case([1, 2, 2], [3, 8, 4100], Plain, true, whole));
        cases.push(case([2, 2, 2], [300, 8, 12], Swapped(1, 3), false, whole));
        cases.push(case([1, 150, 2], [2, 65, 36], Plain, false, whole));
        cases.push(case([2, 40, 3], [300, 8, 12], Plain, true, 100));
        cases
    }
}

impl ExpertLinear {
    /// Whether anything is to be computed, and all numbers are of one type.
    #[cfg(any(feature = "cube", feature = "cpu"))]
    fn is_of_one_type(&self) -> bool {
        let one = self.weight.blocks().iter().all(|block| block.numbers.dtype() == self.x.dtype());
        let [count, output, input] = self.weight.shape();
        one && count * output * input * self.experts.shape().num_elements() > 0
    }

    #[cfg(feature = "cube")]
    fn is_for_gpus(&self) -> bool {
        self.is_of_one_type() && self.weight.shape()[0] <= MOST_EXPERTS
    }

    #[cfg(feature = "cube")]
    fn is_for_few_tokens(&self) -> bool {
        let [rows, tokens, ..] = self.x.dims();
        rows * tokens <= INVARIANT_UP_TO
    }
}

/// How pairs are sorted by expert. Shapes alone say it: a captured step is replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
struct Tiles {
    /// Pairs of a tile, which all go to one expert: 16, 32 or 64.
    tile: usize,
    /// Tiles that there are at most, wherever pairs go.
    tiles: usize,
    /// Rows of a matrix that a workgroup has. A lane has four, and four pairs.
    outputs: usize,
}

#[cfg(feature = "cube")]
impl Tiles {
    fn new(pairs: usize, experts: usize) -> Self {
        let tile = match pairs / experts {
            0..24 => 16,
            24..64 => 32,
            _ => 64,
        };
        let outputs = 16 * crate::launch::LANES / tile;
        Self { tile, tiles: pairs / tile + experts.min(pairs), outputs }
    }
}

const FEW: Shader = Shader {
    name: "expert_linear",
    text: concat!(
        include_str!("../../../../shaders/expert_linear.wgsl"),
        include_str!("../../../../shaders/weights_dense.wgsl"),
        include_str!("../../../../shaders/row_products.wgsl")
    ),
    options: &[PACK, SPLITS],
};

const GROUPS: Shader = Shader {
    name: "expert_groups",
    text: include_str!("../../../../shaders/expert_groups.wgsl"),
    options: &[],
};

const TILES: Shader = Shader {
    name: "expert_tiles",
    text: include_str!("../../../../shaders/expert_tiles.wgsl"),
    options: &[PACK, &["const TILE = 16u;", "const TILE = 32u;", "const TILE = 64u;"]],
};

#[cfg(feature = "wgpu")]
mod wgsl {
    use burn::{
        backend::Cube,
        tensor::{DType, Tensor},
    };
    use burn_cubecl::tensor::CubeTensor;

    use super::{ExpertLinear, FEW, GROUPS, Sharing, TILES, Tiles};
    use crate::{
        launch::{Launch, comes_in_fours, empty, in_order, primitive, strides},
        matrix::StackBlock,
        shader::Shader,
    };

    /// What launches for all blocks have in common.
    struct Product {
        x: CubeTensor,
        experts: CubeTensor,
        y: CubeTensor,
        tokens: usize,
        slots: usize,
        outputs: usize,
    }

    impl Product {
        fn new(x: Tensor<4>, experts: Tensor<3, burn::tensor::Int>, outputs: usize) -> Self {
            let [rows, tokens, slots] = experts.dims();
            let (x, experts) = (primitive(x), in_order(experts));
            let y = empty(&x, [rows, tokens, slots, outputs], x.dtype);
            Self { x, experts, y, tokens, slots, outputs }
        }

        /// A launch for one block, and its `info`, which `last` ends.
        fn launch(&self, shader: &'static Shader, pick: usize, block: &StackBlock) -> (Launch, Vec<u32>) {
            let StackBlock { numbers, members, rows } = block;
            let weight = primitive(numbers.clone());
            let fours = comes_in_fours(&self.x) && comes_in_fours(&weight);
            let ([x0, x1, x2, x3], [w0, w1]) = (strides(&self.x), strides(&weight));
            let x2 = if self.x.meta.shape()[2] == 1 { 0 } else { x2 };
            let input = self.x.meta.shape()[3];
            let sizes = [input, rows.len(), members.start, members.len(), rows.start, self.outputs];
            let sizes = sizes.into_iter().chain([self.tokens, self.slots]).map(|n| n as u32);
            let info = [x0, x1, x2, x3, w0, w1].into_iter().chain(sizes).collect();
            let launch = Launch::new(shader, self.x.dtype, &self.y.client).with(&[usize::from(!fours), pick]);
            (launch.reads(self.x.clone()).reads(weight).reads(self.experts.clone()), info)
        }

        fn result(self) -> Tensor<4> {
            Tensor::from_primitive::<Cube>(self.y)
        }
    }

    pub(super) fn few(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
        let ([_, output, input], pairs) = (weight.shape(), experts.shape().num_elements());
        let product = Product::new(x.clone(), experts, output);
        for block in weight.blocks() {
            let Sharing { splits, workgroups, .. } = Sharing::new(1, input, block.rows.len(), &x.device());
            let (launch, mut info) = product.launch(&FEW, splits.ilog2() as usize, block);
            let workgroups = workgroups * pairs;
            info.extend([pairs as u32, workgroups as u32]);
            launch.updates(&product.y).run(workgroups, &info);
        }
        product.result()
    }

    pub(super) fn many(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
        let ([count, output, _], pairs) = (weight.shape(), experts.shape().num_elements());
        let Tiles { tile, tiles, outputs } = Tiles::new(pairs, count);
        let product = Product::new(x, experts, output);
        let order = empty(&product.x, [tiles, tile], DType::I32);
        let info = [pairs, count, tile, tiles].map(|n| n as u32);
        let launch = Launch::new(&GROUPS, DType::F32, &order.client).reads(product.experts.clone());
        launch.writes(&order).run(1, &info);
        for block in weight.blocks() {
            let (launch, mut info) = product.launch(&TILES, (tile / 16).ilog2() as usize, block);
            let workgroups = tiles * block.rows.len().div_ceil(outputs);
            info.extend([tiles as u32, workgroups as u32]);
            launch.reads(order.clone()).updates(&product.y).run(workgroups, &info);
        }
        product.result()
    }
}
