// What the parts of the stand-in share: devices, streams, memory, captures, faults.
//
// Where CUDA leaves open when something happens, it happens late here; where CUDA calls something
// undefined that mostly goes well, it ends the program with a word.
#pragma once

#define __CUDA_API_VERSION_INTERNAL  // the names that programs link to, not those of macros
#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

using Operation = std::function<void()>;

struct Capture {
  cudaStreamCaptureMode mode;
  unsigned long long id;
  std::thread::id thread;
  std::set<CUstream_st*> streams;
  std::shared_ptr<std::vector<Operation>> graph;
  std::atomic<bool> is_invalid{false};
};

// A queue, and a thread that works through it from the first operation on.
struct CUstream_st {
  int device, priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Operation> queue;
  unsigned long long num_queued = 0, num_done = 0;
  bool has_thread = false;
  std::shared_ptr<Capture> capture;
};

struct CUevent_st {
  int device;
  CUstream_st* stream = nullptr;  // none before it is recorded
  unsigned long long number = 0;  // how many operations of the stream it is behind
  std::shared_ptr<Capture> capture;
};

struct Range {
  char* base;
  size_t nbytes;
  int device;
  bool is_registered;
  char* bytes = nullptr;  // of a device's memory: where they are; nothing is readable at its base
};

using Ranges = std::map<char*, Range>;

// Everything there is, never destroyed: streams work on until the process ends.
struct World {
  std::mutex mutex;
  std::vector<CUstream_st*> defaults, streams;
  std::vector<bool> has_context;
  Ranges device_memory, host_memory;
  std::multimap<char*, size_t> in_flight;  // what asynchronous copies read and write
  std::unordered_map<const void*, std::string> kernels;
  std::set<std::shared_ptr<Capture>> captures;
  unsigned long long num_captures = 0;
  size_t num_allocated = 0, capacity;
  std::mt19937_64 random;
  std::atomic<long> delay_us, first_copy_us, copies_until_failure{-1};
  std::atomic<cudaError_t> failure{cudaSuccess};
  World();
};

World& world();
long option(const char* name, long fallback);
[[noreturn]] void violated(const char* what);

// The device of the calling thread, and its last error.
extern thread_local int current_device;
cudaError_t give(cudaError_t error);

// What every call does that needs a device: make its context, and say whether it has failed.
cudaError_t enter();
// What calls do that are unsafe while a graph is captured: lose the capture, and fail.
cudaError_t enter_unsafe();
#define ENTER(how)                                                    \
  do {                                                                \
    if (auto error = how(); error != cudaSuccess) return give(error); \
  } while (0)

CUstream_st* stream_of(cudaStream_t stream);
unsigned long long push(CUstream_st* stream, Operation operation);
cudaError_t push_or_capture(cudaStream_t stream, Operation operation);
void wait(CUstream_st* stream, unsigned long long number);
void drain(CUstream_st* stream);
bool is_idle(CUstream_st* stream);

const Range* find(const Ranges& ranges, const void* pointer);  // with the lock
