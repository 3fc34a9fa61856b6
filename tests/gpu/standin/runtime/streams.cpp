// Streams, events, and graphs of what streams were told while they were captured.
#include <unistd.h>

#include "world.h"

CUstream_st* stream_of(cudaStream_t stream) {
  bool is_default =
      stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? world().defaults[current_device] : stream;
}

// Sleep a while before one operation of eight.
static void be_late() {
  long us = 0;
  {
    std::lock_guard lock(world().mutex);
    auto number = world().random();
    if (number % 8 == 0 && world().delay_us > 0) us = (number >> 8) % world().delay_us;
  }
  if (us) usleep(us);
}

static void serve(CUstream_st* stream) {
  for (;;) {
    Operation operation;
    {
      std::unique_lock lock(stream->mutex);
      stream->changed.wait(lock, [&] { return !stream->queue.empty(); });
      operation = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    be_late();
    if (world().failure == cudaSuccess) operation();
    {
      std::lock_guard lock(stream->mutex);
      stream->num_done++;
    }
    stream->changed.notify_all();
  }
}

unsigned long long push(CUstream_st* stream, Operation operation) {
  unsigned long long number;
  {
    std::lock_guard lock(stream->mutex);
    if (!stream->has_thread) std::thread(serve, stream).detach();
    stream->has_thread = true;
    stream->queue.push_back(std::move(operation));
    number = ++stream->num_queued;
  }
  stream->changed.notify_all();
  return number;
}

void wait(CUstream_st* stream, unsigned long long number) {
  std::unique_lock lock(stream->mutex);
  stream->changed.wait(lock, [&] { return stream->num_done >= number; });
}

void drain(CUstream_st* stream) {
  unsigned long long number;
  {
    std::lock_guard lock(stream->mutex);
    number = stream->num_queued;
  }
  wait(stream, number);
}

// Whether nothing is queued, for the operation that is under way.
bool is_idle(CUstream_st* stream) {
  std::lock_guard lock(stream->mutex);
  return stream->queue.empty();
}

cudaError_t push_or_capture(cudaStream_t handle, Operation operation) {
  auto stream = stream_of(handle);
  if (auto capture = stream->capture) {
    if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
    capture->graph->push_back(std::move(operation));
  } else {
    push(stream, std::move(operation));
  }
  return cudaSuccess;
}

// What must not be asked of work that is only recorded.
static cudaError_t refuse_captured(const std::shared_ptr<Capture>& capture) {
  if (!capture) return enter_unsafe();
  capture->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  ENTER(enter);
  *stream = new CUstream_st{.device = current_device, .priority = priority};
  std::lock_guard lock(world().mutex);
  world().streams.push_back(*stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its thread lives on

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto stream = stream_of(handle);
  ENTER([&] { return refuse_captured(stream->capture); });
  std::lock_guard lock(stream->mutex);
  return give(stream->num_done == stream->num_queued ? cudaSuccess : cudaErrorNotReady);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto stream = stream_of(handle);
  ENTER([&] { return refuse_captured(stream->capture); });
  drain(stream);
  return give(world().failure);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  ENTER(enter);
  auto stream = stream_of(handle);
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture)
      return give(cudaErrorStreamCaptureMerge);
    stream->capture = event->capture;
    event->capture->streams.insert(stream);
  } else if (stream->capture && event->stream) {
    stream->capture->is_invalid = true;
    return give(cudaErrorStreamCaptureIsolation);
  } else if (event->stream && event->stream != stream) {
    push(stream, [other = event->stream, number = event->number] { wait(other, number); });
  }
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER(enter);
  return give(push_or_capture(stream, [=] { function(data); }));
}

// ---- events

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER(enter);
  *event = new CUevent_st{.device = current_device};
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  ENTER(enter);
  auto stream = stream_of(handle);
  if (stream->device != event->device) return give(cudaErrorInvalidResourceHandle);
  event->stream = stream;
  event->capture = stream->capture;
  if (!stream->capture) event->number = push(stream, [] {});
  return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER([&] { return refuse_captured(event->capture); });
  if (!event->stream) return cudaSuccess;
  std::lock_guard lock(event->stream->mutex);
  return give(event->stream->num_done >= event->number ? cudaSuccess : cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER([&] { return refuse_captured(event->capture); });
  if (event->stream) wait(event->stream, event->number);
  return give(world().failure);
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}

// ---- graphs

using Graph = std::shared_ptr<std::vector<Operation>>;

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER(enter);
  if (handle == nullptr) return give(cudaErrorStreamCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams.insert(handle);
  capture->graph = std::make_shared<std::vector<Operation>>();
  handle->capture = capture;
  std::lock_guard lock(world().mutex);
  capture->id = ++world().num_captures;
  world().captures.insert(capture);
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  ENTER(enter);
  auto capture = handle->capture;
  if (!capture) return give(cudaErrorIllegalState);
  for (auto stream : capture->streams) stream->capture = nullptr;
  {
    std::lock_guard lock(world().mutex);
    world().captures.erase(capture);
  }
  *graph = nullptr;
  if (capture->is_invalid) return give(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(capture->graph));
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  auto capture = stream_of(stream)->capture;
  *status = !capture              ? cudaStreamCaptureStatusNone
            : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes, size_t* num_nodes) {
  auto capture = stream_of(stream)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (num_nodes) *num_nodes = 0;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                     unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                              unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER(enter);
  auto graph = *reinterpret_cast<Graph*>(executable);
  return give(push_or_capture(stream, [graph] {
    for (auto& operation : *graph) operation();
  }));
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* num_nodes) {
  *num_nodes = (*reinterpret_cast<Graph*>(graph))->size();
  return cudaSuccess;
}

API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
