#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    let why = result.unwrap_err().to_string();
    assert!(why.contains(expected), "{why}");
}

#[test]
fn files_beyond_the_limit_and_unreadable_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "12345").unwrap();
    assert_eq!(read(&path, 5).unwrap(), b"12345");
    refused(read(&path, 4), "longer than the 4 bytes");
    refused(read(folder.path(), 4), "is a folder");
    refused(read(&folder.path().join("none"), 4), "no such file");
    assert_eq!(try_read(&folder.path().join("none"), 4), Ok(None));
    fs::write(&path, [0xff, 0xfe]).unwrap();
    refused(read_text(&path), "UTF-8");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n").unwrap();
    refused(read_text(&path), "git lfs pull");
    refused(open_to_seek(&path), "git lfs pull");
}

#[test]
fn streams_become_files_that_can_be_read_in_any_order() {
    let (mut file, mut read) = (spool(&b"12345"[..]).unwrap(), String::new());
    file.seek(io::SeekFrom::Start(3)).unwrap();
    file.read_to_string(&mut read).unwrap();
    assert_eq!(read, "45");

    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
    }
    assert!(spool(Broken).unwrap_err().contains("connection reset"));
}

#[test]
fn a_file_is_replaced_only_when_the_new_one_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    write(&path, b"first").unwrap();
    let (one, other) = (NewFile::create(&path).unwrap(), NewFile::create(&path).unwrap());
    assert_ne!(one.temporary(), other.temporary(), "two processes may write the same file");
    drop(one);
    assert_eq!(fs::read(&path).unwrap(), b"first");
    other.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no temporary file is left");
    refused(write(&folder.path().join("none/file"), b""), "there is no folder");
    refused(write(folder.path(), b""), "is a folder");
}

#[cfg(unix)]
mod unix {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn devices_and_pipes_are_neither_read_nor_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let zero = folder.path().join("zero");
        symlink("/dev/zero", &zero).unwrap();
        for path in [&pipe, &zero] {
            refused(read(path, 10), "not a regular file");
            refused(write(path, b"x"), "not a regular file");
            refused(check_writable(path), "not a regular file");
        }
        assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
        assert!(fs::symlink_metadata(&zero).unwrap().is_symlink());
    }

    #[test]
    fn links_are_followed_and_permissions_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        // The link is relative, and its target does not exist yet.
        symlink("file", &link).unwrap();
        write(&link, b"first").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o600, 0o600);
        fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        write(&link, b"second").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"second");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        fs::set_permissions(&file, PermissionsExt::from_mode(0o444)).unwrap();
        refused(write(&link, b"third"), "read-only");
        assert_eq!(fs::read(&file).unwrap(), b"second");
        let itself = folder.path().join("itself");
        symlink("itself", &itself).unwrap();
        refused(write(&itself, b""), "leads to itself");
    }
}

#[test]
fn a_held_file_has_one_holder_and_keeps_its_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("note");
    let mut held = Held::take(&path).unwrap().unwrap();
    assert_eq!(held.read(9).unwrap(), "");
    held.write("a longer note").unwrap();
    held.write("short").unwrap();
    assert!(Held::take(&path).unwrap().is_none(), "another has it");
    drop(held);
    let mut held = Held::take(&path).unwrap().unwrap();
    assert_eq!(held.read(5).unwrap(), "short");
    refused(held.read(4), "longer than the 4 bytes");
    refused(Held::take(folder.path()), "is a folder");
}
