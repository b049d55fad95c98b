// Errors on the host are sentences with a status; they never cross the C interface as exceptions.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

#include <cuda_runtime.h>

#include "include/flashmoe.h"

// One for the whole library, whose host code is in two namespaces.
inline thread_local std::string flashmoe_error;

namespace flashmoe {

__attribute__((format(printf, 2, 3))) inline int fail(int status, const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    flashmoe_error = text;
    return status;
}

inline int check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return FLASHMOE_OK;
    return fail(FLASHMOE_CUDA_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error),
                cudaGetErrorName(error));
}

// Leaves the calling function with the status of `expression` unless it is FLASHMOE_OK.
#define FLASHMOE_TRY(expression)                              \
    do {                                                      \
        if (const int status_ = (expression)) return status_; \
    } while (0)

}  // namespace flashmoe
