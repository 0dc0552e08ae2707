//! Driver faults that tests inject, because the drivers of test machines are correct.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use burn::tensor::Device;

#[cfg(feature = "wgpu")]
use crate::runtime::device::wgpu::{lose, set_keeps_subnormals as set};

/// A fault of a driver.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// A shader is compiled from a changed text: `from` is replaced by `to`.
    Text { shader: &'static str, from: &'static str, to: &'static str },
    /// Subnormal float16 numbers are unpacked as 0.
    Flush,
    /// The process ends when the kernel is launched.
    Crash { kernel: &'static str },
    /// The launch of the kernel never returns.
    Hang { kernel: &'static str },
    /// The device is lost at the first launch of the kernel.
    Loss { kernel: &'static str },
}

static PLANTED: OnceLock<Fault> = OnceLock::new();

/// Injects a fault for the rest of this process. Only one is possible, before anything is launched.
///
/// # Panics
/// If a fault was injected before.
pub fn plant(fault: Fault) {
    assert!(PLANTED.set(fault).is_ok(), "a fault is planted already");
}

/// Treats an open wgpu device as one that unpacks subnormal float16 numbers, or as one that flushes them to
/// zero. Returns the previous setting, and `None` for other devices.
pub fn set_keeps_subnormals(device: &Device, are_kept: bool) -> Option<bool> {
    set(device, are_kept)
}

#[cfg(feature = "wgpu")]
const FLUSHED: &str = "
fn flushed(word: u32) -> vec2<f32> {
    let numbers = unpack2x16float(word);
    return select(numbers, vec2(0.0), abs(numbers) < vec2(6.103515625e-5));
}
";

/// Returns the text that the faulty driver compiles.
#[cfg(feature = "wgpu")]
pub(crate) fn text(name: &str, text: String) -> String {
    match PLANTED.get() {
        Some(Fault::Text { shader, from, to }) if *shader == name => text.replace(from, to),
        Some(Fault::Flush) => text.replace("unpack2x16float(", "flushed(") + FLUSHED,
        _ => text,
    }
}

#[cfg(not(feature = "wgpu"))]
fn lose(_: &Device) {}

#[cfg(not(feature = "wgpu"))]
fn set(_: &Device, _: bool) -> Option<bool> {
    None
}

/// Triggers the fault of a kernel that is launched on a GPU.
pub(crate) fn launched(name: &str, device: &Device) {
    static IS_LOST: AtomicBool = AtomicBool::new(false);

    match PLANTED.get() {
        Some(Fault::Crash { kernel }) if *kernel == name => std::process::abort(),
        Some(Fault::Hang { kernel }) if *kernel == name => loop {
            std::thread::park();
        },
        Some(Fault::Loss { kernel }) if *kernel == name && !IS_LOST.swap(true, Ordering::Relaxed) => {
            lose(device);
        }
        _ => {}
    }
}
