// How work is handed on within one GPU: tickets say who does it, counters when it can be done.
#pragma once

#include "flashmoe/protocol/atomics.h"

namespace flashmoe::protocol {

// Takes the next `count` items. Scope: one thread.
template <class A>
FLASHMOE_PROTOCOL uint32_t take(typename A::U32* tickets, uint32_t count) {
    return A::add(tickets, count);
}

// The next item of one of `takers`. Each has had the item of its own number first, so that it
// waited for no atomic. Scope: one thread.
template <class A>
FLASHMOE_PROTOCOL uint32_t take_after_own(typename A::U32* tickets, uint32_t takers) {
    return takers + take<A>(tickets, 1);
}

// Counts `items` that this warp has written with ordinary stores: one release tells of all of them.
// Scope: one thread, after the warp has come together.
template <class A>
FLASHMOE_PROTOCOL void publish(typename A::U32* counter, uint32_t items = 1) {
    A::add_release(counter, items);
}

// Counts what this thread has written with bulk copies: `for_each` calls back with every counter.
// The copies have to be complete, not merely read out of shared memory. One fence releases them to
// all counters, since each release waits for everything that its warp has on its way.
template <class A, class ForEach>
FLASHMOE_PROTOCOL void publish_copies(ForEach for_each) {
    A::bulk_wait_complete();
    A::template release_fence<Scope::kGpu>();
    for_each([](typename A::U32* counter) { A::count(counter, 1); });
}

// Ends a warp's bulk copies, so that it can count them among what it has written. Scope: one warp.
template <class A>
FLASHMOE_PROTOCOL void complete_copies() {
    A::bulk_wait_complete();
    A::sync_warp();
}

// Waits until all of `target` have been counted, to read them with ordinary loads.
template <class A, class Wait>
FLASHMOE_PROTOCOL void await(const typename A::U32* counter, uint32_t target, Wait wait) {
    wait([=] { return A::template load_acquire<Scope::kGpu>(counter); },
         [=](uint32_t seen) { return seen == target; });
}

// Looks without waiting, for a warp that has other things to do.
template <class A>
FLASHMOE_PROTOCOL bool is_complete(const typename A::U32* counter, uint32_t target) {
    return A::template load_acquire<Scope::kGpu>(counter) == target;
}

// Waits like `await`, but to read them by TMA from the same thread; `is_seen` if that has found
// them complete before.
template <class A, class Wait>
FLASHMOE_PROTOCOL void await_for_tma(const typename A::U32* counter,
                                     uint32_t target,
                                     Wait wait,
                                     bool is_seen = false) {
    if (not is_seen) await<A>(counter, target, wait);
    A::fence_proxy_async();
}

// Marks `items` (bits) as taken and returns the items that this thread is the first to take.
// `taken` is updated to all that are taken now.
template <class A>
FLASHMOE_PROTOCOL uint32_t take_bits(typename A::U32* word, uint32_t items, uint32_t* taken) {
    const uint32_t before = A::fetch_or(word, items);
    *taken = before | items;
    return items & ~before;
}

}  // namespace flashmoe::protocol
