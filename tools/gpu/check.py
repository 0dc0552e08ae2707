"""What compilers for GPUs make of the kernels, compared with the figures that are committed.

    python tools/gpu/check.py FOLDER --mesa MESA            exit code 1 where something became worse
    python tools/gpu/check.py FOLDER --mesa MESA --write    writes figures.csv and README.md beside it; say why in the commit if something became worse

FOLDER has the texts of `cargo run --release --bin kernel-texts -- FOLDER`, or CUDA C++ (`.cu`), which the software CUDA device keeps
(`SOFTCUDA_TEXTS`, tools/softcuda/README.md). What it has not is not checked. MESA is what `mesa.sh fetch MESA trixie` makes; CUDA C++ does not need it.
Worse is: more spilled registers, fewer subgroups or blocks at a time, more than 5 % more instructions, in all or in the main loop, narrower loads.
Figures are of one version of each compiler; with another, nothing is compared, and that is said. What was compiled before is remembered in ~/.cache/kiln-gpu.
"""

import argparse
import concurrent.futures
import csv
import hashlib
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
FIGURES, PAGE = HERE / "figures.csv", HERE / "README.md"
CACHE = pathlib.Path.home() / ".cache/kiln-gpu/figures.json"
COLUMNS = ["registers", "spilled", "shared", "occupancy", "instructions", "loop", "load"]
FEWER_IS_WORSE = ["occupancy", "load"]
MORE_INSTRUCTIONS = 1.05
# Formats of packed weights, and their numbers in names of texts.
FORMATS = {"Q4_0": 1, "Q8_0": 5, "Q4_K": 8, "Q6_K": 10}
# The compiler's program, its files, the GPU.
TARGETS = {
    "navi31": ("spirv.py", ["*.spv", "coop_mat16x16/*.spv"], "AMD RDNA 3"),
    "navi21": ("spirv.py", ["*.spv"], "AMD RDNA 2"),
    "bmg": ("spirv.py", ["*-f16*.spv", "coop_mat16x8/*.spv"], "Intel Arc B580"),
    "sm_80": ("nvrtc.py", ["*.cu"], "NVIDIA A100"),
    "sm_89": ("nvrtc.py", ["*.cu"], "NVIDIA RTX 40"),
    "sm_90a": ("nvrtc.py", ["*.cu"], "NVIDIA H100"),
    "sm_120a": ("nvrtc.py", ["*.cu"], "NVIDIA RTX 50"),
}
# Texts that are not launched there, because lanes have few registers: for eight rows of packed weights, and for eight rows of attention.
NOT_LAUNCHED = {"bmg": r"linear_packed(_integers)?-f16-\d+-3-|attention_(decode|append)-f16-\d-\d-1$|attention_packed-f16-\d-\d-\d-\d-1$"}


@functools.cache
def own_kernels():
    """Names of Kiln's `#[cube]` kernels, with which those of their CUDA C++ begin. The other texts are Burn's."""
    launched = r"#\[cube\(launch[^\]]*\)\](?:\s*#\[[^\]]*\])*\s*(?:pub(?:\(\w+\))? )?fn (\w+)"
    return {name for file in (HERE.parent.parent / "crates/kiln-kernels/src").rglob("*.rs") for name in re.findall(launched, file.read_text())}


def texts_of(folder, patterns, others="$^"):
    """Files by what their figures are called. Permutations of CUDA C++ have names of no meaning: those of the same types count as one text, unless the
    text says which permutation it is (`write_permutation` in crates/kiln-kernels). Those that `others` matches are left out."""
    found = {}
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        name = file.stem
        if re.match(others, name):
            continue
        if file.suffix == ".cu":
            kernel, types = re.fullmatch(r"(\w+?)((?:_[a-z]_\w+?)*)(?:_[0-9a-f]{8})?-\d+", name).groups()
            # What is computed in bfloat16 is computed in float16, too.
            if kernel not in own_kernels() or "bf16" in types:
                continue
            name = f"{kernel}-{types.strip('_').replace('_', '-')}".rstrip("-")
            if permutation := re.search(r"// permutation: (\S+)", file.read_text()):
                name += f"-{permutation[1]}"
        found.setdefault(name, []).append(file)
    return found


def worst(figures):
    """Of permutations that count as one text."""
    of = lambda column: [figure[column] for figure in figures if column in figure]
    return {column: (min if column in FEWER_IS_WORSE else max)(of(column)) for column in COLUMNS if of(column)}


