//! User input on the command line: everything that is parsed from a string.

use std::path::Path;

use kiln::{
    DtypeChoice, Model, Offload, OnOutOfMemory, Plan,
    device::DeviceName,
    expert::{Ask, Inspection, cache_text, kernels::Choice},
};

use super::{MEMORY, PROMPT, cpu, limited, model_folder};
use crate::fuzz::{Run, Target, mutate::Format};

pub(in crate::fuzz) const TARGET: Target = Target { name: "words", format: Format::Words, seeds, prepare };

fn seeds() -> Vec<Vec<u8>> {
    let words = [
        "dynamic",
        "none",
        "fixed:len=64",
        "static:len=64",
        "static",
        "offloaded",
        "offloaded_static",
        "sliding",
        "sliding:window=8",
        "sink:window=12,sinks=3",
        "sink:window=12,sinks=3,compat=4.47",
        "sink:window=8,sinks=0",
        "quantized",
        "quantized:nbits=4,residual=16,group=16",
        "quantized:nbits=2,residual=16,group=16,rotate=on",
        "quantized:format=quanto,nbits=4,residual=8,group=16,flush=requantize",
        "quantized:format=hqq,nbits=2,residual=8,group=16,flush=requantize,axis_key=1,axis_value=1",
        "quantized:backend=quanto,q_group_size=16,residual_length=4",
        "sliding:window=4 + dynamic",
        "static:len=40 + sink:window=8,sinks=2",
        "auto",
        "cpu",
        "wgpu",
        "wgpu:0",
        "cuda:1",
        "f32",
        "float16",
        "bf16",
        "all",
        "layers=2",
        "fail",
        "offload",
        "quantize",
        "reference",
        "wgsl",
        "cube",
        "-1",
        "0.7",
        "6GiB",
    ];
    words.map(|word| word.as_bytes().to_vec()).into()
}

fn prepare(_: &Path) -> Run {
    let device = cpu();
    let models = ["llama", "gemma2"].map(|name| {
        let model = limited(&model_folder(name), &device).load().unwrap();
        (model, Inspection::of(model_folder(name)).unwrap())
    });
    Box::new(move |input| {
        let text = &*String::from_utf8_lossy(input);
        let device = text.parse::<DeviceName>().map(|name| assert_eq!(name.to_string().parse(), Ok(name)));
        let dtype = text.parse::<DtypeChoice>().map(|dtype| assert_eq!(dtype.to_string().parse(), Ok(dtype)));
        let choice = text.parse::<Choice>().map(|choice| assert_eq!(choice.to_string().parse(), Ok(choice)));
        let answer = text.parse::<OnOutOfMemory>().map(|what| assert_eq!(what.to_string().parse(), Ok(what)));
        let offload = text.parse::<Offload>();
        if let Ok(offload) = offload {
            assert_eq!(offload.to_string().parse(), Ok(offload));
        }
        cache_text(text, None);
        let plan = Plan::named(text);
        if let Ok(plan) = &plan {
            assert_eq!(Plan::named(&plan.to_string()).as_ref(), Ok(plan));
        }
        let mut taken = plan.is_ok();
        for (model, inspection) in &models {
            let needs = model.causal().needs();
            if let Ok(plan) = &plan {
                let plan = offload.as_ref().map_or(plan.clone(), |offload| plan.clone().offloaded(*offload));
                plan.label(&needs);
                for tokens in [0, 1, 128, usize::MAX] {
                    let ask = Ask::new(tokens).rows(3).memory(MEMORY);
                    inspection.caches(Some(&plan), &ask);
                }
                taken |= generated(model, &plan);
            }
        }
        taken
            | [device.is_ok(), dtype.is_ok(), choice.is_ok(), answer.is_ok(), offload.is_ok()].contains(&true)
    })
}

/// Whether a model generates with a plan.
fn generated(model: &Model, plan: &Plan) -> bool {
    let request = model.generate(PROMPT.to_vec()).max_new_tokens(3).plan(plan.clone());
    request.steps().is_ok_and(|mut steps| steps.all(|step| step.is_ok()))
}
