//! Stored results of self-tests, in two files in the user's cache folder: `self-test.json` has verdicts,
//! which say which parts of a device (kernels, matrix units, captured steps) are not trusted.
//! `self-test.running` has a note with the name of the kernel under test, which the next process finds if
//! that kernel crashes this one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use etcetera::BaseStrategy;
use kiln_core::{
    Error, Result,
    files::{self, Held},
};
use web_time::Instant;

/// Maximum size in bytes of a file of verdicts that is read.
const LONGEST: u64 = 1 << 20;

/// Maximum size in bytes of a note that is read.
const LONGEST_NOTE: u64 = 1 << 12;

/// Time after which a kernel under test counts as hanging, if the user ends the program. No working kernel
/// takes as long.
const HANGS: Duration = Duration::from_secs(10);

/// The records of this process that hold the file of the note, for [`interrupted`].
static NOTED: Mutex<Vec<Weak<Mutex<RecordState>>>> = Mutex::new(Vec::new());

/// The verdicts of a program without files; `None`: it has none to keep.
static KEPT: Mutex<Option<Verdicts>> = Mutex::new(None);

/// Gives the self-test the verdicts that [`kept_verdicts`] returned in an earlier run; an empty text the
/// first time. For programs without a cache folder, such as pages in a browser: the kernels of a GPU are then
/// not compared again at each load.
///
/// # Errors
/// [`Error::Setting`] for another text.
pub fn keep_verdicts(text: &str) -> Result<()> {
    let wrong = |e: serde_json::Error| Error::Setting { name: "verdicts", why: format!("are no JSON: {e}") };
    let verdicts =
        if text.is_empty() { Verdicts::new() } else { serde_json::from_str(text).map_err(wrong)? };
    *kept() = Some(verdicts);
    Ok(())
}

/// The verdicts of this run and of those before it, if [`keep_verdicts`] was called.
pub fn kept_verdicts() -> Option<String> {
    kept().as_ref().and_then(|verdicts| serde_json::to_string(verdicts).ok())
}

fn kept() -> MutexGuard<'static, Option<Verdicts>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names of untrusted parts. A key is `DEVICE | TEST`, where `DEVICE` includes the driver and the version of
/// Kiln, and `TEST` is all that the result depends on besides; or `DEVICE | crashes`.
type Verdicts = BTreeMap<String, BTreeSet<String>>;

/// The stored results of one device, and the state of its test. Clones share both.
#[derive(Clone, Debug)]
pub(super) struct Record(Arc<Mutex<RecordState>>);

/// Contents of a [`Record`].
#[derive(Debug)]
struct RecordState {
    /// The device, with its driver and the version of Kiln.
    device: String,
    /// Path of the file of verdicts; `None`: they are in memory, if the program keeps them.
    file: Option<PathBuf>,
    /// The file of the note, locked; `None` if another process holds it, or if it cannot be opened.
    note: Option<Held>,
    /// The kernel under test, and the start of the test.
    testing: Option<(String, Instant)>,
    /// Kernels that crashed a process or lost the device.
    crashed: BTreeSet<String>,
}

/// Kiln's folder in the user's cache folder; `None` if the user has none.
pub(super) fn folder() -> Option<PathBuf> {
    Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("kiln"))
}

impl Record {
    /// Opens the record of a device in `folder`; `None`: nothing is stored. A note that an earlier process
    /// left counts as a crash of the kernel that it names.
    pub(super) fn of(device: String, folder: Option<&Path>) -> Self {
        let file = folder.map(|folder| folder.join("self-test.json"));
        let note = folder.and_then(|folder| {
            let taken = fs::create_dir_all(folder)
                .map_err(|e| e.to_string())
                .and_then(|()| Held::take(&folder.join("self-test.running")).map_err(|e| e.to_string()));
            match taken {
                // `None`: another process is testing, and the note is its own.
                Ok(note) => note,
                Err(why) => {
                    tracing::debug!(target: "kiln", "it is not noted which kernel is tested: {why}");
                    None
                }
            }
        });
        let mut known = RecordState { device, file, note, testing: None, crashed: BTreeSet::new() };
        if let Some(note) = &mut known.note {
            let left = note.read(LONGEST_NOTE).unwrap_or_default();
            if let Some((device, kernel)) = left.split_once('\n') {
                known.remember_crash(device, kernel);
            }
            known.clear();
        }
        known.crashed = known.verdicts().remove(&crashes(&known.device)).unwrap_or_default();
        let has_note = known.note.is_some();
        let known = Arc::new(Mutex::new(known));
        if has_note {
            let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
            noted.retain(|known| known.strong_count() > 0);
            noted.push(Arc::downgrade(&known));
        }
        Self(known)
    }

