// Tells libFuzzer which branches of an instrumented library an input takes. GCC calls one function
// at every edge; libFuzzer wants an array of counters and a table of as many addresses. Its own
// functions are symbols of the process, since atheris carries libFuzzer.
#include <stdint.h>

enum { kNumCounters = 1 << 14 };

static uint8_t counters[kNumCounters];
static uintptr_t places[kNumCounters][2];  // address and flags of each counter

void __sanitizer_cov_8bit_counters_init(uint8_t* start, uint8_t* stop);
void __sanitizer_cov_pcs_init(const uintptr_t* start, const uintptr_t* stop);

__attribute__((constructor)) static void announce(void) {
    for (int i = 0; i < kNumCounters; ++i) places[i][0] = (uintptr_t)&counters[i];
    __sanitizer_cov_8bit_counters_init(counters, counters + kNumCounters);
    __sanitizer_cov_pcs_init(places[0], places[kNumCounters]);
}

void __sanitizer_cov_trace_pc(void) {
    const uintptr_t edge = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&announce;
    counters[(edge * 0x9E3779B97F4A7C15u) >> 50] += 1;
}
