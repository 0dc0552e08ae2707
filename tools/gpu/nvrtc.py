"""What NVIDIA's compilers make of CUDA C++: registers, blocks of a multiprocessor, spills, and how wide loads from global memory are.

    python nvrtc.py ARCHITECTURE FILE.cu ..    prints a line of JSON for each file, after one with the compiler

No GPU is needed: NVRTC compiles for a real architecture, down to machine code. Needs the Python packages `nvidia-cuda-nvrtc`, `nvidia-cuda-runtime` and
`nvidia-cuda-nvdisasm`, and `nvidia-cuda-crt` for matrices. `instructions` are those of machine code; `loop` has those of the block with the most multiply-adds, or
of the loop around it if it multiplies matrices; `multiplies` has the multiply-adds of the same.
"""

import collections
import ctypes
import glob
import json
import re
import site
import subprocess
import sys
import tempfile

WARP = 32
REGISTERS, REGISTER_UNIT = 65536, 256  # of a multiprocessor, and as they are given to a warp
WARPS = {"75": 32, "86": 48, "89": 48, "120": 48}  # of a multiprocessor; 64 elsewhere
SHARED = {"75": 64, "80": 164, "90": 228}  # KiB of a multiprocessor; 100 elsewhere. A block takes 1 KiB more than it asks for.


def toolkit():
    for folder in site.getsitepackages():
        if found := glob.glob(f"{folder}/nvidia/cu13/lib/libnvrtc.so.*"):
            return ctypes.CDLL(found[0]), f"{folder}/nvidia/cu13/include"
    sys.exit("there is no NVRTC; pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt")


def compiled(nvrtc, include, source, architecture):
    """PTX, machine code and log, as cubecl-cuda has NVRTC compile, but with the assembler's figures in the log."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [
        f"--gpu-architecture={architecture}", f"--include-path={include}", f"--include-path={include}/cccl", "-lineinfo", "--ptxas-options=-v",
    ]
    array = (ctypes.c_char_p * len(options))(*map(str.encode, options))

    def text(of):
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, buffer)
        return buffer.raw

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
    log = text("ProgramLog").rstrip(b"\0").decode()
    ptx, code = (None, None) if failed else (text("PTX").rstrip(b"\0").decode(), text("CUBIN"))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, code, log


def disassembler():
    for folder in site.getsitepackages():
        if found := glob.glob(f"{folder}/nvidia/cu13/bin/nvdisasm"):
            return found[0]
    sys.exit("there is no nvdisasm; pip install nvidia-cuda-nvdisasm")


def counted(code):
    """The machine instructions of a program, and of its block with the most multiply-adds."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        listing = subprocess.run([disassembler(), "-c", file.name], check=True, stdout=subprocess.PIPE, text=True).stdout
    blocks, labels, jumps = [[]], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        if (found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", line)) and found[1] != "NOP":
            blocks[-1].append(found[1])
            if target := re.search(r"\bBRA\b.*\((\.L_\w+)\)", line):
                jumps.append((labels.get(target[1]), len(blocks) - 1))
            if found[1] in ("BRA", "EXIT"):
                blocks.append([])
    weights = {"FFMA": 1, "HFMA2": 1, "HMMA": 128}
    multiplies = lambda block: sum(weights.get(instruction, 0) for instruction in block)
    best = max(range(len(blocks)), key=lambda number: multiplies(blocks[number]))
    loop = blocks[best]
    # Barriers of a warp divide loops into blocks.
    around = [(last - first, first, last) for first, last in jumps if first is not None and first <= best <= last]
    if "HMMA" in loop and around:
        _, first, last = min(around)
        loop = [instruction for block in blocks[first : last + 1] for instruction in block]
    loop = {"loop": len(loop), "multiplies": multiplies(loop)} if multiplies(loop) else {}
    return {"instructions": sum(map(len, blocks))} | loop


def widest_load(ptx):
    """Bytes of the widest load from global memory."""
    found = collections.Counter()
    for modifiers in re.findall(r"\bld((?:\.[\w:]+)*\.global(?:\.[\w:]+)*)\s", ptx):
        vector = re.search(r"\.v(\d)\b", modifiers)
        bits = re.search(r"\.[busf](\d+)$", modifiers)
        found[int(vector[1] if vector else 1) * int(bits[1]) // 8] += 1
    return max(found, default=0)


def shared(source):
    """Bytes that a kernel asks for when it is launched: the end of the last of its arrays there."""
    names = re.findall(r"extern __shared__ \S+ char (\w+)\[\]", source)
    arrays = [array for name in names for array in re.findall(rf"reinterpret_cast<array<(\w+), (\d+)> \*>\(&{name}\[(\d+)\]\)", source)]

    def size(element):
        scalar, many = re.fullmatch(r"(\w+?)(?:_(\d+))?", element.removesuffix("_t")).groups()
        bits = {"float": 32, "__half": 16, "__nv_bfloat16": 16, "double": 64, "bool": 8} | {f"{sign}int{n}": n for sign in ("", "u") for n in (8, 16, 32, 64)}
        return bits[scalar.removesuffix("_t")] // 8 * int(many or 1)

    return max((int(offset) + int(count) * size(element) for element, count, offset in arrays), default=0)


def figures(source, ptx, log, architecture):
    figure = lambda pattern: int(m[1]) if (m := re.search(pattern, log)) else 0
    registers = figure(r"Used (\d+) registers")
    warps = -(-int(m[1]) // WARP) if (m := re.search(r"\.maxntid (\d+)", ptx)) else 1
    fitting = REGISTERS // (-(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT) if registers else 64
    number = architecture.removeprefix("sm_").rstrip("a")
    asked = figure(r"(\d+) bytes smem") + shared(source)
    blocks = min(min(fitting, WARPS.get(number, 64)) // warps, SHARED.get(number, 100) * 1024 // (asked + 1024))
    return {
        "registers": registers,
        "spilled": figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
        "shared": asked,
        "occupancy": blocks,
        "load": widest_load(ptx),
    }


def main():
    architecture, files = sys.argv[1], sys.argv[2:]
    nvrtc, include = toolkit()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    print(json.dumps({"driver": f"NVRTC {major.value}.{minor.value}"}), flush=True)
    for file in files:
        source = open(file).read()
        ptx, code, log = compiled(nvrtc, include, source, architecture)
        print(json.dumps(figures(source, ptx, log, architecture) | counted(code) if ptx else {"error": log}), flush=True)


main()
