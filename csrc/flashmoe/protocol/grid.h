// What the CTAs of one launch do together. Counters are zero when a launch begins, because the last
// CTA to leave the one before zeroed them: no launch needs a memset before it.
#pragma once

#include "flashmoe/protocol/epoch.h"

namespace flashmoe::protocol {

// Runs `then` on the last of `expected` threads to come; all that they and their CTAs did before is
// visible to it, and to whom it tells. Scope: one thread of each CTA, after its CTA has come
// together.
template <class A, class Then>
FLASHMOE_PROTOCOL void arrive(typename A::U32* counter, uint32_t expected, Then then) {
    A::template fence<Scope::kSystem>();
    if (A::add(counter, 1) == expected - 1) {
        A::template fence<Scope::kSystem>();
        then();
    }
}

// What all CTAs decided together.
enum Verdict : uint32_t { kUndecided = 0, kGo = 1, kStop = 2 };

// Waits for `expected` threads. Whether to go on is decided once, by the last to arrive, which
// calls may_go_on, or by the first that gives up waiting; so all return the same. Each barrier has
// its own words. Scope: as above; the CTA comes together again afterwards.
template <class A, class MayGoOn, class Wait>
FLASHMOE_PROTOCOL bool barrier(typename A::U32* arrived,
                               typename A::U32* verdict,
                               uint32_t expected,
                               MayGoOn may_go_on,
                               Wait wait) {
    A::template fence<Scope::kGpu>();
    if (A::add(arrived, 1) == expected - 1) {
        A::template fence<Scope::kGpu>();
        A::compare_and_swap(verdict, kUndecided, may_go_on() ? kGo : kStop);
    }
    uint32_t decision = kUndecided;
    wait([=] { return A::template load_acquire<Scope::kGpu>(verdict); },
         [&](uint32_t seen) { return (decision = seen) != kUndecided; });
    if (decision == kUndecided) {  // given up
        A::compare_and_swap(verdict, kUndecided, kStop);
        decision = A::template load_acquire<Scope::kGpu>(verdict);
    }
    const bool goes_on = decision == kGo;
    A::template fence<Scope::kGpu>();
    return goes_on;
}

// True on the last of `expected` threads, which may then write over the counters that all others
// have used. Scope: as above.
template <class A>
FLASHMOE_PROTOCOL bool leave(typename A::U32* counter, uint32_t expected) {
    A::template fence<Scope::kGpu>();
    if (A::add(counter, 1) != expected - 1) return false;
    A::template fence<Scope::kGpu>();
    return true;
}

// Zeroes the counters of a launch. Scope: the CTA that is the last to leave.
template <class A>
FLASHMOE_PROTOCOL void reset(typename A::U32* words, int64_t first, int64_t step, int64_t count) {
    for (int64_t i = first; i < count; i += step) A::write(words + i, 0u);
}

}  // namespace flashmoe::protocol
