#!/bin/bash
# Has the software CUDA device fail in the ways that a GPU's driver does, and looks at what `kiln` makes of it: `faults.sh KILN`. Ends with code 1 where that is not what
# it should be. SOFTCUDA_OUT: as in test.sh.
set -euo pipefail
kiln=$1
eval "$("$(dirname "$0")/test.sh")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

# expect NAME CODE TEXT COMMAND ..: the exit code, and what is printed
expect() {
    local name=$1 code=$2 text=$3 found=0
    "${@:4}" >"$folder/printed" 2>&1 || found=$?
    if [ "$found" = "$code" ] && grep -qF -- "$text" "$folder/printed"; then
        echo "$name: as it should be"
    else
        echo "$name: exit code $found, and this was printed where \"$text\" should be:"
        cat "$folder/printed"
        failed=1
    fi
}
say=("$kiln" run --device cuda --kernels cube --seed 7 -n 12 "ROMEO:")
words=$("${say[@]}" 2>/dev/null | tail -n 1)

mkdir "$folder/toolkit"
cp -r "$CUDA_PATH/include" "$folder/toolkit/"
rm "$folder/toolkit/include/cuda_bf16.h"
expect 'a header of the toolkit is missing' 2 'cuda_bf16.h' env CUDA_PATH="$folder/toolkit" "${say[@]}"
expect 'a recording fails' 0 "$words" env SOFTCUDA_FAIL_CAPTURE=1 "${say[@]}" --cache static
expect 'there is no room for the weights' 2 "no room for the model's weights" env SOFTCUDA_MEMORY=15000000 "${say[@]}"
# Kiln is told that there is more memory than the driver gives.
expect 'the driver refuses memory' 2 'the device has no room for a tensor' env SOFTCUDA_MEMORY=20000000 "${say[@]}" --memory 1GiB
expect 'devices are hidden' 0 'software device 1' env SOFTCUDA_DEVICES=2 CUDA_VISIBLE_DEVICES=1 "$kiln" devices
expect 'a hidden device is asked for' 2 'there are 1 CUDA devices' env SOFTCUDA_DEVICES=2 CUDA_VISIBLE_DEVICES=1 "$kiln" run --device cuda:1 x
g++ -O1 -o "$folder/outside" "$(dirname "$0")/outside.cpp" -L"$CUDA_PATH" -lcuda -lnvrtc
expect 'a kernel that reads its memory' 0 'all numbers were read' "$folder/outside" 0
expect 'a kernel that reads outside' 134 'reads where it must not' "$folder/outside" 1
exit $failed
