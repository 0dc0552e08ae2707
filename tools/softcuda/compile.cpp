#include "compile.h"

#include <dlfcn.h>
#include <regex>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

namespace softcuda {
namespace {
/// The folder of this library. What it needs lies beside it.
std::string folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&folder), &info)) return ".";
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string cache() {
    const char* set = getenv("SOFTCUDA_CACHE");
    std::string path = set ? set : folder() + "/cache";
    mkdir(path.c_str(), 0777);
    return path;
}

std::string hash(const std::string& text) {
    unsigned __int128 state = (unsigned __int128)0x6c62272e07bb0142 << 64 | 0x62b821756295c58d;  // FNV-1a
    const unsigned __int128 prime = (unsigned __int128)1 << 88 | 0x13b;
    for (unsigned char byte : text) state = (state ^ byte) * prime;
    char digits[33];
    snprintf(digits, sizeof digits, "%016llx%016llx", (unsigned long long)(state >> 64), (unsigned long long)state);
    return digits;
}

std::string quoted(const std::string& path) { return "'" + std::regex_replace(path, std::regex("'"), "'\\''") + "'"; }

bool exists(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

/// PTX that cubecl writes where CUDA C++ has no function for all types.
std::string without_ptx(const std::string& line) {
    static const std::regex atom(R"(asm volatile\("atom\.relaxed\.(\w+)(?:\.noftz)?\.(\w+) %0, \[%1\], %2;" : "=\w"\((\w+)\) : "\w"\((\w+)\), "\w"\((\w+)\)\s*\);)");
    static const std::regex saturating(R"(asm\s*\("(add|sub)\.sat\.s32 %0, %1, %2;" : "=r"\((\w+)\) : "r"\((\w+)\), "r"\((\w+)\)\s*\);)");
    static const std::regex extreme(R"(asm\s*\("(max|min)\.NaN\.f32 %0, %1, %2;" : "=f"\((\w+)\) : "f"\((.+)\), "f"\((.+)\)\);)");
    std::smatch part;
    if (std::regex_search(line, part, extreme))
        return part.prefix().str() + part[2].str() + " = softcuda::" + part[1].str() + "_or_nan(" + part[3].str() + ", " + part[4].str() + ");" + part.suffix().str();
    if (std::regex_search(line, part, atom)) {
        static const std::pair<const char*, const char*> types[] = {{"u32", "unsigned"}, {"s32", "int"}, {"u64", "unsigned long long"},
            {"s64", "long long"}, {"f32", "float"}, {"f64", "double"}, {"f16", "__half"}, {"f16x2", "__half2"}, {"bf16", "__nv_bfloat16"}};
        for (auto [ptx, type] : types)
            if (part[2] == ptx)
                return part.prefix().str() + part[3].str() + " = softcuda::atom<" + type + ">(softcuda::" + part[1].str() + ", " + part[4].str() + ", " + part[5].str() + ");" + part.suffix().str();
    }
    static const std::regex matrices(R"(asm volatile\("ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared::cta\.b16 .* : "r"\((\w+)\) : "memory"\);)");
    static const std::regex product(R"(asm volatile\("mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(b?f16)\.b?f16\.f32 .* (: "r".*)\);)");
    if (std::regex_search(line, part, matrices)) {
        const char* transposed = part[2].matched ? "true" : "false";
        return part.prefix().str() + "softcuda::load_matrices<" + part[1].str() + ", " + transposed + ">(SITE, reinterpret_cast<unsigned*>(&result), " + part[3].str() + ");" + part.suffix().str();
    }
    if (std::regex_search(line, part, product)) {
        static const std::regex operand(R"("\w"\(([\w.]+)\))");
        std::string inputs = part[3], list = "{", type = part[2] == "f16" ? "__half" : "__nv_bfloat16";
        size_t count = part[1] == "8" ? 2 : 4, number = 0;
        for (std::sregex_iterator input(inputs.begin(), inputs.end(), operand), end; input != end; ++input, ++number) {
            bool begins = number == count || number == count + count / 2;
            list += (begins ? "}, {" : number ? ", " : "") + (*input)[1].str();
        }
        return part.prefix().str() + "softcuda::multiply_matrices<" + type + ", " + part[1].str() + ">(SITE, reinterpret_cast<float*>(&result), " + list + "});" + part.suffix().str();
    }
    if (std::regex_search(line, part, saturating)) {
        const char* sign = part[1] == "add" ? " + " : " - ";
        return part.prefix().str() + part[2].str() + " = softcuda::saturate((long long)" + part[3].str() + sign + part[4].str() + ");" + part.suffix().str();
    }
    return line;
}

