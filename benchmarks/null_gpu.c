/* A CUDA runtime, driver, cuBLAS and cuDNN for a GPU that is not there (null_gpu.py): memory is addresses that nothing
   is written to, kernels are counted instead of run, streams finish at once, events keep the host's time. All functions
   that are not defined here return 0, which means success; null_gpu.py generates them, also those that launch. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PROCESSORS = 132, COPIED = 1 << 20, ROUND = 2 << 20, LIMIT_OF_GRID = 65535, STREAMS = 4096 };
static const size_t MEMORY = 140ull << 30;

static long launches, graphs;
void null_gpu_launch(void) { launches++; }
long null_gpu_launches(void) { return launches; }
long null_gpu_graphs(void) { return graphs; }

/* Memory: of the device, in address space alone; of the host, pinned. */

typedef struct { char *start; size_t size; } Range;
typedef struct { Range *ranges; int count, room; } Ranges;
static Ranges on_device, pinned;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(Ranges *all, void *start, size_t size) {
  if (all->count == all->room) all->ranges = realloc(all->ranges, sizeof(Range) * (all->room = 2 * all->room + 64));
  all->ranges[all->count++] = (Range){start, size};
}

static int find(const Ranges *all, const void *address) {
  for (int i = 0; i < all->count; i++)
    if ((char *)address >= all->ranges[i].start && (char *)address < all->ranges[i].start + all->ranges[i].size) return i;
  return -1;
}

cudaError_t cudaMalloc(void **address, size_t size) {
  size = (size + ROUND) & -(size_t)ROUND;
  pthread_mutex_lock(&lock);
  *address = 0;
  if (used + size <= MEMORY) {
    *address = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    add(&on_device, *address, size);
    used += size;
  }
  pthread_mutex_unlock(&lock);
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *address) {
  pthread_mutex_lock(&lock);
  int i = find(&on_device, address);
  if (i >= 0) {
    munmap(on_device.ranges[i].start, on_device.ranges[i].size);
    used -= on_device.ranges[i].size;
    on_device.ranges[i] = on_device.ranges[--on_device.count];
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
  if (posix_memalign(address, 4096, size + 1)) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  add(&pinned, *address, size + 1);
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
  pthread_mutex_lock(&lock);
  int i = find(&pinned, address);
  if (i >= 0) pinned.ranges[i] = pinned.ranges[--pinned.count];
  pthread_mutex_unlock(&lock);
  free(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = MEMORY - used, *total = MEMORY;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  pthread_mutex_lock(&lock);
  int device = find(&on_device, address) >= 0, host = find(&pinned, address) >= 0;
  pthread_mutex_unlock(&lock);
  memset(found, 0, sizeof *found);
  found->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (device || host) found->devicePointer = (void *)address;
  if (!device) found->hostPointer = (void *)address;
  return cudaSuccess;
}

/* Small copies to and from the host are made: their values are read. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind == cudaMemcpyDeviceToDevice) launches++;
  else if (size <= COPIED) memcpy(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, size, kind, 0);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  launches++;
  if (size <= COPIED) memset(to, value, size);
  return cudaSuccess;
}

/* The device. Its name says that no number of it was measured on a GPU. */

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "error of null_gpu.c"; }
const char *cudaGetErrorName(cudaError_t error) { return "error of null_gpu.c"; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
  memset(is, 0, sizeof *is);
  strcpy(is->name, "no GPU: nothing is computed");
  is->major = 9, is->multiProcessorCount = PROCESSORS, is->totalGlobalMem = MEMORY, is->warpSize = 32;
  is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024, is->maxThreadsDim[2] = 64;
  is->maxGridSize[0] = INT32_MAX, is->maxGridSize[1] = is->maxGridSize[2] = LIMIT_OF_GRID;
  is->maxThreadsPerMultiProcessor = 2048, is->regsPerBlock = is->regsPerMultiprocessor = 65536;
  is->sharedMemPerBlock = 49152, is->sharedMemPerBlockOptin = 232448, is->sharedMemPerMultiprocessor = 233472;
  is->l2CacheSize = 50 << 20, is->textureAlignment = 512, is->cooperativeLaunch = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp is;
  cudaGetDeviceProperties(&is, device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = is.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = is.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = is.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = is.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = is.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = is.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = is.regsPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = is.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = is.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = is.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = is.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = is.maxGridSize[1]; break;
    case cudaDevAttrL2CacheSize: *value = is.l2CacheSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *is, const void *function) {
  memset(is, 0, sizeof *is);
  is->maxThreadsPerBlock = 1024, is->numRegs = 32, is->binaryVersion = is->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
  return *blocks = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) {
  return *blocks = 2, cudaSuccess;
}

/* Streams and graphs: a number each. What is captured is not kept; a replay is counted. */

static struct { int capturing; unsigned long long capture; } streams[STREAMS];
static uintptr_t made = STREAMS;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return *stream = (cudaStream_t)(8 + made++ % (STREAMS - 8)), cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return streams[(uintptr_t)stream].capturing = 1, streams[(uintptr_t)stream].capture = made++, cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  return streams[(uintptr_t)stream].capturing = 0, *graph = (cudaGraph_t)made++, cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  int active = (uintptr_t)stream < STREAMS && streams[(uintptr_t)stream].capturing;
  return *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *capture, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  if (capture) *capture = streams[(uintptr_t)stream % STREAMS].capture;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
  return *ready = (cudaGraphExec_t)graph, cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(ready, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  if (!nodes) *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return graphs++, cudaSuccess; }

/* Events. */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return *event = calloc(1, sizeof(struct timespec)), cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event), cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
  struct timespec a = *(struct timespec *)first, b = *(struct timespec *)last;
  return *milliseconds = 1e-6f + (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f, cudaSuccess;
}

/* What comes before a launch by the runtime, the driver (Triton, Inductor) or a library. */

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void *data) { return run(data), cudaSuccess; }

