// The layout of a backward's table of gradients.
#pragma once

#include "flashmoe/base/shape.cuh"

namespace flashmoe {

// A table of gradients: TMA descriptors of all matrices of the experts, then where these are, then
// both biases.
inline uint64_t grad_pointers_begin(const Shape& s) {
    return sizeof(CUtensorMap) * s.num_matrices();
}
inline uint64_t grad_table_bytes(const Shape& s) {
    return grad_pointers_begin(s) + sizeof(void*) * (s.num_matrices() + 2 * s.num_local_experts());
}

}  // namespace flashmoe
