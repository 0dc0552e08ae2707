"""What AMD's GPUs would make of compute shaders: registers, spills, occupancy, instructions, and those of the main loop.

    python radv.py FAMILY FILE.spv ..    prints a line of JSON for each file, after one with the driver

No GPU is needed: Mesa's RADV compiles for the family that it is told (its null device) and hands out its compiler's statistics. Needs the Python package
`vulkan` and Debian's `mesa-vulkan-drivers`. Mesa has to be older than 26, which has no null device. Shaders for matrix units need 25 (mesa.sh). The
driver is the installed one, unless VK_DRIVER_FILES names another.
"""

import collections
import glob
import json
import os
import re
import struct
import sys
import tempfile

DRIVERS = "/usr/share/vulkan/icd.d/radeon_icd*.json"
MATRIX_UNITS = "VK_KHR_cooperative_matrix"
CAPTURE_STATISTICS = 0x40  # VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR
ENTRY_POINT, DECORATE, VARIABLE = 15, 71, 59  # SPIR-V instructions
BINDING, STORAGE_BUFFER, UNIFORM = 33, 12, 2
DESCRIPTORS = {STORAGE_BUFFER: 7, UNIFORM: 6}  # storage class to VkDescriptorType
NAMES = {
    "registers": "VGPRs", "spilled": "Spilled VGPRs", "shared": "LDS size", "occupancy": "Subgroups per SIMD", "instructions": "Instructions",
}


def instructions(words):
    at = 5
    while at < len(words):
        yield words[at:at + (words[at] >> 16)]
        at += words[at] >> 16


def main_loop(assembly):
    """Number of instructions in the block with the most multiply-adds. Those of matrix units do 128 of each lane at once."""
    blocks, block = collections.defaultdict(list), None
    for line in assembly.splitlines():
        if begun := re.match(r"(BB\d+):$", line):
            block = begun[1]
        elif block and re.match(r"\t[a-z]\w+.*; [0-9a-f]{8}", line):
            blocks[block].append(line.split()[0])
    multiplies = lambda block: sum(128 * name.startswith("v_wmma") + name.startswith("v_fma") for name in block)
    return len(max(blocks.values(), key=multiplies, default=[]))


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


def statistics(vk, gpu, words):
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
    return {name: found[theirs] for name, theirs in NAMES.items()} | {"loop": main_loop(printed.text)}


def main():
    family, files = sys.argv[1], sys.argv[2:]
    driver = os.environ.get("VK_DRIVER_FILES") or next(iter(glob.glob(DRIVERS)), None)
    if not driver:
        sys.exit("there is no RADV; install Debian's mesa-vulkan-drivers")
    os.environ.update(VK_ICD_FILENAMES=driver, VK_DRIVER_FILES=driver, RADV_FORCE_FAMILY=family, RADV_DEBUG="asm")
    import vulkan as vk  # The loader reads the environment when it is first used.

    properties, gpu = open_device(vk)
    version = properties.driverVersion
    print(json.dumps({"driver": f"Mesa {version >> 22}.{version >> 12 & 0x3ff}.{version & 0xfff}"}), flush=True)
    for file in files:
        data = open(file, "rb").read()
        print(json.dumps(statistics(vk, gpu, list(struct.unpack(f"<{len(data) // 4}I", data)))), flush=True)


main()
