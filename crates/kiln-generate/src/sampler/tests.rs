use super::{Sampler, greedy};

const OUT: f32 = f32::NEG_INFINITY;

fn sampler(seed: u64) -> Sampler {
    Sampler::new(Some(seed)).expect("a seed is given")
}

/// Compares with numbers of a ChaCha8 that was written in Python from the module's description.
#[test]
fn random_numbers_match_a_reference_of_chacha8() {
    for (seed, row, words, eighteenth) in [
        (42, 0, [1675176, 5842740, 1482231], 7830105),
        (42, 1, [15222424, 13033612, 6296939], 2682396),
        (0, 0, [3141376, 14041183, 15251547], 5357989),
        (u64::MAX, 3, [1097349, 7882730, 15227960], 15856340),
    ] {
        let mut sampler = sampler(seed);
        let got: Vec<u32> = (0..18).map(|_| sampler.word(row)).collect();
        assert_eq!(got[..3], words, "seed {seed}, row {row}");
        assert_eq!(got[17], eighteenth, "seed {seed}, row {row}, second block");
    }
}

#[test]
fn tokens_are_sampled_with_their_probabilities() {
    let scores = [1.0f32, OUT, 2.5, 0.0, 2.5, -1.0];
    let draws = 40_000;
    let mut counts = [0u32; 6];
    let mut sampler = sampler(7);
    for _ in 0..draws {
        counts[sampler.sample(0, &scores).expect("finite") as usize] += 1;
    }
    let total: f64 = scores.iter().map(|s| f64::from(*s).exp()).sum();
    for (score, count) in scores.iter().zip(counts) {
        let p = f64::from(*score).exp() / total;
        // Five standard deviations of the binomial distribution.
        let width = 5.0 * (draws as f64 * p * (1.0 - p)).sqrt();
        assert!((f64::from(count) - draws as f64 * p).abs() <= width, "{counts:?}");
    }
}

#[test]
fn each_row_has_its_own_random_stream() {
    let scores = [0.0; 1000];
    let (mut alone, mut among) = (sampler(3), sampler(3));
    for _ in 0..20 {
        let want = alone.sample(2, &scores);
        for row in [0, 1, 5] {
            assert!(among.sample(row, &scores).is_ok());
        }
        assert_eq!(among.sample(2, &scores), want);
    }
}

#[test]
fn a_sampler_without_a_seed_reports_the_one_it_chose() {
    let (mut first, other) = (Sampler::new(None).expect("a system"), Sampler::new(None).expect("a system"));
    assert_ne!(first.seed(), other.seed());
    assert!(first.seed() < 1 << 53, "a float64 holds it");
    let mut again = sampler(first.seed());
    assert_eq!(first.sample(0, &[0.0; 500]), again.sample(0, &[0.0; 500]));
}

#[test]
fn scores_that_are_not_a_distribution_are_errors() {
    for scores in [vec![], vec![OUT; 3], vec![0.0, f32::NAN], vec![0.0, f32::INFINITY]] {
        assert!(sampler(0).sample(0, &scores).is_err(), "{scores:?}");
    }
    assert_eq!(sampler(0).sample(0, &[OUT, f32::MAX, f32::MIN]), Ok(1));
}

#[test]
fn greedy_chooses_the_first_of_equal_scores() {
    assert_eq!(greedy(&[1.0, 3.0, 3.0, 2.0]), Some(1));
    assert_eq!(greedy(&[-0.0, 0.0]), Some(0));
    assert_eq!(greedy(&[OUT, 0.0]), Some(1));
    assert_eq!(greedy(&[1.0, f32::NAN]), None);
    assert_eq!(greedy(&[1.0, f32::INFINITY]), None);
    assert_eq!(greedy(&[OUT, OUT]), None);
}
