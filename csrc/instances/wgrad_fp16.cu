#include "flashmoe/kernel/wgrad.cuh"

namespace flashmoe {
KernelEntry wgrad_fp16(bool into_float32) { return wgrad_entry<__half>(into_float32); }
}  // namespace flashmoe
