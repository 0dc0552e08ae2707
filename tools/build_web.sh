#!/usr/bin/env bash
# Builds the WebAssembly of the npm package web/kiln-web: for the GPU, and for the processor. wasm-bindgen is
# installed in the folder that is named, by default ~/.cache/kiln-ci-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${1:-$HOME/.cache/kiln-ci-tools}
target=wasm32-unknown-unknown
version=$(sed -n '/^name = "wasm-bindgen"$/{n;s/^version = "\(.*\)"$/\1/p;}' Cargo.lock)

# Compiled once, in three minutes.
env -u CARGO_TARGET_DIR cargo install --quiet --debug wasm-bindgen-cli --version "$version" --root "$tools"
# Every browser has had these instructions since 2023.
export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS='-C target-feature=+simd128'
build() {
  cargo build --profile "$2" --target "$target" --no-default-features --features "$1" -p kiln-web
  "$tools/bin/wasm-bindgen" --target web --remove-name-section --remove-producers-section --out-dir "web/kiln-web/$3" \
    "${CARGO_TARGET_DIR:-target}/$target/$2/kiln_web.wasm"
}
build wgpu web module
build cpu web-cpu module-cpu
# The page of the server, for a model in the browser.
cp crates/kiln-serve/page/page.js crates/kiln-serve/page/page.css web/
sed 's/src="page.js"/src="local.js"/' crates/kiln-serve/page/index.html >web/index.html
# What the page for conformance compares with.
rm -rf web/fixtures && mkdir web/fixtures && cp -R tests/fixtures/transformers-5.23.0 web/fixtures/
ls -l web/kiln-web/module*/*.wasm
