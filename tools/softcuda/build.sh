#!/bin/sh -e
# Builds the software CUDA device into a folder (target/softcuda unless one is named): a libcuda and a libnvrtc that run
# kernels on the CPU. It needs g++ 12 or later and x86-64 with AVX2. See README.md.
cd "$(dirname "$0")"
out=${1:-../../target/softcuda}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Of kernels and of the libraries. Overflow of integers wraps, types alias, and a product and a sum round once, as with NVRTC.
flags="-std=c++20 -O2 -march=x86-64-v3 -ffp-contract=fast -fno-strict-aliasing -fwrapv -fPIC -fno-plt"
version=$(cat build.sh include/*.h include/crt/*.h compile.cpp | sha256sum | cut -c1-16)
[ "$(cat "$out/version" 2>/dev/null)" = "$version $(cat ./*.cpp ./*.h | sha256sum)" ] && exit 0

rm -rf "$out/include"
cp -r include "$out"
printf '#define SOFTCUDA_VERSION "%s"\n#define SOFTCUDA_FLAGS "%s"\n' "$version" "$flags" >"$out/config.h"
library="g++ $flags -Wall -Wextra -fvisibility=hidden -shared -pthread -include $out/config.h compile.cpp"
$library driver.cpp streams.cpp scheduler.cpp memory.cpp -ldl -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1"
$library nvrtc.cpp -ldl -Wl,-soname,libnvrtc.so.12 -o "$out/libnvrtc.so.12"
ln -sf libcuda.so.1 "$out/libcuda.so"
ln -sf libnvrtc.so.12 "$out/libnvrtc.so"
echo "$version $(cat ./*.cpp ./*.h | sha256sum)" >"$out/version"
