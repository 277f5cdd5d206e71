// Kernels and libraries of kernels: counted, checked for shapes that a card would refuse, never run.
#include "card.h"
#include <stdlib.h>
#include <string.h>

// ---- registration: PyTorch's libraries name their kernels when they are loaded
EXPORT void **card___cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
EXPORT char card___cudaInitModule(void **handle) { return 1; }

// ---- launches by the <<<grid, block>>> syntax: the configuration is pushed, and popped by the kernel's stub
static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
} pushed[8];
static __thread int pushed_count;

EXPORT unsigned card___cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  if (pushed_count == 8) return 1;
  pushed[pushed_count].grid = grid;
  pushed[pushed_count].block = block;
  pushed[pushed_count].shared_bytes = shared_bytes;
  pushed[pushed_count++].stream = stream;
  return 0;
}
EXPORT cudaError_t card___cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  pushed_count--;
  *grid = pushed[pushed_count].grid;
  *block = pushed[pushed_count].block;
  *shared_bytes = pushed[pushed_count].shared_bytes;
  *(cudaStream_t *)stream = pushed[pushed_count].stream;
  return cudaSuccess;
}

static cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  bool threads = block.x && block.y && block.z && (size_t)block.x * block.y * block.z <= 1024;
  bool blocks = grid.x && grid.y && grid.z && grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
  if (!threads || !blocks) return card_error(cudaErrorInvalidConfiguration);
  if (shared_bytes > card.shared_bytes_per_block) return card_error(cudaErrorInvalidValue);
  card_note_launch(stream);
  return cudaSuccess;
}

EXPORT cudaError_t card_cudaLaunchKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) {
  return launch(grid, block, shared_bytes, stream);
}
EXPORT cudaError_t card___cudaLaunchKernel(
    cudaKernel_t function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) {
  return launch(grid, block, shared_bytes, stream);
}
EXPORT cudaError_t card_cudaLaunchCooperativeKernel(
    const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream) {
  return launch(grid, block, shared_bytes, stream);
}
EXPORT cudaError_t card_cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
EXPORT cudaError_t card___cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = card.binary;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

static int active_blocks(int block_threads, size_t shared_bytes) {
  int blocks = card.threads_per_multiprocessor / (block_threads > 0 ? block_threads : 1);
  int by_shared = shared_bytes ? (int)(card.shared_bytes_per_multiprocessor / shared_bytes) : blocks;
  int most = card.blocks_per_multiprocessor;
  if (by_shared < blocks) blocks = by_shared;
  return blocks < most ? blocks : most;
}
EXPORT cudaError_t card_cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_threads, size_t shared_bytes, unsigned flags) {
  *blocks = active_blocks(block_threads, shared_bytes);
  return cudaSuccess;
}
EXPORT cudaError_t card_cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *function, int block_threads, size_t shared_bytes) {
  *blocks = active_blocks(block_threads, shared_bytes);
  return cudaSuccess;
}

