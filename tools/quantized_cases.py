"""Records matrices as bitsandbytes, GPTQ, AWQ and compressed-tensors store them, and the numbers that these unpack to.

    python tools/quantized_cases.py tests/data/weights/quantized.safetensors

Recorded with torch 2.8.0, transformers 5.23.0, bitsandbytes 0.50.2 and compressed-tensors 0.20.0, on a CPU.

A case has a name. `CASE/TENSOR` are tensors as they are in a folder, `CASE/MODULE.numbers` what the library makes of those of a module, in float32, and
the file's metadata has `quantization_config` of config.json under the name of the case. Cases `edges_*` have values that no quantizer makes. The other
cases are matrices of the recorded llama, so that a test can put them into its folder.

- bitsandbytes: Transformers quantizes and saves the model; bitsandbytes unpacks it, in float32. Its kernel `dequantize_4bit` for CPUs takes wrong scales where
  rows are no whole blocks, so its default implementation is recorded, and compared with the kernel elsewhere.
- compressed-tensors: `PackedQuantizationCompressor` and `NaiveQuantizationCompressor`.
- GPTQ and AWQ: their packages need a GPU or a compiler. Codes are packed here. The formulas that unpack them are those of GPTQModel
  (`PackableQuantLinear.dequantize_weight`, after `convert_gptq_v1_to_v2_format_module`) and AutoAWQ (`dequantize_gemm`).

These three compute in the type of their scales, float16 or bfloat16. `numbers` come from the same formula with the scales as float32; they are
checked to be what the library computes, once they are rounded to its type.
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import QuantState
from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

LLAMA = pathlib.Path(__file__).parent.parent / "tests/fixtures/transformers-5.23.0/models/llama"
MODULES = ["model.layers.1.self_attn.k_proj", "model.layers.2.mlp.down_proj"]

torch.manual_seed(7)
llama = load_file(LLAMA / "model.safetensors")
tensors, metadata = {}, {}


def record(case, config, module, parts, numbers):
    metadata[case] = json.dumps(config)
    tensors.update({f"{case}/{module}.{name}": tensor.clone().contiguous() for name, tensor in parts.items()})
    assert numbers.dtype == torch.float32
    tensors[f"{case}/{module}.numbers"] = numbers.clone().contiguous()


def check_rounded(numbers, reference):
    """The library's numbers are these, rounded to its type."""
    rounded = numbers.to(reference.dtype)
    assert torch.equal(rounded.nan_to_num(7), reference.nan_to_num(7))


# bitsandbytes


compared = []


def four_bits(parts):
    state = QuantState.from_dict({f"weight.{k}": v for k, v in parts.items() if k != "weight"}, torch.device("cpu"))
    state.dtype = torch.float32
    absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    codes = parts["weight"].view(torch.uint8).reshape(-1)
    numbers = _dequantize_4bit_compute(codes, absmax, state.code, state.blocksize, state.shape, torch.float32)
    if state.shape[1] % state.blocksize == 0:
        assert torch.equal(numbers, bnb.dequantize_4bit(parts["weight"], state))
        compared.append(state.quant_type)
    return numbers


def int8(parts):
    return torch.ops.bitsandbytes.int8_vectorwise_dequant.default(parts["weight"], parts["SCB"])


def bitsandbytes(case, **options):
    """What Transformers makes of the model."""
    config = BitsAndBytesConfig(**options)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_pretrained(LLAMA, quantization_config=config, dtype=torch.bfloat16).save_pretrained(folder)
        saved = load_file(f"{folder}/model.safetensors")
        config = json.load(open(f"{folder}/config.json"))["quantization_config"]
    for module in MODULES:
        parts = {name.removeprefix(f"{module}."): tensor for name, tensor in saved.items() if name.startswith(f"{module}.")}
        if "SCB" in parts:
            numbers = int8(parts)
        else:
            numbers = four_bits({name.removeprefix("weight."): tensor for name, tensor in parts.items()})
        record(case, config, module, parts, numbers)