    fn known(&self) -> MutexGuard<'_, RecordState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes to the note that `kernel` is about to be tested.
    pub(super) fn mark(&self, kernel: &str) {
        let mut known = self.known();
        known.testing = Some((kernel.to_owned(), Instant::now()));
        let note = format!("{}\n{kernel}", known.device);
        known.write(&note);
    }

    /// Empties the note: no kernel is being tested.
    pub(super) fn clear(&self) {
        self.known().clear();
    }

    /// Records that the kernel under test lost the device.
    pub(super) fn lost(&self) {
        let mut known = self.known();
        if let Some((kernel, _)) = known.testing.take() {
            let device = known.device.clone();
            known.remember_crash(&device, &kernel);
            known.crashed.insert(kernel);
        }
        known.clear();
    }

    /// Kernels that crashed a process or lost the device.
    pub(super) fn crashed(&self) -> BTreeSet<String> {
        self.known().crashed.clone()
    }

    /// The end of an error message about a crash, with instructions to test the kernel again: the note may be
    /// of a test that the user ended. Empty if nothing is stored.
    pub(super) fn again(&self) -> String {
        let file = self.known().file.as_ref().map(|file| file.display().to_string());
        file.map_or_else(String::new, |file| {
            format!(", until {file} is deleted (if a program was stopped by hand)")
        })
    }

    /// The untrusted parts according to the test `what`: the stored ones, if there are any, else the result
    /// of `find`, which is stored. Without `remembers`, the store is not used.
    ///
    /// # Errors
    /// The errors of `find`.
    pub(super) async fn verdict(
        &self,
        what: &str,
        remembers: bool,
        find: impl AsyncFnOnce() -> Result<BTreeSet<String>>,
    ) -> Result<BTreeSet<String>> {
        if !remembers {
            return find().await;
        }
        let key = format!("{} | {what}", self.known().device);
        if let Some(known) = self.known().verdicts().remove(&key) {
            return Ok(known);
        }
        let found = find().await?;
        let known = self.known();
        let mut verdicts = known.verdicts();
        verdicts.insert(key, found.clone());
        known.remember(&verdicts);
        Ok(found)
    }
}

/// Tells the self-test that the user is about to end this program, as with Ctrl-C.
///
/// A program that ends while the first load of a model tests a kernel of a GPU looks as if that kernel had
/// crashed it, and the kernel is left out from then on. This call prevents that, unless the kernel has run
/// for ten seconds: then it hangs, and is the reason for which the program is ended. No kernel is tested
/// after this call.
///
/// ```
/// // What a program does with Ctrl-C, with the crate `ctrlc`:
/// let handler = || {
///     kiln::expert::interrupted();
///     std::process::exit(130);
/// };
/// # let _ = handler;
/// ```
pub fn interrupted() {
    let noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    for known in noted.iter().filter_map(Weak::upgrade) {
        known.lock().unwrap_or_else(PoisonError::into_inner).interrupted();
    }
}

/// The key under which crashes of a device are stored.
fn crashes(device: &str) -> String {
    format!("{device} | crashes")
}

impl RecordState {
    /// The stored verdicts. Empty if there are none or they cannot be read; they are created again.
    fn verdicts(&self) -> Verdicts {
        let read = |file: &PathBuf| serde_json::from_slice(&files::try_read(file, LONGEST).ok()??).ok();
        match &self.file {
            Some(file) => read(file).unwrap_or_default(),
            None => kept().clone().unwrap_or_default(),
        }
    }

    /// Stores verdicts. If they cannot be written, the test is repeated at the next load.
    fn remember(&self, verdicts: &Verdicts) {
        let Some(file) = &self.file else {
            kept().iter_mut().for_each(|kept| kept.clone_from(verdicts));
            return;
        };
        let written =
            file.parent().map_or(Ok(()), fs::create_dir_all).map_err(|e| e.to_string()).and_then(|()| {
                let text = serde_json::to_vec_pretty(verdicts).map_err(|e| e.to_string())?;
                files::write(file, &text).map_err(|e| e.to_string())
            });
        if let Err(why) = written {
            tracing::debug!(target: "kiln", "verdicts of kernels are not remembered: {why}");
        }
    }

    /// Stores that `kernel` crashed a process or lost `device`.
    fn remember_crash(&self, device: &str, kernel: &str) {
        let mut verdicts = self.verdicts();
        verdicts.entry(crashes(device)).or_default().insert(kernel.to_owned());
        self.remember(&verdicts);
    }

    /// Writes the note, if this process holds it.
    fn write(&mut self, text: &str) {
        if let Some(Err(why)) = self.note.as_mut().map(|note| note.write(text)) {
            tracing::debug!(target: "kiln", "it is not noted which kernel is tested: {why}");
        }
    }

    /// See [`Record::clear`].
    fn clear(&mut self) {
        self.testing = None;
        self.write("");
    }

