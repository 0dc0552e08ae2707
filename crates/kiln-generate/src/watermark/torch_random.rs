//! The random number generator of torch on the CPU.

use kiln_core::model::TokenId;

const WORDS: usize = 624;
const MIDDLE: usize = 397;

/// The Mersenne Twister of torch's CPU generator: MT19937 (Matsumoto and Nishimura, 1998), seeded with 32
/// bits.
#[derive(Debug)]
pub(crate) struct TorchRandom {
    state: [u32; WORDS],
    next: usize,
}

impl TorchRandom {
    /// The state after `manual_seed(seed)`, which takes the low 32 bits.
    pub(crate) fn new(seed: i64) -> Self {
        let mut state = [seed as u32; WORDS];
        for i in 1..WORDS {
            let before = state[i - 1];
            state[i] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: WORDS }
    }

    /// Draws 32 random bits.
    pub(crate) fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        for i in 0..WORDS {
            let next = self.state[(i + 1) % WORDS];
            let bits = (self.state[i] & 0x8000_0000) | (next & 0x7fff_ffff);
            let twisted = (bits >> 1) ^ if next & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + MIDDLE) % WORDS] ^ twisted;
        }
        self.next = 0;
    }

    /// The index with which `torch.randperm` swaps the i-th element of `n`.
    ///
    /// From 214,748,364 elements on, torch draws words of 64 bits. No vocabulary is that large.
    fn exchange(&mut self, i: usize, n: usize) -> usize {
        i + self.word() as usize % (n - i)
    }

    /// The first `count` numbers of `torch.randperm(n)`.
    pub(crate) fn permutation(mut self, n: usize, count: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..n as u32).collect();
        for i in 0..count.min(n.saturating_sub(1)) {
            numbers.swap(i, self.exchange(i, n));
        }
        numbers.truncate(count);
        numbers
    }

    /// Whether `token` is among the first `count` numbers of `torch.randperm(n)`. Follows this number through
    /// the swaps, and so needs no memory.
    pub(crate) fn begins_with(mut self, token: TokenId, n: usize, count: usize) -> bool {
        let mut place = token as usize;
        for i in 0..count.min(n.saturating_sub(1)) {
            let other = self.exchange(i, n);
            if other == place {
                return true;
            }
            if i == place {
                place = other;
            }
        }
        place < count
    }

    /// `torch.randint(0, 2, (count,))`, where 1 is true.
    pub(crate) fn bits(mut self, count: usize) -> Vec<bool> {
        (0..count).map(|_| self.word() % 2 == 1).collect()
    }
}
