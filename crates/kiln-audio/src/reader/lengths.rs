//! Length fields of files, corrected by the actual number of bytes.
//!
//! A recorder that was interrupted and a program that writes to a pipe leave length fields with invalid
//! values. Decoders trust these fields.

use std::{
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
};

use symphonia::core::io::MediaSource;

/// Smallest length that means "unknown": writers use 0x7FFFF000 (sox), 0x7FFFFFFF and 0xFFFFFFFF (ffmpeg),
/// and these values minus the bytes before the audio data.
const UNKNOWN: u64 = 0x7FFF_0000;
/// Length field that symphonia reads as unknown: it then reads up to the end of the source.
const ANY: [u8; 4] = [0xFF; 4];
/// Maximum number of chunks before the audio data.
const MOST_CHUNKS: usize = 1000;
/// Maximum number of tags before the audio data.
const MOST_TAGS: usize = 16;
/// Number of bytes by which an MP3 file may exceed the length in its header: for tags, which some writers do
/// not count.
const SLACK: u64 = 1024;

/// A source with corrected length fields.
pub(super) struct Corrected {
    source: Box<dyn MediaSource>,
    /// Positions in the source, and the four bytes that replace those from there on.
    patches: Vec<(u64, [u8; 4])>,
    /// Number of bytes that are read of the source.
    len: u64,
    /// Position of the next byte.
    at: u64,
}

impl Corrected {
    /// Corrects the length fields of `source` and rewinds it. Also returns the number of bytes after the
    /// audio data that are neither chunks nor tags; 0 if there are none. Does nothing to a source of unknown
    /// length.
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

/// Corrections of a file.
struct Found {
    /// See [`Corrected::patches`].
    patches: Vec<(u64, [u8; 4])>,
    /// Number of bytes to read.
    len: u64,
    /// Number of bytes after the audio data that are neither chunks nor tags.
    unknown: u64,
}

/// A source whose bytes are read by position.
struct File<'a> {
    source: &'a mut dyn MediaSource,
    len: u64,
}

impl File<'_> {
    /// Reads the bytes at `at`; returns zeros beyond the end.
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

/// Returns the position of the first byte after leading ID3v2 tags.
fn skip_id3v2(file: &mut File<'_>) -> io::Result<u64> {
    let mut at = 0;
    for _ in 0..MOST_TAGS {
        let [b'I', b'D', b'3', _, _, flags, a, b, c, d] = file.bytes(at)? else { break };
        // Seven bits per byte.
        let size = [a, b, c, d].iter().fold(0, |size, byte| size << 7 | u64::from(byte & 0x7F));
        at += 10 + size + if flags & 0x10 != 0 { 10 } else { 0 };
    }
    Ok(at)
}

/// Returns the position at which trailing tags begin: ID3v1 and APEv2.
fn before_tags(file: &mut File<'_>) -> io::Result<u64> {
    let mut end = file.len;
    if end >= 128 && &file.bytes(end - 128)? == b"TAG" {
        end -= 128;
    }
    if end >= 32 && &file.bytes(end - 32)? == b"APETAGEX" {
        // The size excludes the header, whose presence is given by the flags.
        let size = u64::from(file.u32_le(end - 20)?);
        let header = if file.u32_le(end - 12)? >> 31 == 1 { 32 } else { 0 };
        end = end.checked_sub(size + header).unwrap_or(end);
    }
    Ok(end)
}

/// Corrects WAVE files in RIFF, and in the variant with 64-bit lengths (RF64, EBU Tech 3306), which is
/// presented as RIFF. `start`: position of the first byte.
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
                // The padding byte that makes the length even may be missing.
                let rest = content + len..before_tags(file)?;
                if rest.end.saturating_sub(rest.start) >= block.max(8)
                    && !is_chunks(file, rest.clone())?
                    && !is_chunks(file, rest.start + claimed % 2..rest.end)?
                {
                    found.unknown = rest.end - rest.start;
                }
                // A length that does not fit into 32 bits becomes unknown, and the source ends after it.
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

/// Returns the number of bytes of audio data at the start of `place`, which ends with the file. `claimed`:
/// the length field.
fn sound_len(file: &mut File<'_>, place: Range<u64>, claimed: u64) -> io::Result<u64> {
    const WRAP: u64 = 1 << 32;

    let there = place.end - place.start;
    let rest = there.checked_sub(claimed);
    Ok(match rest {
        // A length that was never written, unless other chunks follow immediately: then there is no audio
        // data.
        _ if claimed == 0 && !is_chunks(file, place)? => there,
        None if claimed >= UNKNOWN => there,
        // The length overflowed its 32 bits: the file has at least 2^32 bytes more than it says.
        Some(rest) if rest >= WRAP => claimed + rest / WRAP * WRAP,
        _ => claimed,
    })
}

/// Whether a range of the file consists of RIFF chunks: a printable name of four bytes, a length, the
/// content.
fn is_chunks(file: &mut File<'_>, place: Range<u64>) -> io::Result<bool> {
    let mut at = place.start;
    for _ in 0..MOST_CHUNKS {
        let (name, size): ([u8; 4], _) = (file.bytes(at)?, u64::from(file.u32_le(at + 4)?));
        if place.end < at + 8 || !name.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return Ok(false);
        }
        at += 8 + size;
        // The last chunk may lack the padding byte that makes its length even.
        if at == place.end || at + size % 2 == place.end {
            return Ok(true);
        }
        at += size % 2;
    }
    Ok(false)
}

/// Corrects the last box of an MP4 file, whose length may exceed the file or be unspecified.
fn mp4(file: &mut File<'_>, found: &mut Found) -> io::Result<()> {
    let mut at = 0;
    while at + 8 <= file.len && found.patches.is_empty() {
        let size = match file.u32_be(at)? {
            1 => u64::from_be_bytes(file.bytes(at + 8)?),
            size => u64::from(size),
        };
        let there = file.len - at;
        match u32::try_from(there) {
            // Only audio data is corrected: after a box whose length is too short, these bytes are no box.
            Ok(short) if (size == 0 || size > there) && &file.bytes(at + 4)? == b"mdat" => {
                found.patches.push((at, short.to_be_bytes()));
            }
            _ if size < 8 => break,
            _ => at = at.saturating_add(size),
        }
    }
    Ok(())
}

/// Corrects the first frame, in which a Xing or Fraunhofer (VBRI) header states the numbers of frames and
/// bytes. If there are no frames according to it, or if the file is longer than it says, its name is
/// overwritten, so that decoders read the frame like any other. `header`: the second to fourth byte of the
/// frame.
fn mp3(file: &mut File<'_>, start: u64, header: [u8; 3], found: &mut Found) -> io::Result<()> {
    // Number of bytes of side information, after which a Xing header begins.
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
