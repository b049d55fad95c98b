// The bodies of the C interface's calls that make tables in host memory: of the TMA descriptors of
// weights, and of where gradients go.
#include <cstring>
#include <tuple>
#include <utility>

#include "host/calls.h"
#include "host/check.h"
#include "host/tables.h"
#include "host/tensor_map.h"

namespace flashmoe {

int encode_weights(const FlashMoEProblem* problem,
                   const void* const* fc1,
                   const void* const* fc2,
                   void* copies,
                   void* weight_maps) {
    FLASHMOE_TRY(check_problem(problem));
    const Shape s = shape_of(problem);
    const int experts = s.num_local_slots();
    if (fc1 == nullptr or fc2 == nullptr or weight_maps == nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "fc1, fc2 or weight_maps is null");
    }
    for (int i = 0; i < s.num_fc1(); ++i) {
        FLASHMOE_TRY(check_pointer(fc1[i], true, "an expert's fc1"));
    }
    for (int expert = 0; expert < experts; ++expert) {
        FLASHMOE_TRY(check_pointer(fc2[expert], true, "an expert's fc2"));
    }
    // In FP8 products read copies of weights.
    const bool is_copied = is_in_fp8(problem);
    FLASHMOE_TRY(check_pointer(copies, is_copied, "weight_copies", kCopiesAlignment));
    const bool transposed = problem->is_transposed != 0;
    char* const table = static_cast<char*>(weight_maps);
    char* target = table + (kIsFp8 ? fp8_maps_begin(s) : 0);
    char* scales = table + fp8_scales_begin(s);
    char* sources = table + copied_weights_begin(s);
    for (const bool is_backward : {false, true}) {
        if (kIsFp8 and is_backward) break;
        const char* copy = static_cast<const char*>(copies);
        const BoxKind kind = transposed == is_backward ? BoxKind::kKMajor : BoxKind::kMnMajor;
        for (const auto& [weights, count, num_out, num_in] :
             {std::tuple{fc1, s.num_fc1(), s.fc1_rows() / (s.is_split ? 2 : 1), s.hidden},
              {fc2, experts, s.hidden, s.intermediate}}) {
            for (int i = 0; i < count; ++i) {
                alignas(128) CUtensorMap map;
                const void* read = is_copied ? copy : weights[i];
                FLASHMOE_TRY(encode_map(&map, kind, read, transposed ? num_in : num_out,
                                        transposed ? num_out : num_in));
                memcpy(target, &map, sizeof(map));
                target += sizeof(map);
                if constexpr (kIsFp8) {
                    const char* of_copy = copy + int64_t(num_out) * num_in;
                    memcpy(scales, &of_copy, sizeof(of_copy));
                    memcpy(sources, &weights[i], sizeof(weights[i]));
                    scales += sizeof(of_copy);
                    sources += sizeof(weights[i]);
                }
                copy += is_copied ? copied_weight_bytes(num_out, num_in) : 0;
            }
        }
    }
    if constexpr (kIsFp8) {  // transposes, which take the same memory in turn
        char* turned = table + turned_maps_begin(s);
        char* turned_scales = table + turned_scales_begin(s);
        const char* copy = static_cast<const char*>(copies);
        for (const auto& [num_rows, num_columns] :
             {std::pair{s.hidden, s.fc1_rows()}, {s.intermediate, s.hidden}}) {
            for (int i = 0; i < experts; ++i) {
                alignas(128) CUtensorMap map;
                FLASHMOE_TRY(encode_map(&map, BoxKind::kKMajor, copy, num_rows, num_columns));
                memcpy(turned, &map, sizeof(map));
                const char* of_copy = copy + int64_t(num_rows) * num_columns;
                memcpy(turned_scales, &of_copy, sizeof(of_copy));
                turned += sizeof(map);
                turned_scales += sizeof(of_copy);
                copy += copied_weight_bytes(num_rows, num_columns);
            }
        }
    }
    for (int first = 0; first < s.num_matrices() and s.spare_slots > 0; first += experts) {
        const uint64_t bytes = s.num_local_experts() * sizeof(void*);
        memcpy(target, first < s.num_fc1() ? fc1 + first : fc2, bytes);
        target += bytes;
    }
    return FLASHMOE_OK;
}

