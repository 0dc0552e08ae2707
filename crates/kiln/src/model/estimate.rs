//! The memory that a model takes, before its weights are read.

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{Result, read_back};
use kiln_kernels::Kernels;
use kiln_models::configure;

use super::ModelBuilder;
use crate::{
    folder::{Ask, CacheSize, Inspection, generation_config, own_plan},
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
    /// Those of [`load`](Self::load) that need no weights, such as [`Error::OutOfMemory`].
    ///
    /// [`Error::OutOfMemory`]: kiln_core::Error::OutOfMemory
    pub async fn estimate_async(&self) -> Result<Estimate> {
        let devices = self.open_all().await?;
        let mut checkpoint = self.checkpoint()?;
        let configured = configure(&checkpoint.config)?;
        self.check_stages(configured.needs().len())?;
        let dtype = self.dtype_of(&devices, &*configured)?;
        let inspection = Inspection::of_checkpoint(&checkpoint)?;
        self.pack(&mut checkpoint, &devices, dtype)?;
        let stages = devices.try_map(|device| {
            let kernels = Kernels::new(self.kernels, &device.device)?;
            Ok(Trusted { kernels, device: device.clone(), captures: true })
        })?;
        let plan = match &self.plan {
            Some(plan) => plan.clone(),
            None => own_plan(&generation_config(&checkpoint)?),
        };
        plan.check(&configured.needs())?;
        let (weight_bytes, _) = self.claims(&checkpoint, &*configured, dtype, &plan, (&devices, &stages))?;
        Ok(Estimate { inspection, dtype, file_bytes: checkpoint.bytes(), weight_bytes, plan })
    }
}
