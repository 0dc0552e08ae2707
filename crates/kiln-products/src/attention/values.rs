//! Packed values, mixed by weights.
//!
//! A lane is a word, in memory order: of one token, or of several. Codes become floats in registers, where
//! they are summed, multiplied by the weights of rows; the weights include the scales of tokens. The scales
//! of channels are multiplied once for all tokens of a group. The contribution of the offsets is one sum per
//! group.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use kiln_simd::{Lanes, Work};

use super::{
    codes::{Codes, dot, shift},
    few::Mixes,
    segments::{LANES, SEGMENT, Segment},
};

/// Largest number of rows that are processed together.
const ROWS: usize = 4;

/// Sums of weighted values.
pub(super) struct Mixer<'a> {
    values: Codes<'a>,
    rows: usize,
    /// Number of tokens per vector, and number of vectors for the words of a token.
    tokens: usize,
    columns: usize,
    /// Places of the lanes of each column.
    places: Vec<Places>,
    /// `[rows, columns, codes]`: sums of weighted codes, which are too large by powers of 2. If scales belong
    /// to channels, these are sums over one segment only.
    sums: Vec<[f32; LANES]>,
    /// `sums` times the scales of channels, plus the contribution of the offsets of channels.
    scaled: Vec<[f32; LANES]>,
    /// `[rows, groups]`: contribution of the offsets of tokens.
    added: Vec<f32>,
    /// For a segment: `[SEGMENT, groups]`, 0 after its end, and `[groups, SEGMENT]`. Ones if scales belong to
    /// channels.
    scales: Vec<f32>,
    offsets: Vec<f32>,
    by_group: Vec<f32>,
    /// `[vectors, rows]`: weights of lanes, of up to [`ROWS`] rows.
    weights: Vec<[f32; LANES]>,
    /// The words of the last segment of a buffer, padded by as many as a vector reads beyond them.
    last: Vec<u32>,
}

impl<'a> Mixer<'a> {
    pub(super) fn new(values: Codes<'a>, rows: usize) -> Self {
        let (width, groups) = (values.width, values.groups);
        let tokens = if LANES.is_multiple_of(width) { LANES / width } else { 1 };
        let columns = width.div_ceil(LANES);
        let sums = vec![[0.0; LANES]; rows * columns * values.codes];
        Self {
            values,
            rows,
            tokens,
            columns,
            places: (0..columns).map(|column| Places::new(&values, tokens, column)).collect(),
            scaled: if values.tokens.is_some() { sums.clone() } else { Vec::new() },
            sums,
            added: vec![0.0; rows * groups],
            scales: vec![0.0; SEGMENT * groups + LANES],
            offsets: vec![0.0; SEGMENT * groups],
            by_group: vec![0.0; SEGMENT * groups],
            weights: vec![[0.0; LANES]; SEGMENT * ROWS],
            last: Vec::new(),
        }
    }

    /// Adds the values with `SHIFT` codes at a time, or fewer for several rows if there are few registers:
    /// `HALF` for two rows, one for more.
    #[inline(always)]
    fn add_bits<L: Lanes, const BITS: usize, const CODES: usize, const SHIFT: usize, const HALF: usize>(
        &mut self,
        lanes: L,
        segment: Segment,
        weights: &[f32],
        stride: usize,
    ) {
        self.scale(segment, weights, stride);
        self.pad(segment);
        for column in 0..self.columns {
            let mut row = 0;
            while row < self.rows {
                let (weights, place) = (&weights[row * stride..], [row, column, stride]);
                row += if const { L::REGISTERS >= 32 } {
                    match self.rows - row {
                        4.. => self.meet::<L, BITS, CODES, SHIFT, 4>(lanes, segment, weights, place),
                        3 => self.meet::<L, BITS, CODES, SHIFT, 3>(lanes, segment, weights, place),
                        2 => self.meet::<L, BITS, CODES, SHIFT, 2>(lanes, segment, weights, place),
                        _ => self.meet::<L, BITS, CODES, SHIFT, 1>(lanes, segment, weights, place),
                    }
                } else {
                    match self.rows - row {
                        4.. => self.meet::<L, BITS, CODES, 1, 4>(lanes, segment, weights, place),
                        3 => self.meet::<L, BITS, CODES, 1, 3>(lanes, segment, weights, place),
                        2 => self.meet::<L, BITS, CODES, HALF, 2>(lanes, segment, weights, place),
                        _ => self.meet::<L, BITS, CODES, SHIFT, 1>(lanes, segment, weights, place),
                    }
                };
            }
        }
        if self.values.tokens.is_some() {
            self.scale_channels(segment, weights, stride);
        }
    }

