#include "flashmoe/base/with_slots.h"

#include "instances/backward_fp16.cu"