def of_cube(figures, begin, normed):
    """Figures of a `#[cube]` kernel by the begin of its names, whatever follows the main loop and however many groups of lanes share a sum."""
    return [figure for name, figure in figures.items() if (name == begin or name.startswith(f"{begin}-")) and ("-normed" in name) == normed]


def measured(target, texts, prefix):
    """Figures of each text, and the compiler's version."""
    program, files = TARGETS[target][0], [file for files in texts.values() for file in files]
    run = lambda files: [json.loads(line) for line in subprocess.run(
        [*prefix, sys.executable, HERE / program, target, *files], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()]
    (driver,) = run([])
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    version = f"{target} {driver['driver']} {(HERE / program).read_text()}"
    key = lambda file: hashlib.sha256(version.encode() + file.read_bytes()).hexdigest()
    keys = {file: key(file) for file in files}
    new = [file for file in files if keys[file] not in known]
    some = [new[begin:begin + 25] for begin in range(0, len(new), 25)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as compilers:
        for files_of_some, found in zip(some, compilers.map(run, some)):
            known |= zip((keys[file] for file in files_of_some), found[1:])
            CACHE.parent.mkdir(parents=True, exist_ok=True)
            CACHE.write_text(json.dumps(known))
    for file in files:
        if error := known[keys[file]].get("error"):
            sys.exit(f"{file.name} does not compile for {TARGETS[target][2]}:\n{error}")
    return {name: worst([known[keys[file]] for file in files]) for name, files in texts.items()}, driver["driver"]


def committed():
    """Figures by target and name, and the compiler's version by target."""
    figures, drivers = {}, {}
    if FIGURES.exists():
        for row in csv.DictReader(FIGURES.open()):
            drivers[row["target"]] = row["compiler"]
            figures[row["target"], row["kernel"]] = {name: int(row[name]) for name in COLUMNS if row.get(name)}
    return figures, drivers


def worse(before, now):
    """Sentences, of each figure that became worse."""
    rules = {
        "spilled": lambda old, new: new > old,
        "occupancy": lambda old, new: new < old,
        "instructions": lambda old, new: new > old * MORE_INSTRUCTIONS + 4,
        "loop": lambda old, new: new > old * MORE_INSTRUCTIONS + 4,
        "load": lambda old, new: new < old,
    }
    before = before or {"spilled": 0}
    return [f"{name} {before[name]} -> {now[name]}" for name, is_worse in rules.items() if name in before and name in now and is_worse(before[name], now[name])]


def by_weight(figures):
    """A table of the instructions that a packed weight takes."""

    def cell(format, rows):
        # The weights that a lane multiplies in a turn of the loop, in shaders and in CUDA C++.
        number, weights = FORMATS[format], {1: 128, 4: 512, 8: 1024 if format == "Q6_K" else 512}[rows]
        if figure := figures.get(f"linear_packed-f16-{number}-{rows.bit_length() - 1}-0-0"):
            return f"{figure['loop'] / weights:.2f}"
        figure = worst(of_cube(figures, f"linear_packed-e-f16-n-4-{format.lower()}-{rows}", normed=False))
        return f"{figure['loop'] / min(weights, 512):.2f}" if "loop" in figure else "-"

    most = 8 if any(re.match(r"linear_packed-.*f16-.*(-3-|-8)", name) for name in figures) else 4
    lines = [f"| {format} | {cell(format, 1)} | {cell(format, most)} |" for format in FORMATS]
    if all(line.endswith("| - | - |") for line in lines):
        return []
    begin = ["Instructions of the main loop of `linear_packed` in float16, for each weight and row of `x`:", "", f"| format | 1 row | {most} rows |", "|---|---|---|"]
    return [*begin, *lines, ""]


def page(figures, drivers):
    """A table of each kernel's worst permutation."""
    lines = [
        "# What compilers for GPUs make of the kernels", "",
        "No GPU is needed for these figures. Mesa's RADV compiles every shader in every permutation for",
        "families of AMD's GPUs, and its ANV those in float16 for a GPU of Intel that `xe.c` pretends to be.",
        "NVIDIA's NVRTC compiles the CUDA C++ of the `#[cube]` kernels that tests launch. All go down to",
        "machine code.", "",
        "`check.py` makes the figures, and `.ci/run` calls it: a change that makes one of them worse fails,",
        "unless it commits the new figures and says why. `figures.csv` has every permutation. Chrome's",
        "compiler (Tint) takes every shader, too, but those for matrix units: their WGSL is an extension of",
        "naga. Fewer instructions are not less time where memory is the limit. A spill in a loop, or one",
        "workgroup on a multiprocessor, is worth a look on any GPU. Texts of `linear_packed_integers` are for",
        "devices that take subnormal float16 numbers for 0",
        "([decision 0041](../../docs/decisions/0041-subnormal-scales.md)).", "",
        "    cargo run --release --bin kernel-texts -- /tmp/texts",
        "    tools/gpu/mesa.sh fetch ~/.cache/mesa-25 trixie",
        "    python3 tools/gpu/check.py /tmp/texts --mesa ~/.cache/mesa-25", "",
        "[CONTRIBUTING](../../CONTRIBUTING.md) says how to get the CUDA C++. Each row has the worst of a",
        "kernel's permutations: the most registers, the most that are spilled, the fewest subgroups or blocks",
        "that fit one multiprocessor at a time, the most instructions; of NVIDIA also the narrowest of each",
        "permutation's widest loads, in bytes. Of Intel, registers are those of 32 bytes that are live at",
        "once, and the occupancy is the lanes of a thread: a vector engine has eight threads. `figures.csv`",
        "has the instructions of main loops, too: those of the block with the most multiply-adds, or on",
        "tensor cores, of the loop around it.", "",
    ]
    for target, (_, _, gpu) in TARGETS.items():
        own = {name: found for (of, name), found in figures.items() if of == target}
        if not own:
            continue
        columns = ["kernel", "texts", "registers", "spilled", "texts that spill", "occupancy", "instructions"]
        with_loads = any("load" in found for found in own.values())
        columns += ["load"] * with_loads
        lines += [f"## {gpu} (`{target}`, {drivers[target]})", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for kernel in sorted({name.split("-")[0] for name in own}):
            of_kernel = [found for name, found in own.items() if name.split("-")[0] == kernel]
            all_worst = worst(of_kernel)
            spilling = sum(found["spilled"] > 0 for found in of_kernel)
            cells = [f"`{kernel}`", len(of_kernel), all_worst["registers"], all_worst["spilled"], spilling, all_worst["occupancy"], f"{all_worst['instructions']:,}"]
            cells += [all_worst.get("load", "")] * with_loads
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
        lines += by_weight(own)
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="GPU", help=f"not all of {', '.join(TARGETS)}")
    parser.add_argument("--write", action="store_true", help="write the figures that were found")
    parser.add_argument("--mesa", type=pathlib.Path, help="the Mesa that compiles SPIR-V")
    arguments = parser.parse_args()
    (old, old_drivers), figures, drivers = committed(), {}, {}
    failed = False
    for target, (program, patterns, gpu) in TARGETS.items():
        found = texts_of(arguments.folder, patterns, NOT_LAUNCHED.get(target, "$^"))
        if not found or target not in arguments.only:
            continue
        prefix = []
        if program == "spirv.py":
            if not arguments.mesa:
                sys.exit("SPIR-V needs --mesa: `mesa.sh fetch MESA trixie` makes one")
            prefix = [HERE / "mesa.sh", "with", arguments.mesa, "intel" if target == "bmg" else "radeon"]
        found, drivers[target] = measured(target, found, prefix)
        figures |= {(target, name): figure for name, figure in found.items()}
        print(f"{gpu} ({drivers[target]}): {len(found)} texts, {sum(figure['spilled'] > 0 for figure in found.values())} spill")
        if old_drivers and old_drivers.get(target) != drivers[target]:
            print(f"NOT COMPARED for {gpu}: the figures are of {old_drivers.get(target)}, and {drivers[target]} is installed")
            continue
        for name, figure in found.items():
            if sentences := worse(old.get((target, name)), figure):
                failed = True
                print(f"worse for {gpu}: {name}: {', '.join(sentences)}")
    if arguments.write:
        # What was not measured stays.
        for (target, name), figure in old.items():
            if target not in drivers:
                figures[target, name] = figure
        drivers = old_drivers | drivers
        with FIGURES.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["target", "compiler", "kernel", *COLUMNS])
            for (target, name), figure in sorted(figures.items()):
                rows.writerow([target, drivers[target], name, *(figure.get(column, "") for column in COLUMNS)])
        PAGE.write_text(page(figures, drivers))
    elif failed:
        sys.exit("If that is worth it, run with --write, and say in the commit why.")


if __name__ == "__main__":
    main()
