// TMA descriptors of row-major bf16 matrices, with the 128-byte swizzle. An operand is read along
// its contiguous dimension (K-major), or across it (MN-major: transposed weights, weight
// gradients). The encoder is found through the runtime, so nothing links to libcuda.
#pragma once

#include <cuda.h>

#include "flashmoe/base/shape.cuh"
#include "host/error.h"

namespace flashmoe {

enum class BoxKind { kKMajor, kMnMajor };

inline int encode_map(
    CUtensorMap* map, BoxKind kind, const void* matrix, int64_t rows, int64_t columns) {
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
    // Three dimensions: 64 columns, the rows, and the blocks of 64 columns. So a box of 128 columns
    // lies in shared memory as wgmma wants it.
    const cuuint64_t sizes[3] = {BLOCK_K, cuuint64_t(rows), cuuint64_t(columns / BLOCK_K)};
    const cuuint64_t strides[2] = {cuuint64_t(columns) * 2, BLOCK_K * 2};
    const cuuint32_t k_major[3] = {BLOCK_K, kBoxRows, 1};
    const cuuint32_t mn_major[3] = {BLOCK_K, BLOCK_K, kBoxRows / BLOCK_K};
    const cuuint32_t element_strides[3] = {1, 1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix), sizes, strides,
               kind == BoxKind::kKMajor ? k_major : mn_major, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
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