std::string line_rewritten(const std::string& line) {
    static const std::regex shared(R"(extern __shared__ __align__\(\d+\) char (\w+)\[\];)");
    static const std::regex division(R"(^(\s*[\w ]+ const \w+ = )([\w.\-]+) ([/%]) ([\w.\-]+);)");
    if (line.find("__shared__") != std::string::npos) return std::regex_replace(line, shared, "char* const $1 = softcuda::block.shared;");
    if (line.find("asm") != std::string::npos) return without_ptx(line);
    std::smatch part;
    if ((line.find(" / ") != std::string::npos || line.find(" % ") != std::string::npos) && std::regex_search(line, part, division))
        return part[1].str() + "softcuda::" + (part[3] == "/" ? "divide(" : "remainder(") + part[2].str() + ", " + part[4].str() + ");" + part.suffix().str();
    return line;
}
}  // namespace

std::string rewritten(const std::string& cuda, const std::string& options) {
    std::string text = "// Made by softcuda, with " + options + "\n";
    for (size_t from = 0; from < cuda.size();) {
        size_t end = std::min(cuda.find('\n', from), cuda.size());
        text += line_rewritten(cuda.substr(from, end - from)) + "\n";
        from = end + 1;
    }
    static const std::regex signature(R"(extern "C" __global__ void __launch_bounds__\((\d+)\)\s+(\w+)\()");
    std::smatch part;
    if (!std::regex_search(cuda, part, signature)) return text;
    std::string name = part[2].str();
    // A name that all functions of this kind have in them, at which threads wait.
    bool waits = cuda.find("__sync") != std::string::npos || cuda.find("_sync(") != std::string::npos || cuda.find("__activemask") != std::string::npos;
    text += "extern \"C\" const char softcuda_name[] = \"" + name + "\";\n";
    text += "extern \"C\" const unsigned softcuda_most_threads = " + part[1].str() + ";\n";
    text += "extern \"C\" const size_t* softcuda_sizes() { return softcuda::sizes(" + name + "); }\n";
    text += "extern \"C\" void softcuda_thread(void** args) { softcuda::call(" + name + ", args); }\n";
    if (!waits) text += "extern \"C\" void softcuda_each(void** args) { softcuda::call_each(" + name + ", args); }\n";
    return text;
}

std::string compiled(const std::string& text, std::string& log) {
    std::string stem = cache() + "/" + hash(SOFTCUDA_VERSION + text), object = stem + ".so";
    if (exists(object)) return object;
    std::string own = stem + "." + std::to_string(getpid()), source = own + ".cpp";
    FILE* file = fopen(source.c_str(), "w");
    if (!file || fwrite(text.data(), 1, text.size(), file) != text.size() || fclose(file) != 0) {
        log = "softcuda cannot write " + source;
        return "";
    }
    // What else it needs, it finds in the process: the C library, and the driver's library. What it defines is its own: a type
    // of the same name is another one in each kernel.
    std::string command = "g++ " SOFTCUDA_FLAGS " -shared -nostdlib -fno-gnu-unique -Wl,-Bsymbolic -I" + quoted(folder() + "/include") + " -include softcuda.h " + quoted(source) +
        " -lgcc -o " + quoted(own + ".so") + " 2>&1";
    FILE* output = popen(command.c_str(), "r");
    char buffer[4096];
    for (size_t length; output && (length = fread(buffer, 1, sizeof buffer, output)) > 0;) log.append(buffer, length);
    bool good = output && pclose(output) == 0;
    if (!good) {
        log = command + "\n" + log;
        return "";
    }
    // Others may compile the same meanwhile: the last one stays.
    rename(source.c_str(), (stem + ".cpp").c_str());
    return rename((own + ".so").c_str(), object.c_str()) == 0 ? object : "";
}
}  // namespace softcuda
