//! Runs each target in a separate process. An input that crashes, hangs or takes too much memory is saved.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    panic::{self, AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    sync::Mutex,
    thread,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};

use super::{
    TARGETS, Target, corpus,
    mutate::{Pool, Random, smaller},
    put,
};

/// Limit of the address space of a process, in KiB.
const MEMORY: usize = 4 << 20;
/// Time limit of one input.
const LONGEST: Duration = Duration::from_secs(20);
/// Maximum number of processes of one target that may end early.
const MOST_CRASHES: usize = 8;
/// Maximum number of panics at one place that are reported individually.
const MOST_OF_A_PLACE: usize = 1;

/// The report of a child process.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Told {
    inputs: u64,
    accepted: u64,
    seconds: f64,
    /// Seconds taken by the slowest input, which is kept
    slowest: f64,
    /// Number of corpus files and seeds that were run
    given: usize,
    failures: Vec<(String, PathBuf)>,
}

/// The task of a child process.
#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    target: String,
    folder: PathBuf,
    seconds: f64,
    seed: u64,
    /// Number of corpus files and seeds that are not run again
    skip: usize,
}

const ASKED: &str = "KILN_FUZZ_ASKED";

fn number(name: &str, default: f64) -> f64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_input_crashes_hangs_or_panics() {
    let named = std::env::var("KILN_FUZZ_TARGETS").unwrap_or_default();
    let chosen = |target: &&Target| named.is_empty() || named.split(',').any(|name| name == target.name);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    assert!(!targets.is_empty(), "KILN_FUZZ_TARGETS names none");
    let (next, failures) = (Mutex::new(targets.iter()), Mutex::new(Vec::new()));
    // Two targets run at the same time.
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(target) = next.lock().unwrap().next() else { break };
                    let told = all(target);
                    let rate = told.inputs as f64 / told.seconds.max(0.001);
                    println!(
                        "{:20} {:7} inputs, {:7} accepted, {rate:6.0} inputs/s, slowest {:.2} s",
                        target.name, told.inputs, told.accepted, told.slowest
                    );
                    failures.lock().unwrap().extend(told.failures);
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    let lines: Vec<String> =
        failures.iter().map(|(what, path)| format!("{}: {what}", path.display())).collect();
    assert!(lines.is_empty(), "{} inputs failed:\n{}", lines.len(), lines.join("\n"));
}

/// Runs a target until its time is over, in as many processes as necessary.
fn all(target: &Target) -> Told {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(target.name);
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let mut all = Told::default();
    let mut seconds = number("KILN_FUZZ_SECONDS", 3.0);
    let seed = number("KILN_FUZZ_SEED", 1.0) as u64;
    for process in 0..=MOST_CRASHES {
        let asked = Asked {
            target: target.name.to_owned(),
            folder: folder.clone(),
            seconds,
            seed: seed.wrapping_add(process as u64 * 1_000_003),
            skip: all.given,
        };
        _ = fs::remove_file(folder.join("told"));
        let ended = watched(start(&asked), &folder);
        let told: Told = fs::read(folder.join("told"))
            .ok()
            .and_then(|told| serde_json::from_slice(&told).ok())
            .unwrap_or_default();
        seconds -= told.seconds;
        all.inputs += told.inputs;
        all.accepted += told.accepted;
        all.seconds += told.seconds;
        all.slowest = all.slowest.max(told.slowest);
        all.given = all.given.max(told.given);
        all.failures.extend(told.failures);
        let Err(why) = ended else { return all };
        // Counts the input that was running, which the process did not report.
        all.given += usize::from(told.inputs == (told.given.saturating_sub(asked.skip)) as u64);
        let culprit = folder.join(format!("ended-{process}"));
        _ = fs::copy(folder.join("current"), &culprit);
        let said = fs::read_to_string(folder.join("said")).unwrap_or_default();
        let said: Vec<&str> = said.lines().rev().take(4).collect();
        all.failures.push((format!("{why}: {}", said.join(" | ")), culprit));
        if seconds <= 0.0 {
            break;
        }
    }
    all
}

fn start(asked: &Asked) -> Child {
    let (me, name) =
        (std::env::current_exe().unwrap(), "fuzz::driver::a_child_process_runs_the_inputs_of_a_target");
    let mut command = match cfg!(unix) {
        true => {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("ulimit -v {MEMORY} 2>/dev/null; ulimit -c 0; exec \"$0\" \"$@\"")]);
            command.arg(me);
            command
        }
        false => Command::new(me),
    };
    let said = File::create(asked.folder.join("said")).unwrap();
    command.args(["--exact", name, "--nocapture"]).env(ASKED, serde_json::to_string(asked).unwrap());
    command.stdout(said.try_clone().unwrap()).stderr(said).spawn().unwrap()
}

