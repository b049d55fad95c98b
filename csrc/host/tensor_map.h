// TMA descriptors of row-major matrices, with the 128-byte swizzle. 16-bit operands are read along
// their contiguous dimension (K-major), or across it (MN-major: transposed weights, weight
// gradients); float32 gradients are written by a processor's warp.
#pragma once

#include "flashmoe/tile/float_half.cuh"
#include "host/driver.h"

namespace flashmoe {

enum class BoxKind { kKMajor, kMnMajor, kGrad };

// Gives the thread the context that the runtime would give it at its first launch.
inline int bind_thread() {
    int device;
    FLASHMOE_TRY(check_cuda(cudaGetDevice(&device), "asking for the GPU"));
    return check_cuda(cudaSetDevice(device), "binding a thread to its GPU");
}

inline int encode_map(CUtensorMap* map,
                      BoxKind kind,
                      const void* matrix,
                      int64_t rows,
                      int64_t columns,
                      int64_t pitch = 0) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    FLASHMOE_TRY(find_in_driver("cuTensorMapEncodeTiled", &encode));
    // Three dimensions: the columns in 128 bytes, the rows, and the blocks of such columns. So a
    // box of more columns lies in shared memory as wgmma wants it.
    const bool is_grad = kind == BoxKind::kGrad;
    const int element_bytes = is_grad ? int(sizeof(float)) : kOperandBytes;
    if (pitch == 0) pitch = columns * element_bytes;
    const cuuint32_t block = cuuint32_t(128 / element_bytes);
    const cuuint64_t sizes[3] = {block, cuuint64_t(rows), cuuint64_t(columns / block)};
    const cuuint64_t strides[2] = {cuuint64_t(pitch), 128};
    const cuuint32_t boxes[3][3] = {
        {block, kBoxRows, 1}, {block, BLOCK_K, kBoxRows / BLOCK_K}, {block, kWarpRows, 1}};
    const cuuint32_t element_strides[3] = {1, 1, 1};
    const auto attempt = [&] {
        return encode(map,
                      is_grad  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                      : kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                      3, const_cast<void*>(matrix), sizes, strides, boxes[int(kind)],
                      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = attempt();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {  // this thread has used no GPU so far
        FLASHMOE_TRY(bind_thread());
        result = attempt();
    }
    if (result != CUDA_SUCCESS) {
        return fail(FLASHMOE_BAD_ARGUMENT,
                    "cannot describe a [%lld, %lld] %s matrix at %p to TMA (error %d): it must be "
                    "16-byte aligned",
                    (long long)rows, (long long)columns,
                    is_grad  ? "float32"
                    : kIsFp8 ? "E4M3"
                             : "bf16",
                    matrix, int(result));
    }
    return FLASHMOE_OK;
}

#ifdef FLASHMOE_IN_FP8
// The scales of rows that products read, a few at a time: they follow each row's values.
inline int encode_scales(CUtensorMap* map, const char* matrix, int64_t rows, int columns) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    FLASHMOE_TRY(find_in_driver("cuTensorMapEncodeTiled", &encode));
    const cuuint64_t sizes[2] = {cuuint64_t(columns / BLOCK_K), cuuint64_t(rows)};
    const cuuint64_t strides[1] = {cuuint64_t(operand_row_bytes(columns))};
    const cuuint32_t box[2] = {kScalesAtOnce, BLOCK_M}, element_strides[2] = {1, 1};
    const CUresult result = encode(
        map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<char*>(matrix) + columns, sizes,
        strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FLASHMOE_OK;
    return fail(FLASHMOE_BAD_ARGUMENT,
                "cannot describe the scales of %lld rows of %d at %p to TMA (error %d)",
                (long long)rows, columns, matrix, int(result));
}
#endif

}  // namespace flashmoe
