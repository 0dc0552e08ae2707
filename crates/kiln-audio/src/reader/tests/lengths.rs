//! Length fields that were never written, were written too early, or could not be known.

use super::*;

fn put(bytes: &mut [u8], at: usize, length: u32) {
    bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
}

/// Returns the samples of `bytes` and checks that no damage is reported.
#[track_caller]
fn whole(bytes: Vec<u8>) -> Vec<f32> {
    let mut reader = of_bytes(bytes).unwrap();
    let samples = all(&mut reader);
    assert_eq!(reader.damage(), None);
    samples
}

fn find(bytes: &[u8], name: &[u8]) -> usize {
    bytes.windows(name.len()).position(|part| part == name).unwrap()
}

const WAVES: [&str; 4] = ["16k-mono-i16.wav", "8k-mono-u8.wav", "11k-mono-f32.wav", "24k-stereo-i24.wav"];

#[test]
fn a_header_with_unfinished_sizes_loses_no_samples() {
    for name in WAVES {
        let file = bytes(name);
        let (samples, data) = (whole(file.clone()), find(&file, b"data") + 4);
        let (riff, size) = (file.len() as u32 - 8, (file.len() - data - 4) as u32);
        for (riff, size) in [
            (riff, 0),
            (36, 0),
            (0, 0),
            (0, size),
            (36, size),
            (0x7FFF_FFFF, 0x7FFF_FFFF),
            (0x7FFF_F024, 0x7FFF_F000),
            (0x7FFF_FFFF, 0x7FFF_FFFF - 36),
            (u32::MAX, u32::MAX),
            (u32::MAX, u32::MAX - 36),
            (0x8000_0000, 0x8000_0000),
        ] {
            let mut file = file.clone();
            put(&mut file, 4, riff);
            put(&mut file, data, size);
            assert!(whole(file) == samples, "{name} with {riff:x} and {size:x}");
        }
        if name == "8k-mono-u8.wav" {
            continue;
        }
        // The recorder was interrupted in the middle of a sample.
        let mut cut = file.clone();
        put(&mut cut, data, 0);
        cut.push(1);
        assert!(whole(cut) == samples, "{name} and a byte");
    }
    // The number of samples, in a separate chunk.
    let mut file = bytes("11k-mono-f32.wav");
    let (fact, data) = (find(&file, b"fact") + 8, find(&file, b"data") + 4);
    let samples = whole(file.clone());
    put(&mut file, fact, 0);
    put(&mut file, data, 0);
    assert!(whole(file) == samples);
}

#[test]
fn chunks_after_the_samples_are_skipped() {
    let (file, list) = (bytes(WAVES[0]), b"LIST\x0A\0\0\0INFOabcdef");
    let samples = whole(file.clone());
    assert!(whole([&file[..], list].concat()) == samples);
    let mut empty = [&file[..44], list].concat();
    put(&mut empty, 40, 0);
    assert!(whole(empty).is_empty());
    let mut long = file.clone();
    put(&mut long, 40, 16_000);
    let mut reader = of_bytes(long).unwrap();
    assert!(all(&mut reader) == samples);
    assert!(reader.damage().unwrap().contains("is cut short: 0.2 s of 0.5 s"), "{:?}", reader.damage());
    // A header that was written while recording continued.
    let mut stale = file.clone();
    put(&mut stale, 40, 4000);
    let mut reader = of_bytes(stale).unwrap();
    assert!(all(&mut reader) == samples[..2000]);
    assert!(
        reader.damage().unwrap().contains("ends after 0.1 s by its header, and 4000 more bytes"),
        "{:?}",
        reader.damage()
    );
}

#[test]
fn lengths_of_64_bits_are_read() {
    let (file, list) = (bytes(WAVES[0]), b"LIST\x0A\0\0\0INFOabcdef");
    let (samples, sound) = (whole(file.clone()), &file[44..]);
    for (name, more) in [(b"RF64", &list[..]), (b"BW64", &[])] {
        for size in [sound.len() as u64, 0, u64::MAX] {
            let more = if size == sound.len() as u64 { more } else { &[] };
            let long = [
                &name[..],
                b"\xFF\xFF\xFF\xFFWAVEds64\x1C\0\0\0",
                &size.saturating_add(72).to_le_bytes(),
                &size.to_le_bytes(),
                &[0; 12],
                &file[12..40],
                &[0xFF; 4],
                sound,
                more,
            ];
            assert!(whole(long.concat()) == samples, "{size}");
        }
    }
}

