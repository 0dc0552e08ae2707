//! Products of tokens with the matrices of their experts.
//!
//! `y[b, t, s] = W[experts[b, t, s]] x[b, t, s]` for `[rows, tokens, slots, in]` and a stack of weights
//! `[experts, out, in]`. The indices of the experts are on the device, and the host never waits for them. A
//! pair is a token and one of its slots.
//!
//! With few tokens, each pair is multiplied by itself, so that only the weights of chosen experts are read
//! and a pair does not depend on others. With many, pairs are first sorted by expert, so that each weight of
//! an expert is used for all of its pairs at once.

mod cases;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "cpu")]
mod native;
#[cfg(feature = "cube")]
mod product;
#[cfg(feature = "wgpu")]
mod wgsl;

use burn::tensor::{DType, Int, IntDType, Tensor};
use kiln_weights::Format;

#[cfg(feature = "cube")]
use crate::{
    experts::route::MOST_EXPERTS,
    linear::{around::Sharing, matrix::StackBlock, packed::takes_packed},
    runtime::choice::Implementation,
};
use crate::{
    linear::{
        around::{PACK, SPLITS},
        matrix::{Matrix, MatrixStack},
        packed::PackedLayout,
        packed_lines, products_of_rows,
    },
    runtime::{
        kernel::{INVARIANT_UP_TO, Kernel},
        kernels::Kernels,
        shader::{Binding, Lines, Shader, reads, updates, writes},
    },
    testing::{case::Case, checked::Checked, cut::cut_into_tokens},
};

/// Each token times the matrices of its experts: `[rows, tokens, slots, out]`.
///
/// The GPU kernels and the native code read no weights of experts without a token. The reference reads all
/// weights.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    /// `[rows, tokens, 1 or slots, in]`; with 1, all slots of a token share a vector
    pub x: Tensor<4>,
    /// `[experts, out, in]`
    pub weight: MatrixStack,
    /// `[rows, tokens, slots]`, cast to int32: indices of experts
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
            let product = |weight: Matrix| {
                products_of_rows(x.clone(), weight.numbers().cast(x.dtype()), n <= INVARIANT_UP_TO)
            };
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
}

impl Checked for ExpertLinear {
    cut_into_tokens!(x, experts);

    fn shaders() -> &'static [Shader] {
        &[FEW, FEW_PACKED, GROUPS, TILES, TILES_PACKED]
    }

    fn cases() -> Vec<Case<Self>> {
        cases::of_dense().chain(cases::of_packed()).collect()
    }
}

impl ExpertLinear {
    /// Whether the product is not empty, and all numbers have one type.
    #[cfg(any(feature = "cube", feature = "cpu"))]
    fn is_of_one_type(&self) -> bool {
        let one = self.weight.blocks().iter().all(|block| block.matrix.dtype() == self.x.dtype());
        let [count, output, input] = self.weight.shape();
        one && count * output * input * self.experts.shape().num_elements() > 0
    }

    #[cfg(feature = "cube")]
    fn is_for_gpus(&self) -> bool {
        let is_read = |block: &StackBlock| match &block.matrix {
            Matrix::Dense(_) => true,
            Matrix::Packed(packed) => takes_packed(Implementation::Wgsl, packed.layout),
        };
        let are_read = self.weight.blocks().iter().all(is_read);
        are_read && self.is_of_one_type() && self.weight.shape()[0] <= MOST_EXPERTS
    }

    #[cfg(feature = "cube")]
    fn is_for_few_tokens(&self) -> bool {
        let [rows, tokens, ..] = self.x.dims();
        rows * tokens <= INVARIANT_UP_TO
    }
}

/// The tiles into which pairs are sorted by expert. They depend on shapes alone, because a captured step is
/// replayed.
#[cfg(feature = "cube")]
#[derive(Clone, Copy, Debug)]
struct Tiles {
    /// Pairs per tile, which all go to one expert: 16, 32 or 64.
    tile: usize,
    /// Most tiles that there can be, wherever pairs go.
    tiles: usize,
    /// Rows of a matrix per workgroup. A lane has four of them, and four pairs.
    outputs: usize,
}

#[cfg(feature = "cube")]
impl Tiles {
    fn new(pairs: usize, weight: &MatrixStack) -> Self {
        let [experts, ..] = weight.shape();
        let tile = match pairs / experts {
            // For packed weights and tiles of 16, half a run of every row would not fit in memory.
            0..24 if !weight.is_packed() => 16,
            0..64 => 32,
            _ => 64,
        };
        let outputs = 16 * crate::runtime::launch::LANES / tile;
        Self { tile, tiles: pairs / tile + experts.min(pairs), outputs }
    }
}

/// Pairs per tile. Packed weights use the first two sizes.
const SIZES: Lines = || &["const TILE = 32u;", "const TILE = 64u;", "const TILE = 16u;"];

const OF_FEW: &[Binding] = &[reads("x"), reads("w"), reads("experts"), updates("y")];
const OF_TILES: &[Binding] = &[reads("x"), reads("w"), reads("experts"), reads("order"), updates("y")];

const FEW: Shader = Shader {
    name: "expert_linear",
    bindings: OF_FEW,
    text: concat!(
        include_str!("../../../../../shaders/expert_linear.wgsl"),
        include_str!("../../../../../shaders/linear_dense.wgsl"),
        include_str!("../../../../../shaders/weights_dense.wgsl"),
        include_str!("../../../../../shaders/row_products.wgsl")
    ),
    options: &[PACK, SPLITS],
};

const FEW_PACKED: Shader = Shader {
    name: "expert_linear_packed",
    bindings: OF_FEW,
    text: concat!(
        include_str!("../../../../../shaders/expert_linear.wgsl"),
        include_str!("../../../../../shaders/linear_packed.wgsl"),
        include_str!("../../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../../shaders/halves.wgsl"),
        include_str!("../../../../../shaders/row_products.wgsl")
    ),
    options: &[packed_lines::FORMATS, SPLITS],
};

const GROUPS: Shader = Shader {
    name: "expert_groups",
    bindings: &[reads("experts"), writes("order")],
    text: include_str!("../../../../../shaders/expert_groups.wgsl"),
    options: &[],
};

const TILES: Shader = Shader {
    name: "expert_tiles",
    bindings: OF_TILES,
    text: concat!(
        include_str!("../../../../../shaders/expert_tiles.wgsl"),
        include_str!("../../../../../shaders/tile_dense.wgsl")
    ),
    options: &[PACK, SIZES],
};

const TILES_PACKED: Shader = Shader {
    name: "expert_tiles_packed",
    bindings: OF_TILES,
    text: concat!(
        include_str!("../../../../../shaders/expert_tiles.wgsl"),
        include_str!("../../../../../shaders/tile_packed.wgsl"),
        include_str!("../../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../../shaders/halves.wgsl")
    ),
    options: &[packed_lines::FORMATS, || &SIZES()[..2]],
};

impl PackedLayout {
    /// Like [`for_matrix`](Self::for_matrix), for a stack of matrices with `rows` rows each. On the CPU,
    /// `rows` must be a multiple of 16.
    pub fn for_stack(kernels: &Kernels, format: Format, dtype: DType, rows: usize) -> Option<Self> {
        let layout = Self::for_matrix(kernels, format, dtype)?;
        (kernels.implementation_of::<ExpertLinear>() == kernels.implementation()
            && layout.is_for_stacks(rows))
        .then_some(layout)
    }
}