static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configured[16];
static __thread int configurations;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configured[configurations].grid = grid, configured[configurations].block = block;
  configured[configurations].shared = shared, configured[configurations++].stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configured[--configurations].grid, *block = configured[configurations].block;
  *shared = configured[configurations].shared, *(cudaStream_t *)stream = configured[configurations].stream;
  return cudaSuccess;
}

static char object[1 << 16]; /* stands for everything that has an address and no contents */

void **__cudaRegisterFatBinary(void *binary) { return (void **)object; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { return *kernel = (cudaKernel_t)f, cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return *address = object, cudaSuccess; }

#define MAKES(name) int name(void **made) { return *made = object, 0; }
MAKES(cublasCreate_v2) MAKES(cublasLtCreate) MAKES(cudnnCreate) MAKES(cusparseCreate) MAKES(cusolverDnCreate)
MAKES(cuCtxGetCurrent) MAKES(cuDevicePrimaryCtxRetain) MAKES(cuModuleLoadData) MAKES(cuModuleLoadDataEx)
MAKES(cuModuleLoad) MAKES(cuModuleGetFunction)

#define TELLS(name, value) int name(int *told) { return *told = value, 0; }
TELLS(cuDriverGetVersion, CUDART_VERSION) TELLS(cuDeviceGet, 0) TELLS(cuDeviceGetCount, 1) TELLS(cuCtxGetDevice, 0)
TELLS(cuOccupancyMaxActiveBlocksPerMultiprocessor, 2) TELLS(cuOccupancyMaxActiveClusters, 8)

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "error of null_gpu.c", 0; }

int cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 0 ? 1024 /* threads in a block */ : attribute == 4 ? 64 /* registers */ : 0, 0;
}

int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
  if (attribute == 3 /* the device's pointer */) *(uintptr_t *)value = address;
  else *(int *)value = 0;
  return 0;
}

static int succeeds() { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void *)succeeds;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int cublasGetVersion_v2(void *handle, int *version) { return *version = 130000, 0; }

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted, void *found, int *count) {
  return memset(found, 0, 64), *count = 1, 0;
}

size_t cudnnGetVersion(void) { return atol(getenv("NULL_GPU_CUDNN")); }

int cudnnGetProperty(int which, int *value) {
  int version = cudnnGetVersion(), parts[] = {version / 10000, version / 100 % 100, version % 100};
  return *value = parts[which], 0;
}

int cudnnBackendCreateDescriptor(int kind, void **descriptor) { return *descriptor = calloc(1, 64), 0; }
int cudnnBackendDestroyDescriptor(void *descriptor) { return free(descriptor), 0; }

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *handle, int mode, int ops, void *x, void *z, void *y, void *scale, void *activation, size_t *size) {
  return *size = 0, 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void *handle, int mode, int ops, void *x, void *y, void *dy, void *dz, void *dx, void *scale, void *activation,
    size_t *size) {
  return *size = 0, 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    void *handle, int mode, int ops, void *activation, void *x, size_t *size) {
  return *size = 0, 0;
}

/* One engine for every operation, which needs no workspace. */
int cudnnBackendGetAttribute(void *descriptor, int name, int kind, int64_t wanted, int64_t *count, void *values) {
  enum { BOOLEAN = 2, INT64 = 3, INT32 = 23 };
  if (count) *count = 1;
  if (values && kind == BOOLEAN) *(char *)values = 0;
  if (values && kind == INT64) *(int64_t *)values = 0;
  if (values && kind == INT32) *(int32_t *)values = 0;
  return 0;
}