bitsandbytes("nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4")
bitsandbytes("fp4_nested", load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
bitsandbytes("nf4_nested_in_bf16", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
             bnb_4bit_quant_storage=torch.bfloat16)
bitsandbytes("int8", load_in_8bit=True)

for kind in ["nf4", "fp4"]:
    for nested in [False, True]:
        packed, state = bnb.quantize_4bit(torch.randn(33, 128), blocksize=32, compress_statistics=nested, quant_type=kind)
        four_bits({"weight": packed, **state.as_dict(packed=True)})
assert len(compared) == 4

for nested in [False, True]:
    # Rows begin within a byte, and blocks within a row.
    packed, state = bnb.quantize_4bit(torch.randn(33, 35), blocksize=32, compress_statistics=nested, quant_type="nf4")
    if nested:
        state.absmax[:4] = torch.tensor([0, 255, 127, 128], dtype=torch.uint8)
    else:
        state.absmax[:7] = torch.tensor([0.0, -1.5, 1e-40, torch.inf, torch.nan, -0.0, 3e38])
    parts = {"weight": packed, **state.as_dict(packed=True)}
    named = {"weight" if name == "weight" else f"weight.{name}": tensor for name, tensor in parts.items()}
    record(f"edges_nf4{'_nested' * nested}", {"quant_method": "bitsandbytes"}, "odd", named, four_bits(parts))

parts = {"weight": torch.arange(-128, 128, dtype=torch.int8).reshape(8, 32),
         "SCB": torch.tensor([0.0, -1.5, 1e-40, torch.inf, torch.nan, 1.0, 0.3, 3e38])}
record("edges_int8", {"quant_method": "bitsandbytes"}, "even", parts, int8(parts))


# GPTQ


def words(codes, bits):
    """Packs the codes along the last dimension, the first in the lowest bits."""
    places = torch.arange(0, 32, bits)
    packed = (codes.long().reshape(*codes.shape[:-1], -1, 32 // bits) << places).sum(-1)
    return (packed + 2**31).remainder(2**32).sub(2**31).int()


def ones(bits):
    return words(torch.ones(32 // bits), bits).item()


def unpack_gptq(parts, bits, is_v1):
    """GPTQModel's `dequantize_weight`, in the type of the scales; `[in, out]`."""
    qzeros, scales, qweight = parts["qzeros"].clone(), parts["scales"], parts["qweight"]
    if is_v1:
        qzeros += ones(bits)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32).unsqueeze(0)
    dtype = torch.int16 if bits == 8 else torch.int8
    zeros = torch.bitwise_right_shift(qzeros.unsqueeze(2).expand(-1, -1, 32 // bits), shifts.unsqueeze(0)).to(dtype)
    zeros = torch.bitwise_and(zeros, 2**bits - 1).reshape(scales.shape)
    weight = torch.bitwise_right_shift(qweight.unsqueeze(1).expand(-1, 32 // bits, -1), shifts.unsqueeze(-1)).to(dtype)
    weight = torch.bitwise_and(weight, 2**bits - 1)
    weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])
    group = parts["g_idx"].long()
    return scales[group] * (weight - zeros[group])


def gptq(case, module, weight, bits, size, sym=True, act=False, is_v1=True, edges=False):
    out, columns = weight.shape
    size_or_row = columns if size == -1 else size
    group = torch.arange(columns) // size_or_row
    if act:
        group = group[torch.randperm(columns)]
    groups, top = int(group.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(groups, out), torch.zeros(groups, out, dtype=torch.int32)
    for g in range(groups):
        low, high = weight[:, group == g].min(1).values.clamp(max=0), weight[:, group == g].max(1).values.clamp(min=0)
        if sym:
            low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
        scales[g] = (high - low) / top
        zeros[g] = (top + 1) // 2 if sym else torch.round(-low / scales[g]).clamp(0, top).int()
    scales = scales.half()
    if edges:
        scales[0, :6] = torch.tensor([0.0, -0.01, 6e-8, torch.inf, torch.nan, 65504.0])
        zeros[0, :8] = torch.tensor([0, top, 0, 1, 0, 0, top, 0])
        zeros[-1, :] = 0
    codes = torch.round(weight / scales[group].T.float()).nan_to_num(0, 0, 0) + zeros[group].T
    codes = codes.clamp(0, top)
    stored = words(zeros, bits)
    if is_v1:
        stored -= ones(bits)
    parts = {"qweight": words(codes, bits).T, "qzeros": stored, "scales": scales, "g_idx": group.int()}
    numbers = unpack_gptq({**parts, "scales": scales.float()}, bits, is_v1)
    check_rounded(numbers, unpack_gptq(parts, bits, is_v1))
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act, "sym": sym,
              "checkpoint_format": "gptq" if is_v1 else "gptq_v2", "pack_dtype": "int32"}
    record(case, config, module, parts, numbers.T)


for module in MODULES:
    weight = llama[f"{module}.weight"]
    gptq("gptq", module, weight, 4, 16)
    gptq("gptq_act_order", module, weight, 4, 16, sym=False, act=True)
    gptq("gptq_8", module, weight, 8, -1)
    gptq("gptq_v2_2", module, weight, 2, 16, sym=False, is_v1=False)
for is_v1 in [True, False]:
    gptq(f"edges_gptq{'' if is_v1 else '_v2'}", "even", torch.randn(24, 192), 4, 128, sym=False, is_v1=is_v1, edges=True)
gptq("edges_gptq_8", "even", torch.randn(8, 64), 8, 32, sym=False, edges=True)


# AWQ

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
REVERSE = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack_awq(parts, size):
    """AutoAWQ's `dequantize_gemm`, in the type of the scales; `[in, out]`."""
    shifts = torch.arange(0, 32, 4)

    def codes(packed):
        codes = torch.bitwise_right_shift(packed[:, :, None], shifts[None, None, :]).to(torch.int8)
        codes = codes.view(codes.shape[0], -1)
        order = torch.arange(codes.shape[-1], dtype=torch.int32).view(-1, 8)[:, REVERSE].view(-1)
        return torch.bitwise_and(codes[:, order], 15)

    scales, zeros = (x.repeat_interleave(size, dim=0) for x in (parts["scales"], codes(parts["qzeros"])))
    return (codes(parts["qweight"]) - zeros) * scales


def awq(case, module, weight, size, edges=False):
    out, columns = weight.shape
    grouped = weight.reshape(out, -1, size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = torch.round(-low / scales.float()).clamp(0, 15)
    if edges:
        scales[:6, 0] = torch.tensor([0.0, -0.01, 6e-8, torch.inf, torch.nan, 65504.0])
        zeros[:, 1] = torch.tensor([0, 15]).repeat(out // 2)
    codes = torch.round(grouped / scales.float()[..., None]).nan_to_num(0, 0, 0) + zeros[..., None]
    codes = codes.clamp(0, 15).reshape(out, columns)

    def pack(codes):
        return words(codes.reshape(len(codes), -1, 8)[..., ORDER].reshape(len(codes), -1), 4)

    parts = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.contiguous()}
    numbers = unpack_awq({**parts, "scales": parts["scales"].float()}, size)
    check_rounded(numbers, unpack_awq(parts, size))
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True,
              "modules_to_not_convert": None}
    record(case, config, module, parts, numbers.T)


for module in MODULES:
    awq("awq", module, llama[f"{module}.weight"], 16)
awq("edges_awq", "even", torch.randn(24, 64), 32, edges=True)


# compressed-tensors


def compressed(case, module, weight, bits, strategy, size=None, symmetric=True, kind="int", dtype=torch.bfloat16, edges=False):
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, group_size=size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    is_packed = kind == "int" and "int8" not in case
    compressor = PackedQuantizationCompressor if is_packed else NaiveQuantizationCompressor
    out, columns = weight.shape
    groups = 1 if size is None else columns // size
    grouped = weight.reshape(out, groups, -1) if strategy != "tensor" else weight.reshape(1, 1, -1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    most = 448 if kind == "float" else 2 ** (bits - 1) - 1
    scale = torch.maximum(-low, high) / most if symmetric else (high - low) / (2**bits - 1)
    zero = torch.zeros_like(scale) if symmetric else torch.round(-low / scale) - 2 ** (bits - 1)
    scale = scale.to(dtype)
    if edges:
        zero[:6, 0] = torch.tensor([-(2.0 ** (bits - 1)), 2 ** (bits - 1) - 1, 0, 1, -1, 2])
    if strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight.to(dtype), "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    parts = compressor.compress(state, scheme)
    if edges:
        special = torch.tensor([0.0, -0.01, 1e-30, torch.inf, torch.nan, 3e38]).to(dtype)
        parts["weight_scale"][:6, 0] = special
    exact = compressor.decompress({**parts, "weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
    check_rounded(exact, compressor.decompress(parts, scheme)["weight"])
    format = "pack-quantized" if is_packed else f"{kind}-quantized"
    config = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
              "config_groups": {"group_0": json.loads(scheme.model_dump_json())}, "kv_cache_scheme": None}
    record(case, config, module, parts, exact)


for module in MODULES:
    weight = llama[f"{module}.weight"]
    compressed("ct_4_groups", module, weight, 4, "group", 16)
    compressed("ct_4_rows", module, weight, 4, "channel", symmetric=False, dtype=torch.float16)
    compressed("ct_8", module, weight, 8, "group", 16, symmetric=False)
    compressed("ct_int8", module, weight, 8, "channel")
    compressed("ct_float8", module, weight, 8, "tensor", kind="float")
# Rows end within a word, and so do columns of zero points.
compressed("edges_ct", "odd", torch.randn(13, 15), 4, "group", 5, symmetric=False, edges=True)
compressed("edges_ct_rows", "odd", torch.randn(11, 13), 4, "channel", symmetric=False, edges=True)
compressed("edges_ct_int8", "odd", torch.randn(7, 9), 8, "channel", symmetric=False, edges=True)

# Every float of 8 bits.
every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 128)
scale = torch.tensor([[0.5], [3.0]], dtype=torch.bfloat16)
record("edges_ct_float8", {"quant_method": "compressed-tensors"}, "even", {"weight": every, "weight_scale": scale},
       every.float() * scale.float())

save_file(tensors, sys.argv[1], metadata)
