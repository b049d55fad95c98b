// Activations and their derivatives, in float32.
#pragma once

#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

// kSwish is SiLU and quick GELU where their terms are known at run time only.
enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu, kSwish };

// The terms of z sigmoid(beta z), and of the value that it gates: the gate is clamped from above
// and the value from both sides, before the offset is added to the value.
struct SwishTerms {
    float beta;
    float clamp;
    float offset;
};

constexpr float kLog2e = 1.4426950408889634f;

// value = act(z), slope = act'(z)
struct Activated {
    float value;
    float slope;
};

// Phi(-|z|) by Abramowitz and Stegun 7.1.26, |error| < 8e-8: its exponential is the density's, so
// the derivative comes almost for free. What z is scaled by for the exponential, and the density's
// own factor, are in the coefficients.
struct Gelu {
    static constexpr double kScale = 0.84932180028801904;                  // z^2 / 2 in powers of 2
    static constexpr double kT = kScale * 1.4142135623730951 / 0.3275911;  // unit of t
    static constexpr double kLogFactor = -1.3257480647361593, kFactor = 0.3989422804014327;
    static constexpr double kT2 = kT * kT, kT3 = kT2 * kT, kT4 = kT3 * kT, kT5 = kT4 * kT;
    static constexpr float kC1 = float(0.127414796 / kFactor * kT);
    static constexpr float kC2 = float(-0.142248368 / kFactor * kT2);
    static constexpr float kC3 = float(0.710706871 / kFactor * kT3);
    static constexpr float kC4 = float(-0.726576014 / kFactor * kT4);
    static constexpr float kC5 = float(0.530702715 / kFactor * kT5);
};

// (1 + tanh u) / 2 = 1 - 1 / (1 + exp 2u), u = z (kBeta + kKappa z^2)
struct GeluTanh {
    static constexpr float kBeta = 0.79788456080286536f, kKappa = 0.044715f * kBeta;
};

// An activation takes an exponential and a reciprocal, whose latency is longer than all else. So
// that one warp can have those of many values under way, it is computed in three steps: the
// exponential, with it the reciprocal, and with both the value and its slope.
template <Activation kAct>
__device__ __forceinline__ float exponential_of(float z, [[maybe_unused]] const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) {
        return ptx::exp2(-kLog2e * (terms.beta * z));
    } else if constexpr (kAct == Activation::kSilu) {
        return ptx::exp2(-kLog2e * z);
    } else if constexpr (kAct == Activation::kGelu) {
        const float scaled = float(Gelu::kScale) * z;
        return ptx::exp2(float(Gelu::kLogFactor) - scaled * scaled);
    } else if constexpr (kAct == Activation::kGeluTanh) {
        using Tanh = GeluTanh;
        return ptx::exp2(z *
                         (2.0f * kLog2e * Tanh::kBeta + 2.0f * kLog2e * Tanh::kKappa * (z * z)));
    } else {
        return 0.0f;
    }
}
template <Activation kAct>
__device__ __forceinline__ float reciprocal_of(float z, float exponential) {
    if constexpr (kAct == Activation::kGelu) {
        return ptx::rcp(float(Gelu::kT) + fabsf(float(Gelu::kScale) * z));
    } else if constexpr (kAct == Activation::kRelu or kAct == Activation::kSquaredRelu) {
        return 0.0f;
    } else {
        return ptx::rcp(1.0f + exponential);
    }
}
template <Activation kAct>
__device__ __forceinline__ Activated
activated(float z, float exponential, float reciprocal, [[maybe_unused]] const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) {
        const float bz = terms.beta * z, sigmoid = reciprocal;
        return {z * sigmoid, sigmoid + bz * sigmoid * (1.0f - sigmoid)};
    } else if constexpr (kAct == Activation::kSilu) {
        const float sigmoid = reciprocal, value = z * sigmoid;
        return {value, sigmoid + value * (1.0f - sigmoid)};
    } else if constexpr (kAct == Activation::kGelu) {
        const float t = reciprocal, density = exponential;
        const float ratio =
            Gelu::kC1 + t * (Gelu::kC2 + t * (Gelu::kC3 + t * (Gelu::kC4 + t * Gelu::kC5)));
        const float cdf = fabsf((z > 0.0f ? 1.0f : 0.0f) - density * t * ratio);
        return {z * cdf, cdf + z * density};
    } else if constexpr (kAct == Activation::kGeluTanh) {
        const float rest = reciprocal, cdf = 1.0f - rest, value = z * cdf;
        const float zz = z * z;
        return {value,
                cdf + value * rest * (2.0f * GeluTanh::kBeta + 6.0f * GeluTanh::kKappa * zz)};
    } else if constexpr (kAct == Activation::kRelu) {
        return {fmaxf(z, 0.0f), z > 0.0f ? 1.0f : 0.0f};
    } else {
        const float r = fmaxf(z, 0.0f);
        return {r * r, 2.0f * r};
    }
}

template <Activation kAct>
__device__ __forceinline__ Activated activate(float z, const SwishTerms& terms) {
    const float exponential = exponential_of<kAct>(z, terms);
    return activated<kAct>(z, exponential, reciprocal_of<kAct>(z, exponential), terms);
}

// act(gate) * up: its value, and its slopes by the inputs before the clamps. Comparisons are such
// that NaN stays NaN, and that a value at the clamp has the slope of the values below it.
struct GluValue {
    float value;
    float gate_slope;
    float up_slope;
};

template <Activation kAct>
__device__ __forceinline__ float activated_gate(float gate,
                                                [[maybe_unused]] const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) return gate > terms.clamp ? terms.clamp : gate;
    return gate;
}
template <Activation kAct>
__device__ __forceinline__ GluValue
glu_of(const Activated& f, float gate, float up, [[maybe_unused]] const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) {
        const bool is_gate_over = gate > terms.clamp, is_up_over = fabsf(up) > terms.clamp;
        const float factor = (is_up_over ? copysignf(terms.clamp, up) : up) + terms.offset;
        return {f.value * factor, is_gate_over ? 0.0f : f.slope * factor,
                is_up_over ? 0.0f : f.value};
    } else {
        return {f.value * up, f.slope * up, f.value};
    }
}
template <Activation kAct>
__device__ __forceinline__ GluValue activate_glu(float gate, float up, const SwishTerms& terms) {
    const Activated f = activate<kAct>(activated_gate<kAct>(gate, terms), terms);
    return glu_of<kAct>(f, gate, up, terms);
}

}  // namespace flashmoe
