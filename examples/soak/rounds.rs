//! A round: everything that is done with one loaded model, with the results compared with those of the first
//! time.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
};

use kiln::{
    Chat, ChatTemplate, Error, GenerationConfig, Message, Model, Offload, OnOutOfMemory, Plan, Result,
    Sequence, Step, TokenId,
    expert::{STRATEGIES, memory::DeviceState},
};
use tempfile::TempDir;

/// Caches tested in addition to each strategy's default, with windows, capacities and blocks that the short
/// texts exceed.
const MORE: [&str; 7] = [
    "static:len=128",
    "sink:window=24,sinks=4",
    "quantized:group=16,residual=16",
    "quantized:format=quanto,nbits=2,group=32,residual=16",
    "quantized:format=hqq,group=16,residual=16",
    "quantized:format=quanto,group=64,residual=16,flush=requantize",
    "quantized:format=kivi,group=16,residual=16,rotate=on",
];

/// Caches that are also tested in host memory.
const OFFLOADED: [(&str, Offload); 3] = [
    ("dynamic", Offload::All),
    ("quantized:group=16,residual=16", Offload::All),
    ("sink:window=24,sinks=4", Offload::AllBut(2)),
];

/// Caches whose allocations are refused.
const REFUSED: [&str; 4] =
    ["dynamic", "static:len=128", "sink:window=24,sinks=4", "quantized:group=16,residual=16"];

/// Number of tokens per generation.
const NEW: usize = 4;

/// Prompts; the second exceeds the windows and residuals above.
const SHORT: &str = "The Constitution";
const LONG: &str = "KING HENRY V:\nOnce more unto the breach, dear friends, once more.\n";

/// The results of all rounds so far.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// First outcome of each piece. Stored in full, so that a difference can be shown; the total is small.
    first: BTreeMap<String, String>,
    /// Number of outcomes that were compared with another, and number of those that differed or failed.
    pub(crate) compared: u64,
    pub(crate) wrong: u64,
    /// The first problems found.
    pub(crate) problems: Vec<String>,
    /// Hash of all outcomes of the first round, for comparing two reports.
    pub(crate) first_round: u64,
    round: u64,
}

impl Ledger {
    /// Records the outcome of `piece`, which must be the same every time: within this round, and in all
    /// others.
    fn note(&mut self, piece: &str, outcome: Result<impl Debug>) {
        let outcome = match outcome {
            Ok(outcome) => format!("{outcome:?}"),
            Err(error) => return self.wrong(format!("{piece}: {error}")),
        };
        match self.first.get(piece) {
            None => _ = self.first.insert(piece.to_owned(), outcome),
            Some(first) => {
                self.compared += 1;
                if *first != outcome {
                    let problem = format!("{piece}: was {first}, is {outcome}");
                    self.wrong(problem);
                }
            }
        }
    }

    fn wrong(&mut self, problem: String) {
        /// Further problems are counted but not kept: memory is measured here.
        const KEPT: usize = 20;

        self.wrong += 1;
        if self.problems.len() < KEPT {
            self.problems.push(format!("round {}, {problem}", self.round));
        }
    }
}

/// The model, caches and prompts of a round.
pub(crate) struct Rounds<'m> {
    model: &'m Model,
    /// Caches, with the names used for pieces.
    plans: Vec<(String, Plan)>,
    /// A single row, rows of different lengths, and rows of equal length.
    one: Vec<Vec<TokenId>>,
    padded: Vec<Vec<TokenId>>,
    even: Vec<Vec<TokenId>>,
    /// Folder for saved caches; removed at the end.
    folder: TempDir,
}

