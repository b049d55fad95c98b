#include "flashmoe/base/with_slots.h"

#include "instances/forward_fp16_transposed.cu"
