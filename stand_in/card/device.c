// The card as programs ask about it: properties, attributes, errors, and what the driver and NVML say of it.
#include "card.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct card card;
struct counts counts;
pthread_mutex_t card_mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static __thread int device;
static __thread cudaError_t last_error;

// ---- settings: STAND_IN_CARD is "key=value;key=value;..." and written by stand_in/settings.py alone
static char *setting(const char *key) {
  static __thread char value[256];
  const char *text = getenv("STAND_IN_CARD");
  size_t length = strlen(key);
  while (text && *text) {
    if (!strncmp(text, key, length) && text[length] == '=') {
      size_t size = strcspn(text + length + 1, ";");
      snprintf(value, sizeof value, "%.*s", (int)size, text + length + 1);
      return value;
    }
    text = strchr(text, ';');
    text = text ? text + 1 : NULL;
  }
  fprintf(stderr, "stand_in: STAND_IN_CARD has no '%s'; start programs by python -m stand_in\n", key);
  exit(2);
}

static size_t number(const char *key) { return strtoull(setting(key), NULL, 10); }

void card_read_settings(void) {
  snprintf(card.name, sizeof card.name, "%s", setting("name"));
  card.capability = number("capability");
  card.binary = number("binary");
  card.multiprocessors = number("multiprocessors");
  card.threads_per_multiprocessor = number("threads_per_multiprocessor");
  card.blocks_per_multiprocessor = number("blocks_per_multiprocessor");
  card.shared_bytes_per_multiprocessor = number("shared_bytes_per_multiprocessor");
  card.shared_bytes_per_block = number("shared_bytes_per_block");
  card.memory_bytes = number("memory_bytes");
  card.context_bytes = number("context_bytes");
  card.page_locked_bytes = number("page_locked_bytes");
  card.copied_bytes = number("copied_bytes");
  card.host_resident = number("host_resident");
  card.devices = number("devices");
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible) {  // the entries that name a device, in their number alone: all cards are alike
    int named = *visible && *visible != '-';
    for (const char *comma = strchr(visible, ','); named && comma; comma = strchr(comma + 1, ',')) named++;
    if (named < card.devices) card.devices = named;
  }
}

EXPORT const struct counts *card_counts(void) { return &counts; }