impl<'m> Rounds<'m> {
    pub(crate) fn new(model: &'m Model) -> Result<Self> {
        let needs = model.causal().needs();
        let mut plans = Vec::new();
        for text in STRATEGIES.iter().map(|strategy| strategy.name).chain(MORE) {
            plans.push(Plan::named(text)?);
        }
        for (text, offload) in OFFLOADED {
            plans.push(Plan::named(text)?.offloaded(offload));
        }
        // For example `sliding`, if no layer has a window.
        plans.retain(|plan| plan.check(&needs).is_ok());
        let [short, long] = [model.encode(SHORT)?, model.encode(LONG)?];
        let folder = tempfile::tempdir()
            .map_err(|e| Error::File { path: std::env::temp_dir(), why: e.to_string() })?;
        Ok(Self {
            model,
            plans: plans.into_iter().map(|plan| (plan.label(&needs), plan)).collect(),
            one: vec![long.clone()],
            even: vec![long.iter().rev().copied().collect(), long.clone()],
            padded: vec![short, long],
            folder,
        })
    }

    /// Returns the names of the caches under test.
    pub(crate) fn caches(&self) -> impl Iterator<Item = &str> {
        self.plans.iter().map(|(name, _)| name.as_str())
    }

    /// Runs the round with this number, counted from 0.
    pub(crate) fn make(&self, number: u64, ledger: &mut Ledger) {
        ledger.round = number;
        for (i, (name, plan)) in self.plans.iter().enumerate() {
            // Neighbours in the list are similar, so testing every other one is enough.
            if i % 2 == 0 {
                ledger.note(&format!("{name}: a chat"), self.converse(plan));
            }
            // Rows of different lengths cannot share sinks.
            let padded = if plan.global.strategy.name == "sink" { &self.even } else { &self.padded };
            for (rows, sampled) in [(&self.one, false), (padded, true)] {
                let tokens = self.generate(plan, rows, &wanted(NEW, sampled, 1), OnOutOfMemory::default());
                ledger.note(&format!("{name}: {} rows", rows.len()), tokens);
            }
            let rows = if i / 2 % 2 == 0 { &self.one } else { padded };
            let piece = format!("{name}: a sequence of {} rows", rows.len());
            if let Err(error) = self.live(plan, rows, &piece, ledger) {
                ledger.note(&piece, Err::<(), _>(error));
            }
        }
        for text in REFUSED {
            let refused = self.refuse(text, number, ledger);
            ledger.note(&format!("{text}: refusals"), refused);
        }
        let limited = self.limit(ledger);
        ledger.note("a low budget", limited);
        if number == 0 {
            let mut hasher = DefaultHasher::new();
            ledger.first.hash(&mut hasher);
            ledger.first_round = hasher.finish();
        }
    }

    /// Runs the turns of a chat: one is abandoned midway, and one is taken back and rephrased.
    fn converse(&self, plan: &Plan) -> Result<Vec<String>> {
        let templates = self.model.chat_templates();
        let template = templates.choose(false).unwrap_or_else(|_| ChatTemplate::chatml());
        let mut chat = Chat::new(self.model, template, plan)?;
        let mut said = Vec::new();
        let mut say = |chat: &mut Chat, text: &str, pieces: usize, seed| {
            let mut answer = chat.say(text)?.config(wanted(NEW, true, seed)).stream()?;
            said.push(answer.by_ref().take(pieces).collect::<Result<String>>()?);
            said.push(format!("{:?}", answer.reuse()));
            Ok::<_, Error>(())
        };
        say(&mut chat, "What news from Rome?", usize::MAX, 1)?;
        say(&mut chat, "And who told you so?", 2, 2)?;
        // Edits the conversation as a user would: the first answer is replaced.
        let messages = &mut chat.conversation_mut().messages;
        messages.truncate(1);
        messages.push(Message::new("assistant", "None that is good."));
        say(&mut chat, "Then speak of Athens.", usize::MAX, 3)?;
        Ok(said)
    }

    /// Returns the tokens generated after `rows`, with a new cache.
    fn generate(
        &self,
        plan: &Plan,
        rows: &[Vec<TokenId>],
        wanted: &GenerationConfig,
        on_oom: OnOutOfMemory,
    ) -> Result<Vec<Vec<TokenId>>> {
        let mut cache = self.model.cache(plan)?;
        let steps = self
            .model
            .generate(rows.to_vec())
            .cache(&mut cache)
            .config(wanted.clone())
            .on_oom(on_oom)
            .steps()?;
        tokens(steps, rows.len())
    }

