// Gradients of biases: sums over an expert's rows of the gradient of fc1's output, and of dY times
// the routing weight. A CTA owns 256 columns of one expert; its warps take rows in turn and are
// added up in their order, so the bits are the same at every run.
#pragma once

#include "flashmoe/kernel/entry.h"
#include "flashmoe/moe/plan.cuh"
#include "flashmoe/tile/element.cuh"

namespace flashmoe {

struct BiasGradArgs {
    Plan plan;
    // fc1, then fc2.
    const char* rows[2];  // [row][width]: the gradient of fc1's output, dY
    bool is_by_token;     // dY is [token][width]
    int width[2];
    void* const* grads[2];  // device: by local expert; null: not wanted
    bool accumulate;
    const PlanHeader* first_plan;  // LayerArgs::first_plan
};

constexpr int kBiasGradThreads = 256, kBiasGradColumns = 256;

template <class T, class Grad>
__global__ __launch_bounds__(kBiasGradThreads)  //
    void bias_grad_kernel(const __grid_constant__ BiasGradArgs args) {
    constexpr int kWarps = kBiasGradThreads / 32;
    __shared__ float sums[kWarps][kBiasGradColumns];
    const int which = blockIdx.z, expert = blockIdx.y, width = args.width[which];
    if (args.grads[which][expert] == nullptr) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = blockIdx.x * kBiasGradColumns + lane * 8;
    const int64_t first = int64_t(args.plan.expert_block[expert]) * BLOCK_M;
    float sum[8] = {};
    if (column < width) {
#pragma unroll 4
        for (int i = warp; i < args.plan.expert_rows[expert]; i += kWarps) {
            float values[8];
            const int64_t row =
                which == 1 and args.is_by_token ? args.plan.row_meta[first + i].token : first + i;
            unpack8<T>(*reinterpret_cast<const uint4*>(args.rows[which] +
                                                       (row * width + column) * kElementBytes),
                       values);
            const float scale = which == 0 ? 1.0f : args.plan.row_prob[first + i];
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] += scale * values[c];
        }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[warp][lane * 8 + c] = sum[c];
    __syncthreads();
    const int own = blockIdx.x * kBiasGradColumns + int(threadIdx.x);
    if (own >= width) return;
    Grad* grad = static_cast<Grad*>(args.grads[which][expert]) + own;
    // As the backward's outputs are where some rank has none.
    const bool is_void = args.first_plan != nullptr and args.first_plan->unfollowed != 0;
    float total = is_void ? __int_as_float(~0) : args.accumulate ? float(*grad) : 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sums[w][threadIdx.x];
    *grad = Grad(total);
}

template <class T>
KernelEntry bias_grad_entry(bool into_float32) {
    return {into_float32 ? reinterpret_cast<const void*>(&bias_grad_kernel<T, float>)
                         : reinterpret_cast<const void*>(&bias_grad_kernel<T, T>),
            kBiasGradThreads, 0};
}

}  // namespace flashmoe