// ---- the driver's modules and launches, for Triton
EXPORT CUresult card_cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)calloc(1, 64);
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuModuleLoadDataEx(
    CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return card_cuModuleLoadData(module, image);
}
EXPORT CUresult card_cuModuleLoad(CUmodule *module, const char *path) { return card_cuModuleLoadData(module, path); }
EXPORT CUresult card_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)calloc(1, 64);
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuLaunchKernel(
    CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments, void **extra) {
  dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
  return (CUresult)launch(grid, block, shared_bytes, stream);
}
EXPORT CUresult card_cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return card_cuLaunchKernel(
      function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
      config->blockDimZ, config->sharedMemBytes, config->hStream, arguments, extra);
}
EXPORT CUresult card_cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, CUfunction function, int block_threads, size_t shared_bytes) {
  *blocks = active_blocks(block_threads, shared_bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult card_cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = card.multiprocessors;
  return CUDA_SUCCESS;
}

// ---- cuBLAS: a handle knows its stream and its modes; a product is a launch
struct blas {
  cudaStream_t stream;
  int math_mode, pointer_mode;
};
EXPORT int card_cublasCreate_v2(void **handle) {
  *handle = calloc(1, sizeof(struct blas));
  return 0;
}
EXPORT int card_cublasDestroy_v2(void *handle) {
  free(handle);
  return 0;
}
EXPORT int card_cublasSetStream_v2(struct blas *blas, cudaStream_t stream) {
  blas->stream = stream;
  return 0;
}
EXPORT int card_cublasGetStream_v2(struct blas *blas, cudaStream_t *stream) {
  *stream = blas->stream;
  return 0;
}
EXPORT int card_cublasSetMathMode(struct blas *blas, int mode) {
  blas->math_mode = mode;
  return 0;
}
EXPORT int card_cublasGetMathMode(struct blas *blas, int *mode) {
  *mode = blas->math_mode;
  return 0;
}
EXPORT int card_cublasSetPointerMode_v2(struct blas *blas, int mode) {
  blas->pointer_mode = mode;
  return 0;
}
EXPORT int card_cublasGetPointerMode_v2(struct blas *blas, int *mode) {
  *mode = blas->pointer_mode;
  return 0;
}
#define PRODUCT(name) \
  EXPORT int card_##name(struct blas *blas) { \
    card_note_launch(blas->stream); \
    return 0; \
  }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasZgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)

EXPORT int card_cublasLtMatmul(
    void *handle, void *description, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
    const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const void *algorithm, void *workspace,
    size_t workspace_bytes, cudaStream_t stream) {
  card_note_launch(stream);
  return 0;
}
EXPORT size_t card_cublasLtGetVersion(void) { return 130100; }
struct heuristic {  // cublasLtMatmulHeuristicResult_t: one algorithm, which needs no workspace
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
EXPORT int card_cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int wanted,
    struct heuristic *results, int *found) {
  memset(results, 0, sizeof *results);
  results->waves = 1;
  *found = wanted > 0;
  return 0;
}

// ---- cuDNN supports no graph, so that callers take their other path; the rest says versions
enum { CUDNN_VERSION = 92000, CUDNN_STATUS_NOT_SUPPORTED = 3000 };
EXPORT size_t card_cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT size_t card_cudnnGetCudartVersion(void) { return CUDART_VERSION; }
EXPORT const char *card_cudnnGetErrorString(int error) { return "not modelled by the stand-in"; }
EXPORT int card_cudnnGetProperty(int which, int *value) {
  int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
  *value = parts[which];
  return 0;
}
EXPORT int card_cudnnBackendCreateDescriptor(int type, void **descriptor) {
  *descriptor = calloc(1, 256);
  return 0;
}
EXPORT int card_cudnnBackendFinalize(void *descriptor) { return CUDNN_STATUS_NOT_SUPPORTED; }
EXPORT int card_ncclGetVersion(int *version) {
  *version = 22800;
  return 0;
}
EXPORT const char *card_ncclGetErrorString(int error) { return "not modelled by the stand-in"; }
EXPORT int card_nvrtcVersion(int *major, int *minor) {
  *major = CUDART_VERSION / 1000;
  *minor = CUDART_VERSION % 1000 / 10;
  return 0;
}
EXPORT const char *card_nvrtcGetErrorString(int error) { return "not modelled by the stand-in"; }
EXPORT int card_nvrtcGetPTXSize(void *program, size_t *bytes) {
  *bytes = 8;
  return 0;
}
EXPORT int card_nvrtcGetCUBINSize(void *program, size_t *bytes) { return card_nvrtcGetPTXSize(program, bytes); }
EXPORT int card_nvrtcGetProgramLogSize(void *program, size_t *bytes) {
  *bytes = 1;
  return 0;
}
EXPORT int card_nvrtcGetProgramLog(void *program, char *text) {
  *text = 0;
  return 0;
}
EXPORT int card_nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "lowered";
  return 0;
}
EXPORT int card_cuptiGetVersion(uint32_t *version) {
  *version = CUDART_VERSION * 10;
  return 0;
}

// Objects of which nothing is modelled are a piece of memory.
EXPORT void *card_new_handle(void) { return calloc(1, 256); }
