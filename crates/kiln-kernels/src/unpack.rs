//! The numbers of a packed weight.

use burn::tensor::{DType, Int, Tensor};

use crate::{Kernel, PackedFormat, PackedMatrix, Path, cases::Case, invariance::Extent, shader::Shader};

/// The numbers of a packed weight, in float32: `[rows, columns]`.
#[derive(Clone, Debug)]
pub struct Unpack {
    pub matrix: PackedMatrix,
}

impl Unpack {
    /// In plain operations.
    pub(crate) fn numbers(self) -> Tensor<2> {
        let PackedMatrix { words, format: PackedFormat::Bf16 } = self.matrix;
        let [rows, columns] = words.dims();
        let halves = [words.clone(), words.bitwise_right_shift_scalar(16)];
        bf16_numbers(Tensor::stack::<3>(halves.into(), 2)).reshape([rows, 2 * columns])
    }
}

/// The numbers that the lowest 16 bits are, as bfloat16: finite ones.
fn bf16_numbers<const D: usize>(bits: Tensor<D, Int>) -> Tensor<D> {
    let exponent = bits.clone().bitwise_right_shift_scalar(7).bitwise_and_scalar(255);
    let digits = bits.clone().bitwise_and_scalar(127).float().cast(DType::F32);
    let normal = exponent.clone().greater_elem(0);
    let mut number = digits.clone().mask_where(normal, digits + 128.0) * (1.0 / 128.0);
    // Products with powers of 2 are exact, and none on the way is smaller or larger than the number.
    let power = exponent.clamp_min(1) - 127;
    let (up, down) = (power.clone().clamp_min(0), (-power).clamp_min(0));
    for power in [64, 32, 16, 8, 4, 2, 1] {
        for (by, factor) in [(&up, 2f32.powi(power)), (&down, 0.5f32.powi(power))] {
            let set = by.clone().bitwise_and_scalar(power).greater_elem(0);
            number = number.clone().mask_where(set, number * factor);
        }
    }
    let negative = bits.bitwise_and_scalar(0x8000).greater_elem(0);
    number.clone().mask_where(negative, -number)
}

impl Kernel for Unpack {
    const NAME: &'static str = "unpack";
    type Output = Tensor<2>;

    fn checked(self) -> Self {
        self
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.matrix.rows(), self.matrix.columns()]
    }

    fn reference(self) -> Tensor<2> {
        self.numbers()
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<2>, Self> {
        use burn::backend::Cube;

        use crate::launch::{LANES, Launch, empty, in_order};

        let ([rows, columns], format) = ([self.matrix.rows(), self.matrix.columns()], self.matrix.format);
        if rows * columns == 0 || format != PackedFormat::Bf16 {
            return Err(self);
        }
        let words = in_order(self.matrix.words);
        let y = empty(&words, [rows, columns], DType::F32);
        let count = rows * columns / format.numbers_a_word();
        let launch = Launch::new(&SHADER, DType::F32, &y.client).reads(words).writes(&y);
        launch.run(count.div_ceil(LANES), &[count as u32]);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    fn extent(&self) -> [usize; 2] {
        [self.matrix.rows(), 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        Self { matrix: self.matrix.narrow(rows) }
    }

    fn part_of(whole: Tensor<2>, [rows, _]: Extent) -> Tensor<2> {
        whole.narrow(0, rows.start, rows.len())
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let shapes = [[1, 4], [3, 8], [70, 300], [2, 5120]];
        // Every device gives the numbers, to the bit. CUDA has the type itself, and the CPU reads it.
        let lacks = |path, _| matches!(path, Path::Native | Path::Cube);
        let cases = shapes.map(|shape| {
            Case::new(shape, move |numbers| Self { matrix: numbers.packed_matrix(shape) }).without(lacks)
        });
        cases.into()
    }
}

const SHADER: Shader =
    Shader { name: "unpack", text: include_str!("../../../shaders/unpack.wgsl"), options: &[] };

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn::tensor::{Device, TensorData};
    use half::bf16;

    use super::*;
    use crate::Matrix;

    #[test]
    fn numbers_are_those_of_every_bit_pattern_that_is_finite() {
        let device = Device::flex();
        let finite: Vec<u16> = (0..=u16::MAX).filter(|&bits| bf16::from_bits(bits).is_finite()).collect();
        let words: Vec<i32> =
            finite.chunks_exact(2).map(|two| (u32::from(two[0]) | u32::from(two[1]) << 16) as i32).collect();
        let data = TensorData::new(words, [finite.len() / 256, 128]);
        let matrix = PackedMatrix::new(Tensor::from_data(data, (&device, DType::I32)), PackedFormat::Bf16);
        let numbers = Unpack { matrix: matrix.clone() }.numbers().into_data();
        let want: Vec<f32> = finite.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
        assert_eq!(numbers.shape().num_elements(), finite.len() / 256 * 256);
        for (got, want) in numbers.iter::<f32>().zip(&want) {
            assert_eq!(got.to_bits(), want.to_bits(), "{got} is not {want}");
        }
        assert_eq!(Matrix::Packed(matrix).bytes(), finite.len() / 256 * 256 * 2);
    }
}
