#!/usr/bin/env python3
"""Reads the machine code of the CPU's products, for every set of instructions.

    RUSTFLAGS='-C symbol-mangling-version=v0' cargo build --release -p kiln-products --target-dir target/machine-code
    tools/machine_code.py target/machine-code/release/libkiln_products.rlib [--objdump aarch64-linux-gnu-objdump]

A product is as fast as its innermost loop. There, a call or a vector that is stored to the stack and read again costs time: vectors belong
in registers. This fails where a loop with products has a call, or stores more than one vector to the stack for each 35 instructions (20 on
ARM). In tiles of products with packed matrices, one for each 7 (13 on ARM) is allowed where registers are few: a tile whose sums of earlier
groups are on the stack is faster than smaller tiles. Names of functions have their types with that mangling alone.
Needs objdump.
"""

import argparse
import re
import subprocess
import sys

FUNCTION = re.compile(r"[0-9a-f]{16} <.*kiln_simd::(\w+(?:::\w+)?)::.*::run::(run\w*)::<kiln_products::(.*)")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(.*)$", re.M)
# Modules and functions of kiln-simd, and what they are compiled for.
SETS = {
    "x86::avx2 run": "avx2",
    "x86::avx2 run_with_vnni": "avx-vnni",
    "x86::avx512 run": "avx512",
    "aarch64 run": "neon",
    "aarch64 run_with_dot": "neon-dotprod",
}
# A product, a vector that is stored to the stack, a call and a jump, with its target, as objdump writes them for a kind of file.
X86 = [r"vfn?m(?:add|sub)\d+ps|vpdpbusd|vpmaddubsw", r"vmov\w+\s+%[xyz]mm\d+,.*%rsp", r"call", r"j\w+\s+([0-9a-f]+)"]
ARM = [r"fmla|sdot|smull", r"st[rp]\s+q\d+,.*\[sp", r"bl\s", r"(?:b|b\.\w+|cbn?z\s+\w+,|tbn?z\s+\w+, #\d+,)\s+([0-9a-f]+)"]
KINDS = {"elf64-x86-64": X86, "elf64-littleaarch64": ARM}
# Least instructions for each vector that is stored, and those in tiles. No processor has measured those of ARM: they are what its code is at.
A_SPILL = {"elf64-x86-64": 35, "elf64-littleaarch64": 20}
IN_TILES = {"avx512": 35, "avx2": 7, "avx-vnni": 7, "neon": 13, "neon-dotprod": 13}


def innermost_loops(instructions, jump_to):
    """Lists of instructions: from the target of a jump back to the jump, with no other such loop inside."""
    places = {address: i for i, (address, _) in enumerate(instructions)}
    loops = []
    for end, (_, text) in enumerate(instructions):
        jump = jump_to.match(text)
        start = places.get(jump[1]) if jump else None
        if start is not None and start <= end:
            loops.append((start, end))
    for start, end in loops:
        if not any(other != (start, end) and start <= other[0] and other[1] <= end for other in loops):
            yield [text for _, text in instructions[start : end + 1]]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("--objdump", default="objdump")
    given = parser.parse_args()
    command = [given.objdump, "-d", "--no-show-raw-insn", "-C", given.library]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kind = re.search(r"file format (\S+)", listing)[1]
    is_product, is_spill, is_call, jump_to = map(re.compile, KINDS[kind])
    wanted = {name for function, name in SETS.items() if function.startswith("aarch64") == (KINDS[kind] is ARM)}
    counts, wrong = {}, []
    for function in re.split(r"\n(?=[0-9a-f]{16} <)", listing):
        head, _, body = function.partition("\n")
        name = FUNCTION.match(head)
        instructions_of = SETS.get(f"{name[1]} {name[2]}") if name else None
        if not instructions_of:
            continue
        for loop in innermost_loops(INSTRUCTION.findall(body), jump_to):
            if not any(is_product.match(text) for text in loop):
                continue
            counts[instructions_of] = counts.get(instructions_of, 0) + 1
            calls = [text for text in loop if is_call.match(text)]
            spills = [text for text in loop if is_spill.match(text)]
            least = IN_TILES[instructions_of] if "widths::Of<" in name[3] else A_SPILL[kind]
            if calls or len(spills) * least > len(loop):
                first = (calls or spills)[0]
                wrong.append(f"{instructions_of}, {name[3]}: {len(loop)} instructions, {len(calls)} calls, "
                             f"{len(spills)} vectors to the stack: {first}")
    missing = wanted - counts.keys()
    if missing:
        sys.exit(f"machine_code: error: no products were found for {', '.join(sorted(missing))}")
    if wrong:
        print("\n".join(wrong))
        sys.exit(f"machine_code: error: {len(wrong)} of {sum(counts.values())} innermost loops leave their registers")
    print("innermost loops whose vectors stay in registers:", ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
