// Memory of devices is the host's, filled with what no test writes, but not at the addresses that
// programs are given: who reads or writes there as if it were the host's crashes. Copies from or to
// memory that is not pinned block, as CUDA's may; the others happen on their stream, the first late.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "world.h"

static const size_t PAGE = 4096;

static char* map_pages(size_t nbytes, int access = PROT_READ | PROT_WRITE) {
  void* memory = mmap(nullptr, nbytes, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

static size_t whole_pages(size_t nbytes) { return (nbytes / PAGE + 1) * PAGE; }

const Range* find(const Ranges& ranges, const void* pointer) {
  auto address = static_cast<const char*>(pointer);
  auto after = ranges.upper_bound(const_cast<char*>(address));
  if (after == ranges.begin()) return nullptr;
  auto& range = std::prev(after)->second;
  return address < range.base + range.nbytes ? &range : nullptr;
}

// Where the bytes are that a pointer stands for: of a device's memory, elsewhere.
API void* standin_bytes(const void* pointer) {
  std::lock_guard lock(world().mutex);
  auto at = static_cast<char*>(const_cast<void*>(pointer));
  auto range = find(world().device_memory, pointer);
  return range ? range->bytes + (at - range->base) : at;
}

API int standin_is_on_device(const void* pointer) {
  std::lock_guard lock(world().mutex);
  return find(world().device_memory, pointer) != nullptr;
}

// With the lock.
static void require_landed(const Range& range, const char* what) {
  for (auto& [base, nbytes] : world().in_flight)
    if (base < range.base + range.nbytes && range.base < base + nbytes) violated(what);
}

API cudaError_t cudaMalloc(void** pointer, size_t nbytes) {
  ENTER(enter_unsafe);
  auto size = whole_pages(nbytes);
  std::lock_guard lock(world().mutex);
  if (world().num_allocated + size > world().capacity) return give(cudaErrorMemoryAllocation);
  char *memory = map_pages(size, PROT_NONE), *bytes = map_pages(size + PAGE);
  if (!memory || !bytes) return give(cudaErrorMemoryAllocation);
  memset(bytes, 0xA5, size);
  mprotect(bytes + size, PAGE, PROT_NONE);  // who goes beyond it crashes
  world().device_memory[memory] = {memory, size, current_device, false, bytes};
  world().num_allocated += size;
  *pointer = memory;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  ENTER(enter_unsafe);
  std::lock_guard lock(world().mutex);
  auto found = world().device_memory.find(static_cast<char*>(pointer));
  if (found == world().device_memory.end()) return give(cudaErrorInvalidValue);
  require_landed(found->second, "device memory is freed that a copy still uses");
  world().num_allocated -= found->second.nbytes;
  munmap(found->second.bytes, found->second.nbytes + PAGE);
  munmap(pointer, found->second.nbytes);
  world().device_memory.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** pointer, size_t nbytes, unsigned) {
  ENTER(enter_unsafe);
  char* memory = map_pages(whole_pages(nbytes));
  if (!memory) return give(cudaErrorMemoryAllocation);
  std::lock_guard lock(world().mutex);
  world().host_memory[memory] = {memory, whole_pages(nbytes), current_device, false};
  *pointer = memory;
  return cudaSuccess;
}

static cudaError_t let_go(void* pointer, bool is_registered, const char* what) {
  ENTER(enter_unsafe);
  std::lock_guard lock(world().mutex);
  auto found = world().host_memory.find(static_cast<char*>(pointer));
  if (found == world().host_memory.end() || found->second.is_registered != is_registered)
    return give(is_registered ? cudaErrorHostMemoryNotRegistered : cudaErrorInvalidValue);
  require_landed(found->second, what);
  if (!is_registered) munmap(pointer, found->second.nbytes);
  world().host_memory.erase(found);
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* pointer) {
  return let_go(pointer, false, "host memory is freed that a copy still uses");
}

API cudaError_t cudaHostUnregister(void* pointer) {
  return let_go(pointer, true, "host memory is unregistered that a copy still uses");
}

API cudaError_t cudaHostRegister(void* pointer, size_t nbytes, unsigned) {
  ENTER(enter_unsafe);
  auto base = static_cast<char*>(pointer);
  if (!base || !nbytes) return give(cudaErrorInvalidValue);
  (void)*static_cast<volatile char*>(base);  // who registers what is not mapped crashes
  (void)*static_cast<volatile char*>(base + nbytes - 1);
  std::lock_guard lock(world().mutex);
  auto next = world().host_memory.lower_bound(base);
  bool overlaps = next != world().host_memory.end() && next->second.base < base + nbytes;
  if (overlaps || find(world().host_memory, base))
    return give(cudaErrorHostMemoryAlreadyRegistered);
  world().host_memory[base] = {base, nbytes, current_device, true};
  return cudaSuccess;
}

API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ENTER(enter);
  std::lock_guard lock(world().mutex);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (auto range = find(world().device_memory, pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = range->device;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (auto range = find(world().host_memory, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = range->device;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// One end of a copy. Gives whether an asynchronous copy may use it.
static bool check_end(const void* pointer, size_t nbytes, bool is_on_device) {
  std::lock_guard lock(world().mutex);
  auto end = static_cast<const char*>(pointer) + nbytes;
  auto device = find(world().device_memory, pointer), host = find(world().host_memory, pointer);
  if (is_on_device && !device) violated("a copy takes the host's memory for a device's");
  if (!is_on_device && device) violated("a copy takes a device's memory for the host's");
  if (auto range = device ? device : host; range && end > range->base + range->nbytes)
    violated("a copy goes beyond its memory");
  return device || host;
}

static std::function<void()> fly(const void* pointer, size_t nbytes) {
  auto base = static_cast<char*>(const_cast<void*>(pointer));
  std::lock_guard lock(world().mutex);
  world().in_flight.emplace(base, nbytes);
  return [=] {
    std::lock_guard lock(world().mutex);
    auto [first, last] = world().in_flight.equal_range(base);
    for (auto each = first; each != last; ++each)
      if (each->second == nbytes) {
        world().in_flight.erase(each);
        return;
      }
  };
}

API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes,
                                cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER(enter);
  if (!nbytes) return cudaSuccess;
  if (world().copies_until_failure >= 0 && world().copies_until_failure-- == 0) {
    world().failure = cudaErrorIllegalAddress;
    return give(cudaErrorIllegalAddress);
  }
  if (kind == cudaMemcpyDefault) violated("a copy does not say between what it is");
  bool is_asynchronous =
      check_end(target, nbytes, kind != cudaMemcpyDeviceToHost && kind != cudaMemcpyHostToHost);
  is_asynchronous &=
      check_end(source, nbytes, kind != cudaMemcpyHostToDevice && kind != cudaMemcpyHostToHost);
  auto copy = [to = standin_bytes(target), from = standin_bytes(source), nbytes] {
    memcpy(to, from, nbytes);
  };
  auto queue = stream_of(stream);
  if (queue->capture) {
    if (!is_asynchronous) return give(cudaErrorStreamCaptureUnsupported);
    return give(push_or_capture(stream, copy));
  }
  if (!is_asynchronous) {
    drain(queue);
    ENTER(enter);
    copy();
    return cudaSuccess;
  }
  auto target_lands = fly(target, nbytes), source_lands = fly(source, nbytes);
  push(queue, [=] {
    if (is_idle(queue)) usleep(world().first_copy_us);  // who does not wait for it sees that
    copy();
    target_lands();
    source_lands();
  });
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind kind) {
  ENTER(enter_unsafe);
  auto error = cudaMemcpyAsync(target, source, nbytes, kind, nullptr);
  drain(stream_of(nullptr));
  return error;
}

API cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes,
                                    cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, nbytes, cudaMemcpyDeviceToDevice, stream);
}

API cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t stream) {
  ENTER(enter);
  check_end(target, nbytes, true);
  auto to = standin_bytes(target);
  return give(push_or_capture(stream, [=] { memset(to, value, nbytes); }));
}
