// Steps that the CTAs of one launch take together. Counters are zero when a launch begins, because
// the last CTA to leave the one before zeroed them: no launch needs a memset before it.
#pragma once

#include "flashmoe/protocol/epoch.h"

namespace flashmoe::protocol {

// Runs `then` on the last of `expected` threads to come; all that they and their CTAs did before is
// visible to it, and to threads that it signals to. Scope: one thread of each CTA, after its CTA
// has come together.
template <class A, class Then>
FLASHMOE_PROTOCOL void arrive(typename A::U32* counter, uint32_t expected, Then then) {
    A::template fence<Scope::kSystem>();
    if (A::add(counter, 1) == expected - 1) {
        A::template fence<Scope::kSystem>();
        then();
    }
}

// A grid barrier's word counts the CTAs that have come, and from this bit on the CTAs that want to
// stop.
constexpr uint32_t kStop = 1u << 16;

// Comes to a barrier, and does not wait at it. Scope: as above.
template <class A>
FLASHMOE_PROTOCOL void come_to_barrier(typename A::U32* word, bool may_go_on) {
    A::add_release(word, may_go_on ? 1 : 1 + kStop);
}

// Waits as `barrier` does, once this thread has come.
template <class A, class Wait>
FLASHMOE_PROTOCOL bool await_barrier(typename A::U32* word, uint32_t expected, Wait wait) {
    const auto load = [=] { return A::template load_acquire<Scope::kGpu>(word); };
    const auto have_come = [=](uint32_t seen) { return seen % kStop == expected; };
    uint32_t seen = 0;
    if (not wait([&] { return seen = load(); }, have_come)) {  // given up
        for (seen = load(); not have_come(seen); seen = load()) {
            if (A::compare_and_swap(word, seen, seen + kStop) == seen) return false;
        }
    }
    return seen == expected;
}

// Waits for `expected` threads, fewer than kStop, and tells whether all of them have come and may
// go on. All return the same: a thread that gives up waiting says to stop, but only while somebody
// has not come. Each barrier has its own word. Scope: as above; the CTA comes together again
// afterwards.
template <class A, class Wait>
FLASHMOE_PROTOCOL bool barrier(typename A::U32* word,
                               uint32_t expected,
                               bool may_go_on,
                               Wait wait) {
    come_to_barrier<A>(word, may_go_on);
    return await_barrier<A>(word, expected, wait);
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
