"""Predicts from the figures of compilers how fast a Llama-3-8B is on some GPUs.

    python tools/gpu/predict.py            prints the tables of docs/measurements/gpu-predictions.md
    python tools/gpu/predict.py --check    exit code 1 if the page has others

A product takes as long as its bytes or its instructions, whichever is longer; launches add their cost. Measured are the figures (figures.csv), and how
long float16 takes on an H100 (docs/measurements/nvidia.md), from which READ and its cost of a launch are. The other constants are data sheets' and estimates.
"""

import argparse
import csv
import pathlib
import sys

import check

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent.parent / "docs/measurements/gpu-predictions.md"

# Name, target of the instructions, GB/s, 10^12 instructions of a lane a second, 10^12 multiply-adds a second of matrix units that Kiln uses for few rows, µs a
# launch. Apple's instructions are those of RDNA 3, for want of its compiler.
GPUS = [
    ("RTX 4090, CUDA", "sm_89", 1008, 41.3, 82.6, 2.2),
    ("RTX 4090, Vulkan", "sm_89", 1008, 41.3, 82.6, 3.5),
    ("H100, CUDA", "sm_90a", 3350, 29.6, 300, 3.8),
    ("RX 7900 XTX", "navi31", 960, 15.3, 61.4, 5.0),
    ("M3 Max", "navi31", 400, 7.1, 7.1, 4.2),
    ("Arc B580", "bmg", 456, 7.3, 58.4, 8.0),
]
# Targets of which the shaders' figures are known.
SHADERS = ("navi31", "bmg")
# The share of its bandwidth that a GPU reads with at most, and the share of its instructions that it issues.
READ, ISSUED = 0.92, 0.85
# Of the instructions outside the main loop, those that most lanes execute: the others add up the sums of a workgroup.
OUTSIDE = 0.4