    /// Returns the tokens generated after `rows`, with a sequence that may already hold a part of them.
    fn go_on(
        &self,
        sequence: &mut Sequence,
        rows: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        on_oom: OnOutOfMemory,
    ) -> Result<Vec<Vec<TokenId>>> {
        let count = rows.len();
        tokens(
            self.model.generate(rows).sequence(sequence).config(wanted.clone()).on_oom(on_oom).steps()?,
            count,
        )
    }

    /// Tests a sequence: abandoned midway and continued, split into two continuations, saved and loaded.
    fn live(&self, plan: &Plan, rows: &[Vec<TokenId>], piece: &str, ledger: &mut Ledger) -> Result<()> {
        let mut sequence = Sequence::new(self.model, plan)?;
        let given_up = self
            .model
            .generate(rows.to_vec())
            .sequence(&mut sequence)
            .config(wanted(50, false, 0))
            .steps()?;
        let first = tokens(given_up.take(NEW / 2), rows.len());
        ledger.note(&format!("{piece}, given up"), first);
        let said: Vec<TokenId> = rows.iter().flatten().copied().take(4).collect();
        let more = |sequence: &Sequence| -> Vec<Vec<TokenId>> {
            sequence.tokens().iter().map(|row| [row.as_slice(), &said].concat()).collect()
        };
        let next = more(&sequence);
        let rest = self.go_on(&mut sequence, next, &wanted(NEW / 2, false, 0), OnOutOfMemory::default());
        ledger.note(&format!("{piece}, continued"), rest);

        let mut other = sequence.snapshot();
        let mut again = sequence.snapshot();
        for (name, sequence, seed) in
            [("one", &mut sequence, 1), ("other", &mut other, 2), ("one", &mut again, 1)]
        {
            let next = more(sequence);
            let future = self.go_on(sequence, next, &wanted(NEW / 2, true, seed), OnOutOfMemory::default());
            ledger.note(&format!("{piece}, {name} future"), future);
        }

        let path: PathBuf = self.folder.path().join("cache.safetensors");
        match self.model.check_saving(&path, plan) {
            // A cache that retains nothing cannot be saved.
            Err(Error::Setting { .. }) => return Ok(()),
            checked => checked?,
        }
        sequence.save(self.model, plan, &path)?;
        let mut loaded = Sequence::load(self.model, plan, &path)?;
        for sequence in [&mut sequence, &mut loaded] {
            let next = more(sequence);
            let future = self.go_on(sequence, next, &wanted(NEW / 2, true, 3), OnOutOfMemory::default());
            ledger.note(&format!("{piece}, saved"), future);
        }
        Ok(())
    }

