// Streams, events, copies, and the order in which what was queued is run.
//
// A stream is a queue of work: copies, settings of memory, computations (of stand_in/values.py), records of events and
// waits for them. CUDA promises no more of their order than that a stream's work is run in its order, that work behind
// a wait is run after what the event recorded, and that what the host has waited for is done. Any order that keeps
// those promises may happen on a card; STAND_IN_ORDER chooses one:
//
//   issue       everything at once, in the order in which the host asks for it (the default)
//   late        nothing before the host waits for it, and then no more than that needs
//   lowest      when the host waits: always the stream that was made first, of those that can go on
//   highest     when the host waits: always the one that was made last
//   random:N    any that can go on, by random numbers of seed N, also while the host does not wait
//
// A missing wait is then more than a danger: in one of these orders it gives other results.
#include "card.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum order { ISSUE, LATE, LOWEST, HIGHEST, RANDOM };
enum { MOST_STREAMS = 1024, POLLS_BEFORE_PROGRESS = 64 };

struct stream {
  int index;
  bool busy;              // one thread runs work of it at this moment
  uint64_t issued, done;  // numbers of its work
  struct work *first, **end;
};

struct event {
  struct stream *stream;  // where it was recorded last, NULL before
  uint64_t number;        // the work that records it there
  double milliseconds;
  int references;  // the program's, and one for each record that waits in a queue
};

static struct stream *streams[MOST_STREAMS];
static int stream_count;
static enum order order;
static uint64_t random_state;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static int (*computation)(int64_t);
static bool failed;              // a computation did; as on a card, whoever waits from then on is told so
static __thread int running;     // how many pieces of work this thread is in
static __thread int polls;       // queries in a row that found work not done

static struct stream *make_stream(void) {
  if (stream_count == MOST_STREAMS) {
    fprintf(stderr, "stand_in: more than %d streams\n", MOST_STREAMS);
    exit(1);
  }
  struct stream *stream = calloc(1, sizeof *stream);
  stream->index = stream_count;
  stream->end = &stream->first;
  return streams[stream_count++] = stream;
}

static struct stream *stream_of(cudaStream_t handle) {  // 0, 1 and 2 are CUDA's names of default streams
  return (uintptr_t)handle <= 2 ? streams[0] : (struct stream *)handle;
}

static bool set_order(const char *name) {
  static const char *const names[] = {"issue", "late", "lowest", "highest"};
  for (int i = 0; i < 4; i++)
    if (!strcmp(name, names[i])) {
      order = i;
      return true;
    }
  order = RANDOM;
  random_state = strncmp(name, "random:", 7) ? 0 : strtoull(name + 7, NULL, 10) * 2 + 1;
  return random_state != 0;
}

__attribute__((constructor)) static void start(void) {
  card_read_settings();
  card_make_arena();
  make_stream();
  const char *name = getenv("STAND_IN_ORDER");
  if (!set_order(name ? name : "issue")) {
    fprintf(stderr, "stand_in: STAND_IN_ORDER=%s: no such order\n", name);
    exit(2);
  }
}

// ---- running work; the mutex is held, but not while a piece of work runs
static uint64_t random_below(uint64_t n) {  // xorshift64*, Vigna 2016
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return (random_state * 2685821657736338717ull >> 32) % n;
}

static void wait_for_event(struct work *work) {}

static bool can_go_on(struct stream *stream) {
  struct work *work = stream->first;
  if (!work || stream->busy) return false;
  return work->run != wait_for_event || ((struct stream *)work->destination)->done >= work->number;
}

static void run_first(struct stream *stream) {
  struct work *work = stream->first;
  stream->busy = true;
  running++;
  UNLOCK;
  work->run(work);
  LOCK;
  running--;
  stream->busy = false;
  stream->done++;
  stream->first = work->next;
  if (!stream->first) stream->end = &stream->first;
  free(work->staged);
  free(work);
  pthread_cond_broadcast(&progress);
}

