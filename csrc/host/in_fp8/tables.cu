#include "flashmoe/base/in_fp8.h"

#include "host/tables.cu"
