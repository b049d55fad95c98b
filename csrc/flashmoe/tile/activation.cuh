// Activations and their derivatives, in float32.
#pragma once

#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu };

constexpr float kLog2e = 1.4426950408889634f;

// value = act(z), slope = act'(z)
struct Activated {
    float value;
    float slope;
};

template <Activation kAct>
__device__ __forceinline__ Activated activate(float z) {
    if constexpr (kAct == Activation::kSilu) {
        const float sigmoid = ptx::rcp(1.0f + ptx::exp2(-kLog2e * z));
        return {z * sigmoid, sigmoid * (1.0f + z * (1.0f - sigmoid))};
    } else if constexpr (kAct == Activation::kGelu) {
        // Phi(-|z|) by Abramowitz and Stegun 7.1.26, |error| < 8e-8: its exponential is the
        // density's, so the derivative comes almost for free.
        constexpr float kInvSqrt2 = 0.70710678118654752f, kInvSqrt2Pi = 0.39894228040143268f;
        const float t = ptx::rcp(1.0f + 0.3275911f * kInvSqrt2 * fabsf(z));
        const float density = ptx::exp2(-0.5f * kLog2e * z * z);
        const float tail =
            density * t *
            (0.127414796f +
             t * (-0.142248368f + t * (0.710706871f + t * (-0.726576014f + t * 0.530702715f))));
        const float cdf = 0.5f + copysignf(0.5f - tail, z);
        return {z * cdf, cdf + z * kInvSqrt2Pi * density};
    } else if constexpr (kAct == Activation::kGeluTanh) {
        // (1 + tanh u) / 2 = 1 - 1 / (1 + exp 2u)
        constexpr float kBeta = 0.79788456080286536f, kKappa = 0.044715f;
        const float zz = z * z;
        const float exp2u = ptx::exp2(2.0f * kBeta * kLog2e * z * (1.0f + kKappa * zz));
        const float rest = ptx::rcp(1.0f + exp2u), cdf = 1.0f - rest;
        return {z * cdf, cdf + 2.0f * kBeta * z * cdf * rest * (1.0f + 3.0f * kKappa * zz)};
    } else if constexpr (kAct == Activation::kRelu) {
        return {fmaxf(z, 0.0f), z > 0.0f ? 1.0f : 0.0f};
    } else {
        const float r = fmaxf(z, 0.0f);
        return {r * r, 2.0f * r};
    }
}

}  // namespace flashmoe
