// The same of kernels with narrow tiles.
#include "flashmoe/base/narrow_tiles.h"

#include "kernel_smem.cu"
