//! The divergence of a model's predictions from a reference, and its severity.

use kiln_core::{Result, model::TokenId};
use kiln_generate::sampler::{greedy, no_distribution};

/// A comparison of predicted distributions of the next token with reference distributions, over all positions
/// of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Comparison {
    /// Mean Kullback-Leibler divergence from the reference, in nats.
    pub divergence: f64,
    /// Maximum divergence over all tokens.
    pub largest_divergence: f64,
    /// Share of positions at which the same token is likeliest.
    pub agreement: f64,
    /// Perplexity of the text: `exp` of the mean negative logarithm of each token's probability.
    pub perplexity: f64,
}

/// Maximum mean divergence of a loss that is not noticeable: distributions differ less than those of a model
/// in 8 bits and in 16.
pub const UNSEEN: f64 = 0.01;

/// Minimum share of positions with the same likeliest token, for a loss that is not noticeable.
pub const UNSEEN_AGREEMENT: f64 = 0.99;

/// Minimum mean divergence of a broken model.
pub const BROKEN: f64 = 0.5;

/// Sizes with a smaller ratio than this count as equal.
const SAME_SIZE: f64 = 1.01;

/// The severity of a loss for the text that a model writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Within [`UNSEEN`] and [`UNSEEN_AGREEMENT`].
    Unseen,
    /// Between the bounds: some tokens change, and the text is a different one of the same quality.
    Seen,
    /// Above [`BROKEN`].
    Broken,
}

impl Comparison {
    /// The severity of the measured loss.
    pub fn loss(&self) -> Loss {
        if self.divergence <= UNSEEN && self.agreement >= UNSEEN_AGREEMENT {
            Loss::Unseen
        } else if self.divergence <= BROKEN {
            Loss::Seen
        } else {
            Loss::Broken
        }
    }
}

/// A smaller, lossy variant.
pub(super) trait Lossy {
    fn bytes(&self) -> f64;
    fn compared(&self) -> &Comparison;

    /// Whether the loss is low enough to recommend the variant.
    fn is_good(&self) -> bool {
        self.compared().loss() == Loss::Unseen
    }
}

/// Sorts variants by ascending loss.
pub(super) fn ranked<T: Lossy>(all: &[T]) -> Vec<&T> {
    let mut ranked: Vec<&T> = all.iter().collect();
    ranked.sort_by(|a, b| a.compared().divergence.total_cmp(&b.compared().divergence));
    ranked
}

/// The smallest variant that can be recommended; among variants of one size, the one with the least loss.
/// `None` if none has fewer than `bytes` bytes.
pub(super) fn recommended<T: Lossy>(all: &[T], bytes: f64) -> Option<&T> {
    let mut good = ranked(all);
    good.retain(|one| one.is_good() && one.bytes() < bytes);
    let smallest = good.iter().map(|one| one.bytes()).min_by(f64::total_cmp)?;
    good.into_iter().find(|one| one.bytes() <= SAME_SIZE * smallest)
}

/// Logarithms of the probabilities of all tokens.
pub(super) struct Distribution {
    logarithms: Vec<f64>,
    likeliest: usize,
}

impl Distribution {
    pub(super) fn of(logits: &[f32]) -> Self {
        let (mut likeliest, mut most) = (0, f32::NEG_INFINITY);
        for (at, &logit) in logits.iter().enumerate() {
            if logit > most {
                (likeliest, most) = (at, logit);
            }
        }
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
        let all = f64::from(most) + sum.ln();
        Self { logarithms: logits.iter().map(|&logit| f64::from(logit) - all).collect(), likeliest }
    }

    /// Creates the reference distribution from logits.
    ///
    /// # Errors
    /// Logits that are not a distribution: the model itself is wrong, not the variants that are compared with
    /// it.
    pub(super) fn checked(logits: &[f32]) -> Result<Self> {
        match greedy(logits) {
            Some(_) => Ok(Self::of(logits)),
            None => Err(no_distribution()),
        }
    }

