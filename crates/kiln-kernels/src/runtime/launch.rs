//! Shared parts of GPU launches: tensors as the backend sees them, and bindings in the order of a shader.

use std::sync::LazyLock;

use burn::{
    backend::{Cube, DispatchDevice},
    tensor::{BackendPrimitive, DType, Device, Shape, Tensor, kind::Basic},
};
use burn_cubecl::{
    CubeDevice, kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::{device::WgpuDeviceKind, frontend::cube_comment, prelude::*};

/// Threads per workgroup: as many as every WebGPU device supports.
pub(crate) const LANES: usize = 256;

/// The most workgroups along one axis that every device supports.
const GROUPS: usize = 65_535;

/// Returns the backend's tensor.
///
/// # Panics
/// On a tensor of another backend, as Burn does wherever devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> CubeTensor
where
    K: Basic + BackendPrimitive<Cube, Primitive = CubeTensor>,
{
    tensor.try_into_primitive::<Cube>().expect("the tensors of a kernel are on its device")
}

/// Returns a tensor whose elements are in order and without gaps in memory.
pub(crate) fn in_order<const D: usize, K>(tensor: Tensor<D, K>) -> CubeTensor
where
    K: Basic + BackendPrimitive<Cube, Primitive = CubeTensor>,
{
    into_contiguous(primitive(tensor))
}

/// Returns a tensor whose rows, along the last dimension, have their elements in order. There may be gaps
/// between rows.
pub(crate) fn in_rows<const D: usize, K>(tensor: Tensor<D, K>) -> CubeTensor
where
    K: Basic + BackendPrimitive<Cube, Primitive = CubeTensor>,
{
    let tensor = primitive(tensor);
    let is_in_rows = tensor.meta.strides().last() == Some(&1) || tensor.meta.shape().last() == Some(&1);
    if is_in_rows { tensor } else { into_contiguous(tensor) }
}

/// Allocates a result with the shape and type of `tensor`, without gaps.
pub(crate) fn empty_like(tensor: &CubeTensor) -> CubeTensor {
    empty(tensor, tensor.meta.shape().clone(), tensor.dtype)
}

/// Allocates a tensor without gaps on the device of `tensor`.
pub(crate) fn empty(tensor: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(tensor.client.clone(), tensor.device.clone(), shape.into(), dtype)
}

/// Returns `tensor` itself if it is the only handle of its memory and no two elements overlap, and a copy
/// otherwise.
pub(crate) fn to_write(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() && tensor.is_nonoverlapping() { tensor } else { tensor.copy() }
}

/// Whether vectors of a tensor, along the last dimension, are contiguous and aligned to four elements.
pub(crate) fn comes_in_fours(tensor: &CubeTensor) -> bool {
    comes_in(4, tensor)
}

/// Whether vectors of a tensor, along the last dimension, are contiguous, and begin and end at multiples of
/// `many` elements.
pub(crate) fn comes_in(many: usize, tensor: &CubeTensor) -> bool {
    let fits = |number: &usize| number.is_multiple_of(many);
    match (tensor.meta.strides().split_last(), tensor.meta.shape().last()) {
        (Some((1, others)), Some(len)) => others.iter().all(fits) && fits(len),
        _ => false,
    }
}

/// Whether the device is a software GPU, on which each workgroup is expensive. For tests, the environment
/// variable `KILN_SHARE_AS_A_GPU` divides work as on a real GPU there, too.
pub(crate) fn prefers_few_groups(device: &Device) -> bool {
    static AS_A_GPU: LazyLock<bool> = LazyLock::new(|| std::env::var_os("KILN_SHARE_AS_A_GPU").is_some());

    let is_software = match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) => match wgpu.kind {
            WgpuDeviceKind::Cpu => true,
            // A device that was reopened.
            #[cfg(feature = "wgpu")]
            WgpuDeviceKind::Existing(_) => crate::runtime::device::opened::is_software(device),
            _ => false,
        },
        #[cfg(feature = "cuda")]
        DispatchDevice::Cube(CubeDevice::Cuda(_)) => crate::runtime::device::cuda::is_software(),
        _ => false,
    };
    is_software && !*AS_A_GPU
}

pub(crate) fn is_cuda(tensor: &CubeTensor) -> bool {
    matches!(tensor.device, CubeDevice::Cuda(_))
}

/// Number of workgroups that keeps a device busy: `on_gpus` on any real GPU. On a software GPU it is one per
/// thread, because more are slower there.
pub(crate) fn enough(device: &Device, on_gpus: usize) -> usize {
    // The query takes as long as a launch.
    static THREADS: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

    if prefers_few_groups(device) { *THREADS } else { on_gpus }
}

/// At least `groups` workgroups; kernels number them by row, and the surplus ones return at once.
pub(crate) fn count(groups: usize) -> CubeCount {
    let width = groups.clamp(1, GROUPS);
    CubeCount::Static(width as u32, groups.div_ceil(width) as u32, 1)
}

