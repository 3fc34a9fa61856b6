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

// Between what it is, the addresses say.
API int cuMemcpyAsync(void* target, void* source, size_t nbytes, void* stream) {
  return cudaMemcpyAsync(target, source, nbytes, standin_is_on_device(target) ? 1 : 2, stream);
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
