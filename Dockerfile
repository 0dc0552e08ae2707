# Kiln on the CPU: docker build -t kiln . && docker run --rm -it kiln run "ROMEO:"
FROM rust:1.95-bookworm AS build
WORKDIR /kiln
COPY . .
RUN cargo install --locked --path crates/kiln-cli --root /out --no-default-features --features cpu,hub

FROM debian:bookworm-slim
COPY --from=build /out/bin/kiln /usr/local/bin/kiln
# The demo model is looked for beside the binary.
COPY assets/demo /usr/local/bin/assets/demo
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/kiln/
# The cache of models: mount a folder here to keep it.
ENV HF_HOME=/models
RUN useradd --create-home kiln && mkdir /models && chown kiln /models
USER kiln
VOLUME /models
ENTRYPOINT ["kiln"]
