//! Which tensors kernels write in place, and which they do not.

use burn::tensor::{DType, Tensor};
use kiln::expert::{
    kernels::{AttentionAppend, AttentionShape, Choice, Kernels, KvAppend},
    memory::{Positions, RowPosition},
    read_back,
};

use super::choices;

#[test]
fn kv_append_writes_in_place_unless_the_buffer_is_shared() {
    for (name, device) in kiln_testkit::devices() {
        for (choice, kernels) in choices(&name, &device) {
            if choice == Choice::Reference {
                continue;
            }
            let new = || Tensor::<4>::ones([1, 2, 2, 8], (&device, DType::F32));
            // Wraps around from the last slot to the first.
            let positions = |first| Positions::all_at(first, 1, &device);
            let buffer = Tensor::<4>::zeros([1, 2, 16, 8], (&device, DType::F32));
            let values = Tensor::<4>::ones([1, 2, 16, 8], (&device, DType::F32));
            let (buffers, before) = addresses([buffer, values], &name);
            let new = || [new(), new() * 2.0];
            let (buffers, after) = addresses(append(&kernels, buffers, new(), positions(15)), &name);
            assert_eq!(before, after, "{choice} on {name} copies a buffer that is its own");
            assert_eq!(buffers.clone().map(sum), [32.0, 288.0], "{choice} on {name}");

            let (appended, copy) = addresses(append(&kernels, buffers.clone(), new(), positions(16)), &name);
            for i in 0..2 {
                assert_ne!(
                    copy[i], after[i],
                    "{choice} on {name} writes into a buffer that is held elsewhere"
                );
            }
            assert_eq!(buffers.map(sum), [32.0, 288.0], "{choice} on {name}");
            assert_eq!(appended.map(sum), [48.0, 304.0], "{choice} on {name}");
        }
    }
}

#[test]
fn attention_writes_in_place_unless_the_buffer_is_shared() {
    for (name, device) in kiln_testkit::devices() {
        for (choice, kernels) in choices(&name, &device) {
            if choice == Choice::Reference {
                continue;
            }
            let token = |heads| Tensor::<4>::ones([1, heads, 1, 8], (&device, DType::F32));
            let step = |buffers: [Tensor<4>; 2], first| {
                let positions = Positions::all_at(first, 1, &device);
                let append = KvAppend { buffers, new: [token(2), token(2) * 2.0], positions, origin: 0 };
                let shape = AttentionShape {
                    scale: 1.0,
                    softcap: None,
                    window: None,
                    causal: true,
                    end: None,
                    latent: false,
                };
                let step =
                    AttentionAppend { q: token(4), append, start: 0, shared: None, shape, sinks: None };
                let [_, keys, values] = step.run(&kernels);
                [keys, values]
            };
            let zeros = || Tensor::<4>::zeros([1, 2, 16, 8], (&device, DType::F32));
            let (buffers, before) = addresses([zeros(), zeros()], &name);
            let (buffers, after) = addresses(step(buffers, 3), &name);
            assert_eq!(before, after, "{choice} on {name} copies buffers that are its own");
            assert_eq!(buffers.clone().map(sum), [16.0, 32.0], "{choice} on {name}");
            let (appended, copy) = addresses(step(buffers.clone(), 4), &name);
            for i in 0..2 {
                assert_ne!(
                    copy[i], after[i],
                    "{choice} on {name} writes into a buffer that is held elsewhere"
                );
            }
            assert_eq!(buffers.map(sum), [16.0, 32.0], "{choice} on {name}");
            assert_eq!(appended.map(sum), [32.0, 64.0], "{choice} on {name}");
        }
    }
}

#[test]
fn kv_append_writes_each_row_at_its_own_position() {
    for (name, device) in kiln_testkit::devices() {
        for (choice, kernels) in choices(&name, &device) {
            let zeros = || Tensor::<4>::zeros([3, 1, 4, 1], (&device, DType::F32));
            let new = Tensor::<4>::from_data([[[[1.0], [2.0]]], [[[3.0], [4.0]]], [[[5.0], [6.0]]]], &device);
            let rows = [5, 0, 3].map(|first| RowPosition { first, ..RowPosition::default() });
            let positions = Positions::new(rows.into(), &device);
            let [keys, _] = append(&kernels, [zeros(), zeros()], [new.clone(), new], positions);
            let keys: Vec<f32> = read_back::read(keys).unwrap().try_into_vec().unwrap();
            let want = [0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 0.0, 6.0, 0.0, 0.0, 5.0];
            assert_eq!(keys, want, "{choice} on {name}");
        }
    }
}

fn append(
    kernels: &Kernels,
    buffers: [Tensor<4>; 2],
    new: [Tensor<4>; 2],
    positions: Positions,
) -> [Tensor<4>; 2] {
    kernels.run(KvAppend { buffers, new, positions, origin: 0 })
}

fn sum(tensor: Tensor<4>) -> f32 {
    read_back::read(tensor.sum()).unwrap().iter::<f32>().sum()
}

fn addresses([keys, values]: [Tensor<4>; 2], device: &str) -> ([Tensor<4>; 2], [usize; 2]) {
    let ((keys, a), (values, b)) = (address(keys, device), address(values, device));
    ([keys, values], [a, b])
}

/// Returns the tensor and an address that identifies its memory.
fn address(tensor: Tensor<4>, device: &str) -> (Tensor<4>, usize) {
    match device {
        #[cfg(feature = "cpu")]
        "cpu" => {
            use burn::backend::Flex;
            let tensor = tensor.try_into_primitive::<Flex>().unwrap();
            let address = tensor.bytes().as_ptr().addr();
            (Tensor::from_primitive::<Flex>(tensor), address)
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        _ => {
            use burn::backend::Cube;
            let tensor = tensor.try_into_primitive::<Cube>().unwrap();
            let address = tensor.handle.clone().binding().memory.id().value;
            (Tensor::from_primitive::<Cube>(tensor), address)
        }
    }
}
