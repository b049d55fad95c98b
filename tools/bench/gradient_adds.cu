// How long an SM takes to have floats of shared memory added to global memory, by what adds them:
// until the last operation is issued, until shared memory has been read, and until a load that is
// issued shortly after the first operation has come.
//
//     nvcc -arch=sm_90a -O3 -o gradient_adds tools/bench/gradient_adds.cu && ./gradient_adds
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum class Way { kNothing, kRows, kBlocks, kBoxes, kRegisters };

constexpr int kColumns = 2048, kTileColumns = 128, kWarps = 8, kRows = 16;  // of a warp
constexpr int kWarpBytes = kRows * kTileColumns * 4, kAddedBytes = kWarps * kWarpBytes;
constexpr int kLoadedBytes = 32 * 1024, kInputBytes = 16 << 20;
constexpr int kRounds = 24, kThreads = (kWarps + 1) * 32;

struct Cycles {
    long long issued, read, loaded;
};

__device__ uint32_t address_of(const void* shared) {
    return uint32_t(__cvta_generic_to_shared(shared));
}

__device__ void add_box(const CUtensorMap* map, const uint8_t* from, int column, int row) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::
            "l"(map),
        "r"(address_of(from)), "r"(column), "r"(row)
        : "memory");
}

// One warp's 16 rows of 128 columns.
template <Way kWay>
__device__ void add(const CUtensorMap* boxes,
                    const CUtensorMap* blocks,
                    float* out,
                    const uint8_t* from,
                    int row,
                    int column) {
    const int lane = threadIdx.x % 32;
    float* const first = out + size_t(row) * kColumns + column;
    if constexpr (kWay == Way::kRows) {
        if (lane >= kRows) return;
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                first + size_t(lane) * kColumns),
            "r"(address_of(from + lane * kTileColumns * 4)), "r"(kTileColumns * 4)
            : "memory");
    } else if constexpr (kWay == Way::kBlocks) {
        if (lane < 4) add_box(blocks, from + lane * kWarpBytes / 4, column + lane * 32, row);
    } else if constexpr (kWay == Way::kBoxes) {
        if (lane == 0) add_box(boxes, from, column, row);
    } else if constexpr (kWay == Way::kRegisters) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(
                             first + size_t(i) * kColumns + lane * 4),
                         "f"(0.0f)
                         : "memory");
        }
    }
}

__device__ void load_and_wait(uint8_t* to, const char* from, uint64_t* barrier, int parity) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)),
        "r"(kLoadedBytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address_of(to)),
        "l"(from), "r"(kLoadedBytes), "r"(address_of(barrier))
        : "memory");
    for (uint32_t has_come = 0; has_come == 0;) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(has_come)
            : "r"(address_of(barrier)), "r"(parity)
            : "memory");
    }
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads) measure(const __grid_constant__ CUtensorMap boxes,
                                                    const __grid_constant__ CUtensorMap blocks,
                                                    float* out,
                                                    const char* in,
                                                    Cycles* cycles) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barrier;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < kAddedBytes / 4; i += kThreads) {
        reinterpret_cast<float*>(shared)[i] = 0.0f;
    }
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(&barrier)));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    Cycles sum{};
    for (int round = 0; round < kRounds; ++round) {
        __syncthreads();
        const int tile = round * gridDim.x + blockIdx.x;
        const long long begin = clock64();
        if (warp < kWarps) {
            const int column = tile % (kColumns / kTileColumns) * kTileColumns;
            const int row = (tile / (kColumns / kTileColumns) * kWarps + warp) * kRows;
            add<kWay>(&boxes, &blocks, out, shared + warp * kWarpBytes, row, column);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            __syncwarp();
            sum.issued += clock64() - begin;
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            __syncwarp();
            sum.read += clock64() - begin;
        } else {
            __nanosleep(300);
            __syncwarp();
            const long long asked = clock64();
            if (lane == 0) {
                load_and_wait(shared + kAddedBytes, in + size_t(tile) * kLoadedBytes % kInputBytes,
                              &barrier, round % 2);
            }
            __syncwarp();
            sum.loaded += clock64() - asked;
        }
        for (int i = 0; i < 16; ++i) __nanosleep(600);  // until all has drained
        __syncwarp();
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (threadIdx.x == 0) cycles[blockIdx.x].issued = sum.issued / kRounds;
    if (threadIdx.x == 0) cycles[blockIdx.x].read = sum.read / kRounds;
    if (threadIdx.x == kWarps * 32) cycles[blockIdx.x].loaded = sum.loaded / kRounds;
}

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

CUtensorMap map_of(float* out, int rows, int box_columns) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                           cudaEnableDefault, &found));
    const cuuint64_t sizes[] = {kColumns, cuuint64_t(rows)}, strides[] = {kColumns * 4};
    const cuuint32_t box[] = {cuuint32_t(box_columns), kRows}, steps[] = {1, 1};
    CUtensorMap map;
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, out, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", int(result)), exit(1);
    return map;
}

template <Way kWay>
void report(const char* name, int num_ctas, int rows, float* out, char* in, Cycles* cycles) {
    const auto kernel = measure<kWay>;
    const int shared = kAddedBytes + kLoadedBytes;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    for (int i = 0; i < 3; ++i) {
        kernel<<<num_ctas, kThreads, shared>>>(map_of(out, rows, kTileColumns),
                                               map_of(out, rows, 32), out, in, cycles);
    }
    check(cudaDeviceSynchronize());
    double issued = 0, read = 0, loaded = 0;
    for (int i = 0; i < num_ctas; ++i) {
        issued += double(cycles[i].issued) / num_ctas;
        read += double(cycles[i].read) / num_ctas;
        loaded += double(cycles[i].loaded) / num_ctas;
    }
    printf("%-28s %4d %8.0f %8.0f %8.0f\n", name, num_ctas, issued, read, loaded);
}

int main() {
    cudaDeviceProp gpu;
    check(cudaGetDeviceProperties(&gpu, 0));
    const int most = gpu.multiProcessorCount;
    const int rows = (most * kRounds / (kColumns / kTileColumns) + 1) * kWarps * kRows;
    float* out;
    char* in;
    Cycles* cycles;
    check(cudaMalloc(&out, size_t(rows) * kColumns * 4));
    check(cudaMemset(out, 0, size_t(rows) * kColumns * 4));
    check(cudaMalloc(&in, kInputBytes + kLoadedBytes));
    check(cudaMemset(in, 0, kInputBytes + kLoadedBytes));
    check(cudaMallocManaged(&cycles, most * sizeof(Cycles)));
    printf("%s; 64 KB a CTA, cycles\n%-28s CTAs   issued     read   loaded\n", gpu.name, "");
    for (const int ctas : {1, 16, most}) {
        report<Way::kNothing>("nothing", ctas, rows, out, in, cycles);
        report<Way::kRows>("bulk add of a row", ctas, rows, out, in, cycles);
        report<Way::kBlocks>("box of 16 rows, 32 columns", ctas, rows, out, in, cycles);
        report<Way::kBoxes>("box of 16 rows, 128 columns", ctas, rows, out, in, cycles);
        report<Way::kRegisters>("red.v4 of registers", ctas, rows, out, in, cycles);
    }
}
