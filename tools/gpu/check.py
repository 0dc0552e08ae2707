"""What compilers for GPUs make of the kernels, compared with the figures that are committed.

    python tools/gpu/check.py FOLDER            exit code 1 where something became worse
    python tools/gpu/check.py FOLDER --write    writes tools/gpu/figures.csv and docs/gpu.md; say why in the commit if something became worse
    .. --mesa FOLDER                            with texts for matrix units, for which the installed Mesa may be too old: `mesa.sh fetch FOLDER trixie`

FOLDER has the texts of `cargo run --release --bin kernel-texts -- FOLDER`, and may have CUDA C++ (`.cu`),
which the software CUDA device keeps (`SOFTCUDA_TEXTS`, tools/softcuda/README.md). Worse is: more spilled registers, fewer subgroups
or blocks at a time, more than 5 % more instructions, narrower loads. Figures are of one version of each compiler; where another is installed,
nothing is compared, and that is said. What was compiled before is remembered in ~/.cache/kiln-gpu.
"""

import argparse
import csv
import hashlib
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
FIGURES, PAGE = HERE / "figures.csv", HERE.parent.parent / "docs/gpu.md"
CACHE = pathlib.Path.home() / ".cache/kiln-gpu/figures.json"
COLUMNS = ["registers", "spilled", "shared", "occupancy", "instructions", "load"]
MORE_INSTRUCTIONS = 1.05
# The compiler's program, its files, the GPU.
TARGETS = {
    "gfx1100": ("radv.py", "*.spv", "AMD RDNA 3"),
    "navi21": ("radv.py", "*.spv", "AMD RDNA 2"),
    "navi31": ("radv.py", "coop_mat16x16/*.spv", "AMD RDNA 3, matrix units"),
    "sm_80": ("nvrtc.py", "*.cu", "NVIDIA A100"),
    "sm_89": ("nvrtc.py", "*.cu", "NVIDIA RTX 40"),
    "sm_90a": ("nvrtc.py", "*.cu", "NVIDIA H100"),
    "sm_120a": ("nvrtc.py", "*.cu", "NVIDIA RTX 50"),
}


def measured(target, files, prefix):
    """Figures of each file by its name, and the compiler's version."""
    program = TARGETS[target][0]
    run = lambda files: [json.loads(line) for line in subprocess.run(
        [*prefix, sys.executable, HERE / program, target, *files], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()]
    (driver,) = run([])
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    key = lambda file: hashlib.sha256(f"{target} {driver['driver']} ".encode() + file.read_bytes()).hexdigest()
    keys = {file: key(file) for file in files}
    new = [file for file in files if keys[file] not in known]
    for begin in range(0, len(new), 50):
        some = new[begin:begin + 50]
        known |= zip((keys[file] for file in some), run(some)[1:])
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        CACHE.write_text(json.dumps(known))
    return {file.stem: known[keys[file]] for file in files}, driver["driver"]


def committed():
    """Figures by target and name, and the compiler's version by target."""
    figures, drivers = {}, {}
    if FIGURES.exists():
        for row in csv.DictReader(FIGURES.open()):
            drivers[row["target"]] = row["compiler"]
            figures[row["target"], row["kernel"]] = {name: int(row[name]) for name in COLUMNS if row[name]}
    return figures, drivers


def worse(before, now):
    """Sentences, of each figure that became worse."""
    rules = {
        "spilled": lambda old, new: new > old,
        "occupancy": lambda old, new: new < old,
        "instructions": lambda old, new: new > old * MORE_INSTRUCTIONS + 4,
        "load": lambda old, new: new < old,
    }
    before = before or {"spilled": 0}
    return [f"{name} {before[name]} -> {now[name]}" for name, is_worse in rules.items() if name in before and name in now and is_worse(before[name], now[name])]


def page(figures, drivers):
    """A table of each kernel's worst permutation."""
    lines = [
        "# What compilers for GPUs make of the kernels", "",
        "No GPU is needed for these figures: Mesa's RADV compiles every shader in every permutation for families of AMD's GPUs.",
        "They are made by `tools/gpu/check.py`, which `.ci/run` calls: a change that makes one of them worse fails, unless it commits the new figures and says why.",
        "`tools/gpu/figures.csv` has every permutation. Chrome's compiler (Tint) takes every shader, too, but those for matrix units: their WGSL is an extension of naga. Fewer instructions are not less time where memory is the limit. A spill in a",
        "loop, or one workgroup on a multiprocessor, is worth a look on any GPU.", "",
        "    cargo run --release --bin kernel-texts -- /tmp/texts",
        "    tools/gpu/mesa.sh fetch ~/.cache/mesa-25 trixie",
        "    python3 tools/gpu/check.py /tmp/texts --mesa ~/.cache/mesa-25", "",
        "Each row has the worst of a kernel's permutations: the most registers, the most that are spilled, the fewest subgroups or blocks that fit one multiprocessor at a time, the",
        "most instructions.", "",
    ]
    for target, (_, _, gpu) in TARGETS.items():
        own = {name: found for (of, name), found in figures.items() if of == target}
        if not own:
            continue
        lines += [f"## {gpu} (`{target}`, {drivers[target]})", "", "| kernel | texts | registers | spilled | texts that spill | occupancy | instructions |", "|---|---|---|---|---|---|---|"]
        for kernel in sorted({name.split("-")[0] for name in own}):
            texts = [found for name, found in own.items() if name.split("-")[0] == kernel]
            most = lambda column: max(found[column] for found in texts)
            spilling = sum(found["spilled"] > 0 for found in texts)
            lines.append(
                f"| `{kernel}` | {len(texts)} | {most('registers')} | {most('spilled')} | {spilling} | {min(found['occupancy'] for found in texts)} | {most('instructions'):,} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--write", action="store_true", help="write the figures that were found")
    parser.add_argument("--mesa", type=pathlib.Path, help="a newer Mesa, for texts for matrix units")
    arguments = parser.parse_args()
    (old, old_drivers), figures, drivers = committed(), {}, {}
    failed = False
    for target, (_, pattern, gpu) in TARGETS.items():
        files = sorted(arguments.folder.glob(pattern))
        if not files:
            continue
        prefix = []
        if "/" in pattern:
            if not arguments.mesa:
                print(f"NOT CHECKED for {gpu}: that needs --mesa")
                continue
            prefix = [HERE / "mesa.sh", "with", arguments.mesa, "radeon"]
        found, drivers[target] = measured(target, files, prefix)
        figures |= {(target, name): figure for name, figure in found.items()}
        for name, figure in found.items():
            if "error" in figure:
                sys.exit(f"{name} does not compile for {gpu}:\n{figure['error']}")
        print(f"{gpu} ({drivers[target]}): {len(found)} texts, {sum(figure['spilled'] > 0 for figure in found.values())} spill")
        if old_drivers.get(target) != drivers[target]:
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


main()
