// Blockwise FP8 as Transformer Engine's recipe has it: E4M3 values, and for a block of them the
// power of two that they are read back with. `flashmoe_megatron/blockwise.py` has the same rule.
#pragma once

#include "flashmoe/tile/element.cuh"

namespace flashmoe {

constexpr int kScaleBlock = 128;              // values along a row that share a scale
constexpr int kScaleLanes = kScaleBlock / 8;  // lanes with eight of them each
static_assert(not kIsFp8 or BLOCK_K == kScaleBlock);

// A block's largest value becomes at most 448 = 1.75 * 2^8, by a power of two and its reciprocal.
struct BlockScale {
    float scale;
    float inverse;

    // `amax` is a bfloat16, and not NaN.
    __device__ __forceinline__ static BlockScale of(float amax) {
        const uint32_t bits = __float_as_uint(amax), mantissa = bits & 0x7FFFFF;
        const int exponent = int(bits >> 23) - 127;
        int power = min(8 - exponent - int(mantissa > 0x600000), 127);
        if (exponent == -127) power = 127;               // 448 / amax is past float32
        if (amax == 0.0f or exponent == 128) power = 0;  // of zeros, or with an infinity
        const uint32_t inverse = power == 127 ? 0x400000 : uint32_t(127 - power) << 23;
        return {__uint_as_float(uint32_t(127 + power) << 23), __uint_as_float(inverse)};
    }
};

// Quantizes eight bfloat16 values of a lane, whose block is that of the 16 lanes of half a warp,
// and stores them at `values`; one lane stores the scale at `scale`. Scope: half a warp, `lanes`
// are its mask.
__device__ __forceinline__ void quantize8(
    const uint4& packed, uint32_t lanes, bool is_inside, uint2* values, float* scale) {
    const auto* pairs_of = reinterpret_cast<const __nv_bfloat162*>(&packed);
    __nv_bfloat162 most{};
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __hmax2(most, __habs2(pairs_of[i]));  // leaves NaN out
#pragma unroll
    for (int step = 1; step < kScaleLanes; step *= 2) {
        most = __hmax2(most, __shfl_xor_sync(lanes, most, step));
    }
    const BlockScale of_block = BlockScale::of(fmaxf(__low2float(most), __high2float(most)));
    float v[8];
    unpack8<__nv_bfloat16>(packed, v);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __nv_cvt_float2_to_fp8x2(
            {v[2 * i] * of_block.scale, v[2 * i + 1] * of_block.scale}, __NV_SATFINITE, __NV_E4M3);
    }
    if (not is_inside) return;
    *values = {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
    if (threadIdx.x % kScaleLanes == 0) *scale = of_block.inverse;
}

}  // namespace flashmoe
