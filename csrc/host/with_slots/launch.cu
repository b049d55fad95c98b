#include "flashmoe/base/with_slots.h"

#include "host/launch.cu"
