#include "flashmoe/base/with_slots.h"

#include "flashmoe/kernel/settle.cuh"

namespace flashmoe {
KernelEntry settle_entry(const Shape& shape) { return entry_of_settle(shape); }
}  // namespace flashmoe
