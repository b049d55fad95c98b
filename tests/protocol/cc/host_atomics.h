// The protocol on host threads, for ThreadSanitizer: what the protocol orders, these operations
// order, and no more. ThreadSanitizer does not know fences, so a fence is kept in mind: after one,
// relaxed stores release until the thread writes plainly again, and it acquires every word that the
// thread has read relaxed since the last one. Copies by TMA are ordinary accesses here; the proxies
// are the explorer's part.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "forward.h"

namespace host {

using flashmoe::protocol::Scope;
using protocol_test::WaitEnd;

// Now and then a thread is late: for a moment, or for long enough to let all others go on.
class Delays {
 public:
    static void seed(uint64_t seed) { state() = seed * 0x9e3779b97f4a7c15ull | 1; }
    static void now() {
        uint64_t& x = state();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const int dice = int(x >> 20 & 1023);
        if (dice == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(x >> 32 & 1023));
        } else if (dice < 64) {
            std::this_thread::yield();
        } else if (dice < 192) {
            for (volatile int i = 0; i < int(x >> 32 & 255); i = i + 1) {
            }
        }
    }

 private:
    static uint64_t& state() {
        static thread_local uint64_t state = 1;
        return state;
    }
};

struct Atomics {
    using U32 = uint32_t;
    using U64 = uint64_t;
    struct Plain {
        uint64_t value = 0;
    };

    template <class T>
    struct Array {
        std::vector<T> items;
        Array(int count, const char*, int) : items(count) {}
        T& operator[](int64_t i) { return items.at(size_t(i)); }
    };

    // What hardware and streams do: a barrier among threads.
    class Join {
     public:
        explicit Join(int threads) : threads_(threads) {}
        Join(const Join& other) : threads_(other.threads_) {}
        void arrive() {
            std::unique_lock<std::mutex> lock(mutex_);
            const uint64_t generation = generation_;
            if (++arrived_ == threads_) {
                arrived_ = 0;
                ++generation_;
                all_.notify_all();
            } else {
                const auto limit = std::chrono::steady_clock::now() + 2 * bound();
                if (not all_.wait_until(lock, limit, [&] { return generation_ != generation; })) {
                    give_up("its launch or CTA");
                }
            }
        }

     private:
        const int threads_;
        int arrived_ = 0;
        uint64_t generation_ = 0;
        std::mutex mutex_;
        std::condition_variable all_;
    };

    static constexpr int kLanes = 1;
    static int lane() { return 0; }
    static void sync_warp() {}

    static uint32_t load(const U32* word) {
        Delays::now();
        fences().read.push_back(word);
        return __atomic_load_n(word, __ATOMIC_RELAXED);
    }
    template <Scope, class Word>
    static Word load_acquire(const Word* word) {
        Delays::now();
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    template <Scope, class Word, class Value>
    static void store(Word* word, Value value) {
        Delays::now();
        if (fences().is_released) {
            __atomic_store_n(word, value, __ATOMIC_RELEASE);
        } else {
            __atomic_store_n(word, value, __ATOMIC_RELAXED);
        }
    }
    static uint32_t add(U32* word, uint32_t value) {
        Delays::now();
        fences().read.push_back(word);
        return fences().is_released ? __atomic_fetch_add(word, value, __ATOMIC_RELEASE)
                                    : __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
    }
    static uint32_t fetch_or(U32* word, uint32_t value) {
        Delays::now();
        fences().read.push_back(word);
        return fences().is_released ? __atomic_fetch_or(word, value, __ATOMIC_RELEASE)
                                    : __atomic_fetch_or(word, value, __ATOMIC_RELAXED);
    }
    static uint32_t compare_and_swap(U32* word, uint32_t expected, uint32_t value) {
        Delays::now();
        fences().read.push_back(word);
        if (fences().is_released) {
            __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED);
        } else {
            __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED);
        }
        return expected;
    }
    static void count(U32* word, uint32_t value) {
        Delays::now();
        if (fences().is_released) {
            __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
        } else {
            __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
        }
    }
    static void add_release(U32* word, uint32_t value) {
        Delays::now();
        __atomic_fetch_add(word, value, __ATOMIC_RELEASE);
    }
    template <Scope kScope>
    static void fence() {
        Fences& mine = fences();
        for (const U32* word : mine.read) __atomic_load_n(word, __ATOMIC_ACQUIRE);
        mine.read.clear();
        release_fence<kScope>();
    }
    template <Scope>
    static void release_fence() {
        fences().is_released = true;
        Delays::now();
    }

    static uint64_t read(const Plain* cell) { return cell->value; }
    static uint32_t read(const U32* word) { return *word; }
    static void write(Plain* cell, uint64_t value) {
        fences().is_released = false;
        cell->value = value;
    }
    static void write(U32* word, uint32_t value) {
        fences().is_released = false;
        *word = value;
    }
    static uint64_t read_by_tma(const Plain* cell) { return read(cell); }
    static void write_by_bulk(Plain* cell, uint64_t value) { write(cell, value); }
    static void fence_proxy_async() {}
    static void bulk_wait_complete() {}

    // Nobody is absent here: whoever waits too long has found a hang.
    template <class Load, class Done>
    static WaitEnd wait(const char* what, Load load, Done done, const U32*, uint32_t*) {
        const auto start = std::chrono::steady_clock::now();
        while (not done(load())) {
            fences().read.clear();
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - start > bound()) give_up(what);
        }
        return WaitEnd::kDone;
    }

    static void join(Join& join, bool) { join.arrive(); }
    static bool is_void() { return false; }
    static void set_in_time(bool) {}
    static void count_ahead() {}
    static void forget(int, int) {}
    static void name(U32*, const char*, int) {}
    static void check(bool is_right, const char* message) {
        if (not is_right) stop(message, "");
    }

    static std::chrono::seconds& bound() {
        static std::chrono::seconds bound(60);
        return bound;
    }

 private:
    struct Fences {
        bool is_released = false;
        std::vector<const U32*> read;
    };
    static Fences& fences() {
        static thread_local Fences fences;
        return fences;
    }
    [[noreturn]] static void give_up(const char* what) { stop("nobody can go on: ", what); }
    [[noreturn]] static void stop(const char* message, const char* what) {
        std::fprintf(stderr, "%s%s\n", message, what);
        std::fflush(stderr);
        std::_Exit(3);
    }
};

}  // namespace host