    /// Compares the distribution with the reference, at a position after which the text has the token `next`.
    pub(super) fn beside(&self, right: &Self, next: TokenId) -> Place {
        let terms = right.logarithms.iter().zip(&self.logarithms);
        let sum: f64 =
            terms.map(|(p, q)| if *p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }).sum();
        Place {
            // Rounding errors can make the sum negative. NaN stays NaN.
            divergence: if sum < 0.0 { 0.0 } else { sum },
            agrees: self.likeliest == right.likeliest,
            surprise: -self.logarithms.get(next as usize).copied().unwrap_or(f64::NEG_INFINITY),
        }
    }
}

/// The comparison of two distributions at a position of a text.
pub(super) struct Place {
    /// Divergence in nats.
    divergence: f64,
    agrees: bool,
    /// The negative logarithm of the probability of the token that follows.
    surprise: f64,
}

/// Sums over the positions compared so far.
#[derive(Default)]
pub(super) struct Comparisons {
    divergences: Vec<f64>,
    agreed: usize,
    surprise: f64,
}

impl Comparisons {
    pub(super) fn add(&mut self, Place { divergence, agrees, surprise }: Place) {
        self.divergences.push(divergence);
        self.agreed += usize::from(agrees);
        self.surprise += surprise;
    }

    pub(super) fn finish(self) -> Comparison {
        let n = self.divergences.len().max(1) as f64;
        Comparison {
            divergence: self.divergences.iter().sum::<f64>() / n,
            largest_divergence: self.divergences.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0),
            agreement: self.agreed as f64 / n,
            perplexity: (self.surprise / n).exp(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sized(&'static str, f64, Comparison);

    impl Lossy for Sized {
        fn bytes(&self) -> f64 {
            self.1
        }

        fn compared(&self) -> &Comparison {
            &self.2
        }
    }

    fn compared(divergence: f64, agreement: f64) -> Comparison {
        Comparison { divergence, largest_divergence: divergence, agreement, perplexity: 1.0 }
    }

    #[test]
    fn the_rating_of_a_loss_follows_from_its_bounds() {
        assert_eq!(compared(UNSEEN, UNSEEN_AGREEMENT).loss(), Loss::Unseen);
        assert_eq!(compared(9e-4, 0.952).loss(), Loss::Seen, "one token in twenty changes");
        assert_eq!(compared(BROKEN, 0.2).loss(), Loss::Seen);
        assert_eq!(compared(f64::NAN, 1.0).loss(), Loss::Broken);
    }

    #[test]
    fn the_smallest_option_without_a_noticeable_loss_is_recommended() {
        let eight = || Sized("8", 50.0, compared(1e-4, 0.999));
        let four = Sized("4", 30.0, compared(1e-3, 0.995));
        let close = Sized("close", 29.9, compared(5e-3, 0.991));
        let coarse = || Sized("2", 20.0, compared(0.03, 0.92));
        let name = |all: &[Sized]| recommended(all, 100.0).map(|best| best.0);
        assert_eq!(name(&[eight(), coarse()]), Some("8"));
        assert_eq!(name(&[close, eight(), four, coarse()]), Some("4"), "of one size the one that loses less");
        assert_eq!(name(&[coarse()]), None);
        assert!(recommended(&[eight()], 50.0).is_none(), "it is not smaller");
    }

    #[test]
    fn divergence_agreement_and_perplexity_follow_their_formulas() {
        // The formula for probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4: ln 2 / 2 - ln 2 / 4.
        let [right, said] =
            [[2.0_f32, 1.0, 1.0], [1.0, 2.0, 1.0]].map(|odds| Distribution::of(&odds.map(f32::ln)));
        let mut all = Comparisons::default();
        all.add(said.beside(&right, 0));
        all.add(right.beside(&right, 0));
        let Comparison { divergence, largest_divergence, agreement, perplexity } = all.finish();
        let ln2 = std::f64::consts::LN_2;
        // Logits are float32, whose rounding errors are below 1e-7.
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        near(largest_divergence, ln2 / 4.0);
        near(divergence, ln2 / 8.0);
        near(agreement, 0.5);
        // The token has probabilities 1/4 and 1/2.
        near(perplexity, 8.0_f64.sqrt());
        assert!(Distribution::checked(&[0.0, f32::NAN]).is_err());
    }
}