static struct stream *choose(void) {
  struct stream *able[MOST_STREAMS];
  int count = 0;
  for (int i = 0; i < stream_count; i++)
    if (can_go_on(streams[i])) able[count++] = streams[i];
  if (!count) return NULL;
  return order == RANDOM ? able[random_below(count)] : able[order == HIGHEST ? count - 1 : 0];
}

// Runs work until number `number` of `stream` is done. Where only another thread can go on, it waits for that, or
// returns if it may not: whoever asks without waiting may hold Python's lock, which that thread needs.
static void run_until(struct stream *stream, uint64_t number, bool may_wait) {
  while (stream->done < number) {
    struct stream *next = NULL;
    if (order == ISSUE || order == LATE) {
      struct work *work = stream->first;
      if (!stream->busy && work->run == wait_for_event) run_until(work->destination, work->number, may_wait);
      if (can_go_on(stream)) next = stream;
    } else {
      next = choose();
    }
    if (next)
      run_first(next);
    else if (running || !may_wait)
      return;  // `running`: what this thread runs is waited for by itself, when Python frees memory while it computes
    else
      pthread_cond_wait(&progress, &card_mutex);
  }
}

// Queues work and says its number; what is queued may only be run (`proceed`) when the mutex is held once.
static uint64_t append(struct stream *stream, struct work work) {
  struct work *queued = malloc(sizeof *queued);
  *queued = work;
  queued->next = NULL;
  *stream->end = queued;
  stream->end = &queued->next;
  return ++stream->issued;
}

static void proceed(struct stream *stream) {
  LOCK;
  if (order == ISSUE && !stream->busy) run_until(stream, stream->issued, true);
  while (order == RANDOM && !running && random_below(2)) {
    struct stream *next = choose();
    if (!next) break;
    run_first(next);
  }
  UNLOCK;
}

void card_queue(cudaStream_t handle, struct work work) {
  struct stream *stream = stream_of(handle);
  LOCK;
  append(stream, work);
  UNLOCK;
  proceed(stream);
}

static void run_all(void) {
  for (int i = 0; i < stream_count; i++) run_until(streams[i], streams[i]->issued, true);
}

void card_synchronize_device(void) {
  LOCK;
  run_all();
  UNLOCK;
}

static cudaError_t outcome(void) { return card_error(failed ? cudaErrorLaunchFailure : cudaSuccess); }

// Whether work is done, for a host that asks and does not wait. One that asks again and again must see it done one day.
static cudaError_t query(struct stream *stream, uint64_t number) {
  LOCK;
  if (stream->done < number && ++polls >= POLLS_BEFORE_PROGRESS) run_until(stream, stream->done + 1, false);
  bool done = stream->done >= number;
  if (done) polls = 0;
  UNLOCK;
  return done ? outcome() : card_error(cudaErrorNotReady);
}

// ---- streams
EXPORT cudaError_t card_cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  LOCK;
  *handle = (cudaStream_t)make_stream();
  UNLOCK;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
  return card_cudaStreamCreateWithPriority(handle, flags, 0);
}
EXPORT cudaError_t card_cudaStreamCreate(cudaStream_t *handle) {
  return card_cudaStreamCreateWithPriority(handle, 0, 0);
}
EXPORT cudaError_t card_cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; }  // its work is still to be done
EXPORT cudaError_t card_cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaStreamSynchronize(cudaStream_t handle) {
  LOCK;
  struct stream *stream = stream_of(handle);
  run_until(stream, stream->issued, true);
  UNLOCK;
  return outcome();
}
EXPORT cudaError_t card_cudaDeviceSynchronize(void) {
  card_synchronize_device();
  return outcome();
}
EXPORT CUresult card_cuCtxSynchronize(void) { return (CUresult)card_cudaDeviceSynchronize(); }
EXPORT cudaError_t card_cudaStreamQuery(cudaStream_t handle) {
  struct stream *stream = stream_of(handle);
  return query(stream, stream->issued);
}

// ---- events
static double now_milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static void release(struct event *event) {
  LOCK;
  if (!--event->references) free(event);
  UNLOCK;
}

