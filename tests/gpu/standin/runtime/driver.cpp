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

API int cuMemcpyDtoHAsync_v2(void* target, void* source, size_t nbytes, void* stream) {
  if (!standin_is_on_device(source)) return 1; /* CUDA_ERROR_INVALID_VALUE */
  return cudaMemcpyAsync(target, source, nbytes, 2, stream);
}

API int cuMemcpyHtoDAsync_v2(void* target, void* source, size_t nbytes, void* stream) {
  if (!standin_is_on_device(target)) return 1;
  return cudaMemcpyAsync(target, source, nbytes, 1, stream);
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