    /// Reads the scales of a segment along channels, and adds the contribution of the offsets.
    #[inline(always)]
    fn scale(&mut self, segment: Segment, weights: &[f32], stride: usize) {
        let groups = self.values.groups;
        if self.values.tokens.is_some() {
            self.scales[..segment.len].fill(1.0);
            self.scales[segment.len..].fill(0.0);
            return;
        }
        self.values.scales_of_tokens(segment, &mut self.by_group, &mut self.offsets);
        self.scales[segment.len * groups..].fill(0.0);
        if groups == 1 {
            self.scales[..segment.len].copy_from_slice(&self.by_group[..segment.len]);
        } else {
            for (i, scales) in self.scales.chunks_exact_mut(groups).take(segment.len).enumerate() {
                for g in 0..groups {
                    scales[g] = self.by_group[g * SEGMENT + i];
                }
            }
        }
        for r in 0..self.rows {
            let weights = &weights[r * stride..][..segment.len];
            for g in 0..groups {
                self.added[r * groups + g] += dot(weights, &self.offsets[g * SEGMENT..][..segment.len]);
            }
        }
    }

    /// Copies the words of a segment if vectors would read beyond the buffer.
    #[inline(always)]
    fn pad(&mut self, segment: Segment) {
        let Codes { words, width, .. } = self.values;
        let words = &words[segment.slot * width..];
        self.last.clear();
        if words.len() < segment.len * width + LANES {
            self.last.extend_from_slice(&words[..segment.len * width]);
            self.last.resize(segment.len * width + LANES, 0);
        }
    }

    /// Adds a vector of words of each token for M rows, C codes of each word at a time.
    #[inline(always)]
    fn meet<L: Lanes, const BITS: usize, const CODES: usize, const C: usize, const M: usize>(
        &mut self,
        lanes: L,
        segment: Segment,
        weights: &[f32],
        [row, column, stride]: [usize; 3],
    ) -> usize {
        let Self { values, tokens, columns, .. } = *self;
        let step = tokens * values.width;
        let words =
            if self.last.is_empty() { &values.words[segment.slot * values.width..] } else { &self.last };
        let words = &words[column * LANES..];
        let vectors = segment.len.div_ceil(tokens);
        let places = &self.places[column];
        let spread = &mut self.weights[..vectors * M];
        lanes.call(Spread::<M> {
            weights,
            stride,
            tokens,
            scales: &self.scales[places.first..],
            step: tokens * values.groups,
            places,
            spread,
        });
        let weights = self.weights[..vectors * M].as_chunks::<M>().0;
        let sums = &mut self.sums[(row * columns + column) * CODES..];
        lanes.call(Meeting::<BITS, CODES, C, M> { words, step, weights, sums, stride: columns * CODES });
        M
    }

    /// Multiplies the sums of a segment by the scales of channels.
    #[inline(always)]
    fn scale_channels(&mut self, segment: Segment, weights: &[f32], stride: usize) {
        let Self { values, tokens, columns, .. } = *self;
        let (width, codes) = (values.width, values.codes);
        let (mut scales, mut offsets) = (vec![0.0; width * codes], vec![0.0; width * codes]);
        values.scales_of_channels(segment, &mut scales, &mut offsets);
        let mut of_lanes = vec![[0.0; LANES]; 2 * columns * codes];
        let (lane_scales, lane_offsets) = of_lanes.split_at_mut(columns * codes);
        let (bits, shift) = (values.bits, shift(values.bits));
        for w in 0..width {
            for c in 0..codes {
                let (place, lane) = (w / LANES * codes + c, w % LANES);
                for token in 0..tokens {
                    lane_scales[place][token * width + lane] = scales[w * codes + c];
                }
                lane_offsets[place][lane] = offsets[w * codes + c] * (1u32 << (c % shift * bits)) as f32;
            }
        }
        let rows =
            self.sums.chunks_exact_mut(columns * codes).zip(self.scaled.chunks_exact_mut(columns * codes));
        for (r, (sums, scaled)) in rows.enumerate() {
            let mut weight = 0.0;
            for w in &weights[r * stride..][..segment.len] {
                weight += *w;
            }
            for i in 0..columns * codes {
                for l in 0..LANES {
                    scaled[i][l] += sums[i][l] * lane_scales[i][l] + lane_offsets[i][l] * weight;
                }
                sums[i] = [0.0; LANES];
            }
        }
    }
}