EXPORT cudaError_t card_cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
  struct event *event = calloc(1, sizeof *event);
  event->references = 1;
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaEventCreate(cudaEvent_t *handle) { return card_cudaEventCreateWithFlags(handle, 0); }
EXPORT cudaError_t card_cudaEventDestroy(cudaEvent_t handle) {
  release((struct event *)handle);
  return cudaSuccess;
}

static void record(struct work *work) {
  work->event->milliseconds = now_milliseconds();
  release(work->event);
}

EXPORT cudaError_t card_cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  struct event *event = (struct event *)handle;
  LOCK;
  event->references++;
  event->stream = stream_of(stream);
  event->number = append(event->stream, (struct work){.run = record, .event = event});
  UNLOCK;
  proceed(stream_of(stream));
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return card_cudaEventRecordWithFlags(handle, stream, 0);
}

EXPORT cudaError_t card_cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  struct event *event = (struct event *)event_handle;
  LOCK;  // the wait is for what the event records now: a later record of it does not matter
  struct work wait = {.run = wait_for_event, .destination = event->stream, .number = event->number};
  if (event->stream) append(stream_of(handle), wait);
  UNLOCK;
  proceed(stream_of(handle));
  return cudaSuccess;
}

EXPORT cudaError_t card_cudaEventQuery(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  return event->stream ? query(event->stream, event->number) : cudaSuccess;
}
EXPORT cudaError_t card_cudaEventSynchronize(cudaEvent_t handle) {
  struct event *event = (struct event *)handle;
  LOCK;
  if (event->stream) run_until(event->stream, event->number, true);
  UNLOCK;
  return outcome();
}
EXPORT cudaError_t card_cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct event *start = (struct event *)from, *end = (struct event *)to;
  if (!start->stream || !end->stream) return card_error(cudaErrorInvalidResourceHandle);
  LOCK;
  bool done = start->stream->done >= start->number && end->stream->done >= end->number;
  UNLOCK;
  if (!done) return card_error(cudaErrorNotReady);
  double difference = end->milliseconds - start->milliseconds;
  *milliseconds = difference > 0.0005 ? difference : 0.0005;  // the resolution that CUDA states
  return cudaSuccess;
}

// ---- graphs cannot be captured
EXPORT cudaError_t card_cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  return card_error(cudaErrorNotSupported);
}

// ---- host functions
static void call_host(struct work *work) { ((cudaHostFn_t)(uintptr_t)work->source)(work->destination); }
EXPORT cudaError_t card_cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
  card_queue(stream, (struct work){.run = call_host, .source = (void *)function, .destination = argument});
  return cudaSuccess;
}

// ---- copies
static void copy(struct work *work) {
  memmove(work->destination, work->staged ? work->staged : work->source, work->bytes);
}

static void set_bytes(struct work *work) { memset(work->destination, work->value, work->bytes); }
static void leave_out(struct work *work) {}  // a copy of more than card.copied_bytes

static cudaError_t queue_copy(void *destination, const void *source, size_t bytes, cudaStream_t stream, bool wait) {
  if (!bytes) return cudaSuccess;
  bool to_device = card_is_device_memory(destination), from_device = card_is_device_memory(source);
  LOCK;
  counts.copies++;
  if (to_device && from_device) counts.bytes_on_device += bytes;
  else if (to_device) counts.bytes_to_device += bytes;
  else if (from_device) counts.bytes_to_host += bytes;
  UNLOCK;
  struct work work = {.run = copy, .destination = destination, .source = source, .bytes = bytes};
  bool pageable_source = to_device && !from_device && !card_is_page_locked(source);
  bool pageable_destination = from_device && !to_device && !card_is_page_locked(destination);
  bool on_host = !to_device && !from_device;
  if (bytes > card.copied_bytes && !on_host) {
    work.run = from_device && card.host_resident ? set_bytes : leave_out;  // device memory is zeros where none is moved
  } else if (pageable_source && !wait) {  // the host may change it as soon as this call returns
    work.staged = malloc(bytes);
    memcpy(work.staged, source, bytes);
  }
  card_queue(stream, work);
  return wait || pageable_destination || on_host ? card_cudaStreamSynchronize(stream) : outcome();
}

