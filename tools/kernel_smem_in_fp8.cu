// The same of kernels in FP8.
#include "flashmoe/base/in_fp8.h"

#include "kernel_smem.cu"
