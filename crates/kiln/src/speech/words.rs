//! The times of words: the attention of the decoder follows the audio (transformers'
//! `_extract_token_timestamps`, after OpenAI's `timing.py`).

use kiln_core::{Result, model::TokenId};

/// Number of frames per position of the encoder.
const FRAMES: usize = 2;

/// The frames at which each of `tokens` tokens begins, from the beginning of the window. `attention`
/// `[heads, tokens, positions]` is the attention to the encoder, whose first `heard` positions were recorded.
pub(super) fn beginnings(
    attention: &[f32],
    [heads, tokens, positions]: [usize; 3],
    heard: usize,
    filter_width: usize,
) -> Vec<usize> {
    let heard = heard.clamp(1, positions.max(1));
    let mut mean = vec![0.0f64; tokens * heard];
    for head in attention.chunks_exact((tokens * positions).max(1)).take(heads) {
        let mut own: Vec<f32> =
            head.chunks_exact(positions).flat_map(|row| row[..heard].iter().copied()).collect();
        normalize(&mut own, heard);
        for (row, sums) in own.chunks_exact(heard).zip(mean.chunks_exact_mut(heard)) {
            for (sum, filtered) in sums.iter_mut().zip(median_filtered(row, filter_width)) {
                *sum += f64::from(filtered) / heads as f64;
            }
        }
    }
    let (rows, columns) = warped(&mean, heard);
    // The start of each row of the path.
    let begins = (0..rows.len()).filter(|&i| i == 0 || rows[i] != rows[i - 1]);
    begins.map(|i| columns[i] * FRAMES).collect()
}

/// Normalizes each position to mean 0 and deviation 1 over all tokens.
fn normalize(numbers: &mut [f32], positions: usize) {
    let tokens = (numbers.len() / positions.max(1)) as f32;
    for at in 0..positions {
        let column = || numbers.iter().skip(at).step_by(positions);
        let mean = column().sum::<f32>() / tokens;
        let deviation = (column().map(|x| (x - mean) * (x - mean)).sum::<f32>() / tokens).sqrt();
        for x in numbers.iter_mut().skip(at).step_by(positions) {
            *x = if deviation > 0.0 { (*x - mean) / deviation } else { 0.0 };
        }
    }
}

/// The median of `width` neighbors of each number, mirrored at both ends.
fn median_filtered(row: &[f32], width: usize) -> Vec<f32> {
    let half = width / 2;
    if row.len() <= half {
        return row.to_vec();
    }
    let mirrored = |at: isize| {
        let last = row.len() as isize - 1;
        let at = if at < 0 { -at } else { at };
        row[(if at > last { 2 * last - at } else { at }) as usize]
    };
    let median = |at: usize| {
        let mut window: Vec<f32> =
            (0..width).map(|i| mirrored(at as isize + i as isize - half as isize)).collect();
        window.sort_by(f32::total_cmp);
        window[half]
    };
    (0..row.len()).map(median).collect()
}

/// The path through `[rows, columns]` from the first number to the last with the largest sum (dynamic time
/// warping): the row and the column of each step.
fn warped(numbers: &[f64], columns: usize) -> (Vec<usize>, Vec<usize>) {
    #[derive(Clone, Copy)]
    enum Step {
        Both,
        Row,
        Column,
    }
    let rows = numbers.len() / columns;
    let width = columns + 1;
    let mut cost = vec![f32::INFINITY; (rows + 1) * width];
    let mut steps = vec![Step::Column; (rows + 1) * width];
    cost[0] = 0.0;
    (1..=rows).for_each(|row| steps[row * width] = Step::Row);
    for column in 1..=columns {
        for row in 1..=rows {
            let at = row * width + column;
            let (both, above, left) = (cost[at - width - 1], cost[at - width], cost[at - 1]);
            let (least, step) = if both < above && both < left {
                (both, Step::Both)
            } else if above < both && above < left {
                (above, Step::Row)
            } else {
                (left, Step::Column)
            };
            cost[at] = (f64::from(least) - numbers[(row - 1) * columns + column - 1]) as f32;
            steps[at] = step;
        }
    }
    let (mut row, mut column) = (rows, columns);
    let (mut path_rows, mut path_columns) = (Vec::new(), Vec::new());
    while row > 0 || column > 0 {
        path_rows.push(row.saturating_sub(1));
        path_columns.push(column.saturating_sub(1));
        match steps[row * width + column] {
            Step::Both => (row, column) = (row - 1, column - 1),
            Step::Row => row -= 1,
            Step::Column => column -= 1,
        }
    }
    path_rows.reverse();
    path_columns.reverse();
    (path_rows, path_columns)
}

/// Groups `tokens` into words: their text, and their tokens. `decode` returns the text of tokens. In
/// languages without spaces, each character is a word. Punctuation belongs to the adjacent word.
pub(super) fn words(
    tokens: &[TokenId],
    without_spaces: bool,
    decode: impl Fn(&[TokenId]) -> Result<String>,
) -> Result<Vec<(String, std::ops::Range<usize>)>> {
    let mut words: Vec<(String, std::ops::Range<usize>)> = Vec::new();
    for (text, own) in characters(tokens, decode)? {
        let is_punctuation = text.trim().chars().all(|c| c.is_ascii_punctuation());
        match words.last_mut() {
            Some((word, range)) if !without_spaces && !text.starts_with(' ') && !is_punctuation => {
                word.push_str(&text);
                range.end = own.end;
            }
            _ => words.push((text, own)),
        }
    }
    Ok(with_punctuation(words))
}

/// Groups tokens into runs of whole characters.
fn characters(
    tokens: &[TokenId],
    decode: impl Fn(&[TokenId]) -> Result<String>,
) -> Result<Vec<(String, std::ops::Range<usize>)>> {
    const INCOMPLETE: char = '\u{fffd}';

    let whole = decode(tokens)?;
    let (mut found, mut begin, mut offset) = (Vec::new(), 0, 0);
    for end in 1..=tokens.len() {
        let text = decode(&tokens[begin..end])?;
        // The replacement character for incomplete characters may also be in the text itself.
        let is_whole = text
            .find(INCOMPLETE)
            .is_none_or(|at| whole.get(offset + at..).is_none_or(|rest| rest.starts_with(INCOMPLETE)));
        if is_whole {
            offset += text.len();
            found.push((text, begin..end));
            begin = end;
        }
    }
    Ok(found)
}

/// Joins punctuation with the word that it belongs to.
fn with_punctuation(words: Vec<(String, std::ops::Range<usize>)>) -> Vec<(String, std::ops::Range<usize>)> {
    const BEFORE: &str = "\"'“¡¿([{-";
    const AFTER: &str = "\"'.。,，!！?？:：”)]}、";

    let mut joined: Vec<(String, std::ops::Range<usize>)> = Vec::new();
    for (text, range) in words.into_iter().rev() {
        match joined.last_mut() {
            Some((next, next_range)) if text.starts_with(' ') && BEFORE.contains(text.trim()) => {
                next.insert_str(0, &text);
                next_range.start = range.start;
            }
            _ => joined.push((text, range)),
        }
    }
    let mut words: Vec<(String, std::ops::Range<usize>)> = Vec::new();
    for (text, range) in joined.into_iter().rev() {
        match words.last_mut() {
            Some((word, own)) if !word.ends_with(' ') && AFTER.contains(&*text) => {
                word.push_str(&text);
                own.end = range.end;
            }
            _ => words.push((text, range)),
        }
    }
    words
}