EXPORT cudaError_t card_cudaMemcpyAsync(
    void *destination, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return queue_copy(destination, source, bytes, stream, false);
}
EXPORT cudaError_t card_cudaMemcpy(void *destination, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
  return queue_copy(destination, source, bytes, NULL, true);
}
EXPORT cudaError_t card_cudaMemcpyPeerAsync(
    void *destination, int to, const void *source, int from, size_t bytes, cudaStream_t stream) {
  return queue_copy(destination, source, bytes, stream, false);
}
EXPORT cudaError_t card_cudaMemcpy2DAsync(
    void *destination, size_t destination_pitch, const void *source, size_t source_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t row = 0; row < height && !error; row++)
    error = queue_copy(
        (char *)destination + row * destination_pitch, (const char *)source + row * source_pitch, width, stream, false);
  return error;
}

static void set_words(struct work *work) {
  for (size_t i = 0; i < work->bytes / 4; i++) ((int *)work->destination)[i] = work->value;
}

static cudaError_t queue_setting(work_function run, void *destination, int value, size_t bytes, cudaStream_t stream) {
  if (bytes && bytes <= card.copied_bytes)
    card_queue(stream, (struct work){.run = run, .destination = destination, .value = value, .bytes = bytes});
  return outcome();
}
EXPORT cudaError_t card_cudaMemsetAsync(void *destination, int value, size_t bytes, cudaStream_t stream) {
  return queue_setting(set_bytes, destination, value, bytes, stream);
}
EXPORT cudaError_t card_cudaMemset(void *destination, int value, size_t bytes) {
  return queue_setting(set_bytes, destination, value, bytes, NULL);
}
EXPORT CUresult card_cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t count, CUstream stream) {
  return (CUresult)queue_setting(set_bytes, (void *)destination, value, count, stream);
}
EXPORT CUresult card_cuMemsetD32Async(CUdeviceptr destination, unsigned value, size_t count, CUstream stream) {
  return (CUresult)queue_setting(set_words, (void *)destination, value, count * 4, stream);
}

// ---- computations: what the kernels of one operator would compute, by a function of Python (values.py)
static __thread struct {
  bool counted;  // values.py will compute what these launches stand for
  int launches;
  cudaStream_t stream;
  bool several;  // streams
} launched;
static bool values, said;

// A kernel that nobody computes leaves what was there before. That must not go unnoticed.
static void note_uncomputed(void) {
  if (!values || launched.counted || said) return;
  said = true;
  fprintf(stderr, "stand_in: a kernel was launched that values.py does not see, in another thread than the one that "
                  "imported PyTorch or with dispatch modes disabled; it computes nothing\n");
}

void card_note_launch(cudaStream_t stream) {
  LOCK;
  counts.launches++;
  note_uncomputed();
  UNLOCK;
  launched.several |= launched.launches && stream_of(launched.stream) != stream_of(stream);
  launched.launches++;
  launched.stream = stream;
}

// From here on the launches of this thread are counted; card_launches says how many there were, -1 if they were on
// several streams, and on which.
EXPORT void card_count_launches(void) {
  memset(&launched, 0, sizeof launched);
  launched.counted = true;
}
EXPORT int card_launches(uintptr_t *stream) {
  *stream = (uintptr_t)launched.stream;
  launched.counted = false;
  return launched.several ? -1 : launched.launches;
}

static void compute(struct work *work) {
  if (computation((int64_t)work->number)) failed = true;
}
EXPORT void card_set_computation(int (*function)(int64_t)) {
  computation = function;
  values = true;
}
EXPORT void card_compute(uintptr_t stream, int64_t number) {
  card_queue((cudaStream_t)stream, (struct work){.run = compute, .number = (uint64_t)number});
}

// For tests: another order from here on; whether there is such an order.
EXPORT int card_set_order(const char *name) {
  card_synchronize_device();
  LOCK;
  bool good = set_order(name);
  UNLOCK;
  return good;
}
