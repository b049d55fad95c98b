// TMA descriptors: every one describes a row-major bf16 matrix read or written in 64 x 64 boxes
// with the 128-byte swizzle. The encoder is found through the runtime, so nothing links to libcuda.
#pragma once

#include <cuda.h>

#include "flashmoe/base/shape.cuh"
#include "host/error.h"

namespace flashmoe {

inline int encode_map(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        FLASHMOE_TRY(check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                                 12000, cudaEnableDefault, &result),
                                "looking up cuTensorMapEncodeTiled"));
        if (result != cudaDriverEntryPointSuccess or found == nullptr) {
            return fail(FLASHMOE_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled");
        }
        encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    }
    const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
    const cuuint64_t strides[1] = {cuuint64_t(columns) * 2};
    const cuuint32_t box[2] = {kBoxDim, kBoxDim};
    const cuuint32_t element_strides[2] = {1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes, strides,
               box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        return fail(
            FLASHMOE_BAD_ARGUMENT,
            "cannot describe a [%lld, %lld] bf16 matrix at %p to TMA (error %d): it must be "
            "16-byte aligned",
            (long long)rows, (long long)columns, matrix, int(result));
    }
    return FLASHMOE_OK;
}

}  // namespace flashmoe
