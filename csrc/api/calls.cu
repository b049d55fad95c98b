// The calls of the C interface that are compiled three times: a layer with experts in FP8 takes
// those in FP8, but for its backward, or what of it is not in FP8; a group whose layers have spare
// slots those with slots, any other the same as if there were neither.
#include <algorithm>

#include "host/error.h"

#include "host/calls.h"

#define flashmoe flashmoe_with_slots
#include "host/calls.h"
#undef flashmoe

#define flashmoe flashmoe_in_fp8
#include "host/calls.h"
#undef flashmoe

namespace {

bool is_fp8(const FlashMoEProblem* p) {
    if (p == nullptr or p->struct_size != sizeof(FlashMoEProblem)) return false;
    return p->experts == FLASHMOE_FP8 or p->experts == FLASHMOE_FP8_DGRAD;
}

bool has_fp8_dgrad(const FlashMoEProblem* p) {
    return is_fp8(p) and p->experts == FLASHMOE_FP8_DGRAD;
}

bool has_slots(const FlashMoEProblem* p) {
    if (p == nullptr or p->struct_size != sizeof(FlashMoEProblem)) return false;
    return p->spare_slots != 0 or p->heap_experts != 0 or p->heap_slot_elements != 0;
}

// Calls one of three functions that take the same.
template <class... Args>
int choose(int (*without)(const FlashMoEProblem*, Args...),
           int (*with)(const FlashMoEProblem*, Args...),
           int (*in_fp8)(const FlashMoEProblem*, Args...),
           const FlashMoEProblem* problem,
           Args... args) {
    if (is_fp8(problem)) return in_fp8(problem, args...);
    return has_slots(problem) ? with(problem, args...) : without(problem, args...);
}

}  // namespace

extern "C" {

int flashmoe_sizes(const FlashMoEProblem* problem, FlashMoESizes* sizes) {
    FLASHMOE_TRY(choose(flashmoe::sizes, flashmoe_with_slots::sizes, flashmoe_in_fp8::sizes,
                        problem, sizes));
    if (not is_fp8(problem)) return FLASHMOE_OK;
    // A backward uses the same memory of the group, and what it reads is of 16 bits.
    FlashMoESizes of_backward = *sizes;
    FLASHMOE_TRY(flashmoe::sizes(problem, &of_backward));
    sizes->heap_bytes = std::max(sizes->heap_bytes, of_backward.heap_bytes);
    sizes->workspace_bytes = std::max(sizes->workspace_bytes, of_backward.workspace_bytes);
    sizes->scratch_block_bytes[1] = of_backward.scratch_block_bytes[1];
    if (has_fp8_dgrad(problem)) return FLASHMOE_OK;
    sizes->weight_copy_bytes[1] = of_backward.weight_copy_bytes[1];
    return FLASHMOE_OK;
}

int flashmoe_preload(const FlashMoEProblem* problem) {
    if (is_fp8(problem)) FLASHMOE_TRY(flashmoe::preload(problem));  // a backward's
    return choose(flashmoe::preload, flashmoe_with_slots::preload, flashmoe_in_fp8::preload,
                  problem);
}

int flashmoe_slot(const FlashMoEProblem* problem,
                  void* heap,
                  int32_t spare_slot,
                  FlashMoESlot* slot) {
    return choose(flashmoe::slot, flashmoe_with_slots::slot, flashmoe_in_fp8::slot, problem, heap,
                  spare_slot, slot);
}

int flashmoe_encode_weights(const FlashMoEProblem* problem,
                            const void* const* fc1,
                            const void* const* fc2,
                            void* weight_copies,
                            void* weight_maps) {
    if (is_fp8(problem) and not has_fp8_dgrad(problem)) {  // a backward's
        FLASHMOE_TRY(flashmoe::encode_weights(problem, fc1, fc2, weight_copies, weight_maps));
    }
    return choose(flashmoe::encode_weights, flashmoe_with_slots::encode_weights,
                  flashmoe_in_fp8::encode_weights, problem, fc1, fc2, weight_copies, weight_maps);
}

int flashmoe_encode_grads(const FlashMoEProblem* problem,
                          void* const* grads,
                          void* const* bias_grads,
                          int32_t grads_dtype,
                          void* grad_table) {
    return choose(flashmoe::encode_grads, flashmoe_with_slots::encode_grads, flashmoe::encode_grads,
                  problem, grads, bias_grads, grads_dtype, grad_table);
}

int flashmoe_plan(const FlashMoEProblem* problem,
                  const FlashMoEGroup* group,
                  const FlashMoEInput* input,
                  void* plan) {
    return choose(flashmoe::plan, flashmoe_with_slots::plan, flashmoe_in_fp8::plan, problem, group,
                  input, plan);
}

int flashmoe_forward(const FlashMoEProblem* problem,
                     const FlashMoEGroup* group,
                     const FlashMoEInput* input,
                     const FlashMoELaunch* launch,
                     int32_t is_planned) {
    return choose(flashmoe::forward, flashmoe_with_slots::forward, flashmoe_in_fp8::forward,
                  problem, group, input, launch, is_planned);
}

int flashmoe_settle(const FlashMoEProblem* problem,
                    const FlashMoEGroup* group,
                    const uint32_t* route_counts,
                    const void* weight_maps,
                    const void* biases) {
    return choose(flashmoe::settle, flashmoe_with_slots::settle, flashmoe_in_fp8::settle, problem,
                  group, route_counts, weight_maps, biases);
}

int flashmoe_gather(const FlashMoEProblem* problem,
                    const FlashMoEGroup* group,
                    const FlashMoELaunch* launch,
                    const void* x) {
    return choose(flashmoe::gather, flashmoe_with_slots::gather, flashmoe_in_fp8::gather, problem,
                  group, launch, x);
}

int flashmoe_backward(const FlashMoEProblem* problem,
                      const FlashMoEGroup* group,
                      const FlashMoELaunch* launch,
                      const void* grad_out,
                      const void* grad_table,
                      int32_t grads_dtype,
                      int32_t accumulate,
                      uint64_t number) {
    if (has_fp8_dgrad(problem)) {  // gradients of tokens, ahead of those of weights
        FLASHMOE_TRY(flashmoe_in_fp8::backward(problem, group, launch, grad_out, grad_table,
                                               grads_dtype, accumulate, number));
    }
    return choose(flashmoe::backward, flashmoe_with_slots::backward, flashmoe::backward, problem,
                  group, launch, grad_out, grad_table, grads_dtype, accumulate, number);
}

int flashmoe_backward_rows(const FlashMoEProblem* problem,
                           const FlashMoELaunch* launch,
                           FlashMoEBackwardRows* rows) {
    return choose(flashmoe::backward_rows, flashmoe_with_slots::backward_rows,
                  flashmoe::backward_rows, problem, launch, rows);
}

}  // extern "C"
