// A compiled kernel as the host sees it. One file of instances/ per direction, type of tokens and
// weights, and layout of weights defines one function, and one those of biases.
#pragma once

#include "flashmoe/base/shape.cuh"

namespace kernel_entries {  // the same for sources of all namespaces

struct KernelEntry {
    const void* function;
    int num_threads;
    int smem_bytes;
};

// A forward with narrow tiles, of experts without a gate, whose weights are K-major.
KernelEntry narrow_forward_bf16();

}  // namespace kernel_entries

namespace flashmoe {

using kernel_entries::KernelEntry;

KernelEntry forward_bf16(bool is_gated);
KernelEntry forward_bf16_transposed(bool is_gated);
KernelEntry forward_fp16(bool is_gated);
KernelEntry forward_fp16_transposed(bool is_gated);
KernelEntry forward_fp8(bool is_gated);
KernelEntry backward_bf16(bool is_gated);
KernelEntry backward_bf16_transposed(bool is_gated);
KernelEntry backward_fp16(bool is_gated);
KernelEntry backward_fp16_transposed(bool is_gated);
KernelEntry backward_of_fp8(bool is_gated);
KernelEntry backward_fp8(bool is_gated);

// Copies of weights and of rows for experts in FP8; see kernel/copies.h.
KernelEntry copy_weights_entry();
KernelEntry read_rows_entry();
KernelEntry turn_weights_entry();
KernelEntry quantize_grads_entry();

// Gradients of weights, after a backward in FP8.
KernelEntry weight_grads_entry();

// From 16-bit rows, into buffers of another type or the same.
KernelEntry bias_grad_bf16(bool into_float32);
KernelEntry bias_grad_fp16(bool into_float32);

// From spare slots, into buffers of another type or the tokens'.
KernelEntry add_replicas_bf16(bool into_float32);
KernelEntry add_replicas_fp16(bool into_float32);

// The launch that settles on replicas. It has few CTAs, so that other kernels have most of the GPU.
constexpr int kSettleCtas = 8;
KernelEntry settle_entry(const Shape& shape);

}  // namespace flashmoe
