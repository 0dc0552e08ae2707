# Short names for the commands of CONTRIBUTING.md. just is optional: each recipe is one plain command.

_list:
    @just --list --unsorted

# Run all tests on every device of this machine; arguments select some of them
test *args:
    cargo test --release {{ args }}

# Run all tests on one device: cpu, wgpu or cuda
test-on device *args:
    KILN_TEST_DEVICES={{ device }} cargo test --release {{ args }}

# Compare with the recordings of transformers: just conformance --device wgpu
conformance *args:
    cargo run --release -- conformance tests/fixtures/transformers-5.23.0 {{ args }}

# Rewrite the snapshots of the command line; review them with git diff
snapshots:
    INSTA_UPDATE=always cargo test --release --test cli snapshots

# Format the code
fmt:
    cargo fmt --all

# Run clippy; warnings are errors
lint:
    cargo clippy --release --all-targets -- -D warnings

# Check licences, sources and advisories of dependencies; needs cargo-deny
deny:
    cargo deny check

# Measure prefill and decode: just bench --device wgpu
bench *args:
    cargo run --release -- bench {{ args }}

# Run each fuzzer for this many seconds
fuzz seconds="600":
    KILN_FUZZ_SECONDS={{ seconds }} cargo test --release --test kiln fuzz

# Look for memory that grows and results that differ: just soak 30 --device wgpu
soak minutes="30" *args:
    cargo run --release --example soak -- --minutes {{ minutes }} {{ args }}

# Build the documentation of the library, in target/doc
docs *args:
    cargo doc --no-deps --release {{ args }}

# Run everything that must pass before a change lands
ci:
    .ci/run
