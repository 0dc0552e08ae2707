"""What GPUs of AMD and Intel would make of compute shaders: registers, spills, occupancy, instructions, and those of the main loop.

    mesa.sh with MESA radeon python spirv.py navi31 FILE.spv ..    prints a line of JSON for each file, after one with the driver
    mesa.sh with MESA intel python spirv.py bmg FILE.spv ..

No GPU is needed. Mesa's RADV compiles for the family that it is told (its null device), and ANV for the GPU of `xe.c`, an Arc B580; both hand out their
compiler's statistics. Needs the Python package `vulkan`. Mesa has to be older than 26, whose RADV has no null device.
"""

import collections
import json
import os
import re
import struct
import sys
import tempfile

MATRIX_UNITS = "VK_KHR_cooperative_matrix"
CAPTURE_STATISTICS = 0x40  # VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR
ENTRY_POINT, DECORATE, VARIABLE = 15, 71, 59  # SPIR-V instructions
BINDING, STORAGE_BUFFER, UNIFORM = 33, 12, 2
DESCRIPTORS = {STORAGE_BUFFER: 7, UNIFORM: 6}  # storage class to VkDescriptorType
# What the drivers call these. ANV's occupancy is the lanes of a thread, of which an engine has eight.
RADV = {
    "registers": "VGPRs", "spilled": "Spilled VGPRs", "shared": "LDS size", "occupancy": "Subgroups per SIMD", "instructions": "Instructions",
}
ANV = {
    "registers": "Max live registers", "spilled": "Spill Count", "shared": "Workgroup Memory Size", "occupancy": "Max dispatch width",
    "instructions": "Instruction Count",
}


def instructions(words):
    at = 5
    while at < len(words):
        yield words[at:at + (words[at] >> 16)]
        at += words[at] >> 16


def main_loop_of_radv(assembly):
    """Number of instructions in the block with the most multiply-adds. Those of matrix units do 128 of each lane at once."""
    blocks, block = collections.defaultdict(list), None
    for line in assembly.splitlines():
        if begun := re.match(r"(BB\d+):$", line):
            block = begun[1]
        elif block and re.match(r"\t[a-z]\w+.*; [0-9a-f]{8}", line):
            blocks[block].append(line.split()[0])
    multiplies = lambda block: sum(128 * name.startswith("v_wmma") + name.startswith(("v_fma", "v_dot")) for name in block)
    return len(max(blocks.values(), key=multiplies, default=[]))


def main_loop_of_anv(assembly):
    """The same. Labels stand between blocks."""
    blocks, block = [], []
    for line in assembly[assembly.rfind("Native code"):].splitlines():
        if re.match(r"\s+(START|END) B\d+", line):
            blocks.append(block)
            block = []
        elif begun := re.match(r"(?:\(\S+\) )?([a-z][\w.]*)\(\d+\)\s", line):
            block.append(begun[1])
    multiplies = lambda block: sum(128 * name.startswith("dpas") + name.startswith(("mad", "dp4a")) for name in block)
    return len(max(blocks, key=multiplies, default=[]))


class Printed:
    """Standard error meanwhile, where the driver prints."""

    def __enter__(self):
        self.file, self.before = tempfile.TemporaryFile(), os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *_):
        os.dup2(self.before, 2)
        os.close(self.before)
        self.file.seek(0)
        self.text = self.file.read().decode(errors="replace")
        self.file.close()


def interface(words):
    """Binding numbers of set 0 with their Vulkan descriptor types, and the entry point's name."""
    code = list(instructions(words))
    number = {i[1]: i[3] for i in code if i[0] & 0xffff == DECORATE and i[2] == BINDING}
    kinds = {i[2]: DESCRIPTORS.get(i[3]) for i in code if i[0] & 0xffff == VARIABLE}
    entry = next(i for i in code if i[0] & 0xffff == ENTRY_POINT)
    name = struct.pack(f"<{len(entry) - 3}I", *entry[3:]).split(b"\0")[0].decode()
    return sorted((at, kinds[variable]) for variable, at in number.items()), name


