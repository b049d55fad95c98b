// Functions of the driver are found through the runtime, so nothing links to libcuda.
#pragma once

#include <cuda.h>

#include "host/error.h"

namespace flashmoe {

// Finds a function of the driver as of CUDA 12.0, once for each.
template <class Function>
int find_in_driver(const char* name, Function** function) {
    if (*function != nullptr) return FLASHMOE_OK;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    FLASHMOE_TRY(check_cuda(
        cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name));
    if (result != cudaDriverEntryPointSuccess or found == nullptr) {
        return fail(FLASHMOE_CUDA_ERROR, "the driver has no %s", name);
    }
    *function = reinterpret_cast<Function*>(found);
    return FLASHMOE_OK;
}

}  // namespace flashmoe
