//! Lengths that files claim, corrected by the bytes that are there.
//!
//! A recorder that was ended, and a program that writes to a pipe, leave lengths that were never known. Decoders take them at their word.

use std::{
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
};

use symphonia::core::io::MediaSource;

/// Lengths from here on say that nobody knew it: 0x7FFFF000 (sox), 0x7FFFFFFF, 0xFFFFFFFF (ffmpeg), and those less what comes before the sound.
const UNKNOWN: u64 = 0x7FFF_0000;
/// The length field that symphonia reads as unknown.
const ANY: [u8; 4] = [0xFF; 4];
/// Chunks before the sound.
const MOST_CHUNKS: usize = 1000;
/// Tags before the sound.
const MOST_TAGS: usize = 16;
/// Bytes that a length may be wrong by: tags that are not counted.
const SLACK: u64 = 1024;

/// A source whose lengths are right.
pub(super) struct Corrected {
    source: Box<dyn MediaSource>,
    /// Bytes that stand in place of the source's own, by their place.
    patches: Vec<(u64, [u8; 4])>,
    len: u64,
    at: u64,
}

impl Corrected {
    /// `source` with right lengths, at its beginning; and bytes behind its sound that are nothing that is known.
    pub(super) fn of(mut source: Box<dyn MediaSource>) -> io::Result<(Box<dyn MediaSource>, u64)> {
        let Some(len) = source.byte_len() else { return Ok((source, 0)) };
        let mut found = Found { patches: Vec::new(), len, unknown: 0 };
        let mut file = File { source: &mut *source, len };
        let tag = skip_id3v2(&mut file)?;
        match file.bytes(tag)? {
            [b'R', b'I', b'F', b'F'] | [b'R', b'F', b'6', b'4'] | [b'B', b'W', b'6', b'4'] => {
                wave(&mut file, tag, &mut found)?;
            }
            [b'f', b'L', b'a', b'C'] | [b'O', b'g', b'g', b'S'] => found.len = before_tags(&mut file)?,
            [0xFF, second, third, fourth] if second & 0xE0 == 0xE0 => {
                found.len = before_tags(&mut file)?;
                mp3(&mut file, tag, [second, third, fourth], &mut found)?;
            }
            _ if &file.bytes(4)? == b"ftyp" => mp4(&mut file, &mut found)?,
            _ => {}
        }
        source.rewind()?;
        let unknown = found.unknown;
        Ok((Box::new(Self { source, patches: found.patches, len: found.len, at: 0 }), unknown))
    }
}

impl Read for Corrected {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.len.saturating_sub(self.at)).unwrap_or(usize::MAX).min(into.len());
        let Some(into) = into.get_mut(..most) else { return Ok(0) };
        let read = self.source.read(into)?;
        let end = self.at + read as u64;
        for (place, bytes) in &self.patches {
            for (at, byte) in (*place..).zip(bytes) {
                if (self.at..end).contains(&at)
                    && let Some(into) = into.get_mut((at - self.at) as usize)
                {
                    *into = *byte;
                }
            }
        }
        self.at = end;
        Ok(read)
    }
}

impl Seek for Corrected {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::End(by) => SeekFrom::Start(self.len.saturating_add_signed(by)),
            to => to,
        };
        self.at = self.source.seek(to)?;
        Ok(self.at)
    }
}

impl MediaSource for Corrected {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.len)
    }
}

/// Corrections of a file: bytes to replace, by their places, and the length that is read.
struct Found {
    patches: Vec<(u64, [u8; 4])>,
    len: u64,
    unknown: u64,
}

struct File<'a> {
    source: &'a mut dyn MediaSource,
    len: u64,
}

impl File<'_> {
    /// The bytes at `at`; zeros where there are none.
    fn bytes<const N: usize>(&mut self, at: u64) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        if at.checked_add(N as u64).is_some_and(|end| end <= self.len) {
            self.source.seek(SeekFrom::Start(at))?;
            self.source.read_exact(&mut bytes)?;
        }
        Ok(bytes)
    }

    fn u32_le(&mut self, at: u64) -> io::Result<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn u32_be(&mut self, at: u64) -> io::Result<u32> {
        self.bytes(at).map(u32::from_be_bytes)
    }
}

/// Where the file begins after tags that are before it.
fn skip_id3v2(file: &mut File<'_>) -> io::Result<u64> {
    let mut at = 0;
    for _ in 0..MOST_TAGS {
        let [b'I', b'D', b'3', _, _, flags, a, b, c, d] = file.bytes(at)? else { break };
        // Seven bits a byte.
        let size = [a, b, c, d].iter().fold(0, |size, byte| size << 7 | u64::from(byte & 0x7F));
        at += 10 + size + if flags & 0x10 != 0 { 10 } else { 0 };
    }
    Ok(at)
}

/// Where the file ends before tags that are after it: ID3v1, and APEv2.
fn before_tags(file: &mut File<'_>) -> io::Result<u64> {
    let mut end = file.len;
    if end >= 128 && &file.bytes(end - 128)? == b"TAG" {
        end -= 128;
    }
    if end >= 32 && &file.bytes(end - 32)? == b"APETAGEX" {
        // Without its header, which the flags tell of.
        let size = u64::from(file.u32_le(end - 20)?);
        let header = if file.u32_le(end - 12)? >> 31 == 1 { 32 } else { 0 };
        end = end.checked_sub(size + header).unwrap_or(end);
    }
    Ok(end)
}

