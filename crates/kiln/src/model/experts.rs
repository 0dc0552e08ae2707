//! The place of the experts of a mixture: the device, host memory, or the CPU.

use kiln_core::{Error, Result, budget::Budget, stages::Stages};
use kiln_kernels::{
    Choice, Kernels,
    device::{self, DeviceClass, DeviceName, Opened},
};
use kiln_models::{ExpertPlace, LoadTarget, Sizes};

use super::ModelBuilder;
use crate::out_of_memory::usable;

impl ModelBuilder<'_> {
    /// Checks that the options for experts go together, and with these stages.
    pub(super) fn check_experts(&self, stages: &Stages<Opened>) -> Result<()> {
        if stages.count() > 1 && self.resident_experts.is_some() {
            let why = "is for models on one device; leave it out, or name one device".to_owned();
            return Err(Error::Setting { name: "offload_experts", why });
        }
        if let Some(name) = self.experts_on {
            let wrong = |why: &str| Err(Error::Setting { name: "experts", why: why.to_owned() });
            if name != DeviceName::Cpu {
                return wrong("takes only `cpu`");
            }
            if self.resident_experts.is_some() {
                return wrong(
                    "has the CPU compute experts, and --offload-experts the GPU; leave one of them out",
                );
            }
            if stages.count() > 1 {
                return wrong("is for models on one device; leave it out, or name one device");
            }
        }
        Ok(())
    }

    /// [`resident_experts`](Self::resident_experts) for the comparison of devices, where the GPU computes all
    /// experts: those of the CPU are copied to it.
    pub(super) fn copied_experts(&self) -> Option<usize> {
        self.resident_experts.or(self.experts_on.map(|_| 0))
    }

    /// The device of experts, if it is not that of the model.
    pub(super) async fn experts_device(&self, devices: &Stages<Opened>) -> Result<Option<Opened>> {
        // On the CPU, they are there.
        match self.experts_on.filter(|_| devices.first().info.class != DeviceClass::Cpu) {
            Some(name) => device::open_async(name).await.map(Some),
            None => Ok(None),
        }
    }

    /// The place of experts. Checks that there is memory for their `bytes`, if another device has them.
    pub(super) fn expert_place(
        &self,
        device: Option<&Opened>,
        bytes: impl FnOnce(&Kernels) -> u64,
    ) -> Result<ExpertPlace> {
        if let Some(resident) = self.resident_experts {
            return Ok(ExpertPlace::HostMemory { resident });
        }
        let Some(device) = device else { return Ok(ExpertPlace::Device) };
        let choice = if self.kernels == Choice::Reference { Choice::Reference } else { Choice::Auto };
        let kernels = Kernels::new(choice, &device.device)?;
        let bytes = bytes(&kernels);
        if Budget::new(usable(&device.info)).of_this_process().claim("experts", bytes).is_err() {
            let why = format!(
                "take {} MiB of host memory, which is not free; pack them, such as with --quant q4_k_m",
                bytes >> 20
            );
            return Err(Error::Setting { name: "experts", why });
        }
        let (largest_binding, copied) = (device.info.largest_binding, device.is_asynchronous());
        let arithmetic = self.arithmetic.on_cpu();
        Ok(ExpertPlace::Elsewhere(LoadTarget { kernels, arithmetic, largest_binding, copied }))
    }

    /// Bytes of the device's memory that are saved if experts, which take `bytes` together, are in host
    /// memory.
    pub(super) fn spared(&self, device: &Opened, sizes: &Sizes, bytes: u64) -> Result<u64> {
        let (name, spared) = match (self.resident_experts, self.experts_on) {
            (Some(resident), _) => ("offload_experts", sizes.offloaded_bytes(resident, bytes)),
            (None, Some(_)) => ("experts", sizes.experts.map(|_| bytes)),
            (None, None) => return Ok(0),
        };
        match spared {
            // The memory of the CPU device is host memory.
            Some(_) if device.info.class == DeviceClass::Cpu => Ok(0),
            Some(bytes) => Ok(bytes),
            None => {
                let why =
                    "is for mixtures of experts, and this model has no experts; leave it out".to_owned();
                Err(Error::Setting { name, why })
            }
        }
    }
}
