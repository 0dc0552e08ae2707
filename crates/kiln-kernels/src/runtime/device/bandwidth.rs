//! Memory bandwidth, which is the lower bound for the time of a decode step.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::{Result, device_state::DeviceState, read_back};

use crate::runtime::device::info::{DeviceClass, Opened};

impl Opened {
    /// Measures the bytes per second that a kernel can read and write on `bytes` bytes. Fewer than the caches
    /// of a CPU hold are read from the caches; on a GPU, at least 128 MiB are used.
    ///
    /// # Errors
    /// Returns errors of the device.
    pub fn measure_bandwidth(&self, bytes: usize) -> Result<f64> {
        measure(self, bytes)
    }

    /// Measures the bytes per second that are copied between the host and this device. Returns `None` if they
    /// share memory, so that nothing has to be copied.
    ///
    /// # Errors
    /// Returns errors of the device.
    pub fn measure_copies(&self) -> Result<Option<CopyBandwidth>> {
        match self.info.class {
            DeviceClass::Cpu => Ok(None),
            _ => measure_copies(&self.device).map(Some),
        }
    }
}

/// Well beyond any GPU cache, and no larger than the largest tensor that every GPU can bind.
const BYTES: usize = 128 << 20;

const REPETITIONS: usize = 8;

/// Measures the bandwidth as the best of several passes. On the CPU, passes only read, because Kiln drives
/// the threads itself; elsewhere they add one to every element, which reads and writes.
#[cfg_attr(not(feature = "cpu"), expect(unused_variables, reason = "a GPU reads as much in any case"))]
fn measure(opened: &Opened, bytes: usize) -> Result<f64> {
    match opened.info.class {
        #[cfg(feature = "cpu")]
        DeviceClass::Cpu => Ok(read_on_cpu(bytes.clamp(LEAST, MOST))),
        _ => read_and_write(opened),
    }
}

/// Least number of bytes read on the CPU. More than `MOST` would not change the result.
#[cfg(feature = "cpu")]
const LEAST: usize = 1 << 20;
#[cfg(feature = "cpu")]
const MOST: usize = 512 << 20;

/// Reads the way products read weights: in pieces, on the threads that products use. Tries one thread and all
/// of them, because on some machines one reads as fast as all do.
#[cfg(feature = "cpu")]
fn read_on_cpu(bytes: usize) -> f64 {
    use std::time::Duration;

    use kiln_products::threads::{pieces, share};

    /// Long enough for one pass to be undisturbed by other processes.
    const LONG: Duration = Duration::from_millis(300);

    let data = vec![1.0f32; bytes / 4];
    let best = |worth: usize| {
        let chunk = data.len().div_ceil(pieces(worth)).next_multiple_of(16);
        let (began, mut best) = (Instant::now(), f64::INFINITY);
        let mut passes = 0;
        while passes < REPETITIONS || began.elapsed() < LONG {
            let start = Instant::now();
            share(worth, data.chunks(chunk).collect(), |chunk| {
                std::hint::black_box(kiln_simd::run(Sum(chunk)));
            });
            best = best.min(start.elapsed().as_secs_f64());
            passes += 1;
        }
        best
    };
    size_of_val(&data[..]) as f64 / best(usize::MAX).min(best(0))
}

/// Sums numbers, as fast as products read their weights.
#[cfg(feature = "cpu")]
struct Sum<'a>(&'a [f32]);

#[cfg(feature = "cpu")]
impl kiln_simd::Work for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: kiln_simd::Lanes>(self, lanes: L) -> f32 {
        // Several sums, so that additions do not wait for each other.
        let mut sums = [lanes.splat(0.0); 4];
        for four in self.0.as_chunks::<16>().0.as_chunks::<4>().0 {
            lanes.prefetch(four);
            for i in 0..4 {
                sums[i] = lanes.add(sums[i], lanes.floats(&four[i]));
            }
        }
        let [a, b, c, d] = sums;
        lanes.array(lanes.add(lanes.add(a, b), lanes.add(c, d))).iter().sum()
    }
}

fn read_and_write(opened: &Opened) -> Result<f64> {
    /// Passes between two waits, so that the measurement covers memory and not the wait.
    const PASSES: usize = 8;

    let device = &opened.device;
    let mut data = Tensor::<1>::zeros([BYTES / 4], (device, DType::F32));
    let mut best = f64::INFINITY;
    for _ in 0..REPETITIONS {
        wait(device)?;
        let start = Instant::now();
        for _ in 0..PASSES {
            data = data + 1.0;
        }
        wait(device)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((2 * BYTES * PASSES) as f64 / best)
}

/// Bytes per second between the host and a device with its own memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyBandwidth {
    /// To the device.
    pub up: f64,
    /// To the host.
    pub down: f64,
}

/// Takes the best of a few copies of a buffer as large as a layer of a cache may be.
fn measure_copies(device: &Device) -> Result<CopyBandwidth> {
    const COPIED: usize = 32 << 20;

    let host = TensorData::new(vec![1.0f32; COPIED / 4], [COPIED / 4]);
    let (mut up, mut down) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..REPETITIONS {
        let data = host.clone();
        wait(device)?;
        let start = Instant::now();
        let copy = Tensor::<1>::from_data(data, (device, DType::F32));
        wait(device)?;
        up = up.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        read_back::read(copy)?;
        down = down.min(start.elapsed().as_secs_f64());
    }
    Ok(CopyBandwidth { up: COPIED as f64 / up, down: COPIED as f64 / down })
}

fn wait(device: &Device) -> Result<()> {
    DeviceState::of(device).sync()
}
