// The calls of the C interface that depend on how a layer lies in memory, which spare slots change:
// each is compiled without and with them (flashmoe/base/with_slots.h), and api/calls.cu chooses.
// No #pragma once, since that includes it for both namespaces.
#include "include/flashmoe.h"

namespace flashmoe {

int sizes(const FlashMoEProblem* problem, FlashMoESizes* sizes);
int preload(const FlashMoEProblem* problem);
int slot(const FlashMoEProblem* problem, void* heap, int32_t spare_slot, FlashMoESlot* slot);
int encode_weights(const FlashMoEProblem* problem,
                   const void* const* fc1,
                   const void* const* fc2,
                   void* weight_maps);
int encode_grads(const FlashMoEProblem* problem,
                 void* const* grads,
                 void* const* bias_grads,
                 int32_t grads_dtype,
                 void* grad_table);
int plan(const FlashMoEProblem* problem,
         const FlashMoEGroup* group,
         const FlashMoEInput* input,
         void* plan);
int forward(const FlashMoEProblem* problem,
            const FlashMoEGroup* group,
            const FlashMoEInput* input,
            const FlashMoELaunch* launch_args,
            int32_t is_planned);
int gather(const FlashMoEProblem* problem,
           const FlashMoEGroup* group,
           const FlashMoELaunch* launch_args,
           const void* x);
int backward(const FlashMoEProblem* problem,
             const FlashMoEGroup* group,
             const FlashMoELaunch* launch_args,
             const void* grad_out,
             const void* grad_table,
             int32_t grads_dtype,
             int32_t accumulate,
             uint64_t number);

}  // namespace flashmoe
