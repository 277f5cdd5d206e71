// Memory: addresses, device memory and its limit, mappings (expandable segments), page-locked and managed memory.
//
// All device memory lies in one reserved range of host addresses, the arena, so that an address says by itself whose it
// is. What is allocated can be read and written, by copies and by the values of stand_in/values.py; anything else in
// the arena is protected, so that whoever uses memory that was given back is ended by a segmentation fault.
#include "card.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum kind { ALLOCATED, RESERVED, MANAGED };  // by cudaMalloc; addresses without memory; by cudaMallocManaged

struct page {  // of managed memory
  bool resident;  // on the device
  bool read_mostly, accessed_by_device;
  int preferred, prefetched;  // a device's number, cudaCpuDeviceId or cudaInvalidDeviceId
};

struct range {  // sorted by address, never overlapping
  size_t at, bytes;
  enum kind kind;
  int device;
  struct page *pages;
  struct range *next;
};

struct physical {  // memory of cuMemCreate, which lives as long as its handle or a mapping of it
  size_t bytes;
  int references, device;
};

struct mapping {
  size_t at, bytes;
  struct physical *memory;
  struct mapping *next;
};

static char *arena;
static size_t arena_bytes;
static struct range *ranges;
static struct mapping *mappings;
static size_t used_bytes[MOST_DEVICES];
static bool poison;

size_t card_round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

void card_make_arena(void) {
  // Virtual addresses cost nothing; expandable segments reserve 9/8 of the card's memory for each stream and pool.
  arena_bytes = card_round_up(card.memory_bytes * 24 + ((size_t)64 << 30), PAGE);
  char *start = mmap(NULL, arena_bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    perror("stand_in: no addresses for device memory");
    exit(1);
  }
  arena = (char *)card_round_up((size_t)start, PAGE);
  const char *values = getenv("STAND_IN_VALUES");
  poison = values && *values;
}

EXPORT void card_arena(void **start, size_t *bytes) {
  *start = arena;
  *bytes = arena_bytes;
}

bool card_is_device_memory(const void *address) {
  return (char *)address >= arena && (char *)address < arena + arena_bytes;
}

static void open_pages(size_t at, size_t bytes) {
  mprotect(arena + at, bytes, PROT_READ | PROT_WRITE);
  madvise(arena + at, bytes, MADV_NOHUGEPAGE);
  madvise(arena + at, bytes, MADV_DONTDUMP);
  if (poison) memset(arena + at, 0xFF, bytes);  // NaN in every floating-point format: memory of a GPU is not zero
}

