// Managed memory for PyTorch's CUDAPluggableAllocator, and what can be asked of it: advice, prefetches.
//
// No header of CUDA is needed: what is called is declared here, as libcudart has it, whose version -DCUDA_MAJOR gives
// (12 or 13; in 13 a place is a structure, and cudaMemPrefetchAsync takes flags). libcudart itself is the one that
// PyTorch has loaded.
#include <stddef.h>
#include <sys/types.h>

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { HOST = -1, ATTACH_GLOBAL = 1 };

cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags);
cudaError_t cudaFree(void *address);
cudaError_t cudaMemRangeGetAttribute(void *data, size_t data_bytes, int attribute, const void *address, size_t bytes);
const char *cudaGetErrorString(cudaError_t error);

#if CUDA_MAJOR >= 13
struct location {
  int type;  // 1: a device, 2: the host
  int id;
};
cudaError_t cudaMemPrefetchAsync(const void *, size_t, struct location, unsigned flags, cudaStream_t);
cudaError_t cudaMemAdvise(const void *, size_t, int advice, struct location);

static struct location place(int device) {
  return device == HOST ? (struct location){2, 0} : (struct location){1, device};
}
#define PREFETCH(address, bytes, device, stream) cudaMemPrefetchAsync(address, bytes, place(device), 0, stream)
#define ADVISE(address, bytes, advice, device) cudaMemAdvise(address, bytes, advice, place(device))
#else
cudaError_t cudaMemPrefetchAsync(const void *, size_t, int device, cudaStream_t);
cudaError_t cudaMemAdvise(const void *, size_t, int advice, int device);
#define PREFETCH(address, bytes, device, stream) cudaMemPrefetchAsync(address, bytes, device, stream)
#define ADVISE(address, bytes, advice, device) cudaMemAdvise(address, bytes, advice, device)
#endif

static const char *said(cudaError_t error) { return error ? cudaGetErrorString(error) : NULL; }

// As CUDAPluggableAllocator calls them. NULL where there is no memory: PyTorch then raises its OutOfMemoryError.
void *managed_allocate(ssize_t bytes, int device, cudaStream_t stream) {
  void *address = NULL;
  (void)device, (void)stream;
  return cudaMallocManaged(&address, (size_t)bytes, ATTACH_GLOBAL) ? NULL : address;
}

void managed_free(void *address, ssize_t bytes, int device, cudaStream_t stream) {
  (void)bytes, (void)device, (void)stream;
  cudaFree(address);
}

// What follows returns NULL, or what CUDA says is wrong. `device`: a number, or -1 for the host.
const char *managed_advise(void *address, size_t bytes, int advice, int device) {
  return said(ADVISE(address, bytes, advice, device));
}

const char *managed_prefetch(void *address, size_t bytes, int device, cudaStream_t stream) {
  return said(PREFETCH(address, bytes, device, stream));
}

// An attribute of all of these bytes, by CUDA's number of it: 0 or 1, or a device, -1 for the host, -2 where the bytes
// differ or none was given.
const char *managed_attribute(void *address, size_t bytes, int attribute, int *found) {
  return said(cudaMemRangeGetAttribute(found, sizeof *found, attribute, address, bytes));
}
