//! Memory layout of quantized keys and values.
//!
//! Adjacent elements form a group that shares a scale and an offset; an element is `code * scale + offset`,
//! in float32. A word of codes holds codes of one token; a word of scales holds two float16 numbers. All
//! words are unsigned, in tensors of [`DType::I32`]: not every device has other integers.

use burn::tensor::{DType, Device, Int, Tensor};

use crate::{Error, Result, gapless};

/// Which elements form a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Along {
    /// Adjacent channels of a token; the last group of a vector may be smaller.
    Channels,
    /// Adjacent slots of a channel; the first slot is a multiple of the group size.
    Tokens,
}

/// Parameters of the packing of keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    bits: usize,
    group: usize,
    along: Along,
}

impl Packing {
    /// Bits per code that kernels exist for.
    pub const BITS: [usize; 5] = [1, 2, 3, 4, 8];

    /// Largest group size.
    pub const LARGEST_GROUP: usize = 256;

    /// Creates a packing with `bits` bits per code and groups of `group` elements.
    ///
    /// # Errors
    /// [`Error::Setting`] if `bits` is not one of [`Self::BITS`], or `group` is not a multiple of 8 up to
    /// [`Self::LARGEST_GROUP`].
    pub fn new(bits: usize, group: usize, along: Along) -> Result<Self> {
        let refused = |name, why| Err(Error::Setting { name, why });
        if !Self::BITS.contains(&bits) {
            return refused("bits", format!("{bits} bits are not possible; use 1, 2, 3, 4 or 8"));
        }
        if group == 0 || !group.is_multiple_of(8) || group > Self::LARGEST_GROUP {
            let most = Self::LARGEST_GROUP;
            let why = format!("groups of {group} are not possible; use a multiple of 8, up to {most}");
            return refused("group", why);
        }
        Ok(Self { bits, group, along })
    }

    pub fn bits(&self) -> usize {
        self.bits
    }

    pub fn group(&self) -> usize {
        self.group
    }

    pub fn along(&self) -> Along {
        self.along
    }

    /// The largest code.
    pub fn largest(&self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Number of codes per word; the first is in the lowest bits.
    pub fn codes_a_word(&self) -> usize {
        32 / self.bits
    }

    /// Number of channels that are packed together, beginning a new word: those of a group, or all.
    pub fn channels_together(&self, head_dim: usize) -> usize {
        match self.along {
            Along::Channels => self.group.min(head_dim),
            Along::Tokens => head_dim,
        }
    }

    /// Number of words of the channels that are packed together.
    pub fn words_together(&self, head_dim: usize) -> usize {
        self.channels_together(head_dim).div_ceil(self.codes_a_word())
    }

    /// Number of words of a token's codes. Unused bits are 0.
    pub fn words(&self, head_dim: usize) -> usize {
        match head_dim {
            0 => 0,
            _ => head_dim.div_ceil(self.channels_together(head_dim)) * self.words_together(head_dim),
        }
    }

    /// Returns the shape of the codes of a buffer `[batch, kv_heads, slots, head_dim]`.
    pub fn codes_shape(&self, [batch, heads, slots, head_dim]: [usize; 4]) -> [usize; 4] {
        [batch, heads, slots, self.words(head_dim)]
    }

    /// Returns the shape of the scales of such a buffer: `[.., slots, groups]` along channels,
    /// `[.., groups, head_dim]` along tokens.
    pub fn scales_shape(&self, [batch, heads, slots, head_dim]: [usize; 4]) -> [usize; 4] {
        match self.along {
            Along::Channels => [batch, heads, slots, head_dim.div_ceil(self.group)],
            Along::Tokens => [batch, heads, slots.div_ceil(self.group), head_dim],
        }
    }

    /// The number of slots of a buffer must be a multiple of this.
    pub fn slots_together(&self) -> usize {
        match self.along {
            Along::Channels => 1,
            Along::Tokens => self.group,
        }
    }

    /// Returns the size in bytes of a buffer `[batch, kv_heads, slots, head_dim]`.
    pub fn bytes(&self, shape: [usize; 4]) -> usize {
        let bytes = |shape: [usize; 4]| shape.iter().fold(4usize, |bytes, &len| bytes.saturating_mul(len));
        bytes(self.codes_shape(shape)).saturating_add(bytes(self.scales_shape(shape)))
    }
}

/// A packed buffer of keys or of values.
#[derive(Clone, Debug)]
pub struct PackedBuffer {
    /// [`Packing::codes_shape`]
    pub codes: Tensor<4, Int>,
    /// [`Packing::scales_shape`]; the scale is in the low half of a word, the offset in the high half.
    pub scales: Tensor<4, Int>,
}

impl PackedBuffer {
    /// Creates a buffer of zeros for the unpacked shape `[batch, kv_heads, slots, head_dim]`.
    pub fn zeros(shape: [usize; 4], packing: Packing, device: &Device) -> Self {
        Self {
            codes: gapless::zeros(packing.codes_shape(shape), (device, DType::I32)),
            scales: gapless::zeros(packing.scales_shape(shape), (device, DType::I32)),
        }
    }

    pub fn slots(&self) -> usize {
        self.codes.dims()[2]
    }
}

/// Packed keys and values of the positions before `end`: position `p` is in slot `(p - origin) mod slots`,
/// and only as many of the latest positions as there are slots are valid.
#[derive(Clone, Debug)]
pub struct PackedKv {
    pub keys: PackedBuffer,
    pub values: PackedBuffer,
    pub key_packing: Packing,
    pub value_packing: Packing,
    /// A multiple of the group size along tokens.
    pub origin: usize,
    /// `[1]`, on the device: the first position that is not packed.
    pub end: Tensor<1, Int>,
}