impl Mixes for Mixer<'_> {
    #[inline(always)]
    fn add<L: Lanes>(&mut self, lanes: L, segment: Segment, weights: &[f32], stride: usize) {
        match self.values.bits {
            1 => self.add_bits::<L, 1, 32, 4, 2>(lanes, segment, weights, stride),
            2 => self.add_bits::<L, 2, 16, 4, 2>(lanes, segment, weights, stride),
            3 => self.add_bits::<L, 3, 10, 5, 1>(lanes, segment, weights, stride),
            4 => self.add_bits::<L, 4, 8, 4, 2>(lanes, segment, weights, stride),
            _ => self.add_bits::<L, 8, 4, 2, 2>(lanes, segment, weights, stride),
        }
    }

    #[inline(always)]
    fn write(&self, row: usize, mixed: &mut [f32]) {
        let Self { values, tokens, columns, .. } = *self;
        let (width, codes, together) = (values.width, values.codes, values.together);
        let (bits, shift) = (values.bits, shift(values.bits));
        let sums = if values.tokens.is_some() { &self.scaled } else { &self.sums };
        let sums = &sums[row * columns * codes..][..columns * codes];
        let channels = values.channels;
        for (g, mixed) in mixed.chunks_mut(channels).enumerate() {
            let added = self.added[row * values.groups + g];
            for (w, mixed) in mixed.chunks_mut(codes).enumerate() {
                let word = g * together + w;
                for (c, mixed) in mixed.iter_mut().enumerate() {
                    let lanes = &sums[word / LANES * codes + c];
                    let mut sum = 0.0;
                    for token in 0..tokens {
                        sum += lanes[token * width + word % LANES];
                    }
                    *mixed = sum * (1.0 / (1u32 << (c % shift * bits)) as f32) + added;
                }
            }
        }
    }
}

/// The token and the scale of each lane of a vector of words.
struct Places {
    /// Index of the first scale.
    first: usize,
    /// Token of each lane, and its scale counted from the first.
    tokens: [u32; LANES],
    scales: [u32; LANES],
}

impl Places {
    /// Finds the places for a column of words.
    fn new(values: &Codes<'_>, tokens: usize, column: usize) -> Self {
        let first = if values.tokens.is_some() { 0 } else { column * LANES / values.together };
        let mut places = Self { first, tokens: [0; LANES], scales: [0; LANES] };
        for lane in 0..LANES {
            let (token, word) =
                if tokens > 1 { (lane / values.width, lane % values.width) } else { (0, lane) };
            let group = ((column * LANES + word) / values.together).min(values.groups - 1);
            places.tokens[lane] = token as u32;
            places.scales[lane] = (token * values.groups + group - first) as u32;
        }
        places
    }
}

/// Gives each lane of words the weights of its token, for M rows, times its scale.
struct Spread<'a, const M: usize> {
    weights: &'a [f32],
    /// Distance from row to row, and numbers of tokens and scales from vector to vector.
    stride: usize,
    tokens: usize,
    step: usize,
    scales: &'a [f32],
    places: &'a Places,
    /// `[vectors, M]`
    spread: &'a mut [[f32; LANES]],
}

impl<const M: usize> Work for Spread<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (of_token, of_scale) = (lanes.words(&self.places.tokens), lanes.words(&self.places.scales));
        let (mut token, mut scale) = (0, 0);
        for spread in self.spread.as_chunks_mut::<M>().0 {
            let Some(scales) = self.scales[scale..].first_chunk::<LANES>() else { return };
            let scales = lanes.pick(scales, of_scale);
            for m in 0..M {
                let Some(weights) = self.weights[m * self.stride + token..].first_chunk::<LANES>() else {
                    return;
                };
                spread[m] = lanes.array(lanes.mul(lanes.pick(weights, of_token), scales));
            }
            token += self.tokens;
            scale += self.step;
        }
    }
}

/// A vector of words of each token, or of several tokens, and their weights in M rows. C codes of each word
/// are summed at a time.
struct Meeting<'a, const BITS: usize, const CODES: usize, const C: usize, const M: usize> {
    words: &'a [u32],
    /// Number of words from vector to vector.
    step: usize,
    weights: &'a [[[f32; LANES]; M]],
    /// Sums of codes, `stride` apart from row to row.
    sums: &'a mut [[f32; LANES]],
    stride: usize,
}

impl<const BITS: usize, const CODES: usize, const C: usize, const M: usize> Work
    for Meeting<'_, BITS, CODES, C, M>
{
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for pass in 0..CODES / C {
            let mut sums = [[lanes.splat(0.0); C]; M];
            for m in 0..M {
                let before = &self.sums[m * self.stride + pass * C..][..C];
                for c in 0..C {
                    sums[m][c] = lanes.floats(&before[c]);
                }
            }
            // Codes are summed in their places within the shifted words, too large by powers of 2.
            let place = pass * C % shift(BITS);
            let by = ((pass * C - place) * BITS) as u32;
            let mut rest = self.words;
            for weights in self.weights {
                let Some(words) = rest.first_chunk() else { break };
                let word = lanes.shift_right(lanes.words(words), by);
                for c in 0..C {
                    let mask = ((1u32 << BITS) - 1) << ((place + c) * BITS);
                    let code = lanes.to_floats(lanes.and(word, mask));
                    for m in 0..M {
                        sums[m][c] = lanes.mul_add(code, lanes.floats(&weights[m]), sums[m][c]);
                    }
                }
                rest = &rest[self.step..];
            }
            for m in 0..M {
                let after = &mut self.sums[m * self.stride + pass * C..][..C];
                for c in 0..C {
                    after[c] = lanes.array(sums[m][c]);
                }
            }
        }
    }
}
