#include "flashmoe/base/with_slots.h"

#include "flashmoe/kernel/bias_grad.cuh"

namespace flashmoe {
KernelEntry bias_grad_bf16(bool into_float32) {
    return bias_grad_entry<__nv_bfloat16>(into_float32);
}
}  // namespace flashmoe