    /// See [`interrupted`].
    fn interrupted(&mut self) {
        if self.testing.as_ref().is_none_or(|(_, since)| since.elapsed() < HANGS) {
            self.clear();
            // Other threads run until the process ends, and must not write the note again.
            self.note = None;
        }
    }
}

/// Empties the note. A process that crashes does not get here, so its note stays.
impl Drop for RecordState {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use kiln_core::read_back;

    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn never() -> Result<BTreeSet<String>> {
        Err(Error::Execution("asked again".into()))
    }

    /// The verdict of a test that finds `found`, if it is made.
    fn verdict(
        record: &Record,
        dtype: &str,
        remembers: bool,
        found: Result<BTreeSet<String>>,
    ) -> Result<BTreeSet<String>> {
        read_back::wait(record.verdict(dtype, remembers, async || found))
    }

    #[test]
    fn a_verdict_is_computed_once_per_device_and_type() {
        let folder = tempfile::tempdir().unwrap();
        let of = |device: &str| Record::of(device.to_owned(), Some(&folder.path().join("kiln")));
        assert_eq!(verdict(&of("a"), "f32", true, Ok(names(&["linear"]))), Ok(names(&["linear"])));
        assert_eq!(verdict(&of("a"), "f32", true, never()), Ok(names(&["linear"])));
        assert_eq!(verdict(&of("a"), "f16", true, Ok(names(&[]))), Ok(names(&[])), "another type");
        assert_eq!(verdict(&of("b"), "f32", true, Ok(names(&[]))), Ok(names(&[])), "another driver");
        assert_eq!(verdict(&of("b"), "f32", true, never()), Ok(names(&[])));
        assert_eq!(verdict(&of("a"), "f32", true, never()), Ok(names(&["linear"])), "still known");
        assert!(verdict(&of("a"), "f32", false, never()).is_err(), "what is remembered is not asked");
        assert!(
            verdict(&Record::of("a".to_owned(), None), "f32", true, never()).is_err(),
            "there is no file"
        );
    }

    #[test]
    fn verdicts_are_kept_by_a_program_without_files() {
        let record = || Record::of("kept".to_owned(), None);
        assert_eq!(verdict(&record(), "f32", true, Ok(names(&["linear"]))), Ok(names(&["linear"])));
        assert!(verdict(&record(), "f32", true, never()).is_err(), "nobody keeps them");
        keep_verdicts("").unwrap();
        assert_eq!(verdict(&record(), "f32", true, Ok(names(&["linear"]))), Ok(names(&["linear"])));
        assert_eq!(verdict(&record(), "f32", true, never()), Ok(names(&["linear"])));
        let kept = kept_verdicts().unwrap();
        keep_verdicts("").unwrap();
        assert!(verdict(&record(), "f32", true, never()).is_err(), "they were forgotten");
        keep_verdicts(&kept).unwrap();
        assert_eq!(verdict(&record(), "f32", true, never()), Ok(names(&["linear"])));
        assert!(keep_verdicts("[1]").is_err());
    }

    #[test]
    fn an_unusable_file_of_verdicts_does_not_change_verdicts() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("self-test.json");
        fs::write(&file, "[1, 2").unwrap();
        let record = Record::of("a".to_owned(), Some(folder.path()));
        assert_eq!(verdict(&record, "f32", true, Ok(names(&["sample"]))), Ok(names(&["sample"])));
        assert_eq!(verdict(&record, "f32", true, never()), Ok(names(&["sample"])), "the file was replaced");
        // A file is in the place of the folder.
        let record = Record::of("a".to_owned(), Some(&file));
        record.mark("linear");
        assert_eq!(verdict(&record, "f32", true, Ok(names(&[]))), Ok(names(&[])));
    }

    #[test]
    fn an_unfinished_test_counts_as_a_crash_on_its_device() {
        let folder = tempfile::tempdir().unwrap();
        let of = |device: &str| Record::of(device.to_owned(), Some(folder.path()));
        let record = of("a");
        record.mark("linear");
        let other = of("a");
        assert_eq!(other.crashed(), names(&[]), "it is still being tested");
        other.mark("sample");
        drop(other);
        let left = fs::read_to_string(folder.path().join("self-test.running")).unwrap();
        drop(record);
        assert_eq!(of("a").crashed(), names(&[]), "the test was ended");
        // The state that a crashed process leaves.
        fs::write(folder.path().join("self-test.running"), &left).unwrap();
        assert_eq!(of("b").crashed(), names(&[]), "it was another device");
        assert_eq!(of("a").crashed(), names(&["linear"]));
        assert_eq!(of("a").crashed(), names(&["linear"]), "it is remembered");
        let record = of("a");
        record.mark("sample");
        record.lost();
        assert_eq!(record.crashed(), names(&["linear", "sample"]));
        drop(record);
        assert_eq!(of("a").crashed(), names(&["linear", "sample"]));
    }
}
