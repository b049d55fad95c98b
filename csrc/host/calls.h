// The calls of the C interface that depend on how a layer lies in memory, which spare slots and FP8
// change: each is compiled without, with slots (flashmoe/base/with_slots.h) and in FP8
// (flashmoe/base/in_fp8.h), and api/calls.cu chooses. No #pragma once, since that includes it for
// all namespaces.
#include "include/flashmoe.h"

namespace flashmoe {

// With the parameters that the interface has.
decltype(flashmoe_sizes) sizes;
decltype(flashmoe_preload) preload;
decltype(flashmoe_slot) slot;
decltype(flashmoe_encode_weights) encode_weights;
decltype(flashmoe_encode_grads) encode_grads;
decltype(flashmoe_plan) plan;
decltype(flashmoe_forward) forward;
decltype(flashmoe_settle) settle;
decltype(flashmoe_gather) gather;
decltype(flashmoe_backward) backward;
decltype(flashmoe_backward_rows) backward_rows;

}  // namespace flashmoe
