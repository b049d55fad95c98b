// Blockwise FP8 as Transformer Engine's recipe has it: E4M3 values, and for a block of them the
// power of two that they are read back with. `flashmoe_megatron/blockwise.py` has the same rule.
#pragma once

#include "flashmoe/tile/element.cuh"

namespace flashmoe {

constexpr int kScaleLanes = kScaleBlock / 8;  // with eight values each of a row of a block
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

// The largest of eight bfloat16 values and of `most`, in pairs; leaves NaN out.
__device__ __forceinline__ __nv_bfloat162 most_of8(const uint4& packed, __nv_bfloat162 most) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __hmax2(most, __habs2(pairs[i]));
    return most;
}
// The same of so many lanes of the mask that follow one another. Scope: the lanes of the mask.
template <int kLanes>
__device__ __forceinline__ __nv_bfloat162 most_of_lanes(__nv_bfloat162 most, uint32_t lanes) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
        most = __hmax2(most, __shfl_xor_sync(lanes, most, step));
    }
    return most;
}
__device__ __forceinline__ BlockScale scale_of(__nv_bfloat162 most) {
    return BlockScale::of(fmaxf(__low2float(most), __high2float(most)));
}

// Eight bfloat16 values in E4M3, and what such values stand for.
__device__ __forceinline__ uint2 encode8(const uint4& packed, float scale) {
    float v[8];
    unpack8<__nv_bfloat16>(packed, v);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __nv_cvt_float2_to_fp8x2({v[2 * i] * scale, v[2 * i + 1] * scale},
                                            __NV_SATFINITE, __NV_E4M3);
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
__device__ __forceinline__ uint4 decode8(const uint2& values, float inverse) {
    const uint32_t words[2] = {values.x, values.y};
    uint32_t read[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const auto pair = __nv_fp8x2_storage_t(words[i / 2] >> i % 2 * 16);
        const float2 v = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
        read[i] = pack<__nv_bfloat16>(v.x * inverse, v.y * inverse);
    }
    return {read[0], read[1], read[2], read[3]};
}

// The scale of the block that half a warp has, eight values of a row a lane. Scope: half a warp,
// `lanes` is its mask.
__device__ __forceinline__ BlockScale scale_of_row(const uint4& packed, uint32_t lanes) {
    return scale_of(most_of_lanes<kScaleLanes>(most_of8(packed, {}), lanes));
}
// Quantizes such a block, and stores it at `values`; one lane stores the scale at `scale`.
__device__ __forceinline__ void quantize8(
    const uint4& packed, uint32_t lanes, bool is_inside, uint2* values, float* scale) {
    const BlockScale of_block = scale_of_row(packed, lanes);
    const uint2 encoded = encode8(packed, of_block.scale);
    if (not is_inside) return;
    *values = encoded;
    if (threadIdx.x % kScaleLanes == 0) *scale = of_block.inverse;
}
// The bfloat16 values that the same eight are read back as.
__device__ __forceinline__ uint4 rounded8(const uint4& packed, uint32_t lanes) {
    const BlockScale of_block = scale_of_row(packed, lanes);
    return decode8(encode8(packed, of_block.scale), of_block.inverse);
}

}  // namespace flashmoe
