// CUDA C++ to a shared object, as both libraries do it.
#pragma once
#include <string>

namespace softcuda {
/// The text of a kernel as C++ of a CPU, with an entry point. `options` are those of NVRTC.
std::string rewritten(const std::string& cuda, const std::string& options);

/// The path of the shared object, which is compiled unless the cache has it. Empty on failure, and `log` says why.
std::string compiled(const std::string& text, std::string& log);
}  // namespace softcuda
