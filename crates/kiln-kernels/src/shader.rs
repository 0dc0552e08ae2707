//! The texts of a shader: for each type of element, and for what launches ask for.

use burn::tensor::DType;

/// A file of `shaders/`, with what it shares with others behind it. As it stands it is valid WGSL for float32; other
/// texts have other lines in some places.
#[derive(Debug)]
pub struct Shader {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Lines of the text, each with what a launch may put in their place.
    pub(crate) options: &'static [Lines],
}

/// A finished text.
#[derive(Clone, Debug)]
pub struct Text {
    /// The shader, its type of element, and the number of the line of each option.
    pub name: String,
    pub wgsl: String,
    /// Whether drivers get it with counters that end its loops.
    pub counts_loops: bool,
}

/// The lines that stand in the file, and others.
pub(crate) type Lines = &'static [&'static str];

/// The type of element, which all shaders have.
const ELEMENT: Lines = &["alias elem = f32;", "enable f16;\nalias elem = f16;"];

impl Shader {
    /// The finished text, with that one of each option's lines. Types that WGSL does not have get the text of float32:
    /// tensors on wgpu cannot have them either.
    pub(crate) fn finish(&self, elem: DType, picks: &[usize]) -> String {
        let element = (&ELEMENT, usize::from(elem == DType::F16));
        let mut text = self.text.to_owned();
        for (lines, pick) in self.options.iter().zip(picks.iter().copied()).chain([element]) {
            text = text.replacen(lines[0], lines[pick], 1);
        }
        #[cfg(feature = "wgpu")]
        return crate::faults::text(self.name, text);
        #[cfg(not(feature = "wgpu"))]
        text
    }

    /// Whether drivers get loops with counters that end them at some time. They cost registers, and no loop of ours needs them. But without,
    /// Mesa's software Vulkan (22.3.6) computes prompts of 256 dimensions wrong.
    pub(crate) fn counts_loops(&self, picks: &[usize]) -> bool {
        self.name == "attention_prefill" && picks.get(2) == Some(&0)
    }

    /// Whether it multiplies with matrix units. They take float16 alone.
    fn uses_matrix_units(&self) -> bool {
        self.text.contains("enable wgpu_cooperative_matrix;")
    }

    /// The text in every permutation.
    pub fn permutations(&self) -> impl Iterator<Item = Text> + use<'_> {
        let mut all = vec![vec![]];
        for lines in self.options {
            let longer = |picks: Vec<usize>| (0..lines.len()).map(move |pick| [&picks[..], &[pick]].concat());
            all = all.into_iter().flat_map(longer).collect();
        }
        let elements: &[DType] = match self.uses_matrix_units() {
            true => &[DType::F16],
            false => &[DType::F32, DType::F16],
        };
        let all =
            all.into_iter().flat_map(move |picks| elements.iter().map(move |&elem| (elem, picks.clone())));
        all.map(move |(elem, picks)| {
            let name = picks
                .iter()
                .fold(format!("{} {}", self.name, elem.name()), |name, pick| format!("{name} {pick}"));
            Text { name, wgsl: self.finish(elem, &picks), counts_loops: self.counts_loops(&picks) }
        })
    }
}
