"""Records how packed weights are unpacked and packed by gguf (PyPI) and ggml.

    python tools/weights_cases.py LIBRARY tests/data/weights/formats.gguf        (Python with gguf 0.19.0)

LIBRARY is libggml-base.so of llama.cpp (recorded with ggml 0.25.3, in the source package llama-cpp-python 0.3.36), built for plain x86-64, which
has no fused multiplication and addition, as published builds of it are:

    cmake -S ggml -B build -DGGML_NATIVE=OFF -DGGML_CPU=OFF -DGGML_BUILD_EXAMPLES=OFF -DGGML_BUILD_TESTS=OFF
    cmake --build build --target ggml-base

For each format, the file has `FORMAT.blocks`, which are random bytes with special scales, `FORMAT.numbers`, which gguf makes of them, and
`FORMAT.packed`, which ggml makes of `numbers`. Where gguf can pack, too, it must make the same bytes. The metadata has a value of each type.
"""

import ctypes
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

FORMATS = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K,
           Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4]
# Where a block has its float16 scales.
SCALES = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q2_K: [80, 82], Type.Q3_K: [108],
          Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.IQ4_NL: [0], Type.IQ4_XS: [0]}
COLUMNS = 256

random = np.random.default_rng(7)
library = ctypes.CDLL(sys.argv[1])


def blocks(format):
    """Random blocks of 8 rows. The first of the blocks have special scales, the others small ones."""
    numbers, size = gguf.GGML_QUANT_SIZES[format]
    bytes = random.integers(0, 256, (8 * COLUMNS // numbers, size), dtype=np.uint8)
    special = np.array([np.inf, np.nan, -0.0, 6e-8, -65504.0], dtype=np.float16)
    for nth, at in enumerate(SCALES.get(format, [])):
        scales = random.normal(size=len(bytes)).astype(np.float16)
        # The minimum is not always as special as the scale.
        scales[nth : nth + len(special)] = special
        bytes[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return bytes.reshape(8, -1)


def inputs():
    """16 rows: ordinary weights, and groups that are hard to pack."""
    x = random.normal(0, 0.03, (16, COLUMNS))
    x[2] *= np.repeat(10.0 ** random.uniform(-4, 1, COLUMNS // 16), 16)
    x[3] = random.standard_t(2, COLUMNS)
    x[4] = np.abs(x[4])
    x[5] = -np.abs(x[5]) - 1
    x[6] = 0
    x[7, :64], x[7, 64:128] = 0, 0.25
    x[7, 128:160], x[7, 160:192] = -0.5, 3.0
    x[8] = random.integers(-8, 8, COLUMNS) / 8
    x[9] = random.integers(-1, 2, COLUMNS)
    x[10] *= 1e-6
    x[11] *= 1e-12
    x[12] = random.uniform(-65504, 65504, COLUMNS)
    x[13] = random.uniform(-1, 1, COLUMNS)
    x[14, ::7] = 0
    x[15, 5] = 40
    return x.astype(np.float32)


def pack(numbers, format):
    if format in (Type.F32, Type.F16, Type.BF16):
        return gguf.quantize(numbers, format)
    function = getattr(library, f"quantize_{format.name.lower().replace('_k', '_K')}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    rows = len(numbers)
    block, size = gguf.GGML_QUANT_SIZES[format]
    bytes = np.zeros((rows, COLUMNS // block * size), np.uint8)
    assert function(numbers.ctypes.data, bytes.ctypes.data, rows, COLUMNS, None) == bytes.size
    try:
        assert np.array_equal(bytes, gguf.quantize(numbers, format)), f"{format.name}: gguf packs other bytes than ggml"
    except NotImplementedError:
        pass
    return bytes


writer = gguf.GGUFWriter(sys.argv[2], "none")
writer.add_uint8("type.u8", 200)
writer.add_int8("type.i8", -100)
writer.add_uint16("type.u16", 60000)
writer.add_int16("type.i16", -30000)
writer.add_uint32("type.u32", 4000000000)
writer.add_int32("type.i32", -2000000000)
writer.add_float32("type.f32", 0.1)
writer.add_bool("type.bool", True)
writer.add_string("type.string", "häßlich 🐍")
writer.add_array("type.strings", ["", "a", "ä"])
writer.add_array("type.i32s", [1, -2, 3])
writer.add_array("type.f32s", [0.5, -1.5])
writer.add_array("type.bools", [True, False])
writer.add_uint64("type.u64", 2**64 - 1)
writer.add_int64("type.i64", -(2**63))
writer.add_float64("type.f64", 0.1)

numbers = inputs()
writer.add_tensor("numbers", numbers)
for format in FORMATS:
    name = format.name.lower()
    packed = blocks(format)
    with np.errstate(all="ignore"):
        unpacked = gguf.dequantize(packed, format)
    writer.add_tensor(f"{name}.blocks", packed, raw_dtype=format)
    writer.add_tensor(f"{name}.numbers", unpacked)
    writer.add_tensor(f"{name}.packed", pack(numbers, format).view(np.uint8), raw_dtype=format)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