static void close_pages(size_t at, size_t bytes) {
  mmap(arena + at, bytes, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// ---- the limit
static void set_resident(struct range *range, size_t index, bool resident) {
  struct page *page = &range->pages[index];
  if (page->resident == resident) return;
  page->resident = resident;
  used_bytes[range->device] += resident ? PAGE : -PAGE;
  counts.managed_resident_bytes += resident ? PAGE : -PAGE;
  if (counts.managed_resident_bytes > counts.peak_managed_resident_bytes)
    counts.peak_managed_resident_bytes = counts.managed_resident_bytes;
}

static bool evict_a_page(int device) {
  for (struct range *range = ranges; range; range = range->next)
    for (size_t i = 0; range->kind == MANAGED && range->device == device && i < range->bytes / PAGE; i++)
      if (range->pages[i].resident) {
        set_resident(range, i, false);
        return true;
      }
  return false;
}

static bool take(int device, size_t bytes) {
  while (used_bytes[device] + card.context_bytes + bytes > card.memory_bytes)
    if (!evict_a_page(device)) return false;
  used_bytes[device] += bytes;
  counts.device_bytes += bytes;
  if (counts.device_bytes > counts.peak_device_bytes) counts.peak_device_bytes = counts.device_bytes;
  return true;
}

static void give_back(int device, size_t bytes) {
  used_bytes[device] -= bytes;
  counts.device_bytes -= bytes;
}

// ---- addresses: the lowest that are free
static struct range *place(size_t bytes, size_t alignment, enum kind kind) {
  struct range **link = &ranges;
  size_t at = alignment;  // not 0, which would look like the null pointer's offset
  for (; *link; link = &(*link)->next) {
    if (at + bytes <= (*link)->at) break;
    at = card_round_up((*link)->at + (*link)->bytes, alignment);
  }
  if (at + bytes > arena_bytes) return NULL;
  struct range *range = calloc(1, sizeof *range);
  *range = (struct range){at, bytes, kind, card_device(), NULL, *link};
  return *link = range;
}

static struct range *range_of(const void *address) {
  if (!card_is_device_memory(address)) return NULL;
  size_t at = (char *)address - arena;
  for (struct range *range = ranges; range && range->at <= at; range = range->next)
    if (at < range->at + range->bytes) return range;
  return NULL;
}

static void remove_range(struct range *range) {
  struct range **link = &ranges;
  while (*link != range) link = &(*link)->next;
  *link = range->next;
  close_pages(range->at, range->bytes);
  free(range->pages);
  free(range);
}

// ---- cudaMalloc
EXPORT cudaError_t card_cudaMalloc(void **address, size_t bytes) {
  *address = NULL;
  if (!bytes) return cudaSuccess;
  LOCK;
  struct range *range = NULL;
  size_t rounded = card_round_up(bytes, PAGE);
  if (take(card_device(), rounded)) {
    range = place(rounded, PAGE, ALLOCATED);
    if (!range) give_back(card_device(), rounded);
  }
  if (range) {
    open_pages(range->at, range->bytes);
    *address = arena + range->at;
  }
  UNLOCK;
  return card_error(range ? cudaSuccess : cudaErrorMemoryAllocation);
}

EXPORT cudaError_t card_cudaFree(void *address) {
  if (!address) return cudaSuccess;
  card_synchronize_device();  // as CUDA does: work that was queued may use the memory
  LOCK;
  struct range *range = range_of(address);
  bool good = range && arena + range->at == (char *)address && range->kind != RESERVED;
  if (good && range->kind == ALLOCATED) give_back(range->device, range->bytes);
  if (good && range->kind == MANAGED) {
    for (size_t i = 0; i < range->bytes / PAGE; i++) set_resident(range, i, false);
    counts.managed_bytes -= range->bytes;
  }
  if (good) remove_range(range);
  UNLOCK;
  return card_error(good ? cudaSuccess : cudaErrorInvalidValue);
}

EXPORT cudaError_t card_cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
  return card_cudaMalloc(address, bytes);
}
EXPORT cudaError_t card_cudaFreeAsync(void *address, cudaStream_t stream) { return card_cudaFree(address); }
EXPORT cudaError_t card_cudaGetSymbolAddress(void **address, const void *symbol) { return card_cudaMalloc(address, 64); }

EXPORT cudaError_t card_cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  LOCK;
  *total_bytes = card.memory_bytes;
  *free_bytes = card.memory_bytes - used_bytes[card_device()] - card.context_bytes;
  UNLOCK;
  return cudaSuccess;
}

