//! Writes the keys and values of new tokens into ring buffers of slots, at positions that only the device
//! knows.
//!
//! `buffer[b, .., base[b] + (first[b] - origin + i) mod capacity, ..] = new[b, .., i, ..]` for
//! `[batch, heads, capacity, width]` and `[batch, heads, n, width]`, for keys and for values, which may
//! differ in heads and width. If the capacity is never reached, this is `StaticCache.update` of transformers.

use burn::tensor::{Int, Tensor};
use kiln_core::layer::{Positions, RowPosition};

use crate::{
    runtime::{
        kernel::{Kernel, checked_positions},
        shader::{Shader, reads, updates},
    },
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut_positions, cut_rows},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Writes new keys and values into ring buffers: token `i` of row `b` into slot
/// `(first[b] - origin + i) mod capacity`.
///
/// Returns the buffers. Rows may share a single row of the buffers: each row has slots of its own there,
/// which follow its base.
///
/// Writes in place if a buffer is the only handle of its memory, and to a copy otherwise. The positions stay
/// on the device, so that a captured step can advance them.
#[derive(Clone, Debug)]
pub struct KvAppend {
    /// Keys and values: `[batch, heads, capacity, width]`, or `[1, ..]` if rows share the buffers
    pub buffers: [Tensor<4>; 2],
    /// Keys and values: `[batch, heads, n, width]`, with `n <= capacity`; cast to the type of the buffers
    pub new: [Tensor<4>; 2],
    /// Positions of `batch` rows.
    pub positions: Positions,
    /// The position stored in slot 0.
    pub origin: usize,
}

impl Kernel for KvAppend {
    const NAME: &'static str = "kv_append";
    type Output = [Tensor<4>; 2];

    fn checked(self) -> Self {
        let Self { buffers, new, positions, origin } = self;
        let ([held, _, capacity, _], [batch, _, n, _]) = (buffers[0].dims(), new[0].dims());
        for (buffer, new) in buffers.iter().zip(&new) {
            let [_, heads, _, width] = buffer.dims();
            assert_eq!(buffer.dims(), [held, heads, capacity, width], "kv_append: keys and values");
            assert_eq!(new.dims(), [batch, heads, n, width], "kv_append: new and buffers");
        }
        assert!(held == batch || held == 1, "kv_append: {batch} rows into {held} of the buffers");
        assert!(n <= capacity, "kv_append: {n} tokens into {capacity} slots");
        let dtype = buffers[0].dtype();
        assert_eq!(buffers[1].dtype(), dtype, "kv_append: buffers of keys and of values");
        let (new, positions) =
            (new.map(|new| new.cast(dtype)), checked_positions(positions, batch, Self::NAME));
        Self { buffers, new, positions, origin: origin % capacity.max(1) }
    }

    fn shape(&self) -> Vec<usize> {
        self.new[0].dims().into()
    }

    /// Moves the whole buffers, and never writes in place.
    fn reference(self) -> [Tensor<4>; 2] {
        if self.is_shared() || self.positions.on_host.iter().any(|row| row.base > 0) {
            return self.row_by_row();
        }
        let firsts = self.positions.on_device.narrow(0, 0, 1).transpose() - self.origin as i64;
        let ([keys, values], [new_keys, new_values]) = (self.buffers, self.new);
        [written(keys, new_keys, firsts.clone()), written(values, new_values, firsts)]
    }

