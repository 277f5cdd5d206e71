// What the files of the card share. The functions of CUDA that are modelled bear the prefix `card_`; build.py makes
// libcudart, libcuda, libcublas, ... whose functions jump here.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_DEVICES 8
#define PAGE ((size_t)2 << 20)  // the granularity of device memory

// ---- device.c: what kind of card this is, from the environment variable STAND_IN_CARD
struct card {
  char name[256];
  int capability;  // 86 for compute capability 8.6
  int binary;      // of the code that PyTorch's build has for it: 86 for an RTX 4090 (8.9), too
  int multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
  size_t shared_bytes_per_multiprocessor, shared_bytes_per_block;
  size_t memory_bytes;        // what CUDA reports as the total
  size_t context_bytes;       // what a CUDA context takes of it
  size_t page_locked_bytes;   // host memory that may be page-locked; more is refused
  size_t copied_bytes;        // copies of more bytes than this move no data
  bool host_resident;         // host memory takes RAM where CUDA would make it: page-locked, or copied to
  int devices;
};
extern struct card card;
void card_read_settings(void);

// Sets the error that cudaGetLastError returns in this thread, and returns it.
cudaError_t card_error(cudaError_t error);
int card_device(void);  // the current device of this thread

// ---- memory.c
void card_make_arena(void);
bool card_is_device_memory(const void *address);
bool card_is_page_locked(const void *address);
size_t card_round_up(size_t bytes, size_t multiple);

// ---- streams.c: work is put into a stream's queue, and run in an order that streams and events allow
struct work;
typedef void (*work_function)(struct work *);
struct work {
  work_function run;
  void *destination;
  const void *source;
  void *staged;  // a copy of pageable host memory, made when the work was queued
  size_t bytes;
  int value;
  uint64_t number;
  struct event *event;
  struct work *next;
};
void card_queue(cudaStream_t stream, struct work work);
void card_note_launch(cudaStream_t stream);
void card_synchronize_device(void);

// ---- counts, for reports and tests
struct counts {
  uint64_t launches, copies, bytes_to_device, bytes_to_host, bytes_on_device;
  uint64_t device_bytes, peak_device_bytes, page_locked_bytes, peak_page_locked_bytes;
  uint64_t managed_bytes, managed_resident_bytes, peak_managed_resident_bytes;
  uint64_t prefetched_to_device_bytes, prefetched_to_host_bytes;
};
extern struct counts counts;
// Guards everything above. It is recursive, but work is run only where it is held once, since it is let go meanwhile.
extern pthread_mutex_t card_mutex;
#define LOCK pthread_mutex_lock(&card_mutex)
#define UNLOCK pthread_mutex_unlock(&card_mutex)
