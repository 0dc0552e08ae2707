//! Steps that are recorded once and replayed.

use burn::tensor::{DType, Tensor};
use kiln::expert::{
    kernels::{Recorded, Recording},
    read_back,
};

#[test]
fn a_recorded_step_may_need_a_kernel_that_was_not_launched_before() {
    for (name, device) in kiln_testkit::devices() {
        // A kernel that no other test launches.
        let launch = |x: &Tensor<2>| x.clone().acosh();
        let x = Tensor::<2>::ones([3, 7], (&device, DType::F32));
        if Recording::prepare(&device).is_err() {
            assert!(!name.starts_with("cuda"), "CUDA records steps");
            continue;
        }
        let recorded = Recording::record(&device, || Ok(launch(&x))).unwrap();
        match recorded {
            Recorded::Graph(recording, output) => {
                recording.replay().unwrap();
                let numbers: Vec<f32> = read_back::read(output).unwrap().try_into_vec().unwrap();
                assert_eq!(numbers, [0.0; 21], "{name}");
            }
            Recorded::Never => assert!(!name.starts_with("cuda"), "CUDA records steps"),
            Recorded::Lost(why) => panic!("{name}: {why}"),
        }
        let numbers: Vec<f32> = read_back::read(x).unwrap().try_into_vec().unwrap();
        assert_eq!(numbers, [1.0; 21], "{name}: what the step reads is as before");
    }
}
