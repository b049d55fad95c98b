#include "flashmoe/base/with_slots.h"

#include "instances/bias_grad.cu"
