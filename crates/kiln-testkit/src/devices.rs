//! Selection of the devices that tests run on.

use std::{
    io::{self, Write},
    sync::OnceLock,
};

use burn::tensor::Device;
use kiln::device::{self, DeviceClass, DeviceInfo, DeviceName, Opened};

/// Returns the devices to test, with their names.
///
/// `KILN_TEST_DEVICES=cpu,wgpu,cuda` names them. If unset, they are the CPU and all GPUs that this build can
/// use here, software Vulkan included. They are printed once, so that a run states what it covered.
///
/// `KILN_INSTRUCTIONS=plain`, `avx2` or `avx-vnni` makes the CPU compute like machines without better
/// instructions.
///
/// # Panics
/// If a named device is missing: a test must not pass because it did not run.
#[allow(clippy::panic, reason = "see above")]
pub fn devices() -> Vec<(String, Device)> {
    opened().iter().map(|(name, opened)| (name.clone(), opened.device.clone())).collect()
}

/// Returns the devices of [`devices`], with the information about each.
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
            // Not `eprintln!`: the test harness captures the output of macros.
            let _ = writeln!(io::stderr(), "testing on {name}: {adapter} ({api}, {driver})");
        }
        devices
    })
}

/// Returns one device of each kind that is present.
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
