// The layout of a backward's table of gradients.
#pragma once

#include "flashmoe/base/shape.cuh"

namespace flashmoe {

// A table of gradients: TMA descriptors of both matrices of every expert, then where these are,
// then both biases.
inline uint64_t grad_pointers_begin(const Shape& s) {
    return 2 * sizeof(CUtensorMap) * s.num_local_experts();
}
inline uint64_t grad_table_bytes(const Shape& s) {
    return grad_pointers_begin(s) + 4 * sizeof(void*) * s.num_local_experts();
}

}  // namespace flashmoe
