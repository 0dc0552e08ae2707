//! Generation cases: tokens and the logits of every step equal the recorded ones.

use kiln::{
    Completion, GenerationConfig, Model, Plan, TokenId,
    expert::{Batch, ConfigFile, DraftModel, Generation, GenerationOptions, models},
};

use super::{Folder, Mismatch, Setup, beams, case::Case, difference_of_logits};

pub(super) async fn run(
    folder: &Folder,
    case: &Case,
    model: &Model,
    setup: &Setup,
    plan: &Plan,
) -> Result<f64, Mismatch> {
    let draft = match case.draft() {
        Some(name) => Some(setup.load(folder.model(name), None).await?),
        None => None,
    };
    let draft = draft.as_ref();
    let mut largest = attention_scaling(folder, case)?;
    // Runs once as users do, with tokens chosen on the device if possible, and once with all scores recorded.
    check(folder, &generate(folder, case, model, draft, plan, false).await?, case)?;
    let generated = generate(folder, case, model, draft, plan, true).await?;
    check(folder, &generated, case)?;
    let steps = generated.steps;
    for (name, numbers) in [
        (&case.logits, steps.iter().map(|step| &step.logits).collect::<Vec<_>>()),
        (&case.scores, steps.iter().map(|step| &step.scores).collect()),
    ] {
        let Some(name) = name else { continue };
        let (shape, want) = folder.tensor(name)?;
        let (rows, vocab) = match *shape.as_slice() {
            [_, rows, vocab] if steps.iter().all(|step| step.tokens.len() == rows) => (rows, vocab),
            _ => return Err(Mismatch::new(format!("`{name}` of shape {shape:?} is not [new, rows, vocab]"))),
        };
        for (at, got) in numbers.into_iter().enumerate() {
            for row in 0..rows {
                // After the end of a row there is padding, which the versions compute differently.
                if steps[at].tokens.get(row).copied().flatten().is_none() {
                    continue;
                }
                let start = (at * rows + row) * vocab;
                let want = want.get(start..start + vocab).unwrap_or_default();
                let got = got.as_ref().and_then(|got| got.get(row)).map_or(&[] as &[f32], Vec::as_slice);
                largest = largest.max(difference_of_logits(got, want)?);
            }
        }
    }
    Ok(largest)
}

/// Returns the logits of every step of a case with one row.
pub(super) async fn logits(
    folder: &Folder,
    case: &Case,
    model: &Model,
    plan: &Plan,
) -> Result<Vec<Vec<f32>>, Mismatch> {
    let generated = generate(folder, case, model, None, plan, true).await?;
    Ok(generated
        .steps
        .into_iter()
        .map(|step| step.logits.unwrap_or_default().into_iter().next().unwrap_or_default())
        .collect())
}

/// The result of the generation of a case.
struct Generated {
    steps: Vec<kiln::Step>,
    completions: Vec<Vec<Completion>>,
    has_beams: bool,
}

fn check(folder: &Folder, generated: &Generated, case: &Case) -> Result<(), Mismatch> {
    match generated.has_beams {
        true => beams::check(folder, &generated.completions, case),
        false => check_sequences(&generated.steps, case),
    }
}

async fn generate(
    folder: &Folder,
    case: &Case,
    model: &Model,
    draft: Option<&Model>,
    plan: &Plan,
    keep: bool,
) -> Result<Generated, Mismatch> {
    let left_pad = case.left_pad().ok_or_else(|| Mismatch::new("the mask is not one of left padding"))?;
    let prefix = case.kwargs.get("prefix").and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    let mut batch = Batch::from_rows(&case.input_ids, model.device())?;
    batch.left_pad = left_pad.clone();
    if prefix >= batch.len() {
        return Err(Mismatch::new(format!("a prefix of {prefix} leaves nothing to feed")));
    }
    let mut cache = model.cache(plan)?;
    if prefix > 0 {
        model.causal().forward(&batch.slice(0..prefix), kiln::expert::Logits::Last, &mut cache)?;
    }
    let arguments = GenerationConfig::from_arguments(&case.kwargs)?;
    let mut wanted = arguments.max_new_tokens(case.max_new_tokens);
    wanted.pad_token_id = wanted.pad_token_id.or(model.generation_config().pad_token_id);
    let mut settings = wanted.resolve()?;
    settings.set_compat_4_47(folder.is_4_47());
    let unpadded = |(row, &pad): (&Vec<TokenId>, &usize)| row.get(pad..).unwrap_or_default().to_vec();
    let prompts: Vec<Vec<TokenId>> = case.input_ids.iter().zip(&left_pad).map(unpadded).collect();
    let has_beams = settings.has_beams();
    let options = GenerationOptions {
        settings,
        lookahead: true,
        keep_logits: keep,
        keep_scores: keep,
        compile: !keep && model.opened().is_asynchronous(),
        kernels: Some(model.kernels().clone()),
        ..GenerationOptions::default()
    };
    let batch = batch.slice(prefix..batch.len());
    let mut generation = Generation::new(model.causal().clone(), &mut cache, batch, prompts, options)?;
    if let Some(draft) = draft {
        let (cache, device) = (draft.cache(&Plan::dynamic())?, draft.device().clone());
        generation =
            generation.with_draft(DraftModel::new(draft.causal().clone(), cache, device, usize::MAX))?;
    }
    let mut steps = Vec::new();
    while let Some(step) = generation.next_step().await {
        steps.push(step?);
    }
    Ok(Generated { steps, completions: generation.completions(), has_beams })
}

fn check_sequences(steps: &[kiln::Step], case: &Case) -> Result<(), Mismatch> {
    if case.sequences.len() != case.input_ids.len() {
        return Err(Mismatch::new(format!("{} sequences were recorded", case.sequences.len())));
    }
    for (row, (want, prompt)) in case.sequences.iter().zip(&case.input_ids).enumerate() {
        let got: Vec<TokenId> =
            steps.iter().map_while(|step| step.tokens.get(row).copied().flatten()).collect();
        let want = want.get(prompt.len()..).unwrap_or_default();
        // Only a row that reached an end token may stop before the others; it is filled with padding.
        let (generated, filled) = want.split_at(got.len().min(want.len()));
        let ended = got.last().is_some_and(|id| case.eos().contains(id));
        if got != generated || !(filled.is_empty() || ended) {
            let at = got.iter().zip(want).take_while(|(got, want)| got == want).count();
            return Err(Mismatch::new(format!(
                "row {row}, new token {at}: {:?}, {:?} was recorded",
                got.get(at),
                want.get(at)
            )));
        }
    }
    Ok(())
}

/// Returns the difference between Kiln's scaling factor of cosines and sines and the recorded one.
fn attention_scaling(folder: &Folder, case: &Case) -> Result<f64, Mismatch> {
    let Some(want) = case.attention_scaling else { return Ok(0.0) };
    let config = ConfigFile::from_source(&*folder.model(&case.model))?;
    let configured = models::configure(&config)?;
    let ropes = configured.ropes().ok_or_else(|| Mismatch::new("the model has no rotary positions"))?;
    Ok((f64::from(ropes.full.attention_scaling) - want).abs())
}
