//! Cases of any kernel, with the type of the kernel erased.

use std::{fmt, pin::Pin, rc::Rc};

use burn::tensor::{DType, Device, TensorData};
use kiln_core::{
    Result,
    read_back::{self, ReadBack},
};
use kiln_weights::{Format, streams::Arithmetic};

use crate::{
    check::invariance::violation,
    runtime::{choice::Implementation, kernels::Kernels},
    testing::{
        case::{Case, Lacks, Read, Tolerance, difference},
        checked::Checked,
        numbers::Numbers,
    },
};

/// Runs a kernel, and starts reading its results.
type Run = Box<dyn Fn(&Kernels, DType) -> Vec<ReadBack>>;

/// Measures a kernel's work.
type Work = Box<dyn Fn(&Kernels) -> u64>;

/// Runs a kernel whole and in parts, and reports how the results differ.
type Invariance = Box<dyn Fn(&Kernels, DType) -> Pin<Box<dyn Future<Output = Result<Option<String>>>>>>;

/// A case of any kernel.
pub struct AnyCase {
    kernel: &'static str,
    name: String,
    run: Run,
    work: Work,
    invariance: Invariance,
    lacks: Lacks,
    tolerance: Tolerance,
    is_probed: bool,
    packed: Option<(Format, Arithmetic)>,
}

impl AnyCase {
    pub(crate) fn of<K: Checked>(
        Case { name, inputs, lacks, tolerance, is_probed, packed }: Case<K>,
    ) -> Self {
        let inputs = Rc::new(inputs);
        let (again, sized) = (Rc::clone(&inputs), Rc::clone(&inputs));
        let work =
            Box::new(move |kernels: &Kernels| sized(&mut Numbers::new(kernels.device(), DType::F32)).work());
        let run = move |kernels: &Kernels, dtype| {
            let inputs = inputs(&mut Numbers::new(kernels.device(), dtype));
            kernels.run(inputs).read()
        };
        let invariance: Invariance = Box::new(move |kernels, dtype| {
            let inputs = again(&mut Numbers::new(kernels.device(), dtype));
            let kernels = kernels.clone();
            Box::pin(async move { violation(inputs, &kernels).await })
        });
        let run = Box::new(run);
        Self { kernel: K::NAME, name, run, work, invariance, lacks, tolerance, is_probed, packed }
    }

    /// Whether quick self-tests always run this case, whichever others they leave out.
    pub(crate) fn is_probed(&self) -> bool {
        self.is_probed
    }

    /// The format of the packed weights, if the case has any, and the arithmetic of their products.
    pub fn packed(&self) -> Option<(Format, Arithmetic)> {
        self.packed
    }

    /// Whether the case is of many rows, which programs of their own compute on some devices.
    pub fn has_many_rows(&self, kernels: &Kernels) -> bool {
        (self.work)(kernels) > 0
    }

    /// Runs the case on the device of `kernels`, for inputs of type `dtype`, and returns the results.
    ///
    /// # Errors
    /// Returns errors of the device.
    pub async fn run(&self, kernels: &Kernels, dtype: DType) -> Result<Vec<TensorData>> {
        read_back::all((self.run)(kernels, dtype)).await
    }

    /// Describes in a sentence how the result for a row or a token depends on others computed beside it;
    /// `None` if it does not.
    ///
    /// # Errors
    /// Returns errors of the device.
    pub async fn variance(&self, kernels: &Kernels, dtype: DType) -> Result<Option<String>> {
        (self.invariance)(kernels, dtype).await
    }

    /// The implementation that runs on a device for which `preferred` is selected.
    pub fn path(&self, preferred: Implementation, dtype: DType, device: &Device) -> Implementation {
        if (self.lacks)(preferred, dtype, device) { Implementation::Reference } else { preferred }
    }

    /// Describes in a sentence the element that differs most, if it differs too much.
    pub fn difference(&self, dtype: DType, got: &[TensorData], want: &[TensorData]) -> Option<String> {
        if got.len() != want.len() {
            return Some(format!("has {} results, not {}", got.len(), want.len()));
        }
        got.iter().zip(want).find_map(|(got, want)| difference(&*self.tolerance, dtype, got, want))
    }
}

impl fmt::Debug for AnyCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kernel, self.name)
    }
}