/// RIFF, and its variant with lengths of 64 bits (EBU Tech 3306).
fn wave(file: &mut File<'_>, start: u64, found: &mut Found) -> io::Result<()> {
    if &file.bytes(start + 8)? != b"WAVE" {
        return Ok(());
    }
    found.patches.extend([(start, *b"RIFF"), (start + 4, ANY)]);
    let (mut at, mut block, mut long) = (start + 12, 1, None);
    for _ in 0..MOST_CHUNKS {
        let (name, size): ([u8; 4], _) = (file.bytes(at)?, u64::from(file.u32_le(at + 4)?));
        let content = at + 8;
        match &name {
            b"fmt " => block = u64::from(u16::from_le_bytes(file.bytes(content + 12)?)).max(1),
            b"ds64" => long = Some(u64::from_le_bytes(file.bytes(content + 8)?)),
            b"data" => {
                let sound = content..file.len;
                if sound.is_empty() {
                    return Ok(());
                }
                let claimed = long.filter(|_| size == u64::from(u32::MAX)).unwrap_or(size);
                let len = sound_len(file, sound, claimed)? / block * block;
                // The sound may lack the byte that makes its length even.
                let rest = content + len..before_tags(file)?;
                if rest.end.saturating_sub(rest.start) >= block.max(8)
                    && !is_chunks(file, rest.clone())?
                    && !is_chunks(file, rest.start + claimed % 2..rest.end)?
                {
                    found.unknown = rest.end - rest.start;
                }
                // What does not fit into 32 bits ends where the source ends.
                found.patches.push((at + 4, u32::try_from(len).map_or(ANY, u32::to_le_bytes)));
                if len >= u64::from(u32::MAX) {
                    found.len = found.len.min(content.saturating_add(len));
                }
                return Ok(());
            }
            _ => {}
        }
        at = content + size + size % 2;
    }
    Ok(())
}

/// Bytes of sound that begin with `place`, which claims to be as long as `claimed`.
fn sound_len(file: &mut File<'_>, place: Range<u64>, claimed: u64) -> io::Result<u64> {
    const WRAP: u64 = 1 << 32;

    let there = place.end - place.start;
    let rest = there.checked_sub(claimed);
    Ok(match rest {
        // A length that was never written, unless other chunks follow at once: then there is no sound.
        _ if claimed == 0 && !is_chunks(file, place)? => there,
        None if claimed >= UNKNOWN => there,
        // Longer than 32 bits can say.
        Some(rest) if rest >= WRAP => claimed + rest / WRAP * WRAP,
        _ => claimed,
    })
}

/// Whether a place is made of chunks.
fn is_chunks(file: &mut File<'_>, place: Range<u64>) -> io::Result<bool> {
    let mut at = place.start;
    for _ in 0..MOST_CHUNKS {
        let (name, size): ([u8; 4], _) = (file.bytes(at)?, u64::from(file.u32_le(at + 4)?));
        if place.end < at + 8 || !name.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return Ok(false);
        }
        at += 8 + size;
        // The last may lack the byte that makes its length even.
        if at == place.end || at + size % 2 == place.end {
            return Ok(true);
        }
        at += size % 2;
    }
    Ok(false)
}

/// The last part of an MP4 file may say that it is longer than the file, or not how long it is.
fn mp4(file: &mut File<'_>, found: &mut Found) -> io::Result<()> {
    let mut at = 0;
    while at + 8 <= file.len && found.patches.is_empty() {
        let size = match file.u32_be(at)? {
            1 => u64::from_be_bytes(file.bytes(at + 8)?),
            size => u64::from(size),
        };
        let there = file.len - at;
        match u32::try_from(there) {
            // After a length that is too short there is no part, but sound.
            Ok(short) if (size == 0 || size > there) && &file.bytes(at + 4)? == b"mdat" => {
                found.patches.push((at, short.to_be_bytes()));
            }
            _ if size < 8 => break,
            _ => at = at.saturating_add(size),
        }
    }
    Ok(())
}

/// A first frame that says how many follow: Xing's, and Fraunhofer's. Where there are more, it is made a frame as any other.
fn mp3(file: &mut File<'_>, start: u64, header: [u8; 3], found: &mut Found) -> io::Result<()> {
    let (is_mpeg1, is_mono) = (header[0] >> 3 & 3 == 3, header[2] >> 6 == 3);
    let side = match (is_mpeg1, is_mono) {
        (true, false) => 32,
        (true, true) | (false, false) => 17,
        (false, true) => 9,
    };
    let there = found.len.saturating_sub(start);
    let is_short = |frames: u32, bytes: Option<u32>| {
        frames == 0 || bytes.is_some_and(|bytes| u64::from(bytes) + SLACK < there)
    };
    let xing = start + 4 + side;
    let name: [u8; 4] = file.bytes(xing)?;
    if &name == b"Xing" || &name == b"Info" {
        let flags = file.u32_be(xing + 4)?;
        let frames = file.u32_be(xing + 8)?;
        let bytes = (flags & 2 != 0).then_some(file.u32_be(xing + 12)?);
        if flags & 1 != 0 && is_short(frames, bytes) {
            found.patches.push((xing, [0; 4]));
        }
    }
    let vbri = start + 36;
    if &file.bytes(vbri)? == b"VBRI" && is_short(file.u32_be(vbri + 14)?, Some(file.u32_be(vbri + 10)?)) {
        found.patches.push((vbri, [0; 4]));
    }
    Ok(())
}
