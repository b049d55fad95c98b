// Weight gradients: one CTA owns a whole 128 x 256 tile of one expert's gradient, with all rows of
// that expert as K. No split along K, hence no atomics, and the same bits at every run. Pad rows
// are zeros. fc2's tiles come first, so that its gradients are complete early.
#pragma once

#include <cuda.h>

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/args.cuh"
#include "flashmoe/tile/element.cuh"
#include "flashmoe/tile/mainloop.cuh"

namespace flashmoe {

// One of the two products, dW = left^T right over an expert's rows.
struct WgradProduct {
    CUtensorMap left;   // [row][out]
    CUtensorMap right;  // [row][in]
    int num_out;        // rows of the weight
    int num_in;         // columns of the weight
};

struct WgradArgs {
    Shape shape;
    Plan plan;
    Workspace workspace;
    Watchdog watchdog;
    WgradProduct product[2];  // fc2, fc1
    void* const* grads;       // device: fc1 of every local expert, then fc2
    bool accumulate;
};

// Ticket -> pair of tiles; an expert's pairs stay together, m fastest.
__device__ __forceinline__ TileInfo wgrad_pair(const WgradArgs& args, int ticket) {
    for (int which = 0; which < 2; ++which) {
        const int num_m = ceil_div(args.product[which].num_out, kClusterSize * BLOCK_M);
        const int num_n = ceil_div(args.product[which].num_in, BLOCK_N);
        const int tiles = args.shape.num_local_experts() * num_m * num_n;
        if (ticket < tiles) {
            const int in_expert = ticket % (num_m * num_n);
            return {int16_t(which), Pair::kAlongM, ticket / (num_m * num_n),
                    in_expert % num_m * kClusterSize, in_expert / num_m};
        }
        ticket -= tiles;
    }
    return TileInfo::nothing(TileInfo::kNoTile);
}

__device__ __forceinline__ int wgrad_k_blocks(const Plan& plan, int expert) {
    return ceil_div(plan.expert_rows[expert], BLOCK_K);
}

// Half a warpgroup's share of a tile, row by row, for bulk copies into the gradient. Rows are 32
// bytes apart in banks, which makes the accumulators' writes conflict-free.
constexpr int kGradColumns = BLOCK_N / 2;

struct alignas(16) GradStaging {
    static constexpr int kRowBytes = kGradColumns * 4 + 32;
    uint8_t row[64][kRowBytes];
};

struct WgradSmem {
    StageRing<3> ring;
    GradStaging staging[kNumProcessors];
    TileMailbox mailbox;
};

__device__ __forceinline__ void put_pair(float* at, float a, float b) {
    *reinterpret_cast<float2*>(at) = {a, b};
}
template <class T>
__device__ __forceinline__ void put_pair(T* at, float a, float b) {
    *reinterpret_cast<uint32_t*>(at) = pack<T>(a, b);
}

// Writes the tile, or adds it to a float gradient: staged in shared memory, then one bulk copy or
// reduction per row, which the L2 performs while the next tile is computed. Every element is added
// to once per launch, so the order of additions is fixed.
template <class Grad, class Accumulator>
__device__ __forceinline__ void send_grad_tile(Grad* grad,
                                               const WgradProduct& product,
                                               const TileInfo& tile,
                                               int warpgroup,
                                               const Accumulator& accumulator,
                                               bool accumulate,
                                               GradStaging& staging) {
    const int thread = threadIdx.x % 128;
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int first_column = tile.n * BLOCK_N + half * kGradColumns;
        if (first_column >= product.num_in) break;
        cute::tma_store_wait<0>();
        cutlass::arch::NamedBarrier::sync(128, uint32_t(warpgroup));
#pragma unroll
        for (int j = 0; j < kGradColumns / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 4 * (half * kGradColumns / 8 + j) + 2 * i;
                put_pair(reinterpret_cast<Grad*>(staging.row[row + 8 * i]) + column + 8 * j,
                         accumulator(at), accumulator(at + 1));
            }
        }
        cute::tma_store_fence();
        cutlass::arch::NamedBarrier::sync(128, uint32_t(warpgroup));
        const int out_row = tile.m * BLOCK_M + warpgroup * 64 + thread;
        if (thread < 64 and out_row < product.num_out) {
            Grad* target = grad + int64_t(out_row) * product.num_in + first_column;
            const int bytes = min(kGradColumns, product.num_in - first_column) * int(sizeof(Grad));
            if (accumulate) {
                ptx::bulk_add_f32(target, staging.row[thread], bytes);
            } else {
                cute::SM90_BULK_COPY_S2G::copy(staging.row[thread], target, bytes);
            }
            cute::tma_store_arrive();
        }
    }
}

// Adds the tile to a 16-bit gradient, rounding once: read, add in float32, write.
template <class Grad, class Accumulator>
__device__ __forceinline__ void add_grad_tile(Grad* grad,
                                              const WgradProduct& product,
                                              const TileInfo& tile,
                                              int warpgroup,
                                              const Accumulator& accumulator) {
    const int thread = threadIdx.x % 128;
    const int row = tile.m * BLOCK_M + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int column = tile.n * BLOCK_N + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row + 8 * i >= product.num_out) continue;
        Grad* line = grad + int64_t(row + 8 * i) * product.num_in;
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j) {
            if (column + 8 * j >= product.num_in) continue;
            auto* target = reinterpret_cast<uint32_t*>(line + column + 8 * j);
            const float2 old = unpack<Grad>(*target);
            *target = pack<Grad>(old.x + accumulator(4 * j + 2 * i),
                                 old.y + accumulator(4 * j + 2 * i + 1));
        }
    }
}

