#!/usr/bin/env python3
"""Reads the machine code of the CPU's products, for every set of instructions.

    RUSTFLAGS='-C symbol-mangling-version=v0' cargo build --release -p kiln-products --target-dir target/machine-code
    tools/machine_code.py target/machine-code/release/libkiln_products.rlib

A product is as fast as its innermost loop. There, a call or a vector that is stored to the stack and read again costs more than the
products do: vectors belong in registers. This fails where a loop with products has a call, or stores more than one vector to the stack for
each 35 instructions, which is what today's compiler needs for Q6_K with AVX2. Names of functions have their types with that mangling alone.
Needs objdump.
"""

import re
import subprocess
import sys

FUNCTION = re.compile(r"[0-9a-f]{16} <.*kiln_simd::x86::(avx2|avx512)::.*::run::(run\w*)::<kiln_products::tiles::Tiles<(.*)")
PRODUCT = re.compile(r"vfn?m(?:add|sub)\d+ps|vpdpbusd|vpmaddubsw")
SPILL = re.compile(r"vmov\w+\s+%[xyz]mm\d+,.*%rsp")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(.*)$", re.M)
JUMP = re.compile(r"j\w+\s+([0-9a-f]+)")
INSTRUCTIONS_A_SPILL = 35


def innermost_loops(instructions):
    """Lists of instructions: from the target of a jump back to the jump, with no other such loop inside."""
    places = {address: i for i, (address, _) in enumerate(instructions)}
    loops = []
    for end, (_, text) in enumerate(instructions):
        jump = JUMP.match(text)
        start = places.get(jump[1]) if jump else None
        if start is not None and start <= end:
            loops.append((start, end))
    for start, end in loops:
        if not any(other != (start, end) and start <= other[0] and other[1] <= end for other in loops):
            yield [text for _, text in instructions[start : end + 1]]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    command = ["objdump", "-d", "--no-show-raw-insn", "-C", sys.argv[1]]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts, wrong = {}, []
    for function in re.split(r"\n(?=[0-9a-f]{16} <)", listing):
        head, _, body = function.partition("\n")
        name = FUNCTION.match(head)
        if not name:
            continue
        instructions_of = "avx-vnni" if name[2] == "run_with_vnni" else name[1]
        for loop in innermost_loops(INSTRUCTION.findall(body)):
            if not any(PRODUCT.match(text) for text in loop):
                continue
            counts[instructions_of] = counts.get(instructions_of, 0) + 1
            calls = [text for text in loop if text.startswith("call")]
            spills = [text for text in loop if SPILL.match(text)]
            if calls or len(spills) * INSTRUCTIONS_A_SPILL > len(loop):
                first = (calls or spills)[0]
                wrong.append(f"{instructions_of}, {name[3]}: {len(loop)} instructions, {len(calls)} calls, "
                             f"{len(spills)} vectors to the stack: {first}")
    missing = {"avx2", "avx-vnni", "avx512"} - counts.keys()
    if missing:
        sys.exit(f"machine_code: error: no products were found for {', '.join(sorted(missing))}")
    if wrong:
        print("\n".join(wrong))
        sys.exit(f"machine_code: error: {len(wrong)} of {sum(counts.values())} innermost loops leave their registers")
    print("innermost loops whose vectors stay in registers:", ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