// ---- expandable segments: reserved addresses, memory, and mappings of the one to the other
EXPORT CUresult card_cuMemGetAllocationGranularity(
    size_t *bytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

EXPORT CUresult card_cuMemAddressReserve(
    CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  LOCK;
  struct range *range = place(card_round_up(bytes, PAGE), alignment > PAGE ? alignment : PAGE, RESERVED);
  if (range) *address = (CUdeviceptr)(arena + range->at);
  UNLOCK;
  return range ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult card_cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  LOCK;
  struct range *range = range_of((void *)address);
  bool good = range && range->kind == RESERVED && arena + range->at == (char *)address;
  if (good) remove_range(range);
  UNLOCK;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult card_cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
    unsigned long long flags) {
  if (bytes % PAGE) return CUDA_ERROR_INVALID_VALUE;
  int device = properties->location.id;
  LOCK;
  bool good = device >= 0 && device < card.devices && take(device, bytes);
  if (good) {
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){bytes, 1, device};
    *handle = (CUmemGenericAllocationHandle)memory;
  }
  UNLOCK;
  return good ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void release(struct physical *memory) {
  if (--memory->references) return;
  give_back(memory->device, memory->bytes);
  free(memory);
}

EXPORT CUresult card_cuMemRelease(CUmemGenericAllocationHandle handle) {
  LOCK;
  release((struct physical *)handle);
  UNLOCK;
  return CUDA_SUCCESS;
}

EXPORT CUresult card_cuMemMap(
    CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  LOCK;
  struct range *range = range_of((void *)address);
  size_t at = (char *)address - arena;
  bool good = range && range->kind == RESERVED && at + bytes <= range->at + range->bytes;
  for (struct mapping *other = mappings; other; other = other->next)
    good &= at >= other->at + other->bytes || other->at >= at + bytes;
  if (good) {
    struct mapping *mapping = malloc(sizeof *mapping);
    *mapping = (struct mapping){at, bytes, (struct physical *)handle, mappings};
    mappings = mapping;
    mapping->memory->references++;
    open_pages(at, bytes);
  }
  UNLOCK;
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult card_cuMemUnmap(CUdeviceptr address, size_t bytes) {
  LOCK;
  size_t at = (char *)address - arena;
  bool found = false;
  for (struct mapping **link = &mappings; *link;) {
    struct mapping *mapping = *link;
    if (mapping->at >= at && mapping->at + mapping->bytes <= at + bytes) {
      *link = mapping->next;
      close_pages(mapping->at, mapping->bytes);
      release(mapping->memory);
      free(mapping);
      found = true;
    } else {
      link = &mapping->next;
    }
  }
  UNLOCK;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult card_cuMemSetAccess(
    CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t descriptions) {
  return CUDA_SUCCESS;
}

EXPORT CUresult card_cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
  LOCK;
  struct range *range = range_of((void *)address);
  if (range && start) *start = (CUdeviceptr)(arena + range->at);
  if (range && bytes) *bytes = range->bytes;
  UNLOCK;
  return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- page-locked host memory
struct locked {
  char *at;
  size_t bytes;
  bool ours;  // made by cudaHostAlloc, where cudaHostRegister locks what a program has
  struct locked *next;
};
static struct locked *locked_ranges;

static struct locked *locked_range_of(const void *address, size_t bytes) {
  for (struct locked *range = locked_ranges; range; range = range->next)
    if ((char *)address < range->at + range->bytes && range->at < (char *)address + bytes) return range;
  return NULL;
}

bool card_is_page_locked(const void *address) {
  LOCK;
  bool found = locked_range_of(address, 1) != NULL;
  UNLOCK;
  return found;
}

// For tests: how much may be page-locked from here on; returns how much it was.
EXPORT size_t card_set_page_locked_bytes(size_t bytes) {
  size_t before = card.page_locked_bytes;
  card.page_locked_bytes = bytes;
  return before;
}

static cudaError_t lock_pages(void *address, size_t bytes, bool ours) {
  if (locked_range_of(address, bytes)) return cudaErrorHostMemoryAlreadyRegistered;
  if (counts.page_locked_bytes + bytes > card.page_locked_bytes) return cudaErrorMemoryAllocation;
  if (card.host_resident)
    for (volatile char *page = address; page < (char *)address + bytes; page += 4096) *page = *page;
  struct locked *range = malloc(sizeof *range);
  *range = (struct locked){address, bytes, ours, locked_ranges};
  locked_ranges = range;
  counts.page_locked_bytes += bytes;
  if (counts.page_locked_bytes > counts.peak_page_locked_bytes)
    counts.peak_page_locked_bytes = counts.page_locked_bytes;
  return cudaSuccess;
}

static bool unlock_pages(void *address, bool ours) {
  for (struct locked **link = &locked_ranges; *link; link = &(*link)->next)
    if ((*link)->at == address && (*link)->ours == ours) {
      struct locked *range = *link;
      *link = range->next;
      counts.page_locked_bytes -= range->bytes;
      if (ours) munmap(range->at, card_round_up(range->bytes, 4096));
      free(range);
      return true;
    }
  return false;
}

EXPORT cudaError_t card_cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = NULL;
  if (!bytes) return cudaSuccess;
  void *memory =
      mmap(NULL, card_round_up(bytes, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return card_error(cudaErrorMemoryAllocation);
  LOCK;
  cudaError_t error = lock_pages(memory, bytes, true);
  UNLOCK;
  if (error)
    munmap(memory, card_round_up(bytes, 4096));
  else
    *address = memory;
  return card_error(error);
}
EXPORT cudaError_t card_cudaMallocHost(void **address, size_t bytes) { return card_cudaHostAlloc(address, bytes, 0); }

EXPORT cudaError_t card_cudaFreeHost(void *address) {
  if (!address) return cudaSuccess;
  card_synchronize_device();
  LOCK;
  bool good = unlock_pages(address, true);
  UNLOCK;
  return card_error(good ? cudaSuccess : cudaErrorInvalidValue);
}

EXPORT cudaError_t card_cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  if (!address || !bytes) return card_error(cudaErrorInvalidValue);
  LOCK;
  cudaError_t error = lock_pages(address, bytes, false);
  UNLOCK;
  return card_error(error);
}

EXPORT cudaError_t card_cudaHostUnregister(void *address) {
  LOCK;
  bool good = unlock_pages(address, false);
  UNLOCK;
  return card_error(good ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

EXPORT cudaError_t card_cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags) {
  *device_address = address;
  return cudaSuccess;
}

EXPORT cudaError_t card_cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  memset(found, 0, sizeof *found);
  LOCK;
  struct range *range = range_of(address);
  if (range) {
    found->type = range->kind == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
    found->device = range->device;
    found->devicePointer = (void *)address;
    found->hostPointer = range->kind == MANAGED ? (void *)address : NULL;
  } else if (card_is_page_locked(address)) {
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = (void *)address;
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->device = cudaInvalidDeviceId;
    found->hostPointer = (void *)address;
  }
  UNLOCK;
  return cudaSuccess;
}

// ---- managed memory: pages that lie on the host or on the device. Which pages a kernel touches is not known, so
// pages move only when they are prefetched, or evicted (the lowest address first) to make room.
EXPORT cudaError_t card_cudaMallocManaged(void **address, size_t bytes, unsigned flags) {
  *address = NULL;
  if (!bytes) return card_error(cudaErrorInvalidValue);
  LOCK;
  struct range *range = place(card_round_up(bytes, PAGE), PAGE, MANAGED);
  if (range) {
    range->pages = calloc(range->bytes / PAGE, sizeof *range->pages);
    for (size_t i = 0; i < range->bytes / PAGE; i++)
      range->pages[i].preferred = range->pages[i].prefetched = cudaInvalidDeviceId;
    open_pages(range->at, range->bytes);
    counts.managed_bytes += range->bytes;
    *address = arena + range->at;
  }
  UNLOCK;
  return card_error(range ? cudaSuccess : cudaErrorMemoryAllocation);
}

static struct range *managed_range(const void *address, size_t bytes) {
  struct range *range = range_of(address);
  bool inside = range && (char *)address + bytes <= arena + range->at + range->bytes;
  return inside && bytes && range->kind == MANAGED ? range : NULL;
}

static int number_of(struct cudaMemLocation location) {
  return location.type == cudaMemLocationTypeDevice ? location.id : cudaCpuDeviceId;
}

static size_t first_page(struct range *range, const void *address) {
  return ((char *)address - arena - range->at) / PAGE;
}

static size_t page_after(struct range *range, const void *address, size_t bytes) {
  return ((char *)address - arena - range->at + bytes + PAGE - 1) / PAGE;
}

static void prefetch(struct work *work) {
  LOCK;
  struct range *range = managed_range(work->source, work->bytes);
  bool to_device = work->value != cudaCpuDeviceId;
  for (size_t i = range ? first_page(range, work->source) : 0;
       range && i < page_after(range, work->source, work->bytes); i++) {
    range->pages[i].prefetched = work->value;
    if (range->pages[i].resident == to_device) continue;
    while (to_device && used_bytes[range->device] + card.context_bytes + PAGE > card.memory_bytes)
      if (!evict_a_page(range->device)) break;
    if (to_device && used_bytes[range->device] + card.context_bytes + PAGE > card.memory_bytes) break;
    set_resident(range, i, to_device);
    *(to_device ? &counts.prefetched_to_device_bytes : &counts.prefetched_to_host_bytes) += PAGE;
  }
  UNLOCK;
}

EXPORT cudaError_t card_cudaMemPrefetchAsync(
    const void *address, size_t bytes, struct cudaMemLocation location, unsigned flags, cudaStream_t stream) {
  LOCK;
  bool good = managed_range(address, bytes) && number_of(location) < card.devices;
  UNLOCK;
  if (!good) return card_error(cudaErrorInvalidValue);
  card_queue(stream, (struct work){.run = prefetch, .source = address, .bytes = bytes, .value = number_of(location)});
  return cudaSuccess;
}

EXPORT cudaError_t card_cudaMemAdvise(
    const void *address, size_t bytes, enum cudaMemoryAdvise advice, struct cudaMemLocation location) {
  LOCK;
  struct range *range = managed_range(address, bytes);
  for (size_t i = range ? first_page(range, address) : 0; range && i < page_after(range, address, bytes); i++) {
    struct page *page = &range->pages[i];
    switch (advice) {
      case cudaMemAdviseSetReadMostly: page->read_mostly = true; break;
      case cudaMemAdviseUnsetReadMostly: page->read_mostly = false; break;
      case cudaMemAdviseSetPreferredLocation: page->preferred = number_of(location); break;
      case cudaMemAdviseUnsetPreferredLocation: page->preferred = cudaInvalidDeviceId; break;
      case cudaMemAdviseSetAccessedBy: page->accessed_by_device |= number_of(location) >= 0; break;
      case cudaMemAdviseUnsetAccessedBy: page->accessed_by_device &= number_of(location) < 0; break;
    }
  }
  UNLOCK;
  return card_error(range ? cudaSuccess : cudaErrorInvalidValue);
}

// Of several pages that differ, CUDA says that there is no one answer; so does this.
EXPORT cudaError_t card_cudaMemRangeGetAttribute(
    void *data, size_t data_bytes, enum cudaMemRangeAttribute which, const void *address, size_t bytes) {
  LOCK;
  struct range *range = managed_range(address, bytes);
  int answer = cudaInvalidDeviceId;
  for (size_t i = range ? first_page(range, address) : 0; range && i < page_after(range, address, bytes); i++) {
    struct page *page = &range->pages[i];
    int of_page = which == cudaMemRangeAttributeReadMostly             ? page->read_mostly
                  : which == cudaMemRangeAttributePreferredLocation    ? page->preferred
                  : which == cudaMemRangeAttributeAccessedBy           ? (page->accessed_by_device ? 0 : cudaInvalidDeviceId)
                  : which == cudaMemRangeAttributeLastPrefetchLocation ? page->prefetched
                                                                       : cudaInvalidDeviceId;
    if (i == first_page(range, address)) answer = of_page;
    if (answer != of_page) answer = which == cudaMemRangeAttributeReadMostly ? 0 : cudaInvalidDeviceId;
  }
  UNLOCK;
  if (!range || data_bytes < sizeof answer) return card_error(cudaErrorInvalidValue);
  memcpy(data, &answer, sizeof answer);
  return cudaSuccess;
}
