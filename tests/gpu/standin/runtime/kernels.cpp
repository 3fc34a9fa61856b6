// Kernels: the one that keeps a stream busy sleeps, no other runs. What torch would have them do
// is done by operators.py, through `standin_launch`.
#include <unistd.h>

#include <cstdio>

#include "world.h"

// Run a function when a stream comes to it, or at each replay of the graph that is captured.
API int standin_launch(cudaStream_t stream, void (*function)(void*), void* data) {
  ENTER(enter);
  return give(push_or_capture(stream, [=] { function(data); }));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
  std::lock_guard lock(world().mutex);
  world().kernels[host] = name;
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t,
                                 cudaStream_t stream) {
  ENTER(enter);
  std::string name;
  {
    std::lock_guard lock(world().mutex);
    name = world().kernels[kernel];
  }
  if (name.find("spin_kernel") == std::string::npos) {
    fprintf(stderr, "stand-in for CUDA: there is no %s\n", name.c_str());
    return give(cudaErrorNotSupported);
  }
  auto cycles = *static_cast<int64_t*>(arguments[0]);
  return give(push_or_capture(stream, [=] { usleep(cycles / 2000); }));  // at 2 GHz
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

// ---- what torch links to, and nothing here calls

#define REFUSED(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return give(cudaErrorNotSupported); }
REFUSED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
REFUSED(cudaFreeAsync, void*, cudaStream_t)
REFUSED(cudaIpcCloseMemHandle, void*)
REFUSED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
REFUSED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
REFUSED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
REFUSED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
REFUSED(cudaLaunchKernelExC, const cudaLaunchConfig_t*, const void*, void**)
REFUSED(cudaMallocAsync, void**, size_t, cudaStream_t)
REFUSED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
REFUSED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
REFUSED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
REFUSED(cudaMemcpy2DAsync, void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind,
        cudaStream_t)
REFUSED(cudaMemset, void*, int, size_t)
REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int*, const void*, int, size_t,
        unsigned)
REFUSED(cudaStreamAddCallback, cudaStream_t, cudaStreamCallback_t, void*, unsigned)
