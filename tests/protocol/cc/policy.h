// The protocol's policy for the explorer. It knows the engine by what threads call alone, so that a
// mutant of the protocol compiles without the engine's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "forward.h"

namespace explorer {

using protocol_test::WaitEnd;

using flashmoe::protocol::Scope;

enum class Op { kLoad, kStore, kAdd, kOr, kSwap };

struct Request {
    Op op;
    int location;
    uint64_t value;
    bool acquires, releases, returns;
    Scope scope;
    bool (*accepts)(void*, uint64_t);  // what ends a wait
    void* context;
    const char* what;   // waits for
    int escape;         // the word that ends all waits, or -1
    uint64_t expected;  // of a swap
};

// The functions of the engine that threads call; engine.cc has them.
struct Calls {
    static int add_word(const char* name, int index, int rank);
    static void name_word(int word, const char* name, int index);
    static int add_join(int threads);
    static uint64_t perform(const Request& wanted);
    static WaitEnd last_wait();
    static void fence(Scope scope);
    static void release_fence(Scope scope);
    static void fence_proxy_async();
    static void bulk_wait_complete();
    static uint64_t read(int word, bool by_tma);
    static void write(int word, uint64_t value, bool by_bulk);
    static void arrive(int join, bool orders_copies);
    static void forget(int place, int stage);
    static void set_in_time(bool is_in_time);
    static void count_ahead();
    static bool is_void();
    [[noreturn]] static void fail(const char* message);
    [[noreturn]] static void refuse_index(int64_t index, size_t size);
};

// The policy.
struct Atomics {
    struct Word {
        int id = -1;
    };
    struct U32 : Word {};
    struct U64 : Word {};
    struct Plain : Word {};

    template <class T>
    struct Array {
        std::vector<T> items;
        Array(int count, const char* name, int rank) : items(count) {
            for (int i = 0; i < count; ++i) {
                items[i].id = Calls::add_word(name, i, rank);
            }
        }
        T& operator[](int64_t i) {
            if (i < 0 or i >= int64_t(items.size())) {
                Calls::refuse_index(i, items.size());
            }
            return items[i];
        }
    };

    struct Join {
        int id;
        explicit Join(int threads) : id(Calls::add_join(threads)) {}
    };

    static constexpr int kLanes = 1;
    static int lane() { return 0; }
    static void sync_warp() {}

    static uint32_t load(const U32* word) { return uint32_t(do_load(word, false, Scope::kSystem)); }
    template <Scope kScope>
    static uint32_t load_acquire(const U32* word) {
        return uint32_t(do_load(word, true, kScope));
    }
    template <Scope kScope>
    static uint64_t load_acquire(const U64* word) {
        return do_load(word, true, kScope);
    }
    template <Scope kScope>
    static void store(U32* word, uint32_t value) {
        perform(Op::kStore, word, value, false, false, kScope);
    }
    template <Scope kScope>
    static void store(U64* word, uint64_t value) {
        perform(Op::kStore, word, value, false, false, kScope);
    }
    static uint32_t add(U32* word, uint32_t value) {
        return uint32_t(perform(Op::kAdd, word, value, false, true, Scope::kGpu));
    }
    static uint32_t fetch_or(U32* word, uint32_t value) {
        return uint32_t(perform(Op::kOr, word, value, false, true, Scope::kGpu));
    }
    static uint32_t compare_and_swap(U32* word, uint32_t expected, uint32_t value) {
        return uint32_t(perform(Op::kSwap, word, value, false, true, Scope::kGpu, expected));
    }
    static void count(U32* word, uint32_t value) {
        perform(Op::kAdd, word, value, false, false, Scope::kGpu);
    }
    static void add_release(U32* word, uint32_t value) {
        perform(Op::kAdd, word, value, true, false, Scope::kGpu);
    }
    template <Scope kScope>
    static void fence() {
        Calls::fence(kScope);
    }
    template <Scope kScope>
    static void release_fence() {
        Calls::release_fence(kScope);
    }
    static uint64_t read(const Word* word) { return Calls::read(word->id, false); }
    static void write(const Word* word, uint64_t value) { Calls::write(word->id, value, false); }
    static uint64_t read_by_tma(const Word* word) { return Calls::read(word->id, true); }
    static void write_by_bulk(const Word* word, uint64_t value) {
        Calls::write(word->id, value, true);
    }
    static void fence_proxy_async() { Calls::fence_proxy_async(); }
    static void bulk_wait_complete() { Calls::bulk_wait_complete(); }

    // The load becomes one that is possible only where `done` accepts what it reads.
    template <class Load, class Done>
    static WaitEnd wait(
        const char* what, Load load, Done done, const U32* escape, uint32_t* told_by) {
        Awaited awaited{what, escape->id,
                        [](void* context, uint64_t value) {
                            using Value = decltype(load());
                            return bool((*static_cast<Done*>(context))(Value(value)));
                        },
                        &done};
        awaited_slot() = &awaited;
        const uint64_t seen = load();
        const WaitEnd end = Calls::last_wait();
        if (end == WaitEnd::kTold) *told_by = uint32_t(seen);
        return end;
    }

    static void join(Join& join, bool orders_copies) { Calls::arrive(join.id, orders_copies); }
    static bool is_void() { return Calls::is_void(); }
    static void set_in_time(bool is_in_time) { Calls::set_in_time(is_in_time); }
    static void count_ahead() { Calls::count_ahead(); }
    static void forget(int place, int stage) { Calls::forget(place, stage); }
    static void name(const U32* word, const char* name, int index) {
        Calls::name_word(word->id, name, index);
    }
    static void check(bool is_right, const char* message) {
        if (not is_right) Calls::fail(message);
    }

 private:
    struct Awaited {
        const char* what;
        int escape;
        bool (*accepts)(void*, uint64_t);
        void* done;
    };
    static Awaited*& awaited_slot() {
        static Awaited* awaited = nullptr;
        return awaited;
    }
    static uint64_t perform(Op op,
                            const Word* word,
                            uint64_t value,
                            bool releases,
                            bool returns,
                            Scope scope,
                            uint64_t expected = 0) {
        return Calls::perform({op, word->id, value, false, releases, returns, scope, nullptr,
                               nullptr, "", -1, expected});
    }
    static uint64_t do_load(const Word* word, bool acquires, Scope scope) {
        Request request{Op::kLoad, word->id, 0,       acquires, false, true,
                        scope,     nullptr,  nullptr, "",       -1,    0};
        if (Awaited* awaited = awaited_slot()) {
            awaited_slot() = nullptr;
            request.accepts = awaited->accepts;
            request.context = awaited->done;
            request.what = awaited->what;
            request.escape = awaited->escape;
        }
        return Calls::perform(request);
    }
};

}  // namespace explorer
