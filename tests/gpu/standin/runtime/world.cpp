#include "world.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

long option(const char* name, long fallback) {
  const char* text = getenv(name);
  return text ? atol(text) : fallback;
}

World::World()
    : has_context(option("STANDIN_DEVICES", 2), false),
      capacity(option("STANDIN_CAPACITY", 8L << 30)),
      random(option("STANDIN_SEED", 1)),
      delay_us(option("STANDIN_DELAY_US", 2000)),
      first_copy_us(option("STANDIN_FIRST_COPY_US", 2000)) {
  for (size_t i = 0; i < has_context.size(); i++)
    defaults.push_back(new CUstream_st{.device = static_cast<int>(i), .priority = 0});
  streams = defaults;
}

World& world() {
  static World* it = new World;
  return *it;
}

void violated(const char* what) {
  fprintf(stderr, "stand-in for CUDA: %s\n", what);
  abort();
}

cudaError_t give(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t enter() {
  std::lock_guard lock(world().mutex);
  world().has_context[current_device] = true;
  return world().failure;
}

cudaError_t enter_unsafe() {
  ENTER(enter);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard lock(world().mutex);
  cudaError_t error = cudaSuccess;
  for (auto& capture : world().captures) {
    bool is_mine = capture->thread == std::this_thread::get_id();
    bool is_seen = capture->mode == cudaStreamCaptureModeGlobal
                       ? is_mine || thread_mode == cudaStreamCaptureModeGlobal
                       : is_mine && capture->mode == cudaStreamCaptureModeThreadLocal;
    if (!is_seen) continue;
    capture->is_invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

// ---- devices

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = world().defaults.size();
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(world().defaults.size()))
    return give(cudaErrorInvalidDevice);
  current_device = device;
  ENTER(enter);  // makes a context since CUDA 12
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* properties, int device) {
  *properties = {};
  snprintf(properties->name, sizeof properties->name, "stand-in %d", device);
  properties->totalGlobalMem = world().capacity;
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 2;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER(enter);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}

static void drain_all(int device) {
  std::vector<CUstream_st*> streams;
  {
    std::lock_guard lock(world().mutex);
    streams = world().streams;
  }
  for (auto stream : streams)
    if (device < 0 || stream->device == device) drain(stream);
}

API cudaError_t cudaDeviceSynchronize() {
  ENTER(enter_unsafe);
  drain_all(current_device);
  return give(world().failure);
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  ENTER(enter);
  std::lock_guard lock(world().mutex);
  *total = world().capacity;
  *available = *total - world().num_allocated;
  return cudaSuccess;
}

API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors

API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = world().failure;  // what a device has died of stays
  return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    default: return "an error";
  }
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER(enter);
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// ---- what tests ask for

// Whether a device has a context.
API int standin_has_context(int device) {
  std::lock_guard lock(world().mutex);
  return world().has_context[device];
}

// Have all devices die at a copy, after so many that go well; below 0: never.
API void standin_fail_after(long num_copies) { world().copies_until_failure = num_copies; }

// Have the devices live again, which no true one does.
API void standin_revive() {
  world().copies_until_failure = -1;
  world().failure = cudaSuccess;
}

// Wait until nothing is queued on any stream.
API void standin_drain() { drain_all(-1); }
