//! Which devices the tests run on.

use std::{
    io::{self, Write},
    sync::OnceLock,
};

use burn::tensor::Device;
use kiln::device::{self, DeviceClass, DeviceInfo, DeviceName, Opened};

/// The devices to test, with their names.
///
/// `KILN_TEST_DEVICES=cpu,wgpu,cuda` names them. Unset, they are the CPU and whatever GPUs this build can use here,
/// software Vulkan included. Printed once, so that a run says what it covered.
///
/// `KILN_INSTRUCTIONS=plain`, `avx2` or `avx-vnni` has the CPU compute as machines do that have no better instructions.
///
/// # Panics
/// If a device that was named is not there: a test may not pass because it did not run.
#[allow(clippy::panic, reason = "see above")]
pub fn devices() -> Vec<(String, Device)> {
    opened().iter().map(|(name, opened)| (name.clone(), opened.device.clone())).collect()
}

/// The devices of [`devices`], with what is known of each.
#[allow(clippy::panic, reason = "see `devices`")]
pub fn opened() -> &'static [(String, Opened)] {
    static DEVICES: OnceLock<Vec<(String, Opened)>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        if let Ok(name) = std::env::var("KILN_INSTRUCTIONS")
            && let Err(error) = device::limit_instructions(&name)
        {
            panic!("{error}");
        }
        let names = match std::env::var("KILN_TEST_DEVICES") {
            Ok(names) => names.split(',').map(|name| name.trim().to_owned()).collect(),
            Err(_) => present(),
        };
        let open = |name: String| {
            let opened = name.parse::<DeviceName>().and_then(device::open);
            match opened {
                Ok(opened) => (name, opened),
                Err(error) => panic!("KILN_TEST_DEVICES names a device to test on, but {error}"),
            }
        };
        let devices: Vec<_> = names.into_iter().map(open).collect();
        for (name, opened) in &devices {
            let DeviceInfo { adapter, api, driver, .. } = &opened.info;
            // Not a macro: the test harness keeps what those print to itself.
            let _ = writeln!(io::stderr(), "testing on {name}: {adapter} ({api}, {driver})");
        }
        devices
    })
}

/// One device of each kind there is.
fn present() -> Vec<String> {
    let (found, _) = device::list();
    let mut names: Vec<String> = Vec::new();
    for info in found {
        let name = match (info.name, info.class) {
            (DeviceName::Wgpu(_), _) => "wgpu",
            (DeviceName::Cuda(_), _) => "cuda",
            (_, DeviceClass::Cpu) => "cpu",
            _ => continue,
        };
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    names
}
