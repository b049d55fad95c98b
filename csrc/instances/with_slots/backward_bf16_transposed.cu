#include "flashmoe/base/with_slots.h"

#include "instances/backward_bf16_transposed.cu"
