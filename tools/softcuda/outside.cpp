// A kernel that reads one number beyond its memory, for faults.sh. It has to end the process: `outside 0` ends well, `outside 1` reads outside.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" {
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*);
int nvrtcCompileProgram(void*, int, const char* const*);
int nvrtcGetPTXSize(void*, size_t*);
int nvrtcGetPTX(void*, char*);
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxSetCurrent(void*);
int cuMemAlloc_v2(char**, size_t);
int cuModuleLoadData(void**, const char*);
int cuModuleGetFunction(void**, void*, const char*);
int cuStreamCreate(void**, unsigned);
int cuStreamSynchronize(void*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
}

const char* TEXT = "extern \"C\" __global__ void __launch_bounds__(256) reads(float const* const __restrict__ x, float* const __restrict__ y, unsigned beyond) {"
                   "unsigned i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i + beyond]; }";

void must(int result, const char* what) {
    if (result) fprintf(stderr, "%s: error %d\n", what, result), exit(1);
}

int main(int, char** arguments) {
    unsigned beyond = atoi(arguments[1]), numbers = 512;
    void *program, *context, *module, *function, *stream;
    char *x, *y;
    size_t size;
    const char* options[] = {"--gpu-architecture=sm_75"};
    must(nvrtcCreateProgram(&program, TEXT, "reads", 0, nullptr, nullptr), "create");
    must(nvrtcCompileProgram(program, 1, options), "compile");
    must(nvrtcGetPTXSize(program, &size), "size");
    char* ptx = static_cast<char*>(malloc(size));
    must(nvrtcGetPTX(program, ptx), "text");
    must(cuInit(0), "init"), must(cuDevicePrimaryCtxRetain(&context, 0), "context"), must(cuCtxSetCurrent(context), "context");
    must(cuStreamCreate(&stream, 1), "stream");
    must(cuMemAlloc_v2(&x, numbers * sizeof(float)), "memory"), must(cuMemAlloc_v2(&y, numbers * sizeof(float)), "memory");
    must(cuModuleLoadData(&module, ptx), "load"), must(cuModuleGetFunction(&function, module, "reads"), "kernel");
    void* values[] = {&x, &y, &beyond};
    must(cuLaunchKernel(function, numbers / 256, 1, 1, 256, 1, 1, 0, stream, values, nullptr), "launch");
    must(cuStreamSynchronize(stream), "wait");
    puts("all numbers were read");
}
