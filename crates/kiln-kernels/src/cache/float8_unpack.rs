//! Unpacks keys or values that are floats of 8 bits (E4M3), times a scale for each row.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};

use crate::{
    runtime::{choice::Implementation, kernel::Kernel},
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut_rows},
    },
};

/// Number of codes in a word.
const CODES: usize = 4;

/// Exponent of the smallest number with a leading one; smaller numbers are multiples of an eighth of it.
const LOWEST: i32 = -6;

/// Unpacks codes to numbers `[rows, heads, slots, width]`.
#[derive(Clone, Debug)]
pub struct Float8Unpack {
    /// Four codes in each word, the first in its lowest bits: `[rows, heads, slots, words]`.
    pub codes: Tensor<4, Int>,
    /// `[rows, 1]`
    pub scales: Tensor<2>,
    /// Number of codes of a slot; those after them are padding.
    pub width: usize,
    /// The type of the result.
    pub dtype: FloatDType,
}

impl Float8Unpack {
    /// Returns the numbers of all codes, `[rows, 256]`, rounded to the type of the result.
    fn table(&self) -> Tensor<2> {
        let numbers = TensorData::new((0..=255).map(number).collect(), [1, 256]);
        let numbers = Tensor::<2>::from_data(numbers, (&self.scales.device(), DType::F32));
        (numbers * self.scales.clone().cast(DType::F32)).cast(self.dtype)
    }
}

/// Returns the number of a code: a sign, four bits of exponent, three of mantissa.
fn number(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, mantissa) => f32::from(mantissa) * f32::powi(2.0, LOWEST - 3),
        (exponent, mantissa) => f32::from(8 + mantissa) * f32::powi(2.0, exponent - 1 + LOWEST - 3),
    };
    if code >= 128 { -magnitude } else { magnitude }
}

impl Kernel for Float8Unpack {
    const NAME: &'static str = "float8_unpack";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let ([rows, _, _, words], scales) = (self.codes.dims(), self.scales.dims());
        assert!(scales == [rows, 1] && self.width <= words * CODES, "float8_unpack: scales {scales:?}");
        self
    }

    fn shape(&self) -> Vec<usize> {
        let [rows, heads, slots, _] = self.codes.dims();
        vec![rows, heads, slots, self.width]
    }

    fn reference(self) -> Tensor<4> {
        let [rows, heads, slots, words] = self.codes.dims();
        let part = |i: usize| {
            let code = self.codes.clone().bitwise_right_shift_scalar(8 * i as i32);
            code.bitwise_and_scalar(255).unsqueeze_dim::<5>(4)
        };
        let codes: Tensor<5, Int> = Tensor::cat((0..CODES).map(part).collect(), 4);
        let codes: Tensor<4, Int> = codes.reshape([rows, heads, slots, words * CODES]);
        // Each row has a table of its own.
        let firsts: Vec<i32> = (0..rows as i32).map(|row| row * 256).collect();
        let firsts = TensorData::new(firsts, [rows, 1, 1, 1]);
        let firsts = Tensor::<4, Int>::from_data(firsts, (&codes.device(), codes.dtype()));
        let places = (codes + firsts).reshape([rows * heads * slots * words * CODES]);
        let numbers = self.table().reshape([rows * 256]).select(0, places);
        numbers.reshape([rows, heads, slots, words * CODES]).narrow(3, 0, self.width)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<4>, Self> {
        use crate::runtime::native::by_storage;

        by_storage!(self.dtype.into(), E => native::unpacked::<E>(&self), else None).ok_or(self)
    }
}

impl Checked for Float8Unpack {
    fn extent(&self) -> [usize; 2] {
        [self.codes.dims()[0], 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        Self { codes: cut_rows(self.codes, &rows), scales: cut_rows(self.scales, &rows), ..self }
    }

    fn part_of(whole: Tensor<4>, [rows, _]: Extent) -> Tensor<4> {
        cut_rows(whole, &rows)
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |shape: [usize; 4]| {
            let [rows, heads, slots, width] = shape;
            let case = Case::new(shape, move |numbers| {
                let words = width.div_ceil(CODES);
                let of = |i: usize| {
                    // Every code but the two that are no number.
                    let code = |j: usize| (4 * i + j) * 37 % 256;
                    let legal = |code: usize| if code % 128 == 127 { 0 } else { code as u32 };
                    (0..CODES).fold(0, |word, j| word | legal(code(j)) << (8 * j)).cast_signed()
                };
                let codes = (0..rows * heads * slots * words).map(of).collect();
                let codes = TensorData::new(codes, [rows, heads, slots, words]);
                let codes = Tensor::from_data(codes, (numbers.device(), DType::I32));
                let scales = numbers.float32([rows, 1]);
                Self { codes, scales, width, dtype: numbers.float_dtype() }
            });
            case.without(|path, _| path != Implementation::Native)
        };
        vec![case([1, 2, 67, 64]), case([3, 2, 5, 30]), case([2, 1, 1, 3])]
    }
}

#[cfg(feature = "cpu")]
mod native {
    use burn::tensor::{Tensor, TensorData};

    use super::{CODES, Float8Unpack};
    use crate::runtime::native::{Storage, VectorKernel, computed, primitive};

    pub(super) fn unpacked<E: Storage>(kernel: &Float8Unpack) -> Option<Tensor<4>> {
        let [rows, heads, slots, words] = kernel.codes.dims();
        let shape = [rows, heads, slots, kernel.width];
        if shape.contains(&0) {
            return None;
        }
        let (codes, table) = (primitive(kernel.codes.clone()).to_contiguous(), primitive(kernel.table()));
        let (codes, mut widened) = (bytemuck::cast_slice(codes.as_slice::<i32>()?), Vec::new());
        let table = E::in_floats(table.as_slice()?, &mut widened);
        let vectors = Vectors { codes, table, words: words * CODES, of_a_row: heads * slots };
        let y: Vec<E> = computed(&vectors, [rows * heads * slots, kernel.width], 1);
        Some(Tensor::from_data(TensorData::new(y, shape), (&kernel.scales.device(), kernel.dtype.into())))
    }

    struct Vectors<'a> {
        /// Codes as bytes. The targets that Kiln runs on store the lowest bits first.
        codes: &'a [u8],
        /// `[rows, 256]`
        table: &'a [f32],
        /// Bytes of a vector.
        words: usize,
        /// Number of vectors of a row.
        of_a_row: usize,
    }

    impl<E> VectorKernel<E> for Vectors<'_> {
        #[inline(always)]
        fn compute(&self, vector: usize, numbers: &mut [f32]) {
            let table = &self.table[vector / self.of_a_row * 256..][..256];
            for (number, code) in numbers.iter_mut().zip(&self.codes[vector * self.words..][..self.words]) {
                *number = table[usize::from(*code)];
            }
        }
    }
}
