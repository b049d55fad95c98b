#include "flashmoe/base/with_slots.h"

#include "flashmoe/kernel/add_replicas.cuh"

namespace flashmoe {
KernelEntry add_replicas_bf16(bool into_float32) {
    return add_replicas_entry<__nv_bfloat16>(into_float32);
}
KernelEntry add_replicas_fp16(bool into_float32) {
    return add_replicas_entry<__half>(into_float32);
}
}  // namespace flashmoe
