#!/bin/sh -e
# Runs a program on the software CUDA device, with all settings: `test.sh PROGRAM ARGUMENTS...`, such as the test binary with
# filters (on the CPU as well, which some tests compare with). Without a program, it prints the settings, for `eval`. SOFTCUDA_OUT: where the device is built, target/softcuda.
here=$(cd "$(dirname "$0")" && pwd)
out=${SOFTCUDA_OUT:-$here/../../target/softcuda}
"$here/build.sh" "$out" >&2
out=$(cd "$out" && pwd)
export LD_LIBRARY_PATH="$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUDA_PATH="$out"
export KILN_TEST_DEVICES="${KILN_TEST_DEVICES:-cpu,cuda}"
if [ $# = 0 ]; then
    echo "export LD_LIBRARY_PATH='$LD_LIBRARY_PATH' CUDA_PATH='$CUDA_PATH' KILN_TEST_DEVICES='$KILN_TEST_DEVICES'"
else
    exec "$@"
fi
