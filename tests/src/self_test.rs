//! Kernels that give wrong results on a device are detected and replaced by their references.

use burn::tensor::{DType, Tensor};
use kiln::{
    Model,
    device::DeviceClass,
    expert::{
        SelfTest,
        kernels::{
            Checked, Choice, Coverage, Implementation, KERNELS, Kernel, KernelInfo, Kernels, RunCount,
            cases::{Case, Layout},
            invariance::Extent,
            self_test,
        },
        read_back::block_on,
    },
};

use crate::support::{fixtures, float32, greedy};

/// Doubles numbers. All implementations except the reference triple the last one.
#[derive(Clone)]
struct Faulty {
    x: Tensor<1>,
}

impl Faulty {
    #[allow(clippy::unnecessary_wraps, clippy::result_large_err, reason = "as in `Kernel`")]
    fn wrong(self) -> Result<Tensor<1>, Self> {
        let [len] = self.x.dims();
        let (first, last) = (self.x.clone().narrow(0, 0, len - 1) * 2, self.x.narrow(0, len - 1, 1) * 3);
        Ok(Tensor::cat(vec![first, last], 0))
    }
}

impl Kernel for Faulty {
    const NAME: &'static str = "faulty";
    type Output = Tensor<1>;

    fn checked(self) -> Self {
        self
    }

    fn shape(&self) -> Vec<usize> {
        self.x.dims().into()
    }

    fn reference(self) -> Tensor<1> {
        self.x * 2
    }

    fn native(self) -> Result<Tensor<1>, Self> {
        self.wrong()
    }

    fn wgsl(self) -> Result<Tensor<1>, Self> {
        self.wrong()
    }

    fn cube(self) -> Result<Tensor<1>, Self> {
        self.wrong()
    }
}

impl Checked for Faulty {
    fn extent(&self) -> [usize; 2] {
        [1, 1]
    }

    fn part(self, _: Extent) -> Self {
        self
    }

    fn part_of(whole: Tensor<1>, _: Extent) -> Tensor<1> {
        whole
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |len: usize| {
            Case::new(len, move |numbers| {
                let x: Tensor<1> = numbers.tensor([len], Layout::Plain);
                // No number is 0.
                Self { x: x.abs() + 1 }
            })
        };
        (2..11).map(case).collect()
    }
}

#[test]
fn a_wrong_kernel_is_found_and_its_reference_runs() {
    for (name, opened) in kiln_testkit::devices::opened() {
        let faulty = KernelInfo::of::<Faulty>();
        let verdict = block_on(self_test(&faulty, opened, DType::F32, Coverage::Full)).unwrap().unwrap();
        assert_eq!((verdict.compared, verdict.wrong), (9, 9), "{name}");
        let quick = block_on(self_test(&faulty, opened, DType::F32, Coverage::Quick(&[]))).unwrap().unwrap();
        assert_eq!((quick.compared, quick.is_right()), (3, false), "{name}");
        let why = quick.why.unwrap();
        assert!(why.starts_with("faulty 2: element 1 is "), "{name}: {why}");

        let kernels = Kernels::new(Choice::Auto, &opened.device).unwrap().without(["faulty"]);
        let x = Tensor::<1>::full([3], 2.0, (&opened.device, DType::F32));
        let doubled: Vec<f32> =
            kiln::expert::read_back::read(kernels.run(Faulty { x })).unwrap().iter().collect();
        assert_eq!(doubled, [4.0; 3], "{name}");
        assert_eq!(
            kernels.ran(),
            [RunCount { kernel: "faulty", implementation: Implementation::Reference, count: 1 }],
            "{name}"
        );
    }
}

#[test]
fn right_kernels_pass_the_self_test() {
    for (name, opened) in kiln_testkit::devices::opened() {
        for kernel in KERNELS.iter().filter(|kernel| ["kv_append", "linear", "sample"].contains(&kernel.name))
        {
            match block_on(self_test(kernel, opened, DType::F32, Coverage::Quick(&[]))).unwrap() {
                Some(verdict) => assert!(verdict.is_right(), "{name}: {verdict:?}"),
                None => assert_eq!((kernel.name, opened.info.class), ("sample", DeviceClass::Cpu)),
            }
        }
    }
}

/// All kernels are compared and found correct while a model is loaded, and the model runs with them.
#[test]
fn a_model_whose_kernels_were_compared_runs_with_them() {
    let tokens = |opened, when| {
        let folder = fixtures("5.23.0").join("models/llama");
        let model = float32(Model::builder(folder), opened).self_test(when).load().unwrap();
        let steps = model.generate(vec![vec![3, 1, 4]]).config(greedy(5)).steps().unwrap();
        let tokens: Vec<_> = steps.map(|step| step.unwrap().tokens).collect();
        (tokens, model.kernels().ran().iter().any(|ran| ran.implementation != Implementation::Reference))
    };
    for (name, opened) in kiln_testkit::devices::opened() {
        assert_eq!(tokens(opened, SelfTest::Always), tokens(opened, SelfTest::Never), "{name}");
    }
}

/// Models that only make embeddings are compared by their hidden states.
#[test]
fn a_model_without_a_head_is_compared_too() {
    for model in ["qwen3", "gemma3_text"] {
        let folder = fixtures("5.23.0-embeddings").join("models").join(model);
        let embedded = |opened, when| {
            let model = float32(Model::builder(&folder), opened).self_test(when).load().unwrap();
            model.embed(vec![vec![3, 1, 4, 1, 5]]).run().unwrap()
        };
        for (name, opened) in kiln_testkit::devices::opened() {
            let [compared, not] = [SelfTest::Always, SelfTest::Never].map(|when| embedded(opened, when));
            assert_eq!(compared, not, "{name}: {model}");
        }
    }
}
