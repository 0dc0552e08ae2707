//! Tests whether a device unpacks subnormal float16 numbers. WebGPU allows it to flush them to 0, and no
//! known desktop driver does. Unpacking with integers takes up to a fifth of a product's instructions, so it
//! is used only on devices that were seen to need it.

use burn::{
    backend::Cube,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use half::f16;
use kiln_core::{Result, read_back};

use crate::{
    runtime::{
        launch::{Launch, empty, primitive},
        shader::{Shader, reads, writes},
    },
    shaders::subnormals::Info,
};

/// Two numbers per word: the smallest and the largest, subnormal and normal, of both signs.
const WORDS: [u32; 6] = [0x0001_03ff, 0x03ff_8001, 0x83ff_0200, 0x0400_8400, 0x7bff_3c00, 0xbc00_fbff];

const SHADER: Shader = Shader {
    name: "subnormals",
    bindings: &[writes("y"), reads("w")],
    text: concat!(
        include_str!("../../../../../shaders/subnormals.wgsl"),
        include_str!("../../../../../shaders/halves.wgsl")
    ),
    options: &[],
};

/// Whether `device` unpacks subnormal numbers. False if the test fails to run.
pub(super) async fn are_kept(device: &Device) -> bool {
    unpacked(device).await.is_ok_and(|numbers| {
        let halves = WORDS.iter().flat_map(|word| [*word as u16, (word >> 16) as u16]);
        let want: Vec<u32> = halves.map(|half| f16::from_bits(half).to_f32().to_bits()).collect();
        numbers.into_iter().map(f32::to_bits).eq(want)
    })
}

/// Unpacks [`WORDS`] on the device.
async fn unpacked(device: &Device) -> Result<Vec<f32>> {
    let words = TensorData::new(WORDS.map(u32::cast_signed).to_vec(), [WORDS.len()]);
    let words = primitive(Tensor::<1, Int>::from_data(words, (device, DType::I32)));
    let y = empty(&words, [2 * WORDS.len()], DType::F32);
    let launch = Launch::new(&SHADER, DType::F32, &y.client);
    launch.run(1, [&y, &words], Info { words: WORDS.len() as u32 });
    let read = read_back::start(Tensor::<1>::from_primitive::<Cube>(y));
    Ok(read.finish().await?.iter::<f32>().collect())
}
