// The parts of the C interface that need no GPU and no kernel.
#include "include/flashmoe.h"

#include <cstring>

#include "flashmoe/comm/kinds.cuh"
#include "host/error.h"

extern "C" {

int flashmoe_abi_version(void) { return FLASHMOE_ABI_VERSION; }

const char* flashmoe_last_error(void) { return flashmoe_error.c_str(); }

const char* flashmoe_wait_name(uint32_t wait) {
    static const char* const kNames[] = {
        "none",
        "plan: routing of a peer",
        "dispatch: a peer's rows to be published",
        "dispatch: a row from a peer",
        "loader: a free pipeline stage",
        "loader: the processors to take a tile",
        "loader: rows of a block",
        "loader: activations of a block",
        "processor: a tile",
        "processor: a full pipeline stage",
        "processor: the finisher",
        "finisher: a tile",
        "finisher: a processor's outputs",
        "combine: results of a block",
        "reduce: a peer's share of a token",
        "plan: the other CTAs of the grid",
        "routing",
        "gave up in another wait",
        "loader: weights of a replica",
        "gradients of a rank's replicas",
    };
    static_assert(sizeof(kNames) / sizeof(kNames[0]) == size_t(flashmoe::Wait::kCount));
    return wait < uint32_t(flashmoe::Wait::kCount) ? kNames[wait] : "unknown";
}

uint64_t flashmoe_sizeof(const char* name) {
    if (name == nullptr) return 0;
    if (strcmp(name, "FlashMoEProblem") == 0) return sizeof(FlashMoEProblem);
    if (strcmp(name, "FlashMoESizes") == 0) return sizeof(FlashMoESizes);
    if (strcmp(name, "FlashMoEGroup") == 0) return sizeof(FlashMoEGroup);
    if (strcmp(name, "FlashMoEFault") == 0) return sizeof(FlashMoEFault);
    if (strcmp(name, "FlashMoEInput") == 0) return sizeof(FlashMoEInput);
    if (strcmp(name, "FlashMoELaunch") == 0) return sizeof(FlashMoELaunch);
    if (strcmp(name, "FlashMoECounters") == 0) return sizeof(FlashMoECounters);
    if (strcmp(name, "FlashMoERecord") == 0) return sizeof(FlashMoERecord);
    if (strcmp(name, "FlashMoESlot") == 0) return sizeof(FlashMoESlot);
    if (strcmp(name, "FlashMoEBackwardRows") == 0) return sizeof(FlashMoEBackwardRows);
    return 0;
}

}  // extern "C"