int slot(const FlashMoEProblem* problem, void* heap, int32_t spare_slot, FlashMoESlot* slot) {
    FLASHMOE_TRY(check_problem(problem));
    FLASHMOE_TRY(check_struct(slot, "slot"));
    FLASHMOE_TRY(check_pointer(heap, true, "heap", 256));
    if (spare_slot < 0 or spare_slot >= problem->spare_slots) {
        return fail(FLASHMOE_BAD_ARGUMENT, "spare slot %d: wanted 0 to %d", spare_slot,
                    problem->spare_slots - 1);
    }
    const Shape s = shape_of(problem);
    const HeapLayout at = heap_layout(s);
    const int64_t first = spare_slot * s.expert_elements();
    char* weights = static_cast<char*>(heap) + at.slot_weights + first * kElementBytes;
    char* grads = static_cast<char*>(heap) + at.slot_grads + first * int64_t(sizeof(float));
    const auto take = [&](int64_t elements, void** weight, void** grad) {
        *weight = weights;
        *grad = grads;
        weights += elements * kElementBytes;
        grads += elements * int64_t(sizeof(float));
    };
    const int64_t half = int64_t(s.fc1_rows()) * s.hidden / 2;
    take(half, &slot->fc1, &slot->fc1_grad);
    take(half, &slot->fc1_up, &slot->fc1_up_grad);
    take(int64_t(s.hidden) * s.intermediate, &slot->fc2, &slot->fc2_grad);
    take(s.fc1_rows(), &slot->fc1_bias, &slot->fc1_bias_grad);
    take(s.hidden, &slot->fc2_bias, &slot->fc2_bias_grad);
    return FLASHMOE_OK;
}

int encode_grads(const FlashMoEProblem* problem,
                 void* const* grads,
                 void* const* bias_grads,
                 int32_t grads_dtype,
                 void* grad_table) {
    FLASHMOE_TRY(check_problem(problem));
    FLASHMOE_TRY(check_dtype(problem, grads_dtype, "grads_dtype"));
    if (grads == nullptr or grad_table == nullptr) {
        return fail(FLASHMOE_BAD_ARGUMENT, "grads or grad_table is null");
    }
    const Shape s = shape_of(problem);
    const int experts = s.num_local_slots();
    const auto is_used = [&](const void* grad, int i) {
        return grad != nullptr or s.is_spare(i % experts);
    };
    for (int i = 0; i < s.num_matrices(); ++i) {
        FLASHMOE_TRY(check_pointer(grads[i], is_used(grads[i], i), "a weight's gradient"));
    }
    for (int i = 0; i < experts and s.is_split; ++i) {
        if ((grads[i] == nullptr) != (grads[experts + i] == nullptr)) {
            return fail(FLASHMOE_BAD_ARGUMENT,
                        "gradients of the gate at %p and of the up rows at %p in slot %d: wanted "
                        "both or none",
                        grads[i], grads[experts + i], i);
        }
    }
    for (int i = 0; i < 2 * experts and bias_grads != nullptr; ++i) {
        FLASHMOE_TRY(check_pointer(bias_grads[i], is_used(bias_grads[i], i), "a bias's gradient",
                                   size_of(grads_dtype)));
    }
    memset(grad_table, 0, grad_table_bytes(s));
    char* const pointers = static_cast<char*>(grad_table) + grad_pointers_begin(s);
    for (int i = 0; i < s.num_matrices(); ++i) {
        memcpy(pointers + i * sizeof(void*), &grads[i], sizeof(void*));
        if (grads[i] == nullptr) continue;
        if (Dtype(grads_dtype) != Dtype::kFloat32 and not s.is_spare(i % experts)) continue;
        const bool is_fc1 = i < s.num_fc1();
        int rows = is_fc1 ? s.fc1_rows() / (s.is_split ? 2 : 1) : s.hidden;
        int columns = is_fc1 ? s.hidden : s.intermediate;
        if (problem->is_transposed) std::swap(rows, columns);
        alignas(128) CUtensorMap map;
        FLASHMOE_TRY(encode_map(&map, BoxKind::kGrad, grads[i], rows, columns));
        memcpy(static_cast<char*>(grad_table) + i * sizeof(map), &map, sizeof(map));
    }
    if (bias_grads != nullptr) {
        memcpy(pointers + s.num_matrices() * sizeof(void*), bias_grads,
               2 * experts * sizeof(void*));
    }
    int* wanted = reinterpret_cast<int*>(static_cast<char*>(grad_table) + wanted_grads_begin(s));
    for (void* const* of_slots : {grads + s.num_fc1(), grads}) {
        for (int nth = 0; nth < experts; ++nth) {  // spare slots come first
            const int slot = (s.num_local_experts() + nth) % experts;
            if (of_slots[slot] != nullptr) wanted[++wanted[0]] = slot;
        }
        wanted += 1 + experts;
    }
    return FLASHMOE_OK;
}

}  // namespace flashmoe