    /// Copies the vectors of each head.
    #[cfg(feature = "cpu")]
    fn native(self) -> Result<[Tensor<4>; 2], Self> {
        let positions = crate::runtime::native::primitive(self.positions.on_device).into_data();
        let positions: Vec<i64> = positions.iter::<i64>().collect();
        let rows = self.new[0].dims()[0];
        let row = |row: usize| (positions[row] - self.origin as i64, positions[2 * rows + row] as usize);
        let places: Vec<(i64, usize)> = (0..rows).map(row).collect();
        let ([keys, values], [new_keys, new_values]) = (self.buffers, self.new);
        Ok([copied(keys, new_keys, &places), copied(values, new_values, &places)])
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<[Tensor<4>; 2], Self> {
        use burn::backend::Cube;
        use burn_cubecl::tensor::CubeTensor;

        use crate::{
            runtime::launch::{LANES, Launch, in_order, primitive, strides, to_write},
            shaders::kv_append::Info,
        };

        let Self { buffers, new, positions, origin } = self;
        let capacity = buffers[0].dims()[2];
        let [[_, key_heads, tokens, key_width], [_, value_heads, _, value_width]] =
            new.each_ref().map(Tensor::dims);
        let [key_numbers, value_numbers] = new.each_ref().map(|new| new.shape().num_elements());
        let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
        let [new_keys, new_values] = new.map(primitive);
        let positions = in_order(positions.on_device);
        let rows = new_keys.meta.shape()[0];
        let of_buffer = |buffer: &CubeTensor| {
            let [row, head, slot, dim]: [u32; 4] = strides(buffer);
            [if buffer.meta.shape()[0] < rows { 0 } else { row }, head, slot, dim]
        };
        let info = Info {
            key_strides: of_buffer(&keys),
            value_strides: of_buffer(&values),
            new_key_strides: strides(&new_keys),
            new_value_strides: strides(&new_values),
            batch: rows as u32,
            capacity: capacity as u32,
            tokens: tokens as u32,
            key_heads: key_heads as u32,
            key_width: key_width as u32,
            key_numbers: key_numbers as u32,
            value_heads: value_heads as u32,
            value_width: value_width as u32,
            value_numbers: value_numbers as u32,
            origin: origin as i32,
        };
        let tensors = [&keys, &values, &new_keys, &new_values, &positions];
        let workgroups = (key_numbers + value_numbers).div_ceil(LANES);
        Launch::new(&SHADER, keys.dtype, &keys.client).run(workgroups, tensors, info);
        Ok([keys, values].map(Tensor::from_primitive::<Cube>))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<[Tensor<4>; 2], Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for KvAppend {
    fn extent(&self) -> [usize; 2] {
        // Rows that share buffers have a single result.
        if self.is_shared() { [1, 1] } else { [self.new[0].dims()[0], 1] }
    }

    fn part(self, part: Extent) -> Self {
        if self.is_shared() {
            return self;
        }
        let [rows, _] = &part;
        let own = |tensors: [Tensor<4>; 2]| tensors.map(|tensor| cut_rows(tensor, rows));
        let positions = cut_positions(&self.positions, &part, 0, usize::MAX);
        Self { buffers: own(self.buffers), new: own(self.new), positions, ..self }
    }

    fn part_of(whole: [Tensor<4>; 2], [rows, _]: Extent) -> [Tensor<4>; 2] {
        whole.map(|buffer| cut_rows(buffer, &rows))
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        let capacity = 11;
        for head_dim in [8, 12, 64, 80, 96, 128, 256] {
            for (batch, heads, n) in [(1, 1, 1), (3, 2, 1), (1, 8, 5), (3, 2, 5)] {
                let base = Given { buffer: [batch, heads, capacity, head_dim], n, ..GIVEN };
                // The first slot, one in the middle, the last, one from which the rest wraps to the front,
                // and one that is later than there are slots.
                for position in [0, 4, capacity - n, capacity - n + 1, 3 * capacity - 1] {
                    cases.push(Given { position, ..base });
                }
                cases.push(Given { new: Swapped(1, 2), position: 3, ..base });
                // Slots that begin at a later position, before and after the ring wraps.
                for position in [40, 47, 60] {
                    cases.push(Given { position, origin: 40, ..base });
                }
                // Rows of different lengths.
                for apart in [1, 4, capacity + 3] {
                    cases.push(Given { position: 45, origin: 40, apart, ..base });
                }
            }
        }
        // Rows that share buffers, with eleven slots each.
        for (batch, n) in [(3, 1), (2, 5), (16, 1)] {
            let buffer = [batch, 2, capacity, 64];
            cases.push(Given { buffer, n, position: 3, apart: 1, shared: true, ..GIVEN });
        }
        // Keys and values of different shapes.
        for values in [(2, 8), (2, 64), (3, 12), (1, 4)] {
            for n in [1, 5] {
                let base = Given { n, values: Some(values), position: 9, ..GIVEN };
                cases.push(base);
                cases.push(Given { layout: Swapped(1, 2), new: Swapped(1, 2), apart: 4, ..base });
                cases.push(Given {
                    buffer: [3, 2, capacity, 12],
                    position: 3,
                    apart: 1,
                    shared: true,
                    ..base
                });
            }
        }
        // As many tokens as slots, none, and different layouts.
        cases.push(Given { n: 11, position: 7, ..GIVEN });
        cases.push(Given { n: 0, position: 7, ..GIVEN });
        cases.push(Given { layout: Swapped(1, 2), ..GIVEN });
        cases.push(Given { new: Swapped(2, 3), ..GIVEN });
        cases.push(Given { layout: Cut(2), new: Cut(2), ..GIVEN });
        cases.into_iter().map(|given| Case::new(given, move |numbers| given.inputs(numbers))).collect()
    }
}

impl KvAppend {
    /// Whether rows share a single row of the buffers.
    fn is_shared(&self) -> bool {
        self.buffers[0].dims()[0] < self.new[0].dims()[0]
    }

    /// Writes each row into the slots that follow its base.
    fn row_by_row(self) -> [Tensor<4>; 2] {
        let Self { mut buffers, new, positions, origin } = self;
        for (row, RowPosition { base, .. }) in positions.on_host.iter().enumerate() {
            let first =
                positions.on_device.clone().narrow(0, 0, 1).narrow(1, row, 1).transpose() - origin as i64;
            for (buffer, new) in buffers.iter_mut().zip(&new) {
                let [_, heads, slots, dim] = buffer.dims();
                let own = buffer.clone().narrow(2, *base, slots - base);
                let own = written(own, new.clone().narrow(0, row, 1), first.clone());
                *buffer = buffer.clone().slice_assign([0..1, 0..heads, *base..slots, 0..dim], own);
            }
        }
        buffers
    }
}

/// Returns `buffer` `[batch, heads, capacity, dim]` with the vectors of `new` `[batch, heads, n, dim]` in its
/// slots `(first + i) mod capacity`, where `firsts` is `[batch, 1]`.
pub(crate) fn written(buffer: Tensor<4>, new: Tensor<4>, firsts: Tensor<2, Int>) -> Tensor<4> {
    let [batch, heads, capacity, dim] = buffer.dims();
    let [_, _, n, _] = new.dims();
    if n == 0 {
        return buffer;
    }
    // Not `arange`: it uploads its numbers, which a captured step must not do.
    let slots = Tensor::<1, Int>::ones([capacity], (&buffer.device(), firsts.dtype())).cumsum(0) - 1;
    // The index of the new token that a slot would get if there were that many.
    let token = (slots.unsqueeze() - firsts).remainder_scalar(capacity as i64);
    let token = token.reshape([batch, 1, capacity, 1]).expand([batch, heads, capacity, dim]);
    let last = n as i64 - 1;
    let is_new = token.clone().lower_equal_elem(last);
    buffer.mask_where(is_new, new.gather(2, token.clamp_max(last)))
}

/// Copies the vectors into the buffer. `places` is where the tokens of each row go, counted from the first
/// slot of the row.
#[cfg(feature = "cpu")]
fn copied(buffer: Tensor<4>, new: Tensor<4>, places: &[(i64, usize)]) -> Tensor<4> {
    use burn::{
        backend::{Flex, flex::FlexTensor},
        tensor::TensorData,
    };

    use crate::runtime::native::primitive;

    let [held, heads, capacity, _] = buffer.dims();
    let [batch, _, n, dim] = new.dims();
    let vector = dim * new.dtype().size();
    // The memory of the buffer itself if it has one owner, and a copy otherwise.
    let (mut slots, shape, dtype) = primitive(buffer).into_data().into_parts();
    let new = primitive(new);
    let new = if dim <= 1 || new.layout().strides()[3] == 1 { new } else { new.to_contiguous() };

    let (start, strides) = (new.layout().start_offset() as isize, new.layout().strides());
    for row in 0..batch * heads {
        for token in 0..n {
            let (first, base) = places[row / heads];
            let slot = base + (first + token as i64).rem_euclid(capacity as i64) as usize;
            let of_buffer = if held < batch { row % heads } else { row };
            let [batch, head, token] = [row / heads, row % heads, token].map(|i| i as isize);
            let from = (start + batch * strides[0] + head * strides[1] + token * strides[2]) as usize;
            let from = from * dtype.size();
            let to = (of_buffer * capacity + slot) * vector;
            slots[to..to + vector].copy_from_slice(&new.bytes()[from..from + vector]);
        }
    }
    let buffer = FlexTensor::from_data(TensorData::from_bytes(slots, shape, dtype));
    Tensor::from_primitive::<Flex>(buffer)
}

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    buffer: [usize; 4],
    layout: Layout,
    n: usize,
    new: Layout,
    position: usize,
    origin: usize,
    /// Row `b` starts `apart · b` positions after the first row, or as far as its slots reach.
    apart: usize,
    /// Whether rows share the buffers.
    shared: bool,
    /// Heads and width of values, if they are not those of keys.
    values: Option<(usize, usize)>,
}

const GIVEN: Given = Given {
    buffer: [3, 2, 11, 12],
    layout: Plain,
    n: 5,
    new: Plain,
    position: 3,
    origin: 0,
    apart: 0,
    shared: false,
    values: None,
};

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> KvAppend {
        let Self { buffer, layout, n, new, position, origin, apart, shared, values } = *self;
        let [batch, heads, slots, width] = buffer;
        let row = |row| match shared {
            // The last row comes first in the buffer.
            true => RowPosition {
                first: (position + row * apart) % (slots - n + 1),
                base: (batch - 1 - row) * slots,
                ..RowPosition::default()
            },
            false => RowPosition { first: position + row * apart, ..RowPosition::default() },
        };
        let values = values.unwrap_or((heads, width));
        let held = |(heads, width)| match shared {
            true => [1, heads, batch * slots, width],
            false => [batch, heads, slots, width],
        };
        let positions = Positions::new((0..batch).map(row).collect(), numbers.device());
        // Values have a different layout from keys.
        let buffers = [numbers.tensor(held((heads, width)), layout), numbers.tensor(held(values), Plain)];
        let mut tokens = |(heads, width), layout| numbers.tensor([batch, heads, n, width], layout);
        let new = [tokens((heads, width), new), tokens(values, Swapped(0, 3))];
        KvAppend { buffers, new, positions, origin }
    }
}

const SHADER: Shader = Shader {
    name: "kv_append",
    bindings: &[
        updates("keys"),
        updates("values"),
        reads("new_keys"),
        reads("new_values"),
        reads("positions"),
    ],
    text: include_str!("../../../../shaders/kv_append.wgsl"),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::KvAppend;
    use crate::runtime::launch::{LANES, address_type, count, in_order, primitive, to_write};

    /// The place of a number: its row, head, token and channel, and its slot.
    #[derive(CubeType)]
    struct Place {
        batch: usize,
        head: usize,
        token: usize,
        i: usize,
        /// Rows that share buffers all use the first row of the buffers.
        row: usize,
        slot: usize,
    }

    #[cube]
    fn place<E: Numeric>(
        number: usize,
        buffer: &mut Tensor<E>,
        new: &Tensor<E>,
        positions: &Tensor<i32>,
        origin: i32,
    ) -> Place {
        let (heads, tokens, width) = (new.shape(1), new.shape(2), new.shape(3));
        let token = number / width % tokens;
        let batch = number / width / tokens / heads;
        let base = usize::cast_from(positions[2 * new.shape(0) + batch]);
        let capacity = i32::cast_from(buffer.shape(2));
        let slot = ((positions[batch] - origin + i32::cast_from(token)) % capacity + capacity) % capacity;
        Place {
            batch,
            head: number / width / tokens % heads,
            token,
            i: number % width,
            row: min(batch, buffer.shape(0) - 1),
            slot: base + usize::cast_from(slot),
        }
    }

    #[cube]
    fn write<E: Numeric>(buffer: &mut Tensor<E>, new: &Tensor<E>, place: &Place) {
        let to = place.row * buffer.stride(0)
            + place.head * buffer.stride(1)
            + place.slot * buffer.stride(2)
            + place.i * buffer.stride(3);
        buffer[to] = new[place.batch * new.stride(0)
            + place.head * new.stride(1)
            + place.token * new.stride(2)
            + place.i * new.stride(3)];
    }

    #[cube(launch, address_type = "dynamic")]
    fn kv_append<E: Numeric>(
        keys: &mut Tensor<E>,
        values: &mut Tensor<E>,
        new_keys: &Tensor<E>,
        new_values: &Tensor<E>,
        positions: &Tensor<i32>,
        key_numbers: usize,
        value_numbers: usize,
        origin: i32,
        #[comptime] alike: bool,
        #[define(E)] _elem: ElemType,
    ) {
        if comptime!(alike) {
            if ABSOLUTE_POS < key_numbers {
                let both = place(ABSOLUTE_POS, keys, new_keys, positions, origin);
                write(keys, new_keys, &both);
                write(values, new_values, &both);
            }
        } else {
            if ABSOLUTE_POS < key_numbers {
                let key = place(ABSOLUTE_POS, keys, new_keys, positions, origin);
                write(keys, new_keys, &key);
            }
            if ABSOLUTE_POS < value_numbers {
                let value = place(ABSOLUTE_POS, values, new_values, positions, origin);
                write(values, new_values, &value);
            }
        }
    }

    pub(super) fn launch(
        KvAppend { buffers, new, positions, origin }: KvAppend,
    ) -> [burn::tensor::Tensor<4>; 2] {
        let [key_numbers, value_numbers] = new.each_ref().map(|new| new.shape().num_elements());
        let alike = new[0].dims() == new[1].dims();
        let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
        let [new_keys, new_values] = new.map(primitive);
        let elem = dtype_to_storage_type(keys.dtype);
        kv_append::launch(
            &keys.client,
            count(key_numbers.max(value_numbers).div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&keys, &values, &new_keys, &new_values]),
            keys.clone().into_tensor_arg(),
            values.clone().into_tensor_arg(),
            new_keys.into_tensor_arg(),
            new_values.into_tensor_arg(),
            in_order(positions.on_device).into_tensor_arg(),
            key_numbers,
            value_numbers,
            origin as i32,
            alike,
            elem,
        );
        [keys, values].map(burn::tensor::Tensor::from_primitive::<Cube>)
    }
}
