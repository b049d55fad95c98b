// The one place that waits for other CTAs and ranks. Every wait has a bound. A wait that runs out
// leaves a fault with the waiter and the awaited thing, and all ranks leave their launches.
#pragma once

#include "flashmoe/comm/counters.cuh"
#include "flashmoe/comm/watchdog.cuh"
#include "flashmoe/ptx/ld_st.cuh"

namespace flashmoe {

// The awaited thing, as a fault names it.
struct Awaited {
    Wait wait;
    int peer;
    int index;
    uint32_t expected;
};

constexpr uint32_t kPollsBeforeLook = 8;  // some 6 us

// Polls `load` until `done` accepts its value. False once this rank or another has given up: then
// every wait of the launch ends soon, and the launch with it. What it computes from there on is
// void, but stays inside its buffers, since places come from a plan that was complete.
template <class Load, class Done>
__device__ __forceinline__ bool wait_for(const Watchdog& watchdog,
                                         const Awaited& what,
                                         Load load,
                                         Done done) {
    const int64_t begin = Trace::now();
    auto seen = load();
    if (done(seen)) return true;
    const uint64_t start = ptx::globaltimer_ns();
    for (uint32_t spin = 0;; ++spin) {
        seen = load();
        if (done(seen)) break;
        __nanosleep(20);
        // A look takes as long as a poll, and most waits are short: the first ones do without.
        if (spin % 256 != kPollsBeforeLook) continue;
        uint32_t who = watchdog.who_gave_up();
        if (who == 0) {
            if (ptx::globaltimer_ns() - start <= watchdog.timeout_ns) continue;
            watchdog.raise(kFaultTimeout, what.wait, what.peer, what.index, what.expected,
                           uint32_t(seen));
            who = uint32_t(watchdog.rank) + 1;
        }
        watchdog.give_up(who);
        return false;
    }
    watchdog.trace.add(event_of(what.wait), what.index, begin);
    if (is_counted(what.wait)) {
        count_time(span_of(what.wait), uint32_t(ptx::globaltimer_ns() - start));
    }
    return true;
}

}  // namespace flashmoe
