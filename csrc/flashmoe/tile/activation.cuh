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

template <Activation kAct>
__device__ __forceinline__ Activated activate(float z, [[maybe_unused]] const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) {
        const float bz = terms.beta * z, sigmoid = ptx::rcp(1.0f + ptx::exp2(-kLog2e * bz));
        return {z * sigmoid, sigmoid + bz * sigmoid * (1.0f - sigmoid)};
    } else if constexpr (kAct == Activation::kSilu) {
        const float sigmoid = ptx::rcp(1.0f + ptx::exp2(-kLog2e * z)), value = z * sigmoid;
        return {value, sigmoid + value * (1.0f - sigmoid)};
    } else if constexpr (kAct == Activation::kGelu) {
        // Phi(-|z|) by Abramowitz and Stegun 7.1.26, |error| < 8e-8: its exponential is the
        // density's, so the derivative comes almost for free. What z is scaled by for the
        // exponential, and the density's own factor, are in the coefficients.
        constexpr double kScale = 0.84932180028801904;                  // z^2 / 2 in powers of 2
        constexpr double kT = kScale * 1.4142135623730951 / 0.3275911;  // unit of t
        constexpr double kLogFactor = -1.3257480647361593, kFactor = 0.3989422804014327;
        constexpr double kT2 = kT * kT, kT3 = kT2 * kT, kT4 = kT3 * kT, kT5 = kT4 * kT;
        const float scaled = float(kScale) * z;
        const float t = ptx::rcp(float(kT) + fabsf(scaled));
        const float density = ptx::exp2(float(kLogFactor) - scaled * scaled);
        const float ratio = float(0.127414796 / kFactor * kT) +
                            t * (float(-0.142248368 / kFactor * kT2) +
                                 t * (float(0.710706871 / kFactor * kT3) +
                                      t * (float(-0.726576014 / kFactor * kT4) +
                                           t * float(0.530702715 / kFactor * kT5))));
        const float cdf = fabsf((z > 0.0f ? 1.0f : 0.0f) - density * t * ratio);
        return {z * cdf, cdf + z * density};
    } else if constexpr (kAct == Activation::kGeluTanh) {
        // (1 + tanh u) / 2 = 1 - 1 / (1 + exp 2u), u = z (kBeta + kKappa z^2)
        constexpr float kBeta = 0.79788456080286536f, kKappa = 0.044715f * kBeta;
        const float zz = z * z;
        const float exp2u = ptx::exp2(z * (2.0f * kLog2e * kBeta + 2.0f * kLog2e * kKappa * zz));
        const float rest = ptx::rcp(1.0f + exp2u), cdf = 1.0f - rest, value = z * cdf;
        return {value, cdf + value * rest * (2.0f * kBeta + 6.0f * kKappa * zz)};
    } else if constexpr (kAct == Activation::kRelu) {
        return {fmaxf(z, 0.0f), z > 0.0f ? 1.0f : 0.0f};
    } else {
        const float r = fmaxf(z, 0.0f);
        return {r * r, 2.0f * r};
    }
}

// act(gate) * up: its value, and its slopes by the inputs before the clamps. Comparisons are such
// that NaN stays NaN, and that a value at the clamp has the slope of the values below it.
struct GluValue {
    float value;
    float gate_slope;
    float up_slope;
};

template <Activation kAct>
__device__ __forceinline__ GluValue activate_glu(float gate, float up, const SwishTerms& terms) {
    if constexpr (kAct == Activation::kSwish) {
        const bool is_gate_over = gate > terms.clamp, is_up_over = fabsf(up) > terms.clamp;
        const float factor = (is_up_over ? copysignf(terms.clamp, up) : up) + terms.offset;
        const Activated f = activate<kAct>(is_gate_over ? terms.clamp : gate, terms);
        return {f.value * factor, is_gate_over ? 0.0f : f.slope * factor,
                is_up_over ? 0.0f : f.value};
    } else {
        const Activated f = activate<kAct>(gate, terms);
        return {f.value * up, f.slope * up, f.value};
    }
}

}  // namespace flashmoe
