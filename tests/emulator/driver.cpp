// The part of libcuda that talon calls, over kernels that run on the CPU. Everything put into a
// stream is done at once, unless the stream records it.
#include <cuda.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "block.h"
#include "registry.h"

using emulator::Kernel;
using emulator::Work;

struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {
    const Kernel* kernel;
};
struct CUevent_st {
    std::chrono::steady_clock::time_point at;
};
using Steps = std::vector<std::function<void()>>;
struct CUgraph_st {
    Steps steps;
};
struct CUgraphExec_st {
    Steps steps;
};
struct CUstream_st {
    std::unique_ptr<CUgraph_st> recording;
};

namespace {

constexpr int MULTIPROCESSORS = 4;
constexpr size_t TOTAL_BYTES = size_t(8) << 30;

CUctx_st context;
std::mutex lock;
std::map<void*, size_t> allocations;
size_t used_bytes = 0;

// What nobody has written is NaN in every format.
CUresult allocate(void** to, size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock);
    if (used_bytes + bytes > TOTAL_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(memory, 0xFF, bytes);
    allocations[memory] = bytes;
    used_bytes += bytes;
    *to = memory;
    return CUDA_SUCCESS;
}

CUresult give_back(void* memory) {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = allocations.find(memory);
    if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
    used_bytes -= found->second;
    allocations.erase(found);
    std::free(memory);
    return CUDA_SUCCESS;
}

template <class Step>
CUresult put(CUstream stream, Step step) {
    if (stream && stream->recording) {
        stream->recording->steps.push_back(step);
    } else {
        step();
    }
    return CUDA_SUCCESS;
}

CUresult copy(void* to, const void* from, size_t bytes, CUstream stream) {
    return put(stream, [=] { std::memmove(to, from, bytes); });
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) {
    return *text = "the emulator refuses this", CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
    std::snprintf(name, bytes, "talon's emulator");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) {
    std::memset(uuid, 0, sizeof(*uuid));
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* id, int bytes, CUdevice) {
    std::snprintf(id, bytes, "ffff:ff:ff.0");
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
    return *bytes = TOTAL_BYTES, CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) { return *can = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 1 << 20; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = emulator::MAX_SHARED;
            break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
    return *out = &context, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) { return CUDA_SUCCESS; }

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    const std::lock_guard<std::mutex> guard(lock);
    *total = TOTAL_BYTES;
    *free = TOTAL_BYTES - used_bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
    return allocate(reinterpret_cast<void**>(address), bytes);
}
CUresult cuMemFree_v2(CUdeviceptr address) { return give_back(reinterpret_cast<void*>(address)); }
CUresult cuMemHostAlloc(void** start, size_t bytes, unsigned) { return allocate(start, bytes); }
CUresult cuMemFreeHost(void* start) { return give_back(start); }
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, stream);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return copy(reinterpret_cast<void*>(to), from, bytes, stream);
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(to, reinterpret_cast<void*>(from), bytes, stream);
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char byte, size_t bytes, CUstream stream) {
    return put(stream, [=] { std::memset(reinterpret_cast<void*>(at), byte, bytes); });
}

CUresult cuModuleLoadData(CUmodule* module, const void*) {
    return *module = new CUmod_st, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return delete module, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    const auto found = emulator::registry().find(name);
    if (found == emulator::registry().end()) return CUDA_ERROR_NOT_FOUND;
    // As long-lived as the process, as talon keeps no account of them.
    *function = new CUfunc_st{&found->second};
    return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
    const auto& parameters = function->kernel->parameters;
    if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *size = parameters[index];
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int value) {
    return value <= int(emulator::MAX_SHARED) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
    return *value = 0, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    return *blocks = 1, CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(
    const CUlaunchConfig* config, CUfunction function, void** arguments, void**
) {
    const Kernel& kernel = *function->kernel;
    const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    if (threads == 0 || threads > emulator::MAX_THREADS || config->gridDimX == 0 ||
        config->gridDimY == 0 || config->gridDimZ == 0 ||
        config->sharedMemBytes > emulator::MAX_SHARED || config->gridDimX % kernel.cluster != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const emulator::Index grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
    Work work = {kernel.bind(arguments), grid, threads, config->sharedMemBytes, kernel.cluster};
    return put(config->hStream, [work = std::move(work)] { emulator::run(work); });
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
    return *stream = new CUstream_st, CUDA_SUCCESS;
}
CUresult cuStreamDestroy_v2(CUstream stream) { return delete stream, CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode) {
    stream->recording = std::make_unique<CUgraph_st>();
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    return *graph = stream->recording.release(), CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* count) {
    return *count = graph->steps.size(), CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
    return *exec = new CUgraphExec_st{graph->steps}, CUDA_SUCCESS;
}
CUresult cuGraphUpload(CUgraphExec, CUstream) { return CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { return delete graph, CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec exec) { return delete exec, CUDA_SUCCESS; }
CUresult cuGraphLaunch(CUgraphExec exec, CUstream) {
    for (const auto& step : exec->steps) step();
    return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    return put(stream, [=] { function(data); });
}

CUresult cuEventCreate(CUevent* event, unsigned) { return *event = new CUevent_st, CUDA_SUCCESS; }
CUresult cuEventDestroy_v2(CUevent event) { return delete event, CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
    return put(stream, [=] { event->at = std::chrono::steady_clock::now(); });
}
CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
    return CUDA_SUCCESS;
}

}  // extern "C"
