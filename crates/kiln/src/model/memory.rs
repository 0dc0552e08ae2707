//! The memory that a model takes: told before its weights are read, and claimed while they are.

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{
    Result,
    budget::{Budget, Claim},
    read_back,
    stages::Stages,
};
use kiln_kernels::{
    Kernels,
    device::{DeviceClass, Opened},
};
use kiln_models::{Configured, checkpoint::Checkpoint, configure};

use super::ModelBuilder;
use crate::{
    folder::{Ask, CacheSize, Inspection, SMALLEST_CHUNK, generation_config, own_plan},
    out_of_memory::{claim_weights, usable},
    self_test::Trusted,
};

/// The memory that a model takes on its device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Estimate {
    /// Facts of the config and of the headers.
    pub inspection: Inspection,
    /// The number type of the weights that are not packed, of activations and caches.
    pub dtype: DType,
    /// Bytes of the files of weights.
    pub file_bytes: u64,
    /// Bytes of the weights on all devices.
    pub weight_bytes: u64,
    /// By stage, its device and the bytes of its weights there.
    pub stages: Stages<(Opened, u64)>,
    /// The plan of caches.
    pub plan: Plan,
}

impl Estimate {
    /// The size of the cache for `rows` sequences of `tokens` tokens; `None` if the plan does not support the
    /// model.
    pub fn cache(&self, rows: usize, tokens: usize) -> Option<CacheSize> {
        let ask = Ask::new(tokens).rows(rows).element(self.dtype.size());
        self.inspection.caches(Some(&self.plan), &ask).pop()
    }
}

impl ModelBuilder<'_> {
    /// Computes the memory that [`load`](Self::load) takes, and checks that there is as much. It reads the
    /// config and the headers of the weights.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::Model;
    ///
    /// let estimate = Model::builder(folder).estimate()?;
    /// assert_eq!(estimate.weight_bytes, Model::load(folder)?.weight_bytes());
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`estimate_async`](Self::estimate_async).
    pub fn estimate(&self) -> Result<Estimate> {
        read_back::wait(self.estimate_async())
    }

    /// [`estimate`](Self::estimate), which awaits the device.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load) that need no weights, such as
    /// [`Error::OutOfMemory`](kiln_core::Error::OutOfMemory).
    pub async fn estimate_async(&self) -> Result<Estimate> {
        let devices = self.open_all().await?;
        let mut checkpoint = self.checkpoint()?;
        let configured = configure(&checkpoint.config)?;
        self.check_stages(&devices, configured.needs().len())?;
        let dtype = self.dtype_of(&devices, &*configured)?;
        let inspection = Inspection::of_checkpoint(&checkpoint)?;
        self.pack(&mut checkpoint, &devices, dtype)?;
        let experts_on = self.experts_device(&devices).await?;
        self.expert_place(experts_on.as_ref(), |kernels| checkpoint.held_expert_bytes(kernels, DType::F32))?;
        let stages = devices.try_map(|device| {
            let kernels = Kernels::new(self.kernels, &device.device)?;
            Ok(Trusted { kernels, device: device.clone(), captures: true })
        })?;
        let plan = match &self.plan {
            Some(plan) => plan.clone(),
            None => own_plan(&generation_config(&checkpoint)?),
        };
        plan.check(&configured.needs())?;
        let claims = self.claims(&checkpoint, &*configured, dtype, &plan, (&devices, &stages))?;
        let stages = devices.zip(claims, |device, claim| (device.clone(), claim.bytes()));
        let weight_bytes = stages.iter().map(|(_, bytes)| bytes).sum();
        Ok(Estimate { inspection, dtype, file_bytes: checkpoint.bytes(), weight_bytes, stages, plan })
    }

    /// Claims the memory of the weights of each stage.
    pub(super) fn claims(
        &self,
        checkpoint: &Checkpoint,
        configured: &dyn Configured,
        dtype: DType,
        plan: &Plan,
        (devices, stages): (&Stages<Opened>, &Stages<Trusted>),
    ) -> Result<Stages<Claim>> {
        let placement = stages.map(|stage| stage.kernels.clone());
        let by_stage = match devices.count() {
            1 => checkpoint.held_bytes(placement.first(), dtype).into(),
            _ => checkpoint.held_bytes_by_stage(&placement, dtype)?,
        };
        let held: u64 = by_stage.iter().sum();
        let of_experts = checkpoint.held_expert_bytes(placement.first(), dtype);
        let spared = self.spared(&stages.first().device, &configured.sizes(), of_experts)?;
        let elements: u64 = checkpoint.by_dtype().values().map(|(elements, _)| elements).sum();
        // Weights that are packed would not be smaller in float16.
        let half = match devices.first().half_dtype(configured.fits_float16()) {
            Some(half) if held >= elements * dtype.size() as u64 => half.size(),
            _ => dtype.size(),
        };
        let mut of_stage = by_stage.iter().map(|held| held.saturating_sub(spared));
        claim_weights(
            &self.budgets(stages).map(|budget| (budget.clone(), of_stage.next().unwrap_or(0))),
            plan.build(&configured.needs(), &placement)?,
            self.tokens,
            configured.sizes().working_bytes(1, SMALLEST_CHUNK, dtype.size()),
            [dtype.size(), half],
        )
    }

    /// The budget of each stage. Stages on one device share a budget.
    pub(super) fn budgets(&self, stages: &Stages<Trusted>) -> Stages<Budget> {
        let mut known: Vec<(&Opened, Budget)> = Vec::new();
        for Trusted { device, .. } in stages.iter() {
            if known.iter().all(|(other, _)| other.device != device.device) {
                known.push((device, self.budget(device)));
            }
        }
        stages.map(|Trusted { device, .. }| {
            let same = known.iter().find(|(other, _)| other.device == device.device);
            same.map_or_else(|| self.budget(device), |(_, budget)| budget.clone())
        })
    }

    /// The budget of a device, without any claims.
    pub(super) fn budget(&self, device: &Opened) -> Budget {
        let info = &device.info;
        let asked = self.memory.filter(|_| !self.is_divided() || info.class != DeviceClass::Cpu);
        let budget = Budget::new(asked.or_else(|| usable(info)));
        budget.set_device_memory(info.memory);
        budget.set_largest_buffer(u64::try_from(info.largest_binding).ok());
        if info.class == DeviceClass::Cpu { budget.of_this_process() } else { budget }
    }
}
