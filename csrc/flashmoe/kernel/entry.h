// A compiled kernel as the host sees it. One file of instances/ per activation defines one
// function.
#pragma once

namespace flashmoe {

struct KernelEntry {
    const void* function;
    int num_threads;
    int smem_bytes;
};

KernelEntry layer_silu(bool is_backward, bool is_gated);
KernelEntry layer_silu_transposed(bool is_backward, bool is_gated);
KernelEntry layer_gelu(bool is_backward, bool is_gated);
KernelEntry layer_gelu_transposed(bool is_backward, bool is_gated);
KernelEntry layer_gelu_tanh(bool is_backward, bool is_gated);
KernelEntry layer_gelu_tanh_transposed(bool is_backward, bool is_gated);
KernelEntry layer_relu(bool is_backward, bool is_gated);
KernelEntry layer_relu_transposed(bool is_backward, bool is_gated);
KernelEntry layer_squared_relu(bool is_backward, bool is_gated);
KernelEntry layer_squared_relu_transposed(bool is_backward, bool is_gated);

}  // namespace flashmoe
