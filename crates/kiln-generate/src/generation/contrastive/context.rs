//! The hidden states of a text, on the host.

/// The hidden states of the tokens of a row, each of length 1.
#[derive(Debug)]
pub(super) struct Context {
    /// `[tokens, width]`
    states: Vec<f32>,
    width: usize,
}

impl Context {
    /// Creates a context from hidden states `[tokens, width]`.
    pub(super) fn new(states: &[f32], width: usize) -> Self {
        Self { states: normalized(states, width).concat(), width }
    }

    /// Adds the hidden state of the next token, which has length 1.
    pub(super) fn push(&mut self, state: Vec<f32>) {
        self.states.extend(state);
    }

    /// The largest cosine similarity of a hidden state of length 1 to those of the text.
    pub(super) fn similarity(&self, state: &[f32]) -> f32 {
        let all = self.states.chunks_exact(self.width.max(1));
        all.map(|other| dot(other, state)).fold(f32::NEG_INFINITY, f32::max)
    }
}

/// Vectors of `width` elements, divided by their lengths.
pub(super) fn normalized(states: &[f32], width: usize) -> Vec<Vec<f32>> {
    let of_token = |state: &[f32]| {
        let length = dot(state, state).sqrt();
        state.iter().map(|x| x / length).collect()
    };
    states.chunks_exact(width.max(1)).map(of_token).collect()
}

/// The dot product, in parts that the processor adds up at once.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const PARTS: usize = 16;

    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<PARTS>(), b.as_chunks::<PARTS>());
    let mut sums = [0.0f32; PARTS];
    for (a, b) in a.iter().zip(b) {
        for i in 0..PARTS {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
