//! Memory use of long recordings.

use super::*;

/// An hour of silence, generated on the fly.
struct Silence {
    header: Vec<u8>,
    len: u64,
    at: u64,
}

impl Read for Silence {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = (to.len() as u64).min(self.len - self.at) as usize;
        to[..count].fill(0);
        let header = self.header.get(self.at as usize..).unwrap_or_default();
        let both = count.min(header.len());
        to[..both].copy_from_slice(&header[..both]);
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Silence {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.at = match to {
            io::SeekFrom::Start(at) => at,
            io::SeekFrom::End(by) => self.len.saturating_add_signed(by),
            io::SeekFrom::Current(by) => self.at.saturating_add_signed(by),
        };
        self.at = self.at.min(self.len);
        Ok(self.at)
    }
}

impl MediaSource for Silence {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.len)
    }
}

/// Returns the resident memory of this process in KiB.
#[cfg(target_os = "linux")]
fn memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[cfg(not(target_os = "linux"))]
fn memory() -> usize {
    0
}

#[test]
fn an_hour_of_audio_takes_less_than_100_mib() {
    const SECONDS: u32 = 3600;
    const RATE: u32 = 24_000;

    let mut header = wav(1, 16, RATE, &[]);
    header[4..8].copy_from_slice(&(SECONDS * RATE * 2 + 36).to_le_bytes());
    header[40..44].copy_from_slice(&(SECONDS * RATE * 2).to_le_bytes());
    let len = 44 + u64::from(SECONDS * RATE * 2);
    let source = move || Ok(Box::new(Silence { header: header.clone(), len, at: 0 }) as Box<dyn MediaSource>);
    let reader = AudioReader::new(Path::new("silence"), Box::new(source)).unwrap();
    assert_eq!(reader.seconds(), Some(f64::from(SECONDS)));
    let (mut samples, mut frames, mut most) = (0, 0, 0);
    let (mel, before) = (LogMel::new(80).unwrap(), memory());
    let mut stream = mel.stream();
    for (count, block) in reader.enumerate() {
        let block = block.unwrap();
        samples += block.len();
        frames += stream.push(&block).unwrap().len() / 80;
        if count % 1000 == 0 {
            most = most.max(memory());
        }
    }
    assert_eq!(samples, SECONDS as usize * SAMPLE_RATE);
    assert_eq!(frames + stream.finish().0.len() / 80, 100 * SECONDS as usize);
    // Other tests run at the same time. All samples would take 230 MB, all features 115 MB.
    assert!(most < before + (100 << 10), "{before} KiB, then {most} KiB");
}