/// Waits for the end of a process, or kills it if one input takes too long.
fn watched(mut child: Child, folder: &Path) -> Result<(), String> {
    let begun = Instant::now();
    let since_last = || {
        let changed = fs::metadata(folder.join("current")).and_then(|file| file.modified()).ok()?;
        SystemTime::now().duration_since(changed).ok()
    };
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return if status.success() { Ok(()) } else { Err(ended(status)) };
        }
        // The process itself detects slightly slow inputs.
        if since_last().unwrap_or_else(|| begun.elapsed()).min(begun.elapsed()) > 2 * LONGEST {
            _ = child.kill();
            _ = child.wait();
            return Err(format!("takes more than {} s", 2 * LONGEST.as_secs()));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn ended(status: ExitStatus) -> String {
    format!("the process ended ({status})")
}

/// Message and place of the last panic. Caught panics count too: none is expected.
static PANIC: Mutex<Option<(String, String)>> = Mutex::new(None);

/// The child process: does nothing unless [`start`] started it.
#[test]
fn a_child_process_runs_the_inputs_of_a_target() {
    let Ok(asked) = std::env::var(ASKED) else { return };
    let asked: Asked = serde_json::from_str(&asked).unwrap();
    let target = TARGETS.iter().find(|target| target.name == asked.target).unwrap();
    // Set before any other hook, which may silence panics that it expects.
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let said = panic.payload_as_str().unwrap_or("says nothing").to_owned();
        *PANIC.lock().unwrap() = Some((place, said));
    }));
    let ended = catch_unwind(AssertUnwindSafe(|| process(target, &asked)));
    if ended.is_err() {
        eprintln!("{:?}", PANIC.lock().unwrap());
        std::process::abort();
    }
}

fn process(target: &Target, asked: &Asked) {
    let pool = Pool::new(target.format, (target.seeds)());
    let scratch = tempfile::tempdir().unwrap();
    let mut run = (target.prepare)(scratch.path());
    *PANIC.lock().unwrap() = None;
    let mut told = Told { given: asked.skip, ..Told::default() };
    let mut places: HashMap<String, usize> = HashMap::new();
    let (begun, mut written) = (Instant::now(), Instant::now());
    let tell = |told: &mut Told| {
        told.seconds = begun.elapsed().as_secs_f64();
        put(&asked.folder.join("told"), &serde_json::to_vec(told).unwrap());
    };
    let mut one = |input: &[u8], told: &mut Told| {
        put(&asked.folder.join("current"), input);
        let started = Instant::now();
        let failed = failure(&mut run, input, &mut told.accepted);
        told.inputs += 1;
        let took = started.elapsed();
        if took.as_secs_f64() > told.slowest {
            told.slowest = took.as_secs_f64();
            put(&asked.folder.join("slowest"), input);
        }
        if took > LONGEST {
            let path = asked.folder.join(format!("slow-{}-{}", asked.seed, told.inputs));
            fs::write(&path, input).unwrap();
            told.failures.push((format!("takes {:.1} s", took.as_secs_f64()), path));
        }
        if let Some((place, said)) = failed {
            let times = places.entry(place.clone()).or_default();
            *times += 1;
            if *times <= MOST_OF_A_PLACE {
                let path = asked.folder.join(format!("panic-{}-{}", asked.seed, told.inputs));
                fs::write(&path, smallest(&mut run, input, &place, &asked.folder)).unwrap();
                told.failures.push((format!("panics at {place}: {said}"), path));
            }
        }
    };
    let files = corpus(target.name).into_iter().map(|path| fs::read(path).unwrap());
    let given = files.chain(pool.seeds().iter().cloned()).skip(asked.skip);
    for input in given {
        tell(&mut told);
        one(&input, &mut told);
        told.given += 1;
    }
    let mut random = Random(asked.seed);
    while begun.elapsed().as_secs_f64() < asked.seconds {
        one(&pool.mutated(&mut random), &mut told);
        if written.elapsed() > Duration::from_millis(200) {
            tell(&mut told);
            written = Instant::now();
        }
    }
    tell(&mut told);
    let often: BTreeMap<_, _> = places.iter().filter(|(_, times)| **times > 1).collect();
    println!("panics that came again: {often:?}");
}

/// Returns the place and message of a panic caused by an input.
fn failure(run: &mut super::Run, input: &[u8], accepted: &mut u64) -> Option<(String, String)> {
    let ended = catch_unwind(AssertUnwindSafe(|| run(input)));
    *accepted += u64::from(matches!(ended, Ok(true)));
    PANIC.lock().unwrap().take()
}

/// Returns the smallest input found within a few seconds that panics at the same place as `input`.
fn smallest(run: &mut super::Run, input: &[u8], place: &str, folder: &Path) -> Vec<u8> {
    let (begun, mut smallest) = (Instant::now(), input.to_vec());
    'again: loop {
        for less in smaller::than(&smallest) {
            if begun.elapsed() > Duration::from_secs(5) {
                return smallest;
            }
            put(&folder.join("current"), &less);
            let failed = failure(run, &less, &mut 0);
            if less.len() < smallest.len() && failed.is_some_and(|(at, _)| at == place) {
                smallest = less;
                continue 'again;
            }
        }
        return smallest;
    }
}