#[test]
fn tags_after_the_samples_are_skipped() {
    let mut id3 = [0; 128];
    id3[..9].copy_from_slice(b"TAGa song");
    let ape: Vec<u8> = {
        let end = |flags: u8| {
            [
                &b"APETAGEX\xD0\x07\0\0"[..],
                &(32 + 6_u32).to_le_bytes(),
                &[1, 0, 0, 0, 0, 0, 0, flags],
                &[0; 8],
            ]
            .concat()
        };
        [end(0xA0), b"abcdef".to_vec(), end(0x80)].concat()
    };
    for name in ["24k-stereo.flac", "48k-mono.flac", "16k-mono.mp3", "44k-stereo.ogg", "16k-mono-i16.wav"] {
        let file = bytes(name);
        let samples = whole(file.clone());
        assert!(whole([&file[..], &id3].concat()) == samples, "{name}");
        if !name.ends_with("wav") {
            assert!(whole([&file[..], &ape, &id3].concat()) == samples, "{name}");
        }
    }
}

#[test]
fn a_wrong_sample_count_loses_no_samples() {
    for name in ["24k-stereo.flac", "48k-mono.flac"] {
        let file = bytes(name);
        let samples = whole(file.clone());
        // The low 32 bits of the 36-bit sample count.
        let claimed = u32::from_be_bytes(file[22..26].try_into().unwrap());
        for wrong in [0, claimed / 2] {
            let mut file = file.clone();
            file[22..26].copy_from_slice(&wrong.to_be_bytes());
            assert!(whole(file) == samples, "{name} with {wrong}");
        }
        let mut long = file.clone();
        long[22..26].copy_from_slice(&(claimed * 2).to_be_bytes());
        let mut reader = of_bytes(long).unwrap();
        assert!(all(&mut reader) == samples);
        assert!(reader.damage().unwrap().contains("is cut short"), "{name}");
    }
}

/// The first frame of an MP3 file may state the number of frames that follow.
#[test]
fn appended_mp3_frames_are_read() {
    for name in ["16k-mono.mp3", "44k-stereo.mp3"] {
        let file = bytes(name);
        let samples = whole(file.clone());
        let tag = find(&file, b"Info");
        // The position after the first frame, which the byte count includes.
        let counted = u32::from_be_bytes(file[tag + 12..tag + 16].try_into().unwrap()) as usize;
        let start = file.len() - counted;
        let next = (start + 4..file.len()).find(|at| file[*at..*at + 2] == file[start..start + 2]).unwrap();
        let twice = [&file[..], &file[next..]].concat();
        let more = whole(twice).len();
        assert!(more > samples.len() * 3 / 2, "{name}: {more} of twice {}", samples.len());
        let mut none = file.clone();
        none[tag + 8..tag + 12].fill(0);
        assert!(whole(none).len() >= samples.len(), "{name}");
    }
}

/// The audio data of an MP4 file is moved after its tables.
#[test]
fn a_wrong_size_of_the_last_mp4_part_loses_no_samples() {
    let file = bytes("44k-mono.m4a");
    let samples = whole(file.clone());
    let (sound, tables) = (find(&file, b"mdat") - 4, find(&file, b"moov") - 4);
    let mut moved = file[tables..].to_vec();
    // The positions of the audio data, in bytes from the start of the file.
    let places = find(&moved, b"stco") + 8;
    let more = (file.len() - tables) as u32;
    let count = u32::from_be_bytes(moved[places..places + 4].try_into().unwrap()) as usize;
    for place in moved[places + 4..].chunks_mut(4).take(count) {
        let at = u32::from_be_bytes((&*place).try_into().unwrap());
        place.copy_from_slice(&(at + more).to_be_bytes());
    }
    for size in [(tables - sound) as u32, 0, 100, 0x7FFF_FFFF, u32::MAX] {
        let sound = [&size.to_be_bytes(), &file[sound + 4..tables]].concat();
        let all = [&file[..36], &moved, &sound].concat();
        assert!(whole(all) == samples, "{size:x}");
    }
}