// ---- errors
cudaError_t card_error(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
EXPORT cudaError_t card_cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT cudaError_t card_cudaPeekAtLastError(void) { return last_error; }

EXPORT const char *card_cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}
EXPORT const char *card_cudaGetErrorName(cudaError_t error) { return card_cudaGetErrorString(error); }
EXPORT CUresult card_cuGetErrorString(CUresult error, const char **text) {
  *text = card_cudaGetErrorString((cudaError_t)error);  // the two sets of numbers agree
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuGetErrorName(CUresult error, const char **text) { return card_cuGetErrorString(error, text); }

// ---- devices of the runtime
int card_device(void) { return device; }
EXPORT cudaError_t card_cudaGetDeviceCount(int *count) {
  *count = card.devices;
  return card.devices ? cudaSuccess : card_error(cudaErrorNoDevice);
}
EXPORT cudaError_t card_cudaGetDevice(int *index) {
  *index = device;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaSetDevice(int index) {
  if (index < 0 || index >= card.devices) return card_error(cudaErrorInvalidDevice);
  device = index;
  return cudaSuccess;
}

EXPORT cudaError_t card_cudaGetDeviceProperties(struct cudaDeviceProp *p, int index) {
  if (index < 0 || index >= card.devices) return card_error(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card.name);
  memset(p->uuid.bytes, index + 1, sizeof p->uuid.bytes);
  p->major = card.capability / 10;
  p->minor = card.capability % 10;
  p->totalGlobalMem = card.memory_bytes;
  p->multiProcessorCount = card.multiprocessors;
  p->maxThreadsPerMultiProcessor = card.threads_per_multiprocessor;
  p->maxBlocksPerMultiProcessor = card.blocks_per_multiprocessor;
  p->sharedMemPerMultiprocessor = card.shared_bytes_per_multiprocessor;
  p->sharedMemPerBlockOptin = card.shared_bytes_per_block;
  p->sharedMemPerBlock = 49152;
  p->reservedSharedMemPerBlock = card.capability >= 80 ? 1024 : 0;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->memPitch = 2147483647;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->asyncEngineCount = 2;
  p->concurrentKernels = p->cooperativeLaunch = p->unifiedAddressing = p->canMapHostMemory = 1;
  p->hostRegisterSupported = p->managedMemory = p->concurrentManagedAccess = p->streamPrioritiesSupported = 1;
  p->pciBusID = index + 1;
  return cudaSuccess;
}

static int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrMultiProcessorCount: return card.multiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return card.threads_per_multiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return card.blocks_per_multiprocessor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card.shared_bytes_per_multiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card.shared_bytes_per_block;
    case cudaDevAttrReservedSharedMemoryPerBlock: return card.capability >= 80 ? 1024 : 0;
    case cudaDevAttrComputeCapabilityMajor: return card.capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return card.capability % 10;
    case cudaDevAttrAsyncEngineCount: return 2;
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}
EXPORT cudaError_t card_cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int index) {
  *value = attribute(which);
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaDeviceGetPCIBusId(char *text, int size, int index) {
  snprintf(text, size, "0000:%02x:00.0", index + 1);
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaDeviceCanAccessPeer(int *can, int one, int other) {
  *can = 0;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaRuntimeGetVersion(int *version) { return card_cudaDriverGetVersion(version); }

// ---- the driver, as far as PyTorch, Triton and bitsandbytes ask
static char context[64];  // the one context; only its address matters
EXPORT CUresult card_cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult card_cuDriverGetVersion(int *version) { return (CUresult)card_cudaDriverGetVersion(version); }
EXPORT CUresult card_cuDeviceGet(CUdevice *found, int index) {
  *found = index;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDeviceGetCount(int *count) {
  *count = card.devices;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDeviceGetName(char *text, int size, CUdevice index) {
  snprintf(text, size, "%s", card.name);
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDeviceTotalMem(size_t *bytes, CUdevice index) {
  *bytes = card.memory_bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice index) {
  *value = attribute(which);  // the runtime's numbers are the driver's
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuCtxGetCurrent(CUcontext *current) {
  *current = (CUcontext)context;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuCtxGetDevice(CUdevice *index) {
  *index = device;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuCtxPopCurrent(CUcontext *current) {
  if (current) *current = (CUcontext)context;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDevicePrimaryCtxGetState(CUdevice index, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice index) {
  return card_cuCtxGetCurrent(retained);
}
EXPORT CUresult card_cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
  bool here = card_is_device_memory((void *)address);
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr *)value = address;
      return here || card_is_page_locked((void *)address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = here ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = context; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(uint64_t *)value = 1; break;
    default: *(int *)value = 0;
  }
  return CUDA_SUCCESS;
}

// Functions of the driver are looked up by name, with or without the suffix of a version.
EXPORT void card_not_modelled(const char *name) {
  if (getenv("STAND_IN_VERBOSE")) fprintf(stderr, "stand_in: not modelled: %s\n", name);
}
static int succeed(void) { return 0; }
EXPORT cudaError_t card_cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  char ours[256];
  Dl_info here;
  dladdr((void *)succeed, &here);
  void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  snprintf(ours, sizeof ours, "card_%s", name);
  *function = dlsym(library, ours);
  char *suffix = strstr(ours, "_v");
  if (!*function && suffix) {
    *suffix = 0;
    *function = dlsym(library, ours);
  }
  if (!*function) {
    card_not_modelled(name);
    *function = (void *)succeed;
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- NVML, as far as PyTorch looks
EXPORT int card_nvmlInit_v2(void) { return 0; }
EXPORT int card_nvmlShutdown(void) { return 0; }
EXPORT int card_nvmlSystemGetCudaDriverVersion_v2(int *version) { return card_cudaDriverGetVersion(version); }
EXPORT int card_nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.00");
  return 0;
}
EXPORT int card_nvmlDeviceGetCount_v2(unsigned *count) {
  *count = card.devices;
  return 0;
}
EXPORT int card_nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = &card;
  return 0;
}
EXPORT int card_nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
  *handle = &card;
  return 0;
}
EXPORT int card_nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  snprintf(text, size, "%s", card.name);
  return 0;
}
EXPORT int card_nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
  LOCK;
  total_free_used[0] = card.memory_bytes;
  total_free_used[2] = counts.device_bytes + card.context_bytes;
  total_free_used[1] = total_free_used[0] - total_free_used[2];
  UNLOCK;
  return 0;
}
EXPORT int card_nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}
EXPORT int card_nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}
enum { NVML_NOT_SUPPORTED = 3 };
EXPORT int card_nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) { return 0; }  // info says: no fabric
EXPORT int card_nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
EXPORT int card_nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
EXPORT const char *card_nvmlErrorString(int error) { return "not supported by the stand-in"; }
