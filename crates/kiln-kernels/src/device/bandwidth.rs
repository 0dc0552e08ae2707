//! How fast memory is: the floor that decode is held against.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::{Result, device_state::DeviceState, read_back};

#[cfg(feature = "cpu")]
use super::DeviceClass;
use super::Opened;

/// Well beyond any cache, and no larger than the largest tensor every GPU can bind.
const BYTES: usize = 128 << 20;

const REPETITIONS: usize = 8;

/// Best of a few passes over a large buffer: reading only on the CPU, whose threads we can drive ourselves; adding one
/// to every element elsewhere, which reads and writes.
pub(super) fn measure(opened: &Opened) -> Result<f64> {
    match opened.info.class {
        #[cfg(feature = "cpu")]
        DeviceClass::Cpu => Ok(read_on_cpu()),
        _ => read_and_write(opened),
    }
}

#[cfg(feature = "cpu")]
fn read_on_cpu() -> f64 {
    use rayon::prelude::*;

    let data = vec![1.0f32; BYTES / 4];
    let chunk = (data.len() / rayon::current_num_threads()).max(1);
    let pass = |_| {
        let start = Instant::now();
        std::hint::black_box(data.par_chunks(chunk).map(|chunk| kiln_simd::run(Sum(chunk))).sum::<f32>());
        start.elapsed().as_secs_f64()
    };
    BYTES as f64 / (0..REPETITIONS).map(pass).fold(f64::INFINITY, f64::min)
}

/// Adds numbers up, as fast as products with weights read theirs.
#[cfg(feature = "cpu")]
struct Sum<'a>(&'a [f32]);

#[cfg(feature = "cpu")]
impl kiln_simd::Work for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: kiln_simd::Lanes>(self, lanes: L) -> f32 {
        // Several sums, which do not wait for each other.
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
    /// Passes between two waits, so that what is measured is memory and not the wait.
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

/// Bytes a second between the host and a device of memory of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyBandwidth {
    /// To the device.
    pub up: f64,
    /// To the host.
    pub down: f64,
}

/// Best of a few copies of a buffer as large as a layer of a cache may be.
pub(super) fn measure_copies(device: &Device) -> Result<CopyBandwidth> {
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