/// The integer type that the largest of `tensors` has to be indexed with.
pub(crate) fn address_type<const N: usize>(tensors: [&CubeTensor; N]) -> AddressType {
    tensors.into_iter().map(CubeTensor::required_address_type).max().unwrap_or_default()
}

#[cfg(feature = "wgpu")]
pub(crate) use self::wgsl::{Launch, strides};

#[cfg(feature = "wgpu")]
mod wgsl {
    use burn::tensor::{DType, Device};
    use burn_cubecl::{
        template::{KernelSource, SourceKernel, SourceTemplate},
        tensor::CubeTensor,
    };
    use cubecl::{
        client::Client,
        ir::attributes::BufferIOAttr,
        prelude::{CubeDim, ExecutionMode, KernelId},
        server::{KernelArguments, MetadataBindingInfo},
    };

    use super::{LANES, count};
    use crate::runtime::{
        device::wgpu::keeps_subnormals,
        faults,
        shader::{Access, Shader},
    };

    /// A launch of a shader.
    ///
    /// Shaders declare every tensor `read_write`, even if they only read it: tensors share buffers, and a
    /// buffer bound both ways is an error. In a browser, they do not share any.
    pub(crate) struct Launch {
        source: Source,
        client: Client,
    }

    impl Launch {
        pub(crate) fn new(shader: &'static Shader, elem: DType, client: &Client) -> Self {
            let source = Source { shader, elem, picks: vec![], by_integers: false };
            Self { source, client: client.clone() }
        }

        /// Picks one of the lines of each option of the shader.
        pub(crate) fn with(mut self, picks: &[usize]) -> Self {
            self.source.picks = picks.to_vec();
            self
        }

        /// Makes the shader unpack float16 numbers in words in the way that is right on `device`.
        pub(crate) fn unpacking_on(mut self, device: &Device) -> Self {
            self.source.by_integers = !keeps_subnormals(device);
            self
        }

        /// Launches `groups` workgroups with the tensors of the shader's bindings, and its uniform.
        pub(crate) fn run<const N: usize>(
            self,
            groups: usize,
            tensors: [&CubeTensor; N],
            info: impl Into<Vec<u32>>,
        ) {
            let Self { source, client } = self;
            let bindings = source.shader.bindings;
            assert_eq!(N, bindings.len(), "{}: tensors", source.shader.name);
            let mut arguments = KernelArguments::new();
            for (tensor, binding) in tensors.into_iter().zip(bindings) {
                let io = match binding.access {
                    Access::Read => BufferIOAttr::ReadOnly,
                    Access::Update => BufferIOAttr::ReadWrite,
                    Access::Write => BufferIOAttr::WriteOnly,
                };
                arguments = arguments.with_buffer_io(tensor.handle.clone().binding(), io);
            }
            let info: Vec<u32> = info.into();
            // The size of a structure that contains a vector is a multiple of 16 bytes.
            let blocks = info.chunks(4).flat_map(|block| {
                let word = |i: usize| u64::from(block.get(i).copied().unwrap_or(0));
                [word(0) | word(1) << 32, word(2) | word(3) << 32]
            });
            let info = MetadataBindingInfo::custom(blocks.collect());
            let kernel = SourceKernel::new(source, CubeDim::new_1d(LANES as u32));
            client.launch(Box::new(kernel), count(groups), arguments.with_info(info));
        }
    }

    /// Strides in elements along each dimension. They fit: no binding of wgpu has 2³² bytes.
    pub(crate) fn strides<const D: usize>(tensor: &CubeTensor) -> [u32; D] {
        std::array::from_fn(|dim| tensor.meta.strides()[dim] as u32)
    }

    struct Source {
        shader: &'static Shader,
        elem: DType,
        picks: Vec<usize>,
        by_integers: bool,
    }

    impl KernelSource for Source {
        fn source(&self) -> SourceTemplate {
            let text = self.shader.finish(self.elem, &self.picks, self.by_integers);
            let text = if cfg!(target_family = "wasm") { text.with_reads_declared() } else { text };
            SourceTemplate::new(faults::text(self.shader.name, text.wgsl))
        }

        /// Identifies everything that the text depends on.
        fn id(&self) -> KernelId {
            let mode = match self.shader.counts_loops(&self.picks) {
                true => ExecutionMode::Checked,
                false => ExecutionMode::Unchecked,
            };
            let id = KernelId::new::<Self>().mode(mode);
            id.info((self.shader.name, self.elem, self.picks.clone(), self.by_integers))
        }

        fn lang(&self) -> &'static str {
            "wgsl"
        }
    }
}

/// Writes the name of a permutation into the text of a kernel. `tools/gpu/check.py` finds it there.
#[cube]
pub(crate) fn write_permutation(#[comptime] name: String) {
    intrinsic!(|scope| cube_comment::expand(scope, &format!("permutation: {name}")))
}
