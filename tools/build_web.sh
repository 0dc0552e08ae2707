#!/usr/bin/env bash
# Builds the WebAssembly of the npm package web/kiln-web: for the GPU, for the processor, and for its threads.
# wasm-bindgen is installed in the folder that is named, by default ~/.cache/kiln-ci-tools.
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
  cargo build --profile "$2" --target "$target" --no-default-features --features "$1" -p kiln-web "${@:4}"
  "$tools/bin/wasm-bindgen" --target web --remove-name-section --remove-producers-section --out-dir "web/kiln-web/$3" \
    "${CARGO_TARGET_DIR:-target}/$target/$2/kiln_web.wasm"
}
build wgpu web module
build cpu web-cpu module-cpu
# For threads, everything is compiled with atomic instructions, the standard library, too. The compiler has both, but not as
# stable features.
rustup component add rust-src
(
  export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/threads"
  linked='--shared-memory --import-memory --max-memory=4294967296'
  for name in __wasm_init_tls __tls_size __tls_align __tls_base; do linked+=" --export=$name"; done
  CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS+=',+atomics,+bulk-memory'
  for argument in $linked; do CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS+=" -C link-arg=$argument"; done
  build cpu web-cpu module-threads -Z build-std=std,panic_abort
)
# The page of the server, for a model in the browser.
cp crates/kiln-serve/page/page.js crates/kiln-serve/page/page.css web/
sed 's/src="page.js"/src="local.js"/' crates/kiln-serve/page/index.html >web/index.html
# What the page for conformance compares with.
rm -rf web/fixtures && mkdir web/fixtures && cp -R tests/fixtures/transformers-5.23.0 web/fixtures/
ls -l web/kiln-web/module*/*.wasm
