// Activations and their derivatives, in float32.
#pragma once

namespace flashmoe {

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu };

// value = act(z), slope = act'(z)
struct Activated {
    float value;
    float slope;
};

template <Activation kAct>
__device__ __forceinline__ Activated activate(float z) {
    if constexpr (kAct == Activation::kSilu) {
        const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-z));
        return {z * sigmoid, sigmoid * (1.0f + z * (1.0f - sigmoid))};
    } else if constexpr (kAct == Activation::kGelu) {
        constexpr float kInvSqrt2 = 0.70710678118654752f, kInvSqrt2Pi = 0.39894228040143268f;
        const float cdf = 0.5f * (1.0f + erff(z * kInvSqrt2));
        return {z * cdf, cdf + z * kInvSqrt2Pi * __expf(-0.5f * z * z)};
    } else if constexpr (kAct == Activation::kGeluTanh) {
        constexpr float kBeta = 0.79788456080286536f, kKappa = 0.044715f;
        const float t = tanhf(kBeta * (z + kKappa * z * z * z));
        const float slope = kBeta * (1.0f + 3.0f * kKappa * z * z);
        return {0.5f * z * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * z * (1.0f - t * t) * slope};
    } else if constexpr (kAct == Activation::kRelu) {
        return {fmaxf(z, 0.0f), z > 0.0f ? 1.0f : 0.0f};
    } else {
        const float r = fmaxf(z, 0.0f);
        return {r * r, 2.0f * r};
    }
}

}  // namespace flashmoe
