// Tells libFuzzer which branches of an instrumented library an input takes, and what it compares.
// GCC calls a function at every edge; libFuzzer wants an array of counters and a table of as many
// addresses. Its own functions are handed in by whoever loads the library, since atheris keeps them
// to itself; until then nothing is told.
#include <stdint.h>

enum { kNumCounters = 1 << 14 };

static uint8_t counters[kNumCounters];
static uintptr_t places[kNumCounters][2];  // address and flags of each counter

typedef void (*Init8)(uint8_t*, uint8_t*);
typedef void (*InitPlaces)(const uintptr_t*, const uintptr_t*);

__attribute__((visibility("default"))) void flashmoe_tell_coverage(Init8 init,
                                                                   InitPlaces init_places) {
    for (int i = 0; i < kNumCounters; ++i) places[i][0] = (uintptr_t)&counters[i];
    init(counters, counters + kNumCounters);
    init_places(places[0], places[kNumCounters]);
}

void __sanitizer_cov_trace_pc(void) {
    const uintptr_t edge = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&counters;
    counters[(edge * 0x9E3779B97F4A7C15u) >> 50] += 1;
}

// A jump, not a call: libFuzzer tells comparisons apart by the address they return to.
#define COMPARISON(name, type)                                                       \
    void (*flashmoe_hook_##name)(type, type) __attribute__((visibility("default"))); \
    void __sanitizer_cov_trace_##name(type a, type b) {                              \
        void (*hook)(type, type) = flashmoe_hook_##name;                             \
        if (hook) hook(a, b);                                                        \
    }

COMPARISON(cmp1, uint8_t)
COMPARISON(cmp2, uint16_t)
COMPARISON(cmp4, uint32_t)
COMPARISON(cmp8, uint64_t)
COMPARISON(const_cmp1, uint8_t)
COMPARISON(const_cmp2, uint16_t)
COMPARISON(const_cmp4, uint32_t)
COMPARISON(const_cmp8, uint64_t)
void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }
void __sanitizer_cov_trace_switch(uint64_t value, uint64_t* cases) { (void)value, (void)cases; }
