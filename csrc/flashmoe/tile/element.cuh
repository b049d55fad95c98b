// bfloat16 and float16 alike: two in a word, eight in the 16 bytes that a lane moves at once. T is
// __nv_bfloat16 or __half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include <cutlass/numeric_types.h>

#include "flashmoe/base/shape.cuh"

namespace flashmoe {

// The type's name in CUTLASS, which chooses the tensor core's instruction.
template <class T>
struct CutlassElement;
template <>
struct CutlassElement<__nv_bfloat16> {
    using Type = cutlass::bfloat16_t;
};
template <>
struct CutlassElement<__half> {
    using Type = cutlass::half_t;
};
template <>
struct CutlassElement<__nv_fp8_e4m3> {
    using Type = cutlass::float_e4m3_t;
};

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
    if constexpr (std::is_same_v<T, __half>) {
        return __half22float2(reinterpret_cast<const __half2&>(packed));
    } else {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
    }
}

template <class T>
__device__ __forceinline__ void unpack8(const uint4& packed, float (&values)[8]) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float2 pair = unpack<T>(words[w]);
        values[2 * w] = pair.x;
        values[2 * w + 1] = pair.y;
    }
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
    return {pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
            pack<T>(values[4], values[5]), pack<T>(values[6], values[7])};
}

// A value whose type is known at run time only.
__device__ __forceinline__ float load_as_float(const void* values, Dtype dtype, int64_t at) {
    switch (dtype) {
        case Dtype::kFloat32:
            return static_cast<const float*>(values)[at];
        case Dtype::kBFloat16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[at]);
        default:
            return __half2float(static_cast<const __half*>(values)[at]);
    }
}

__device__ __forceinline__ void store_float(void* values, Dtype dtype, int64_t at, float value) {
    switch (dtype) {
        case Dtype::kFloat32:
            static_cast<float*>(values)[at] = value;
            return;
        case Dtype::kBFloat16:
            static_cast<__nv_bfloat16*>(values)[at] = __float2bfloat16_rn(value);
            return;
        default:
            static_cast<__half*>(values)[at] = __float2half_rn(value);
    }
}

}  // namespace flashmoe
