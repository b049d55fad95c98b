// Weight gradients: one CTA owns a whole 128 x 256 tile of one expert's gradient, with all rows of
// that expert as K. No split along K, hence no atomics, and the same bits at every run. Pad rows
// are zeros. fc2's tiles come first, so that its gradients are complete early.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cutlass/arch/reg_reconfig.h>

#include "flashmoe/actor/loader.cuh"
#include "flashmoe/moe/plan.cuh"
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

constexpr int kWgradBlockN = 256;

struct WgradSmem {
    StageRing<4, kWgradBlockN> ring;
    TileMailbox mailbox;
};

// Ticket -> (product, expert, m, n); experts' tiles stay together, m fastest.
__device__ __forceinline__ TileInfo wgrad_tile(const WgradArgs& args, int ticket) {
    for (int which = 0; which < 2; ++which) {
        const int num_m = ceil_div(args.product[which].num_out, BLOCK_M);
        const int num_n = ceil_div(args.product[which].num_in, kWgradBlockN);
        const int tiles = args.shape.num_local_experts() * num_m * num_n;
        if (ticket < tiles) {
            const int in_expert = ticket % (num_m * num_n);
            return {which, ticket / (num_m * num_n), in_expert % num_m, in_expert / num_m};
        }
        ticket -= tiles;
    }
    return {TileInfo::kNoTile, 0, 0, 0};
}

__device__ __forceinline__ int wgrad_k_blocks(const Plan& plan, int expert) {
    return ceil_div(plan.expert_rows[expert], BLOCK_K);
}

template <class Grad>
struct GradPair;
template <>
struct GradPair<float> {
    using Type = float2;
    __device__ static float2 load(const Type& v) { return v; }
    __device__ static Type make(float a, float b) { return {a, b}; }
};
template <>
struct GradPair<__nv_bfloat16> {
    using Type = __nv_bfloat162;
    __device__ static float2 load(const Type& v) { return __bfloat1622float2(v); }
    __device__ static Type make(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

// Writes or adds the tile. Each quad of threads covers 32 bytes (float) of a row.
template <class Grad, class Accumulator>
__device__ __forceinline__ void store_grad_tile(const WgradArgs& args,
                                                const TileInfo& tile,
                                                int warpgroup,
                                                const Accumulator& accumulator,
                                                bool has_rows) {
    using Pair = GradPair<Grad>;
    const WgradProduct& product = args.product[tile.gemm];
    const int matrix = 1 - tile.gemm;  // fc1's pointers come first
    Grad* grad = static_cast<Grad*>(
        args.grads[matrix * args.shape.num_local_experts() + tile.block]);
    const int thread = threadIdx.x % 128;
    const int row = tile.m * BLOCK_M + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int column = tile.n * kWgradBlockN + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (row + 8 * i >= product.num_out) continue;
        Grad* line = grad + int64_t(row + 8 * i) * product.num_in;
#pragma unroll
        for (int j = 0; j < kWgradBlockN / 8; ++j) {
            if (column + 8 * j >= product.num_in) continue;
            auto* target = reinterpret_cast<typename Pair::Type*>(line + column + 8 * j);
            float2 value = {0.0f, 0.0f};
            if (has_rows) value = {accumulator(4 * j + 2 * i), accumulator(4 * j + 2 * i + 1)};
            if (args.accumulate) {
                const float2 old = Pair::load(*target);
                value.x += old.x;
                value.y += old.y;
            }
            *target = Pair::make(value.x, value.y);
        }
    }
}

template <class Grad>
__global__ __launch_bounds__(384, 1) void wgrad_kernel(const __grid_constant__ WgradArgs args) {
    using Main = Mainloop<Major::MN, Major::MN, kWgradBlockN>;
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    auto& smem = *reinterpret_cast<WgradSmem*>(smem_bytes);
    static_assert(sizeof(smem) <= 227 * 1024);
    if (threadIdx.x == 0) {
        init_barriers(smem.ring, smem.mailbox);
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    const int warpgroup = threadIdx.x / 128;
    RingCursor<4> cursor;
    RingCursor<kTileSlots> slot;
    if (warpgroup == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
        if (threadIdx.x > 0) return;
        for (;;) {
            const TileInfo tile =
                wgrad_tile(args, int(atomicAdd(&args.workspace.tickets->tile, 1u)));
            announce_tile(args.watchdog, smem.mailbox, slot, tile);
            if (tile.gemm == TileInfo::kNoTile) return;
            const WgradProduct& product = args.product[tile.gemm];
            const int first_row = args.plan.expert_block[tile.block] * BLOCK_M;
            auto load_boxes = [&](const CUtensorMap& map, Barrier& full, auto& boxes, int column,
                                  int k) {
                for (auto& box : boxes) {
                    load_box(&map, full, box, column, first_row + k * BLOCK_K);
                    column += kBoxDim;
                }
            };
            stream_tile(
                args.watchdog, smem.ring, cursor, wgrad_k_blocks(args.plan, tile.block),
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes(product.left, full, stage.a, tile.m * BLOCK_M, k);
                },
                [&](auto& stage, Barrier& full, int k) {
                    load_boxes(product.right, full, stage.b, tile.n * kWgradBlockN, k);
                },
                [] {});
        }
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        typename Main::Accumulator accumulator;
        for (;;) {
            const TileInfo tile = take_tile(args.watchdog, smem.mailbox, slot);
            if (tile.gemm == TileInfo::kNoTile) return;
            const int num_k_blocks = wgrad_k_blocks(args.plan, tile.block);
            Main::run(accumulator, smem.ring, cursor, num_k_blocks, warpgroup - 1, args.watchdog);
            if (num_k_blocks > 0 or not args.accumulate) {
                store_grad_tile<Grad>(args, tile, warpgroup - 1, accumulator, num_k_blocks > 0);
            }
        }
    }
}

}  // namespace flashmoe