template <class Grad>
__device__ __forceinline__ Grad* grad_of(const WgradArgs& args, const TileInfo& tile) {
    const int matrix = 1 - tile.gemm;  // fc1's pointers come first
    return static_cast<Grad*>(args.grads[matrix * args.shape.num_local_experts() + tile.expert]);
}

// An expert without rows has a gradient: zero.
template <class Grad>
__device__ __forceinline__ void clear_grad_tile(const WgradArgs& args,
                                                const TileInfo& tile,
                                                int warpgroup) {
    const WgradProduct& product = args.product[tile.gemm];
    const int first_column = tile.n * BLOCK_N;
    const int columns = min(BLOCK_N, product.num_in - first_column);
    const int first_row = tile.m * BLOCK_M + warpgroup * 64;
    const int rows = min(64, product.num_out - first_row);
    Grad* grad = grad_of<Grad>(args, tile) + int64_t(first_row) * product.num_in + first_column;
    for (int i = threadIdx.x % 128; i < rows * columns; i += 128) {
        grad[int64_t(i / columns) * product.num_in + i % columns] = Grad(0.0f);
    }
}

template <class Grad, class Accumulator>
__device__ __forceinline__ void finish_grad_tile(const WgradArgs& args,
                                                 const TileInfo& tile,
                                                 int warpgroup,
                                                 const Accumulator& accumulator,
                                                 GradStaging& staging) {
    const WgradProduct& product = args.product[tile.gemm];
    Grad* grad = grad_of<Grad>(args, tile);
    if constexpr (sizeof(Grad) == 2) {
        if (args.accumulate) {
            add_grad_tile(grad, product, tile, warpgroup, accumulator);
            return;
        }
    }
    send_grad_tile(grad, product, tile, warpgroup, accumulator, args.accumulate, staging);
}

// Scope: one thread of each CTA.
template <class Ring>
__device__ __forceinline__ void load_wgrad(const WgradArgs& args,
                                           Ring& ring,
                                           TileMailbox& mailbox) {
    RingCursor<Ring::kNumStages> cursor;
    load_tiles(
        args.watchdog, mailbox,
        [&] {
            return wgrad_pair(args, int(protocol::take<Atomics>(&args.workspace.tickets->tile, 1)));
        },
        [&](const TileInfo& tile, auto near_end) {
            const WgradProduct& product = args.product[tile.gemm];
            const int first_row = args.plan.expert_block[tile.expert] * BLOCK_M;
            stream_tile(
                args.watchdog, ring, cursor, wgrad_k_blocks(args.plan, tile.expert),
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes<Major::MN>(&product.left, full, stage.a, k, first_row, false,
                                          [&](int) { return tile.m * BLOCK_M; });
                },
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes<Major::MN>(
                        &product.right, full, stage.b, k, first_row, true,
                        [&](int box) { return tile.n * BLOCK_N + box * kBoxRows; });
                },
                [] {}, near_end);
        });
}

constexpr int kWgradThreads = 384;

template <class T, class Grad>
__global__ __cluster_dims__(kClusterSize) __launch_bounds__(kWgradThreads, 1)  //
    void wgrad_kernel(const __grid_constant__ WgradArgs args) {
    using Main = Mainloop<T, Major::MN, Major::MN>;
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<WgradSmem*>(smem_bytes);
    static_assert(sizeof(smem) <= 227 * 1024);
    open_counters();
    if (threadIdx.x == 0) {
        init_barriers(smem.ring, smem.mailbox, kNumProcessors * kProcessorWarps);
        cutlass::arch::fence_barrier_init();
    }
    cute::cluster_sync();

    const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
    if (warpgroup == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (threadIdx.x < 32 and cute::elect_one_sync()) load_wgrad(args, smem.ring, smem.mailbox);
        __syncwarp();
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        typename Main::Accumulator accumulator;
        RingCursor<3> cursor;
        RingCursor<kTileSlots> slot;
        for (;;) {
            const TileInfo tile =
                take_tile(args.watchdog, Role::kProcessorTile, smem.mailbox, slot);
            if (tile.gemm == TileInfo::kNoTile) break;
            const int num_k_blocks = wgrad_k_blocks(args.plan, tile.expert);
            if (num_k_blocks == 0) {
                if (not args.accumulate) clear_grad_tile<Grad>(args, tile, warpgroup - 1);
                continue;
            }
            Main::run(accumulator, smem.ring, cursor, num_k_blocks, warpgroup - 1, args.watchdog);
            finish_grad_tile<Grad>(args, tile, warpgroup - 1, accumulator,
                                   smem.staging[warpgroup - 1]);
        }
        ptx::bulk_wait_complete();  // shared memory must outlive the copies from it
    }
    cute::cluster_sync();  // the other CTA may still write to this one's shared memory
    leave(args.workspace, false, [] {});
}

template <class T>
KernelEntry wgrad_entry(bool into_float32) {
    return {into_float32 ? reinterpret_cast<const void*>(&wgrad_kernel<T, float>)
                         : reinterpret_cast<const void*>(&wgrad_kernel<T, T>),
            kWgradThreads, int(sizeof(WgradSmem))};
}

}  // namespace flashmoe