def open_device(vk):
    app = vk.VkApplicationInfo(
        pApplicationName="kiln", applicationVersion=1, pEngineName="", engineVersion=1, apiVersion=vk.VK_MAKE_VERSION(1, 3, 0))
    physical = vk.vkEnumeratePhysicalDevices(vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None))[0]
    chain = vk.VkPhysicalDeviceShaderFloat16Int8Features(shaderFloat16=1, shaderInt8=1)
    chain = vk.VkPhysicalDevice16BitStorageFeatures(storageBuffer16BitAccess=1, uniformAndStorageBuffer16BitAccess=1, pNext=chain)
    chain = vk.VkPhysicalDeviceVulkanMemoryModelFeatures(vulkanMemoryModel=1, vulkanMemoryModelDeviceScope=1, pNext=chain)
    chain = vk.VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR(pipelineExecutableInfo=1, pNext=chain)
    queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, queueCount=1, pQueuePriorities=[1.0])
    extensions = ["VK_KHR_pipeline_executable_properties"]
    if any(found.extensionName == MATRIX_UNITS for found in vk.vkEnumerateDeviceExtensionProperties(physical, None)):
        extensions.append(MATRIX_UNITS)
        chain = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR(cooperativeMatrix=1, pNext=chain)
    info = vk.VkDeviceCreateInfo(
        pNext=chain, queueCreateInfoCount=1, pQueueCreateInfos=[queue], enabledExtensionCount=len(extensions), ppEnabledExtensionNames=extensions)
    return vk.vkGetPhysicalDeviceProperties(physical), vk.vkCreateDevice(physical, info, None)


def statistics(vk, gpu, words, names, main_loop):
    bindings, entry = interface(words)
    slots = [
        vk.VkDescriptorSetLayoutBinding(
            binding=at, descriptorType=kind, descriptorCount=1, stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT)
        for at, kind in bindings
    ]
    info = vk.VkDescriptorSetLayoutCreateInfo(bindingCount=len(slots), pBindings=slots)
    descriptors = vk.vkCreateDescriptorSetLayout(gpu, info, None)
    layout = vk.vkCreatePipelineLayout(gpu, vk.VkPipelineLayoutCreateInfo(setLayoutCount=1, pSetLayouts=[descriptors]), None)
    code = struct.pack(f"<{len(words)}I", *words)
    module = vk.vkCreateShaderModule(gpu, vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code), None)
    stage = vk.VkPipelineShaderStageCreateInfo(stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=entry)
    info = vk.VkComputePipelineCreateInfo(flags=CAPTURE_STATISTICS, stage=stage, layout=layout)
    with Printed() as printed:
        pipeline = vk.vkCreateComputePipelines(gpu, vk.VK_NULL_HANDLE, 1, [info], None)[0]
    ask = vk.vkGetDeviceProcAddr(gpu, "vkGetPipelineExecutableStatisticsKHR")
    text = lambda name: name if isinstance(name, str) else vk.ffi.string(name).decode()
    found = {text(s.name): s.value.u64 for s in ask(gpu, vk.VkPipelineExecutableInfoKHR(pipeline=pipeline, executableIndex=0))}
    vk.vkDestroyPipeline(gpu, pipeline, None)
    vk.vkDestroyShaderModule(gpu, module, None)
    return {name: found[theirs] for name, theirs in names.items()} | {"loop": main_loop(printed.text)}


def main():
    target, files = sys.argv[1], sys.argv[2:]
    if "VK_DRIVER_FILES" not in os.environ:
        sys.exit("no driver is named; run this with `mesa.sh with`")
    if target == "bmg":
        names, main_loop = ANV, main_loop_of_anv
        # What is in the cache is not compiled, and not printed.
        os.environ.update(INTEL_DEBUG="cs", MESA_SHADER_CACHE_DISABLE="true")
    else:
        names, main_loop = RADV, main_loop_of_radv
        os.environ.update(RADV_FORCE_FAMILY=target, RADV_DEBUG="asm")
    import vulkan as vk  # The loader reads the environment when it is first used.

    properties, gpu = open_device(vk)
    version = properties.driverVersion
    print(json.dumps({"driver": f"Mesa {version >> 22}.{version >> 12 & 0x3ff}.{version & 0xfff}"}), flush=True)
    for file in files:
        data = open(file, "rb").read()
        print(json.dumps(statistics(vk, gpu, list(struct.unpack(f"<{len(data) // 4}I", data)), names, main_loop)), flush=True)


main()
