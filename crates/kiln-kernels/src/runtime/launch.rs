//! What the launches of GPU kernels share: tensors as the backend sees them, and bindings in the order of a shader.

use std::sync::LazyLock;

use burn::{
    backend::{Cube, DispatchDevice},
    tensor::{BackendPrimitive, DType, Device, Shape, Tensor, kind::Basic},
};
use burn_cubecl::{
    CubeDevice, kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::{
    device::WgpuDeviceKind,
    prelude::{AddressType, CubeCount},
};

/// Threads of a workgroup: as many as every WebGPU device has.
pub(crate) const LANES: usize = 256;

/// The most workgroups that every device has along one axis.
const GROUPS: usize = 65_535;

/// # Panics
/// On a tensor of another backend, as Burn does wherever devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> CubeTensor
where
    K: Basic + BackendPrimitive<Cube, Primitive = CubeTensor>,
{
    tensor.try_into_primitive::<Cube>().expect("the tensors of a kernel are on its device")
}

/// A tensor whose elements are in order and without gaps in memory.
pub(crate) fn in_order<const D: usize, K>(tensor: Tensor<D, K>) -> CubeTensor
where
    K: Basic + BackendPrimitive<Cube, Primitive = CubeTensor>,
{
    into_contiguous(primitive(tensor))
}

/// Memory for a result of the shape and type of `tensor`, without gaps.
pub(crate) fn empty_like(tensor: &CubeTensor) -> CubeTensor {
    empty(tensor, tensor.meta.shape().clone(), tensor.dtype)
}

/// Memory without gaps, where `tensor` is.
pub(crate) fn empty(tensor: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(tensor.client.clone(), tensor.device.clone(), shape.into(), dtype)
}

/// `tensor` itself where nothing else holds its memory and no two of its elements share a place, else a copy.
pub(crate) fn to_write(tensor: CubeTensor) -> CubeTensor {
    if tensor.can_mut() && tensor.is_nonoverlapping() { tensor } else { tensor.copy() }
}

/// Whether vectors of a tensor, along its last dimension, begin and end between two fours of its memory.
pub(crate) fn comes_in_fours(tensor: &CubeTensor) -> bool {
    comes_in(4, tensor)
}

/// Whether vectors of a tensor, along its last dimension, begin and end between two groups of that many neighbours in memory.
pub(crate) fn comes_in(many: usize, tensor: &CubeTensor) -> bool {
    let fits = |number: &usize| number.is_multiple_of(many);
    match (tensor.meta.strides().split_last(), tensor.meta.shape().last()) {
        (Some((1, others)), Some(len)) => others.iter().all(fits) && fits(len),
        _ => false,
    }
}

/// Whether a GPU is imitated on the CPU, where each workgroup costs most. For tests, `KILN_SHARE_AS_A_GPU` has work shared as on a GPU there, too.
pub(crate) fn prefers_few_groups(device: &Device) -> bool {
    static AS_A_GPU: LazyLock<bool> = LazyLock::new(|| std::env::var_os("KILN_SHARE_AS_A_GPU").is_some());

    let is_software = match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) => match wgpu.kind {
            WgpuDeviceKind::Cpu => true,
            // One that was opened again.
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

/// Whether kernels on the device of `tensor` may have float16 numbers. All CUDA devices have them.
pub(crate) fn has_half(tensor: &CubeTensor) -> bool {
    matches!(tensor.device, CubeDevice::Cuda(_))
}

/// Workgroups that keep a device busy: that many on any GPU. Where one is imitated on the CPU, a thread each: more cost
/// more there.
pub(crate) fn enough(device: &Device, on_gpus: usize) -> usize {
    // Asking takes as long as a launch does.
    static THREADS: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

    if prefers_few_groups(device) { *THREADS } else { on_gpus }
}

/// At least `groups` workgroups; kernels number them by row and return where there is nothing to do.
pub(crate) fn count(groups: usize) -> CubeCount {
    let width = groups.clamp(1, GROUPS);
    CubeCount::Static(width as u32, groups.div_ceil(width) as u32, 1)
}

/// The integers that the largest of `tensors` has to be indexed with.
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
        device::opened::keeps_subnormals,
        faults,
        shader::{Access, Shader},
    };

    /// A launch of a shader.
    ///
    /// Shaders declare every tensor `read_write`, also those that they only read: tensors share buffers, and a buffer
    /// bound both ways is an error.
    pub(crate) struct Launch {
        source: Source,
        client: Client,
    }

    impl Launch {
        pub(crate) fn new(shader: &'static Shader, elem: DType, client: &Client) -> Self {
            let source = Source { shader, elem, picks: vec![], by_integers: false };
            Self { source, client: client.clone() }
        }

        /// One of the lines of each option of the shader.
        pub(crate) fn with(mut self, picks: &[usize]) -> Self {
            self.source.picks = picks.to_vec();
            self
        }

        /// Unpacks float16 numbers in words in the way that is right on `device`.
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
            // A structure with a vector in it is a multiple of 16 bytes long.
            let blocks = info.chunks(4).flat_map(|block| {
                let word = |i: usize| u64::from(block.get(i).copied().unwrap_or(0));
                [word(0) | word(1) << 32, word(2) | word(3) << 32]
            });
            let info = MetadataBindingInfo::custom(blocks.collect());
            let kernel = SourceKernel::new(source, CubeDim::new_1d(LANES as u32));
            client.launch(Box::new(kernel), count(groups), arguments.with_info(info));
        }
    }

    /// Elements between neighbours along each dimension. They fit: no binding of wgpu has 2³² bytes.
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
            SourceTemplate::new(faults::text(self.shader.name, text))
        }

        /// What the text depends on.
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
