//! The texts of a shader, for each element type and for the options of launches.

use burn::tensor::DType;

/// A file in `shaders/`, followed by the code that it shares with others. The text as written is valid WGSL
/// for float32; other texts have other lines in some places.
#[derive(Debug)]
pub struct Shader {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// The tensors, in the order of their binding indices. The uniform is the last.
    pub(crate) bindings: &'static [Binding],
    /// Lines of the text, each with the lines that a launch may replace it by.
    pub(crate) options: &'static [Lines],
}

/// A finished text.
#[derive(Clone, Debug)]
pub struct Text {
    /// The name of the shader, the element type, and the index of the line picked for each option.
    pub name: String,
    pub wgsl: String,
    /// The tensors that a launch binds, in the order of their binding indices.
    pub bindings: &'static [Binding],
    /// Whether the text is given to drivers with counters that end its loops.
    pub counts_loops: bool,
}

impl Text {
    /// The text for devices on which tensors do not share buffers, as in browsers: tensors that are only read
    /// are declared so. Chrome drops launches, and says nothing, in which parts of one buffer overlap that
    /// may be written, as keys and values in the output of a joint projection do.
    pub fn with_reads_declared(mut self) -> Self {
        let reads = self.bindings.iter().enumerate().filter(|(_, binding)| binding.access == Access::Read);
        for (number, _) in reads {
            let declared = |access| format!("@group(0) @binding({number}) var<storage, {access}>");
            self.wgsl = self.wgsl.replacen(&declared("read_write"), &declared("read"), 1);
        }
        self
    }
}

/// A tensor that a launch binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The name of the variable.
    pub name: &'static str,
    pub access: Access,
}

/// The use of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Elements are only read. The tensor stays valid if a launch fails.
    Read,
    /// Elements are read and written, or left as they were.
    Update,
    /// No element is read, and all are written.
    Write,
}

/// A tensor that is only read.
pub(crate) const fn reads(name: &'static str) -> Binding {
    Binding { name, access: Access::Read }
}

/// A tensor that is read and written, or written in part.
pub(crate) const fn updates(name: &'static str) -> Binding {
    Binding { name, access: Access::Update }
}

/// A tensor that is only written.
pub(crate) const fn writes(name: &'static str) -> Binding {
    Binding { name, access: Access::Write }
}

/// The line that stands in the file, and its replacements. A function, because some are generated at run
/// time.
pub(crate) type Lines = fn() -> &'static [&'static str];

/// The element type, an option of all shaders.
const ELEMENT: Lines = || &["alias elem = f32;", "enable f16;\nalias elem = f16;"];

/// The way to unpack float16 numbers in words: by the device, or by integers if the device flushes subnormal
/// ones to 0.
const HALVES: Lines = || &["const KEEPS_SUBNORMALS = true;", "const KEEPS_SUBNORMALS = false;"];

impl Shader {
    /// Returns the finished text, with the picked line of each option. Types that WGSL does not have get the
    /// text for float32: tensors on wgpu cannot have them either. With `by_integers`, float16 numbers in
    /// words are unpacked by integers.
    pub(crate) fn finish(&self, elem: DType, picks: &[usize], by_integers: bool) -> Text {
        let element = (ELEMENT, usize::from(elem == DType::F16));
        let halves = (HALVES, usize::from(by_integers));
        let mut text = self.text.to_owned();
        let options = self.options.iter().copied().zip(picks.iter().copied());
        for (lines, pick) in options.chain([element, halves]) {
            let lines = lines();
            text = text.replacen(lines[0], lines[pick], 1);
        }
        let name = format!("{}{} {}", self.name, if by_integers { "_integers" } else { "" }, elem.name());
        Text {
            name: picks.iter().fold(name, |name, pick| format!("{name} {pick}")),
            wgsl: text,
            bindings: self.bindings,
            counts_loops: self.counts_loops(picks),
        }
    }

    /// Whether drivers get loops with counters that end them eventually. Counters cost registers, and no loop
    /// in this crate needs them, but without them Mesa's software Vulkan (22.3.6) computes prompts of 256
    /// dimensions wrong.
    pub(crate) fn counts_loops(&self, picks: &[usize]) -> bool {
        self.name == "attention_prefill" && picks.get(2) == Some(&0)
    }

    /// Whether the shader uses matrix units, which take only float16.
    fn uses_matrix_units(&self) -> bool {
        self.text.contains("enable wgpu_cooperative_matrix;")
    }

    /// Returns the text in every permutation. Texts that unpack float16 numbers by integers have their own
    /// names.
    pub fn permutations(&self) -> impl Iterator<Item = Text> + use<'_> {
        let mut all = vec![vec![]];
        for lines in self.options {
            let lines = lines();
            let longer = |picks: Vec<usize>| (0..lines.len()).map(move |pick| [&picks[..], &[pick]].concat());
            all = all.into_iter().flat_map(longer).collect();
        }
        let elements: &[DType] = match self.uses_matrix_units() {
            true => &[DType::F16],
            false => &[DType::F32, DType::F16],
        };
        let ways: &[bool] = if self.text.contains(HALVES()[0]) { &[false, true] } else { &[false] };
        let all =
            all.into_iter().flat_map(move |picks| elements.iter().map(move |&elem| (elem, picks.clone())));
        let all = all.flat_map(move |(elem, picks)| ways.iter().map(move |&way| (elem, picks.clone(), way)));
        all.map(move |(elem, picks, by_integers)| self.finish(elem, &picks, by_integers))
    }
}
