//! The text of a shader for each type of element.

use burn::tensor::DType;

/// A file of `shaders/`. As it stands it is valid WGSL for float32; other types of element replace one line.
#[derive(Debug)]
pub(crate) struct Shader {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

impl Shader {
    /// The types of element that shaders have.
    const ELEMENTS: [DType; 2] = [DType::F32, DType::F16];

    /// The finished text. Types that WGSL does not have get that of float32: tensors on wgpu cannot have them either.
    pub(crate) fn finish(&self, elem: DType) -> String {
        match elem {
            DType::F16 => self.text.replace("alias elem = f32;", "enable f16;\nalias elem = f16;"),
            _ => self.text.to_owned(),
        }
    }

    pub(crate) fn permutations(&self) -> impl Iterator<Item = (String, String)> {
        Self::ELEMENTS.into_iter().map(|elem| (format!("{} {}", self.name, elem.name()), self.finish(elem)))
    }
}