LAYERS, CONTEXT = 32, 1024
# Keys and values: 8 heads of 128 numbers in float16.
KV_BYTES = LAYERS * CONTEXT * 2 * 8 * 128 * 2
# Rows and columns of the products of a layer, and whether x is normed; then the head.
PRODUCTS = [(6144, 4096, True), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)]
HEAD = (128256, 4096, True)
BITS = {"f16": 16, "q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.5, "q6_k": 6.5625}
NUMBERS = {"q4_0": 1, "q8_0": 5, "q4_k": 8, "q6_k": 10}
# The formats of layers and of the head. In Q4_K_M, values and `down` of half of the layers are Q6_K.
MODELS = {"f16": ("f16", "f16"), "Q8_0": ("q8_0", "q8_0"), "Q4_0": ("q4_0", "q6_k"), "Q4_K_M": ("q4_k", "q6_k")}

# Launches of a token: five in a layer and twelve, as the test `launches` counts. Attention over 1,024 keys has parts, which one more launch of a layer combines,
# or on CUDA the last workgroups: two fences, a counter, and two reads, each of which takes the way to the cache of the GPU and back (estimated, in µs).
LAUNCHES = 5 * LAYERS + 12
COMBINING = 1.8
# At commit 53d6506: launches, and the instructions of a weight in the main loop, for one row and for one of eight. The latter is not known of CUDA, and
# neither is of Intel.
LAUNCHES_BEFORE = {"Q4_K_M": 317}
BEFORE_EIGHT = 15.7 / 8
BEFORE = {"navi31": {"q4_0": 4.1, "q8_0": 4.1, "q4_k": 4.9, "q6_k": 6.5}, "sm_89": {"q4_0": 4.9, "q8_0": 5.3, "q4_k": 5.9, "q6_k": 7.5}}

# Of the shader `linear_tiles_packed` for 17 to 64 rows, for each weight of Q4_0 and 32 rows: instructions of a lane, counted by hand in the listings of RADV (214
# of 128 lanes, for 64 x 64 weights) and of ANV (391, for 64 x 32), and multiply-adds.
FEW_STEP = {"navi31": 214 * 128 / (64 * 64), "bmg": 391 * 128 / (64 * 32)}
FEW_ROWS = 32

# Prompts: the share of multiply-adds that large products reach; `are_better_unpacked` in crates/kiln-kernels/src/linear/tiles.rs; and cycles of a subgroup
# for 16 products of matrices in `linear_tiles`, counted by hand. RADV's listing: 32 for a product, 2 for each of 46, 101 and 138 instructions. ANV's: 2 for each
# of 340, 605 and 670 instructions; its units take 16 for a product, meanwhile.
MULTIPLIED = {"navi31": 0.8, "bmg": ISSUED * 16 * 16 / (2 * 340)}
UNPACKED_ROWS = {"RX 7900 XTX": 512, "M3 Max": 256, "Arc B580": 256}
TILE_CYCLES = {
    "navi31": {format: 16 * 32 + 2 * instructions for format, instructions in [("f16", 46), ("q4_0", 101), ("q4_k", 138)]},
    "bmg": {format: 2 * instructions for format, instructions in [("f16", 340), ("q4_0", 605), ("q4_k", 670)]},
}


def figures():
    found = {}
    for row in csv.DictReader((HERE / "figures.csv").open()):
        found[row["target"], row["kernel"]] = {name: int(value) for name, value in row.items() if name in ("instructions", "loop") and value}
    return found


FIGURES = figures()


def of_cube(target, begin, normed):
    """The most of a `#[cube]` kernel's figures, by the begin of its names."""
    return check.worst(check.of_cube({name: figure for (of, name), figure in FIGURES.items() if of == target}, begin, normed))


def by_lanes(target, format, normed, turns):
    """Instructions of a lane for a weight, if it takes so many turns of the loop, with four rows of the weight each."""
    if format == "f16":
        # 63 for 16 weights in the shader's loop (`linear-f16-0-0-0-0`). Reading them takes longer on all of these GPUs.
        return 4.0
    if target in SHADERS:
        figure = FIGURES[target, f"linear_packed-f16-{NUMBERS[format]}-0-5-{int(normed)}"]
    else:
        figure = of_cube(target, f"linear_packed-e-f16-n-4-{format}-1", normed)
    outside = OUTSIDE * (figure["instructions"] - figure["loop"])
    return (figure["loop"] + outside / turns) / 128


def by_mma(target, format, normed, rows, columns):
    """Instructions of a lane for a weight of this size where tensor cores multiply up to eight rows of x."""
    figure = of_cube(target, "linear_mma-e-f16-8" if format == "f16" else f"linear_packed_mma-e-f16-{format}-8", normed)
    # A turn has 128 numbers of 32 rows for the lanes of a warp, or 64.
    each = 64 if format in ("f16", "q8_0") else 128
    turns = columns / each / warps(rows, columns)
    return (figure["loop"] + OUTSIDE * (figure["instructions"] - figure["loop"]) / turns) / each


def splits(rows, columns):
    """`Sharing::new` in crates/kiln-kernels/src/linear/around/mod.rs, for packed weights."""
    most = min(columns // 256, 1024 * 128 // rows)
    return 1 << min(max(most, 1), 32).bit_length() - 1


def warps(rows, columns):
    """Warps that share a sum: `Sharing::by_mma` in crates/kiln-kernels/src/linear/around/cube/mma/mod.rs."""
    most = min(columns // 128, 2048 // -(-rows // 32))
    return 1 << min(max(most, 1), 8).bit_length() - 1


def products(model):
    """Rows, columns, whether x is normed, and the format of each product of a token."""
    layers, head = MODELS[model]
    for layer in range(LAYERS):
        for i, (rows, columns, normed) in enumerate(PRODUCTS):
            if model == "Q4_K_M" and layer % 2 and i == 0:
                yield rows - 1024, columns, normed, layers
                yield 1024, columns, normed, "q6_k"
            else:
                yield rows, columns, normed, "q6_k" if model == "Q4_K_M" and layer % 2 and i == 3 else layers
    yield (*HEAD, head)


def floor(model, gpu):
    """Seconds of a token if nothing but its bytes counted."""
    bytes_read = sum(rows * columns * BITS[format] / 8 for rows, columns, _, format in products(model))
    return (bytes_read + KV_BYTES) / (gpu[2] * 1e9)


def seconds(model, gpu, before):
    """Seconds of a token."""
    name, target, bandwidth, issue, _, launch = gpu
    total = KV_BYTES / (READ * bandwidth * 1e9)
    for rows, columns, normed, format in products(model):
        turns = columns / (32 * 8 * splits(rows, columns))
        if before and format != "f16":
            # The norm had loads and conversions of its own then, too.
            each = BEFORE["navi31" if target == "navi31" else "sm_89"][format] + (by_lanes(target, format, normed, turns) - by_lanes(target, format, False, 1e9))
        elif name.endswith("CUDA") and not before:
            each = by_mma(target, format, normed, rows, columns)
        else:
            each = by_lanes(target, format, normed, turns)
        weights = rows * columns
        total += max(weights * BITS[format] / 8 / (READ * bandwidth * 1e9), weights * each / (ISSUED * issue * 1e12))
    if before:
        return total + LAUNCHES_BEFORE.get(model, 237) * launch * 1e-6
    return total + launching(gpu) + (LAYERS // 2 * launch * 1e-6 if model == "Q4_K_M" else 0)


def launching(gpu):
    """Seconds of a token for launches, and for combining parts."""
    name, *_, launch = gpu
    return (LAUNCHES * launch + LAYERS * (COMBINING if name.endswith("CUDA") else launch)) * 1e-6


def batch(gpu, rows, before):
    """Tokens a second of all rows in Q4_0."""
    name, target, bandwidth, issue, units, launch = gpu
    is_cuda = name.endswith("CUDA") and not before
    few = rows > 16 and not before
    # On Intel's GPUs, workgroups of four rows.
    text = f"linear_packed-f16-1-{2 if target == 'bmg' else 3}-0-0"
    each = FIGURES[target, text]["loop"] / 512 if target in SHADERS else of_cube(target, "linear_packed-e-f16-n-4-q4_0-8", False)["loop"] / 512
    if before:
        each = BEFORE_EIGHT
    total = rows * KV_BYTES / (READ * bandwidth * 1e9)
    for outputs, columns, normed, format in products("Q4_0"):
        weights, read = outputs * columns, BITS[format] / 8
        passes = 1 if few or rows <= 16 else 2
        if is_cuda:
            # Tensor cores work beside the lanes. Sixteen rows take a share of the instructions that 8 and 32 rows have; 64 rows are 32 twice, and find the
            # weights in the cache the second time.
            # Up to eight rows are normed in the launch of the product, others in one before it.
            fused = normed and rows <= 8
            of = lambda rows: of_cube(target, f"linear_packed_mma-e-f16-q4_0-{rows}", fused)["loop"] / 128
            lanes = 2 * of(32) if rows == 64 else of(8) + (of(32) - of(8)) * (rows - 8) / 24 if rows > 8 else of(8)
            total += (normed and not fused) * launch * 1e-6
            passes = 1
            busy = max(lanes / (ISSUED * issue * 1e12), rows / (units * 1e12))
        elif few:
            slots = FEW_STEP.get(target, FEW_STEP["navi31"]) / (ISSUED * issue * 1e12)
            # On AMD's and Apple's GPUs, matrices are multiplied by the lanes that compute the rest.
            multiplied = FEW_ROWS / (units * 1e12)
            busy = slots + multiplied if target == "navi31" else max(slots, multiplied)
        elif before and rows > 16:
            # All weights were unpacked to memory. Multiplying took less than that.
            busy, passes, read = 0, 1, read + 4
        else:
            busy = each * rows / (ISSUED * issue * 1e12)
        total += weights * max(read * passes / (READ * bandwidth * 1e9), busy)
    if before and rows > 16:
        return rows / (total + 2700 * launch * 1e-6)
    return rows / (total + launching(gpu) + 3 * LAYERS * (passes - 1) * launch * 1e-6)


def in_integers(gpu, rows):
    """Tokens a second of all rows in Q4_0, whose products are computed in integers: a launch before each product rounds its vectors."""
    _, target, bandwidth, issue, _, launch = gpu
    total = rows * KV_BYTES / (READ * bandwidth * 1e9) + launching(gpu) + (len(PRODUCTS) * LAYERS + 1) * launch * 1e-6
    for outputs, columns, _, format in products("Q4_0"):
        if rows == 1:
            figure = FIGURES[target, f"linear_bytes-f16-{NUMBERS[format]}-0-5-0"]
            turns = columns / (32 * 8 * splits(outputs, columns))
            each = (figure["loop"] + OUTSIDE * (figure["instructions"] - figure["loop"]) / turns) / 128
        else:
            each = FIGURES[target, f"linear_bytes-f16-{NUMBERS[format]}-3-0-0"]["loop"] / 1024 * rows
        weights = outputs * columns
        total += weights * max(BITS[format] / 8 / (READ * bandwidth * 1e9), each / (ISSUED * issue * 1e12))
    return rows / total


def prompt(gpu, tokens, format):
    """Time of the products of a prompt's chunk with packed weights, beside that with weights in float16."""
    name, target, bandwidth, _, units, _ = gpu
    if name.endswith("Vulkan"):
        # Matrices are multiplied beside the lanes that unpack.
        return 1.0
    if tokens < UNPACKED_ROWS.get(name, 0):
        return TILE_CYCLES[target][format] / TILE_CYCLES[target]["f16"]
    unpacked = (BITS[format] + BITS["f16"]) / 8 / (READ * bandwidth * 1e9)
    return 1 + unpacked / (tokens / (MULTIPLIED.get(target, 0.8) * units * 1e12))


def tables():
    lines = ["| " + " | ".join(["", *(f"{model}, before / now" for model in MODELS)]) + " |", "|---" * (len(MODELS) + 1) + "|"]
    for gpu in GPUS:
        cells = []
        for model in MODELS:
            shares = [f"{floor(model, gpu) / seconds(model, gpu, before):.0%}".replace("%", " %") for before in (True, False) if not before or gpu[1] != "bmg"]
            cells.append(f"{' / '.join(shares)}, {1 / seconds(model, gpu, False):.0f} t/s")
        lines.append(f"| {gpu[0]} | {' | '.join(cells)} |")
    lines += ["", "| | 8 rows, before / now | 16 rows, before / now | 32 rows, before / now | 32 rows beside 16, now | 64 rows, now |", "|---|---|---|---|---|---|"]
    for gpu in GPUS:
        is_known = lambda rows: gpu[1] == "navi31" or rows > 16 and gpu[1] != "bmg"
        cells = [f"{batch(gpu, rows, True):,.0f} / " * is_known(rows) + f"{batch(gpu, rows, False):,.0f}" for rows in (8, 16, 32)]
        most = f"{batch(gpu, 64, False):,.0f}" if gpu[0].endswith("CUDA") else "-"
        lines.append(f"| {gpu[0]} | {' | '.join(cells)} | {batch(gpu, 32, False) / batch(gpu, 16, False):.1f} | {most} |")
    lines += ["", "| | 1 row, in floats / in integers | 8 rows | 16 rows | | |", "|---|---|---|---|---|---|"]
    # Apple's GPUs have no such instruction, and no compiler for NVIDIA's takes WGSL.
    for gpu in [gpu for gpu in GPUS if gpu[0] in ("RX 7900 XTX", "Arc B580")]:
        floats = lambda rows: 1 / seconds("Q4_0", gpu, False) if rows == 1 else batch(gpu, rows, False)
        cells = [f"{floats(rows):,.0f} / {in_integers(gpu, rows):,.0f}" for rows in (1, 8, 16)]
        lines.append(f"| {gpu[0]} | {' | '.join(cells)} | | |")
    lines += ["", "| | chunk of 256 tokens, Q4_0 / Q4_K | of 512 | largest chunk | |", "|---|---|---|---|---|"]
    for gpu in GPUS:
        # `largest_chunk` in crates/kiln/src/model/generating.rs
        largest = 1152 if gpu[0] == "M3 Max" else 2048
        ratios = [" / ".join(f"{prompt(gpu, tokens, format):.2f}" for format in ("q4_0", "q4_k")) for tokens in (256, 512, largest)]
        lines.append(f"| {gpu[0]} | {ratios[0]} | {ratios[1]} | {largest:,} | {ratios[2]} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page")
    if not parser.parse_args().check:
        print(tables())
    elif tables() not in PAGE.read_text():
        sys.exit(f"{PAGE} has other tables than `python3 tools/gpu/predict.py` prints; write these there")


main()
