#include "flashmoe/base/with_slots.h"

#include "instances/forward_bf16_transposed.cu"
