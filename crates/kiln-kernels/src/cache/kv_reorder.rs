//! Replaces the latest keys and values of rows by those of other rows of the same prompt, in ring buffers of
//! slots, at positions that only the device knows. A beam search does this after each step.
//! (`Cache.reorder_cache` of transformers, except for the prompt, which is equal in all rows)

use burn::tensor::{Int, IntDType, Tensor, TensorData};
use kiln_core::layer::{Positions, RowPosition};

use crate::{
    runtime::{
        kernel::{Kernel, checked_positions},
        shader::{Shader, reads, updates},
    },
    sampling::beam_step::MOST_BEAMS,
    testing::{
        case::Case,
        checked::Checked,
        cut::Extent,
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

/// Replaces the latest keys and values of row `b` by those of row `parents[b]` of its prompt: at the
/// positions up to `first[b]`, which are in the slots `(position - origin) mod capacity`. Returns the
/// buffers.
///
/// Writes in place if a buffer is the only handle of its memory, and to a copy otherwise.
#[derive(Clone, Debug)]
pub struct KvReorder {
    /// Keys and values: each `[batch, heads, capacity, width]`
    pub buffers: [Tensor<4>; 2],
    /// `[batch]`: for each row, a row of its prompt, counted from the first row of the prompt.
    pub parents: Tensor<1, Int>,
    /// Number of consecutive rows per prompt: up to [`MOST_BEAMS`].
    pub width: usize,
    /// Position of the latest token of each row. Rows of a prompt stand at the same position.
    pub positions: Positions,
    /// `[1]`: number of positions to replace. If there are fewer slots, all slots are replaced.
    pub latest: Tensor<1, Int>,
    /// The position stored in slot 0.
    pub origin: usize,
}

impl Kernel for KvReorder {
    const NAME: &'static str = "kv_reorder";
    type Output = [Tensor<4>; 2];

    fn checked(self) -> Self {
        let [batch, _, capacity, _] = self.buffers[0].dims();
        let [rows, _, slots, _] = self.buffers[1].dims();
        assert_eq!((rows, slots), (batch, capacity), "kv_reorder: buffers of keys and of values");
        assert_eq!(
            self.buffers[1].dtype(),
            self.buffers[0].dtype(),
            "kv_reorder: buffers of keys and of values"
        );
        assert_eq!(self.parents.dims(), [batch], "kv_reorder: parents");
        assert!(
            (1..=MOST_BEAMS).contains(&self.width) && batch.is_multiple_of(self.width),
            "kv_reorder: {} rows of a prompt, {batch} rows",
            self.width
        );
        let cast = |ints: Tensor<1, Int>| ints.cast(IntDType::I32);
        Self {
            parents: cast(self.parents),
            latest: cast(self.latest),
            positions: checked_positions(self.positions, batch, Self::NAME),
            origin: self.origin % capacity.max(1),
            ..self
        }
    }

    fn shape(&self) -> Vec<usize> {
        self.buffers[0].dims().into()
    }

    /// Moves the whole buffers, and never writes in place.
    fn reference(self) -> [Tensor<4>; 2] {
        let Self { buffers, parents, width, positions, latest, origin } = self;
        let [batch, _, capacity, _] = buffers[0].dims();
        let numbers =
            |n: usize| Tensor::<1, Int>::ones([n], (&parents.device(), parents.dtype())).cumsum(0) - 1;
        let rows = parents.clone() + numbers(batch) / width as i64 * width as i64;
        // The age of each slot, in tokens.
        let newest = positions.on_device.narrow(0, 0, 1).transpose() - origin as i64;
        let age =
            newest.expand([batch, capacity]) - numbers(capacity).unsqueeze::<2>().expand([batch, capacity]);
        let age = age.remainder_scalar(capacity as i64);
        let is_latest = age.lower(latest.unsqueeze::<2>().expand([batch, capacity]));
        let is_latest = is_latest.reshape([batch, 1, capacity, 1]);
        buffers.map(|buffer| {
            let is_latest = is_latest.clone().expand(buffer.shape());
            buffer.clone().mask_where(is_latest, buffer.select(0, rows.clone()))
        })
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<[Tensor<4>; 2], Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{Launch, enough, in_order, primitive, strides, to_write},
            shaders::kv_reorder::Info,
        };

        let Self { buffers, parents, width, positions, latest, origin } = self;
        let [[batch, key_heads, capacity, key_width], [_, value_heads, _, value_width]] =
            buffers.each_ref().map(Tensor::dims);
        let heads = key_heads + value_heads;
        let parts = enough(&buffers[0].device(), PARTS);
        let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
        let [parents, positions, latest] =
            [in_order(parents), in_order(positions.on_device), in_order(latest)];
        let info = Info {
            key_strides: strides(&keys),
            value_strides: strides(&values),
            prompts: (batch / width) as u32,
            width: width as u32,
            capacity: capacity as u32,
            key_heads: key_heads as u32,
            key_width: key_width as u32,
            value_heads: value_heads as u32,
            value_width: value_width as u32,
            parts: parts as u32,
            origin: origin as i32,
        };
        let tensors = [&keys, &values, &parents, &positions, &latest];
        Launch::new(&SHADER, keys.dtype, &keys.client).run(batch / width * heads * parts, tensors, info);
        Ok([keys, values].map(Tensor::from_primitive::<Cube>))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<[Tensor<4>; 2], Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for KvReorder {
    /// Nothing is computed: rows are moved.
    fn extent(&self) -> [usize; 2] {
        [1, 1]
    }

    fn part(self, _: Extent) -> Self {
        self
    }

    fn part_of(whole: [Tensor<4>; 2], _: Extent) -> [Tensor<4>; 2] {
        whole
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let base = Given {
            prompts: 1,
            parents: &[1, 0, 2],
            heads: 2,
            capacity: 11,
            dim: 12,
            layout: Plain,
            position: 9,
            latest: 4,
            origin: 0,
            apart: 0,
            values: None,
        };
        let given = [
            // Rows that swap, several that take from one, a ring of rows, all unchanged, a single row.
            base,
            Given { parents: &[2, 2, 2, 2], ..base },
            Given { parents: &[1, 2, 3, 4, 0], prompts: 3, ..base },
            Given { parents: &[0, 1, 2, 3], ..base },
            Given { parents: &[0], prompts: 2, ..base },
            // Around the end of the ring, all of it, more than it has, nothing.
            Given { position: 13, ..base },
            Given { position: 40, latest: 11, ..base },
            Given { position: 40, latest: 30, ..base },
            Given { latest: 0, ..base },
            // Slots that begin at a later position; prompts of different lengths.
            Given { position: 47, origin: 40, ..base },
            Given { prompts: 3, apart: 5, origin: 4, ..base },
            Given { layout: Swapped(1, 2), ..base },
            Given { layout: Cut(2), ..base },
            // Keys and values of different shapes.
            Given { values: Some((2, 8)), ..base },
            Given { values: Some((2, 40)), layout: Swapped(1, 2), position: 13, ..base },
            Given { values: Some((3, 12)), prompts: 3, apart: 5, ..base },
            Given { values: Some((1, 100)), capacity: 200, position: 250, latest: 180, prompts: 2, ..base },
            // More than one piece, and the largest number of rows.
            Given { capacity: 200, dim: 64, position: 250, latest: 180, prompts: 2, ..base },
            Given { capacity: 40, dim: 80, position: 30, latest: 21, parents: &REVERSED, ..base },
        ];
        let case = |given: Given| Case::new(given, move |numbers| given.inputs(numbers)).without_native();
        given.into_iter().map(case).collect()
    }
}

/// Workgroups per head on a GPU.
#[cfg(feature = "cube")]
const PARTS: usize = 16;

/// Parents in which every row takes from another row.
static REVERSED: [i32; MOST_BEAMS] = {
    let mut rows = [0; MOST_BEAMS];
    let mut row = 0;
    while row < MOST_BEAMS {
        rows[row] = (MOST_BEAMS - 1 - row) as i32;
        row += 1;
    }
    rows
};

/// Inputs of a case.
#[derive(Clone, Copy, Debug)]
struct Given {
    prompts: usize,
    /// Parents within each prompt.
    parents: &'static [i32],
    heads: usize,
    capacity: usize,
    dim: usize,
    layout: Layout,
    position: usize,
    latest: i32,
    origin: usize,
    /// Prompt `i` starts `apart · i` positions after the first prompt.
    apart: usize,
    /// Heads and width of values, if they are not those of keys.
    values: Option<(usize, usize)>,
}

impl Given {
    fn inputs(&self, numbers: &mut Numbers) -> KvReorder {
        let Self { prompts, parents, heads, capacity, dim, layout, position, latest, origin, apart, .. } =
            *self;
        let width = parents.len();
        let batch = prompts * width;
        let row =
            |row: usize| RowPosition { first: position + row / width * apart, ..RowPosition::default() };
        let positions = Positions::new((0..batch).map(row).collect(), numbers.device());
        let ints =
            |ints: Vec<i32>| Tensor::from_data(TensorData::new(ints.clone(), [ints.len()]), numbers.device());
        let (parents, latest) = (ints(parents.repeat(prompts)), ints(vec![latest]));
        // Values have a different layout from keys.
        let shape = |(heads, width)| [batch, heads, capacity, width];
        let values = self.values.unwrap_or((heads, dim));
        let buffers = [numbers.tensor(shape((heads, dim)), layout), numbers.tensor(shape(values), Plain)];
        KvReorder { buffers, parents, width, positions, latest, origin }
    }
}

const SHADER: Shader = Shader {
    name: "kv_reorder",
    bindings: &[updates("keys"), updates("values"), reads("parents"), reads("positions"), reads("latest")],
    text: include_str!("../../../../shaders/kv_reorder.wgsl"),
    options: &[],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::backend::{Cube, cubecl::dtype_to_storage_type};
    use cubecl::prelude::*;

    use super::{KvReorder, PARTS};
    use crate::runtime::launch::{LANES, address_type, count, enough, in_order, primitive, to_write};

    /// Number of elements of keys held at once, and of values.
    const HELD: usize = 1920;

    #[cube]
    fn place<E: Numeric>(buffer: &mut Tensor<E>, row: usize, head: usize, slot: usize, i: usize) -> usize {
        row * buffer.stride(0) + head * buffer.stride(1) + slot * buffer.stride(2) + i * buffer.stride(3)
    }

    #[cube]
    fn slot_of(newest: i32, age: usize, capacity: i32) -> usize {
        usize::cast_from(((newest - i32::cast_from(age as u32)) % capacity + capacity) % capacity)
    }

    #[cube(launch, address_type = "dynamic")]
    fn kv_reorder<E: Numeric>(
        keys: &mut Tensor<E>,
        values: &mut Tensor<E>,
        parents: &Tensor<i32>,
        positions: &Tensor<i32>,
        latest: &Tensor<i32>,
        prompts: usize,
        width: usize,
        parts: usize,
        origin: i32,
        #[comptime] alike: bool,
        #[define(E)] _elem: ElemType,
    ) {
        let (key_heads, slots, key_width) = (keys.shape(1), keys.shape(2), keys.shape(3));
        let (value_heads, value_width) = (values.shape(1), values.shape(3));
        let heads = max(key_heads, value_heads);
        let part = CUBE_POS % parts;
        let head = CUBE_POS / parts % heads;
        let prompt = CUBE_POS / parts / heads;
        if prompt >= prompts {
            terminate!();
        }
        let lane = UNIT_POS as usize;
        let mut held_keys = Shared::<[E]>::new_slice(HELD);
        let mut held_values = Shared::<[E]>::new_slice(HELD);

        let first = prompt * width;
        // Elements of a head to replace; none if every row keeps its own.
        let mut moves = false;
        for row in 0..width {
            moves = moves || parents[first + row] != i32::cast_from(row as u32);
        }
        let tokens = min(usize::cast_from(max(latest[0], 0)), slots);
        let key_elements = select(moves, tokens * key_width, 0usize);
        let value_elements = select(moves, tokens * value_width, 0usize);
        let elements = max(key_elements, value_elements);
        let piece = HELD / width;
        let capacity = i32::cast_from(slots as u32);
        let newest = positions[first] - origin;
        let mut begin = part * piece;
        while begin < elements {
            let len = min(piece, elements - begin);
            let mut i = lane;
            while i < width * len {
                let element = begin + i % len;
                let row = first + i / len;
                if comptime!(alike) {
                    let slot = slot_of(newest, element / key_width, capacity);
                    let from = place(keys, row, head, slot, element % key_width);
                    held_keys[i] = keys[from];
                    let from = place(values, row, head, slot, element % key_width);
                    held_values[i] = values[from];
                } else {
                    if head < key_heads && element < key_elements {
                        let slot = slot_of(newest, element / key_width, capacity);
                        let from = place(keys, row, head, slot, element % key_width);
                        held_keys[i] = keys[from];
                    }
                    if head < value_heads && element < value_elements {
                        let slot = slot_of(newest, element / value_width, capacity);
                        let from = place(values, row, head, slot, element % value_width);
                        held_values[i] = values[from];
                    }
                }
                i += LANES;
            }
            sync_cube();
            let mut i = lane;
            while i < width * len {
                let row = i / len;
                let parent = usize::cast_from(parents[first + row]);
                if parent != row {
                    let element = begin + i % len;
                    let from = parent * len + i % len;
                    if comptime!(alike) {
                        let slot = slot_of(newest, element / key_width, capacity);
                        let to = place(keys, first + row, head, slot, element % key_width);
                        keys[to] = held_keys[from];
                        let to = place(values, first + row, head, slot, element % key_width);
                        values[to] = held_values[from];
                    } else {
                        if head < key_heads && element < key_elements {
                            let slot = slot_of(newest, element / key_width, capacity);
                            let to = place(keys, first + row, head, slot, element % key_width);
                            keys[to] = held_keys[from];
                        }
                        if head < value_heads && element < value_elements {
                            let slot = slot_of(newest, element / value_width, capacity);
                            let to = place(values, first + row, head, slot, element % value_width);
                            values[to] = held_values[from];
                        }
                    }
                }
                i += LANES;
            }
            sync_cube();
            begin += parts * piece;
        }
    }

    pub(super) fn launch(
        KvReorder { buffers, parents, width, positions, latest, origin }: KvReorder,
    ) -> [burn::tensor::Tensor<4>; 2] {
        let [[batch, key_heads, _, _], [_, value_heads, _, _]] =
            buffers.each_ref().map(burn::tensor::Tensor::dims);
        let (heads, alike) = (key_heads.max(value_heads), buffers[0].dims() == buffers[1].dims());
        let parts = enough(&buffers[0].device(), PARTS);
        let [keys, values] = buffers.map(|buffer| to_write(primitive(buffer)));
        let elem = dtype_to_storage_type(keys.dtype);
        kv_reorder::launch(
            &keys.client,
            count(batch / width * heads * parts),
            CubeDim::new_1d(LANES as u32),
            address_type([&keys, &values]),
            keys.clone().into_tensor_arg(),
            values.clone().into_tensor_arg(),
            in_order(parents).into_tensor_arg(),
            in_order(positions.on_device).into_tensor_arg(),
            in_order(latest).into_tensor_arg(),
            batch / width,
            width,
            parts,
            origin as i32,
            alike,
            elem,
        );
        [keys, values].map(burn::tensor::Tensor::from_primitive::<Cube>)
    }
}
