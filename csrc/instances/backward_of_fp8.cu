#include "flashmoe/kernel/layer.cuh"

namespace flashmoe {
KernelEntry backward_of_fp8(bool is_gated) {
    return is_gated ? entry_of<BackwardPassOfFp8<__nv_bfloat16, true>>()
                    : entry_of<BackwardPassOfFp8<__nv_bfloat16, false>>();
}
}  // namespace flashmoe