    /// Makes one allocation fail, a different one in each round, and handles it in every way.
    fn refuse(&self, text: &str, round: u64, ledger: &mut Ledger) -> Result<u64> {
        let (plan, budget) = (Plan::named(text)?, self.model.budget());
        let piece = format!("{text}: memory that is refused");
        let whole = wanted(NEW, false, 0);
        // Short enough to be fed at once, also after a refusal: smaller pieces might round differently.
        let rows: Vec<Vec<TokenId>> =
            self.one.iter().map(|row| row.iter().copied().take(16).collect()).collect();

        let before = budget.allocations();
        let mut sequence = Sequence::new(self.model, &plan)?;
        let undisturbed = self.go_on(&mut sequence, rows.clone(), &whole, OnOutOfMemory::Fail);
        ledger.note(&piece, undisturbed);
        let allocations = budget.allocations() - before;
        // A prime step, so that a few rounds reach all layers of a step.
        let n = round * 7 % allocations.max(1);

        let refused = |on_oom, sequence: &mut Sequence| {
            budget.fail_allocation(n);
            let outcome = self.go_on(sequence, rows.clone(), &whole, on_oom);
            // If there were fewer allocations, none may fail later.
            budget.fail_allocation(NEVER);
            outcome
        };
        let mut sequence = Sequence::new(self.model, &plan)?;
        let failed = refused(OnOutOfMemory::Fail, &mut sequence);
        ledger.note(&format!("{piece}, allocation {n}, fail"), or_out_of_memory(failed));
        let again = self.go_on(&mut sequence, rows.clone(), &whole, OnOutOfMemory::Fail);
        ledger.note(&piece, again);
        let mut sequence = Sequence::new(self.model, &plan)?;
        ledger.note(&piece, refused(OnOutOfMemory::Offload, &mut sequence));
        let mut sequence = Sequence::new(self.model, &plan)?;
        let packed = refused(OnOutOfMemory::Quantize, &mut sequence);
        ledger.note(&format!("{piece}, allocation {n}, quantize"), packed);

        // The device itself refuses an allocation that the budget allowed.
        let step = round as usize % NEW;
        let mut sequence = Sequence::new(self.model, &plan)?;
        let mut steps = self
            .model
            .generate(rows.clone())
            .sequence(&mut sequence)
            .config(whole.clone())
            .on_oom(OnOutOfMemory::Offload)
            .steps()?;
        let mut at = 0;
        let reporting = std::iter::from_fn(|| {
            if at == step {
                DeviceState::of(self.model.device()).report_refusal();
            }
            at += 1;
            steps.next()
        });
        ledger.note(&piece, tokens(reporting, rows.len()));
        Ok(allocations)
    }

    /// Sets budgets that are too low for a part of the work: each run gives the right tokens or an error, and
    /// a full run succeeds afterwards.
    fn limit(&self, ledger: &mut Ledger) -> Result<()> {
        let (plan, budget) = (Plan::dynamic(), self.model.budget());
        let run = |on_oom| self.generate(&plan, &self.one, &wanted(NEW, false, 0), on_oom);
        let limit = budget.limit();
        // This also resets the peak.
        budget.set_limit(limit);
        let held = budget.used();
        ledger.note("a budget for everything", run(OnOutOfMemory::Fail));
        let whole = budget.peak().saturating_sub(held);
        for percent in [80, 50, 10] {
            for on_oom in [OnOutOfMemory::Fail, OnOutOfMemory::Offload, OnOutOfMemory::Quantize] {
                budget.set_limit(Some(held + whole * percent / 100));
                let outcome = run(on_oom);
                budget.set_limit(limit);
                ledger.note(&format!("a budget for {percent} %, {on_oom}"), or_out_of_memory(outcome));
            }
        }
        ledger.note("a budget for everything", run(OnOutOfMemory::Fail));
        Ok(())
    }
}

/// Number of an allocation that is never made; small enough that adding to it does not overflow.
const NEVER: u64 = u64::MAX / 2;

/// Returns a configuration without end tokens, so that the number of generated tokens is fixed.
fn wanted(tokens: usize, sampled: bool, seed: u64) -> GenerationConfig {
    GenerationConfig::new()
        .max_new_tokens(tokens)
        .do_sample(sampled)
        .temperature(0.8)
        .top_k(40)
        .repetition_penalty(if sampled { 1.1 } else { 1.0 })
        .eos_token_id(Vec::new())
        .seed(seed)
}

/// Collects the tokens of each row.
fn tokens(steps: impl Iterator<Item = Result<Step>>, rows: usize) -> Result<Vec<Vec<TokenId>>> {
    let mut tokens = vec![Vec::new(); rows];
    for step in steps {
        for (row, token) in tokens.iter_mut().zip(step?.tokens) {
            row.extend(token);
        }
    }
    Ok(tokens)
}

/// Turns an out-of-memory error, with the bytes that it names, into a result that can be compared.
fn or_out_of_memory<T>(outcome: Result<T>) -> Result<Result<T, String>> {
    match outcome {
        Err(error @ Error::OutOfMemory { .. }) => Ok(Err(error.to_string())),
        other => other.map(Ok),
    }
}
