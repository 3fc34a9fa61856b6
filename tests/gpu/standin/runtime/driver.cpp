// A stand-in for libcuda.so.1, the driver: torch asks it which devices have contexts, and who
// cannot find the runtime has it change modes.
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int standin_has_context(int device);
extern "C" int cudaThreadExchangeStreamCaptureMode(int* mode);

API int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = standin_has_context(device);
  return 0;
}

// A mode is kept by the driver, for both; they give its kinds the same numbers.
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  return cudaThreadExchangeStreamCaptureMode(mode);
}

extern "C" int cudaMemcpyAsync(void* target, const void* source, size_t nbytes, int kind,
                               void* stream);
extern "C" int standin_is_on_device(const void* pointer);

// Each copy on its own, the last first: nobody is to rely on their order.
API int cuMemcpyBatchAsync_v2(void** targets, void** sources, size_t* sizes, size_t count,
                              const int* attributes, size_t* firsts, size_t num_attributes,
                              void* stream) {
  if (!count || !stream || num_attributes != 1 || firsts[0] != 0 || attributes[0] != 1) return 1;
  for (auto i = count; i-- > 0;) {
    if (!sizes[i]) return 1;
    int kind = standin_is_on_device(targets[i]) ? 1 : 2;  // to the device, to the host
    if (int error = cudaMemcpyAsync(targets[i], sources[i], sizes[i], kind, stream)) return error;
  }
  return 0;
}

#define REFUSED(name) \
  API int name() { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
REFUSED(cuCtxGetCurrent)
REFUSED(cuCtxSetCurrent)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuGetErrorString)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuTensorMapEncodeTiled)
