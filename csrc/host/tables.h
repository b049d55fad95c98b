// The layouts of a layer's table of weights and of a backward's table of gradients.
#pragma once

#include "flashmoe/base/shape.cuh"

namespace flashmoe {

// A table of weights: TMA descriptors of all matrices in all slots, read along their contiguous
// dimension and across it, then, if replicas get them, where the own experts' are.
inline uint64_t maps_bytes(const Shape& s) { return 2 * sizeof(CUtensorMap) * s.num_matrices(); }
// In FP8 those are of a backward's copies, unless it multiplies transposes in FP8. A forward's
// follow, then those of transposes, one of each expert's fc1 and fc2, then pointers to the scales
// of both, then pointers to the weights that are copied.
inline int num_turned(const Shape& s) { return 2 * s.num_local_slots(); }
inline uint64_t fp8_maps_begin(const Shape& s) { return maps_bytes(s); }
inline uint64_t turned_maps_begin(const Shape& s) {
    return fp8_maps_begin(s) + sizeof(CUtensorMap) * s.num_matrices();
}
inline uint64_t fp8_scales_begin(const Shape& s) {
    return turned_maps_begin(s) + sizeof(CUtensorMap) * num_turned(s);
}
inline uint64_t turned_scales_begin(const Shape& s) {
    return fp8_scales_begin(s) + sizeof(void*) * s.num_matrices();
}
inline uint64_t copied_weights_begin(const Shape& s) {
    return turned_scales_begin(s) + sizeof(void*) * num_turned(s);
}
inline uint64_t weight_table_bytes(const Shape& s) {
    if (kIsFp8) return copied_weights_begin(s) + sizeof(void*) * s.num_matrices();
    const int pushed = s.spare_slots > 0 ? (s.is_split ? 3 : 2) * s.num_local_experts() : 0;
    return maps_bytes(s) + pushed * sizeof(void*);
}

// A table of gradients: TMA descriptors of all matrices in all slots, then where these are, then
// both biases, then for fc2 and for fc1 a count of the slots whose gradient is wanted, and the
// slots.
inline uint64_t grad_pointers_begin(const Shape& s) {
    return sizeof(CUtensorMap) * s.num_matrices();
}
inline uint64_t wanted_grads_begin(const Shape& s) {
    return grad_pointers_begin(s) + sizeof(void*) * (s.num_matrices() + 2 * s.num_local_slots());
}
inline uint64_t grad_table_bytes(const Shape& s) {
    return wanted_grads_begin(s) + 2 * sizeof(int) * (1 + s.num_local_slots());
}

}  // namespace flashmoe
