// libnvrtc.so: its "PTX" is C++ of a CPU, which the driver compiles unless the cache has it.
#include <fstream>
#include <functional>
#include <stdlib.h>
#include <string>
#include <string.h>

#include "compile.h"

namespace {
struct Program {
    std::string source, text, log;
};
enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

/// Keeps the text that a GPU would get in the folder SOFTCUDA_TEXTS, by the name of its kernel: compilers for GPUs can read it there.
void keep(const std::string& source) {
    const char* folder = getenv("SOFTCUDA_TEXTS");
    size_t end = source.find('(', source.find("__launch_bounds__"));
    if (!folder || end == std::string::npos) return;
    end = source.find('(', source.find(')', end));
    size_t begin = source.find_last_of(" \n", end) + 1;
    std::string name = source.substr(begin, end - begin) + "-" + std::to_string(std::hash<std::string>{}(source));
    std::ofstream(std::string(folder) + "/" + name + ".cu") << source;
}
}  // namespace

#define API extern "C" __attribute__((visibility("default"))) Result

API nvrtcVersion(int* major, int* minor) { return *major = 12, *minor = 8, SUCCESS; }

API nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
    if (!program || !source) return INVALID_INPUT;
    *program = new Program{source, "", ""};
    return SUCCESS;
}

API nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    if (!program) return INVALID_PROGRAM;
    keep(program->source);
    std::string architecture;
    for (int i = 0; i < count; i++)
        if (const char* sm = strstr(options[i], "=sm_")) architecture = sm + strlen("=sm_");
    // What a kernel asks about itself, such as whether it may use PTX of a later GPU.
    std::string text = softcuda::rewritten(program->source, "sm_" + architecture);
    text = "#define __CUDA_ARCH__ " + architecture + "0\n" + text;
    program->log.clear();
    if (softcuda::compiled(text, program->log).empty()) return COMPILATION;
    program->text = text;
    return SUCCESS;
}

API nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, SUCCESS; }
API nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log.c_str()), SUCCESS; }
API nvrtcGetPTXSize(Program* program, size_t* size) { return *size = program->text.size() + 1, SUCCESS; }
API nvrtcGetPTX(Program* program, char* text) { return strcpy(text, program->text.c_str()), SUCCESS; }
API nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(Result) { return "an error of softcuda's compiler"; }
