//! Checks of the visitor's GPU: its kernels, and recordings of Transformers.

use std::sync::Arc;

use js_sys::Function;
use kiln::{
    Error, Plan,
    burn::tensor::DType,
    device::{self, DeviceName, Opened},
    expert::kernels::{Coverage, KERNELS, Verdict, self_test},
};
use kiln_testkit::conformance::{self, Setup};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use crate::{
    files::{WebFile, WebSource},
    thrown,
};

/// Runs the cases of a fixture folder whose `MODEL/CASE` contains `filter`. `cache`: one for the cases that
/// name none, or `dynamic`. `on_case` gets each result as JSON. Returns the counts as JSON.
///
/// # Errors
/// An `Error` if the files are no fixture folder.
#[wasm_bindgen]
pub async fn conformance(
    files: Vec<WebFile>,
    filter: String,
    cache: Option<String>,
    on_case: Function,
) -> Result<String, JsValue> {
    let checked = async {
        let source = WebSource::new("the folder".to_owned(), files)?;
        let cache = cache.as_deref().map(Plan::named).transpose()?;
        let device = opened().await?;
        let setup = Setup { cache, ..Setup::on(&device) };
        let mut report = |line: &conformance::Line| {
            let told = on_case.call1(&JsValue::NULL, &json!(line).to_string().into());
            // It threw an exception: the page wants no more.
            told.map(drop).map_err(|_| Error::Execution("the check was ended".to_owned()))
        };
        let mut wanted = |name: &str| name.contains(&filter);
        let summary = conformance::run(Arc::new(source), &mut wanted, &setup, &mut report).await?;
        let mut result = described(&device);
        result["summary"] = json!(summary);
        Ok(result.to_string())
    };
    checked.await.map_err(|e: Error| thrown(&e))
}

/// Compares the kernels with their references, on a few inputs each, or on all (`full`). `on_kernel` gets the
/// numbers of kernels that were compared, and of all. Returns the results as JSON.
///
/// # Errors
/// An `Error` if there is no GPU, or it is lost.
#[wasm_bindgen]
pub async fn doctor(full: bool, on_kernel: Function) -> Result<String, JsValue> {
    let coverage = if full { Coverage::Full } else { Coverage::Quick(&[]) };
    let checked = async {
        let device = opened().await?;
        let dtypes = [DType::F32, DType::F16].into_iter();
        let dtypes: Vec<DType> = dtypes.filter(|dtype| device.device.supports_dtype(*dtype)).collect();
        let (mut kernels, mut done) = (Vec::new(), 0);
        let all = KERNELS.len() * dtypes.len();
        for dtype in &dtypes {
            for kernel in KERNELS {
                _ = on_kernel.call2(&JsValue::NULL, &JsValue::from(done), &JsValue::from(all));
                if let Some(verdict) = self_test(kernel, &device, *dtype, coverage).await? {
                    kernels.push(compared(&verdict));
                }
                done += 1;
            }
        }
        let mut result = described(&device);
        result["kernels"] = json!(kernels);
        Ok(result.to_string())
    };
    checked.await.map_err(|e: Error| thrown(&e))
}

fn compared(Verdict { kernel, path, dtype, compared, wrong, why }: &Verdict) -> Value {
    json!({
        "kernel": kernel,
        "path": path.to_string(),
        "dtype": dtype.name(),
        "compared": compared,
        "wrong": wrong,
        "why": why,
    })
}

async fn opened() -> kiln::Result<Opened> {
    device::open_async(DeviceName::Auto).await
}

fn described(device: &Opened) -> Value {
    let info = &device.info;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "adapter": info.adapter,
        "api": info.api,
        "driver": info.driver,
        "class": info.class.to_string(),
    })
}
