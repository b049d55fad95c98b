// Runs threads of the protocol in all orders, under a weak memory model, and says which rule broke.
//
// Memory. Every atomic word has its history of stores; a load may read any of them that is not
// older than what its thread knows. Knowledge is a view: for each location the latest version known
// of, and who is known to have read it. Views travel only as the PTX model lets them: a release
// fence or a releasing add puts the thread's view into what it stores afterwards, an acquiring load
// or a fence takes it out, at the scope asked for; read-modify-writes pass on what they replace.
// Copies by TMA read with the view of the last proxy fence, and are known of once waited for. An
// ordinary read has to know of the latest write, and an ordinary write of all writes and reads:
// whatever else is a race, found wherever it can happen, not only where it does harm. A word that
// is added to is a counter: it has one value, and once a load has taken that for complete, it must
// not be added to again before it is reset.
//
// Search. One thread runs at a time and threads change at atomic operations only. A wait is enabled
// once its condition can be read. Depth first, by running again from the beginning; a state that
// was seen before is not entered again, where a state is all of memory and views and what each
// thread has read since it last forgot. An operation that commutes with all that other threads may
// still do is performed at once, without an alternative: stores do with loads, which can still read
// what was there before; additions do whose result nobody looks at. What threads may still do is
// learnt from random walks, and whenever one does something else the search begins again. Random
// walks alone use the same machine where a search is too much.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "policy.h"

namespace explorer {

constexpr uint64_t kVoid = 0x7f7f7f7f7f7f7f7f;  // what a race reads
constexpr int kMaxThreads = 12, kMaxLocations = 1536, kStackBytes = 64 * 1024;
constexpr int kStages = 3, kMaxStages = 16 * kStages;  // stages of one launch, of all

struct View {
    uint16_t version[kMaxLocations];
    uint16_t readers[kMaxLocations];
};

struct Message {
    uint64_t value;
    uint16_t version;
    int rank;          // the writer's
    View gpu, system;  // what readers on the writer's rank learn, and readers on others
};

// A word of the program, and where it is among the locations, or -1 before its first use.
struct Word {
    const char* name;
    int index, rank, location;
};

struct Location {
    const char* name;
    int index, rank;
    // Plain memory has these.
    uint64_t value;
    uint16_t version, last_plain, readers;
    bool is_counter, is_complete;  // a load has taken the counter for complete
    bool is_written_from_outside;  // ever, by another rank
    std::vector<Message*> messages;
};

struct Thread {
    int id, rank;
    std::function<void()> body;
    std::string name;
    jmp_buf context;
    ucontext_t start;
    std::vector<char> stack;
    bool is_started, is_finished, is_joining;
    bool has_request;
    Request request;
    bool timed_out, escaped;  // how its last wait ended
    bool is_in_time;          // no wait runs out of time while somebody can go on
    uint64_t reply, history;
    int stage;
    View now, release_gpu, release_system, acquire_gpu, acquire_system, async;
    std::vector<int> copies;  // bulk stores not waited for
};

// What a thread may do to a location in some stage of the program.
struct Habit {
    bool rewrites = false, adds = false;  // reads and modifies; adds without looking
    std::vector<uint64_t> stores;
};

struct JoinState {
    int threads, arrived;
    bool orders_copies;
    uint64_t waiting;  // mask of threads
};

struct Statistics {
    uint64_t runs = 0, states = 0, steps = 0, ahead = 0;
};

// A template without parameters that matter: its code is in engine.cc, which is compiled once, and
// not again with every mutant of the protocol.
template <class>
class EngineTemplate {
 public:
    EngineTemplate() {
        current() = this;
        locations_.reserve(kMaxLocations);  // they stay where they are
        uint64_t x = 1;
        for (uint64_t& weight : weights_) weight = x = hash(x, 0x9e3779b97f4a7c15ull) | 1;
    }
    EngineTemplate(const EngineTemplate&) = delete;

    static EngineTemplate*& current() {
        static EngineTemplate* engine = nullptr;
        return engine;
    }

    // Returns the number by which threads name a word. A word has a location once it is used: most
    // words of a scenario are not, and views and states would be as large as all of them.
    int add_word(const char* name, int index, int rank) {
        words_.push_back({name, index, rank, -1});
        return int(words_.size()) - 1;
    }
    void name_word(int word, const char* name, int index) {
        words_[word].name = name;
        words_[word].index = index;
    }
    int add_join(int threads) {
        joins_.push_back({threads, 0, false, 0});
        return int(joins_.size()) - 1;
    }
    void add_thread(int rank, std::string name, std::function<void()> body) {
        if (int(threads_.size()) == kMaxThreads) die("too many threads");
        auto* thread = new Thread{};
        thread->id = int(threads_.size());
        thread->rank = rank;
        thread->name = std::move(name);
        thread->body = std::move(body);
        thread->stack.resize(kStackBytes);
        threads_.push_back(thread);
    }
    // Waits may run out of time: when nobody can go on, and `early` times while somebody can; in a
    // search of all orders these are rank 0's. From then on what is computed is void, and only who
    // takes it for right breaks a rule.
    void allow_timeouts(int early) {
        has_timeouts_ = true;
        early_timeouts_ = early;
    }
    // Says whether the running thread's waits end in time, until told otherwise.
    void set_in_time(bool is_in_time) { running_->is_in_time = is_in_time; }
    // Counts a delivery ahead, for the record.
    void count_ahead() { ++ahead_; }
    bool is_void() const { return is_void_; }
    // How the running thread's last wait ended.
    WaitEnd last_wait() const {
        if (running_->timed_out) return WaitEnd::kTimeIsUp;
        return running_->escaped ? WaitEnd::kTold : WaitEnd::kDone;
    }

    // All orders, up to `max_states`. False if a rule broke; `failure` then says which and how.
    bool explore(uint64_t max_states, Statistics* statistics) {
        if (not walk(200, 1, statistics)) return false;
        std::unordered_set<uint64_t> seen;
        std::vector<std::pair<int, int>> path;  // (choice, choices)
        has_learnt_ = false;
        is_reducing_ = true;
        for (;;) {
            size_t depth = 0;
            const bool ok = run([&](int choices) {
                if (choices == 1) return 0;
                if (depth < path.size()) return path[depth++].first;
                if (not seen.insert(state()).second) return -1;
                path.emplace_back(0, choices);
                return path[depth++].first;
            });
            ++statistics->runs;
            statistics->steps = steps_;
            if (not ok) return false;
            if (has_learnt_) {
                has_learnt_ = false;
                seen.clear();
                path.clear();
                continue;
            }
            statistics->states = seen.size();
            is_complete_ = seen.size() < max_states;
            if (not is_complete_) return true;
            while (not path.empty() and path.back().first + 1 == path.back().second) {
                path.pop_back();
            }
            if (path.empty()) return true;
            ++path.back().first;
        }
    }

    // `runs` random orders; each thread keeps running with a random stubbornness.
    bool walk(uint64_t runs, uint64_t seed, Statistics* statistics) {
        is_complete_ = is_reducing_ = false;
        uint64_t random = seed * 2 + 1;
        auto next = [&] {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            return random >> 11;
        };
        for (uint64_t i = 0; i < runs; ++i) {
            stubbornness_ = int(next() % 4) * 30;
            const bool ok = run([&](int choices) {
                if (last_choice_ >= 0 and int(next() % 100) < stubbornness_) return last_choice_;
                return int(next() % uint64_t(choices));
            });
            ++statistics->runs;
            statistics->steps = steps_;
            statistics->ahead = ahead_;
            if (not ok) return false;
        }
        return true;
    }

    bool is_complete() const { return is_complete_; }
    const std::string& failure() const { return failure_; }
    std::string trace() const {
        std::string text;
        const size_t first = log_.size() > 60 ? log_.size() - 60 : 0;
        for (size_t i = first; i < log_.size(); ++i) text += "  " + describe(log_[i]) + "\n";
        return text;
    }

    // What threads call.

    // The request has words in place of locations.
    uint64_t perform(const Request& wanted) {
        Thread& thread = *running_;
        thread.request = wanted;
        Request& request = thread.request;
        request.location = location_of(wanted.location);
        if (wanted.escape >= 0) request.escape = location_of(wanted.escape);
        thread.has_request = true;
        yield();
        if (request.returns) {
            remember(thread, thread.reply * 4 + thread.timed_out * 2 + thread.escaped,
                     request.location);
        }
        return thread.reply;
    }

    void fence(Scope scope) {
        Thread& thread = *running_;
        join(thread.now, thread.acquire_gpu);
        if (scope == Scope::kSystem) join(thread.now, thread.acquire_system);
        release_fence(scope);
    }
    void release_fence(Scope scope) {
        Thread& thread = *running_;
        copy(thread.release_gpu, thread.now);
        if (scope == Scope::kSystem) copy(thread.release_system, thread.now);
    }
    void fence_proxy_async() { copy(running_->async, running_->now); }
    void bulk_wait_complete() {
        Thread& thread = *running_;
        for (int location : thread.copies) {
            thread.now.version[location] = locations_[location].version;
            thread.now.readers[location] = 0;
        }
        thread.copies.clear();
    }

    uint64_t read(int word, bool by_tma) {
        Thread& thread = *running_;
        const int at = location_of(word);
        Location& location = locations_[at];
        const View& known = by_tma ? thread.async : thread.now;
        if (known.version[at] != location.version) {
            if (is_void_) return remember(thread, kVoid, at), kVoid;
            fail(location, by_tma ? "is read by TMA before it is known to be written"
                                  : "is read before it is known to be written");
        }
        mark_read(thread, at);
        const uint64_t value =
            location.messages.empty() ? location.value : location.messages.back()->value;
        remember(thread, value, at);
        return value;
    }
    void write(int word, uint64_t value, bool by_bulk) {
        Thread& thread = *running_;
        const int at = location_of(word);
        Location& location = locations_[at];
        const View& known = by_bulk ? thread.async : thread.now;
        if (known.version[at] != location.version and not is_void_) {
            fail(location, "is written over by one who does not know of the last write");
        }
        const uint16_t readers = location.readers & ~(by_bulk ? 0 : 1 << thread.id);
        if ((known.readers[at] & readers) != readers and not is_void_) {
            fail(location, "is written over while it may still be read");
        }
        last_plain_[at] = location.last_plain = ++location.version;
        location.readers = 0;
        location.value = value;
        if (not location.messages.empty()) {  // an atomic word
            location.is_counter = location.is_complete = false;
            put(location, value, thread.rank, nullptr, nullptr);
        }
        if (by_bulk) {
            thread.copies.push_back(at);
        } else {
            thread.now.version[at] = location.version;
            thread.now.readers[at] = 0;
        }
    }

    void arrive(int at, bool orders_copies) {
        Thread& thread = *running_;
        JoinState& join_state = joins_[at];
        join_state.waiting |= 1ull << thread.id;
        if (++join_state.arrived == join_state.threads) {
            auto for_each = [&](auto visit) {
                for (Thread* other : threads_) {
                    if (join_state.waiting >> other->id & 1) visit(*other);
                }
            };
            for_each([&](Thread& other) { join(thread.now, other.now); });
            for_each([&](Thread& other) {
                if (&other != &thread) copy(other.now, thread.now);
                if (orders_copies) {  // the end of a launch orders everything
                    for (View* view : views_of(other)) {
                        if (view != &thread.now and view != &other.now) copy(*view, thread.now);
                    }
                }
                other.is_joining = false;
            });
            join_state.arrived = 0;
            join_state.waiting = 0;
            return;
        }
        thread.is_joining = true;
        yield();
    }

    // From here on what the thread does depends on `place` and on what it will read. A place
    // belongs to a stage; a thread's stages ascend, kStages in each launch.
    void forget(int place, int stage) {
        running_->history = uint64_t(place) * 0x9e3779b97f4a7c15ull + 1;
        running_->stage = stage;
    }
    [[noreturn]] void fail(const std::string& message) {
        failure_ = running_->name + ": " + message;
        longjmp(scheduler_, 2);
    }

 private:
    struct Event {
        int thread, location;
        Op op;
        uint64_t value;
    };

    int location_of(int at) {
        Word& word = words_[at];
        if (word.location < 0) {
            word.location = int(locations_.size());
            if (word.location == kMaxLocations) die("too many locations");
            locations_.push_back(
                {word.name, word.index, word.rank, 0, 0, 0, 0, false, false, false, {}});
        }
        return word.location;
    }

    [[noreturn]] static void die(const char* message) {
        std::fprintf(stderr, "explorer: %s\n", message);
        std::exit(2);
    }

    [[noreturn]] void fail(const Location& location, const char* message) {
        describe_failure(location, message);
        longjmp(scheduler_, 2);
    }
    void describe_failure(const Location& location, const char* message) {
        failure_ = running_->name + ": rank " + std::to_string(location.rank) + "'s " +
                   location.name + "[" + std::to_string(location.index) + "] " + message;
    }

    std::vector<Habit>& habits(const Thread& thread, int stage) {
        if (stage >= kMaxStages) die("too many launches");
        auto& all = habits_[thread.id][stage];
        if (all.empty()) all.resize(kMaxLocations);
        return all;
    }

    void learn(const Thread& thread, const Request& request) {
        Habit& habit = habits(thread, thread.stage)[request.location];
        num_stages_ = std::max(num_stages_, thread.stage + 1);
        Location& location = locations_[request.location];
        location.is_written_from_outside |= location.rank != thread.rank;
        if (request.op == Op::kStore) {
            auto& stores = habit.stores;
            if (std::find(stores.begin(), stores.end(), request.value) == stores.end()) {
                stores.push_back(request.value);
                has_learnt_ = true;
            }
        } else {
            bool& done = request.returns ? habit.rewrites : habit.adds;
            has_learnt_ |= not done;
            done = true;
        }
    }

    // Calls visit(habit) for what others may still do to the location before `thread` moves on. The
    // words of a GPU that only its own threads write are not touched beyond this launch, which ends
    // for all of them together.
    template <class Visit>
    void for_others(const Thread& thread, int location, Visit visit) {
        const bool is_local = locations_[location].rank == thread.rank and
                              not locations_[location].is_written_from_outside;
        for (const Thread* other : threads_) {
            if (other == &thread or other->is_finished) continue;
            const int end = is_local ? (thread.stage / kStages + 1) * kStages : num_stages_;
            for (int stage = other->stage; stage < end; ++stage) {
                const auto& all = habits_[other->id][stage];
                if (not all.empty()) visit(all[location]);
            }
        }
    }

    // Whether what the thread asks for commutes with all that others may still do.
    bool commutes(const Thread& thread) {
        const Request& request = thread.request;
        if (request.escape >= 0 and has_timeouts_) return false;
        const Location& location = locations_[request.location];
        if (request.op == Op::kLoad and location.is_counter and request.accepts) return true;
        bool all = true;
        for_others(thread, request.location, [&](const Habit& habit) {
            if (request.op == Op::kLoad) {
                all &= not habit.rewrites and not habit.adds;
                for (uint64_t value : habit.stores) {
                    all &= request.accepts and not request.accepts(request.context, value);
                }
            } else if (request.op == Op::kAdd and not request.returns) {
                all &= not habit.rewrites and habit.stores.empty();
            } else {
                all &= not habit.rewrites and not habit.adds and habit.stores.empty();
            }
        });
        return all;
    }

    std::string describe(const Event& event) const {
        static const char* const names[] = {"reads", "stores", "adds to", "sets bits of", "swaps"};
        std::string text = threads_[event.thread]->name + " " + names[int(event.op)];
        if (event.location < 0) return threads_[event.thread]->name + " runs out of time";
        const Location& location = locations_[event.location];
        return text + " rank " + std::to_string(location.rank) + "'s " + location.name + "[" +
               std::to_string(location.index) + "]: " + std::to_string(event.value);
    }

    void remember(Thread& thread, uint64_t value, int location) {
        thread.history = hash(thread.history, value * 512 + uint64_t(location));
    }
    void mark_read(Thread& thread, int at) {
        locations_[at].readers |= uint16_t(1 << thread.id);
        thread.now.readers[at] |= uint16_t(1 << thread.id);
    }

    static uint64_t hash(uint64_t a, uint64_t b) {
        uint64_t x = (a ^ b) * 0xbf58476d1ce4e5b9ull;
        x ^= x >> 29;
        x = (x + b) * 0x94d049bb133111ebull;
        return x ^ x >> 31;
    }

    // Whoever has read before the last ordinary write is of no interest any more.
    void join(View& to, const View& from) const {
        const int count = int(locations_.size());
        uint16_t* __restrict to_version = to.version;
        uint16_t* __restrict to_readers = to.readers;
        for (int i = 0; i < count; ++i) {
            const uint16_t floor = last_plain_[i], own = to_version[i], told = from.version[i];
            const uint16_t a = own >= floor ? to_readers[i] : 0;
            const uint16_t b = told >= floor ? from.readers[i] : 0;
            to_readers[i] = a | b;
            to_version[i] = own > told ? own : told;
        }
    }

    void put(Location& location, uint64_t value, int rank, const View* gpu, const View* system) {
        auto* message = new_message();
        message->value = value;
        message->version = location.version;
        message->rank = rank;
        if (gpu != nullptr) {
            copy(message->gpu, *gpu);
        } else {
            clear(message->gpu);
        }
        if (system != nullptr) {
            copy(message->system, *system);
        } else {
            clear(message->system);
        }
        location.messages.push_back(message);
    }

    void copy(View& to, const View& from) const {
        std::memcpy(to.version, from.version, sizeof(uint16_t) * locations_.size());
        std::memcpy(to.readers, from.readers, sizeof(uint16_t) * locations_.size());
    }
    void clear(View& view) const {
        std::memset(view.version, 0, sizeof(uint16_t) * locations_.size());
        std::memset(view.readers, 0, sizeof(uint16_t) * locations_.size());
    }

    Message* new_message() {
        if (messages_used_ == messages_.size()) messages_.push_back(new Message{});
        return messages_[messages_used_++];
    }

    void yield() {
        if (_setjmp(running_->context) == 0) _longjmp(scheduler_, 1);
    }

    static void enter() {
        Thread& thread = *current()->running_;
        thread.body();
        thread.is_finished = true;
        _longjmp(current()->scheduler_, 1);
    }

    // Lets a thread run to its next atomic operation. False if a rule broke.
    bool resume(Thread& thread) {
        running_ = &thread;
        const int why = _setjmp(scheduler_);
        if (why == 0) {
            if (thread.is_started) _longjmp(thread.context, 1);
            thread.is_started = true;
            getcontext(&thread.start);
            thread.start.uc_stack.ss_sp = thread.stack.data();
            thread.start.uc_stack.ss_size = thread.stack.size();
            thread.start.uc_link = nullptr;
            makecontext(&thread.start, &EngineTemplate::enter, 0);
            setcontext(&thread.start);
        }
        return why == 1;
    }

    void reset() {
        messages_used_ = 0;
        is_void_ = false;
        timeouts_left_ = early_timeouts_;
        failure_.clear();
        log_.clear();
        std::memset(last_plain_, 0, sizeof(uint16_t) * locations_.size());
        for (Location& location : locations_) {
            location.value = 0;
            location.version = location.last_plain = location.readers = 0;
            location.is_counter = location.is_complete = false;
            location.messages.clear();
        }
        for (JoinState& one : joins_) one.arrived = 0, one.waiting = 0;
        for (Thread* thread : threads_) {
            thread->is_started = thread->is_finished = thread->is_joining = false;
            thread->has_request = false;
            thread->is_in_time = false;
            thread->history = 1;
            thread->stage = 0;
            thread->copies.clear();
            for (View* view : views_of(*thread)) clear(*view);
        }
    }

    static std::vector<View*> views_of(Thread& t) {
        return {&t.now,         &t.release_gpu,    &t.release_system,
                &t.acquire_gpu, &t.acquire_system, &t.async};
    }

    void make_atomic(Location& location) {
        if (location.messages.empty())
            put(location, location.value, location.rank, nullptr, nullptr);
    }

    struct Option {
        Thread* thread;
        Message* message;  // that a load reads
        bool escapes;      // a wait reads the message from the word that ends it
    };

    void collect(Thread& thread, std::vector<Option>* options) {
        const Request& request = thread.request;
        Location& location = locations_[request.location];
        make_atomic(location);
        if (request.op != Op::kLoad) {
            options->push_back({&thread, nullptr, false});
            return;
        }
        if (request.escape >= 0 and has_timeouts_) {
            Location& word = locations_[request.escape];
            make_atomic(word);
            for (size_t i = word.messages.size(); i-- > 0;) {
                if (word.messages[i]->version < thread.now.version[request.escape]) break;
                if (word.messages[i]->value != 0) {
                    options->push_back({&thread, word.messages[i], true});
                }
            }
            if (timeouts_left_ > 0 and not thread.is_in_time and
                (not is_reducing_ or thread.rank == 0)) {
                options->push_back({&thread, nullptr, false});
            }
        }
        const bool is_wait = request.accepts != nullptr;
        const size_t before = options->size();
        const size_t oldest = location.is_counter ? location.messages.size() - 1 : 0;
        for (size_t i = location.messages.size(); i-- > oldest;) {
            Message* message = location.messages[i];
            if (message->version < thread.now.version[request.location]) break;
            if (is_wait and not request.accepts(request.context, message->value)) continue;
            options->push_back({&thread, message, false});
        }
        if (is_wait and options->size() > before and not is_void_ and
            not request.accepts(request.context, location.messages.back()->value)) {
            running_ = &thread;
            describe_failure(location, "has gone past what is waited for, which may be missed");
        }
    }

    void apply(const Option& option) {
        Thread& thread = *option.thread;
        const Request& request = thread.request;
        thread.has_request = false;
        ++steps_;
        thread.timed_out = request.op == Op::kLoad and option.message == nullptr;
        thread.escaped = option.escapes;
        if (thread.timed_out) {
            is_void_ = true;
            --timeouts_left_;
            thread.reply = 0;
            log_.push_back({thread.id, -1, request.op, 0});
            return;
        }
        const int at = option.escapes ? request.escape : request.location;
        Location& location = locations_[at];
        if (not is_void_ and thread.now.version[at] < location.last_plain) {
            running_ = &thread;
            describe_failure(location, "is used before it is known to be reset");
            return;
        }
        if (request.op == Op::kLoad) {
            const Message& message = *option.message;
            mark_read(thread, at);
            thread.now.version[at] = std::max(thread.now.version[at], message.version);
            location.is_complete |= location.is_counter and request.accepts != nullptr;
            const bool is_near = message.rank == thread.rank;
            const View& told = is_near ? message.gpu : message.system;
            if (option.escapes or
                (request.acquires and (is_near or request.scope == Scope::kSystem))) {
                join(thread.now, told);
            } else {
                join(is_near ? thread.acquire_gpu : thread.acquire_system, told);
            }
            thread.reply = message.value;
            log_.push_back({thread.id, at, request.op, message.value});
            return;
        }
        const Message& last = *location.messages.back();
        const uint64_t before = last.value;
        uint64_t value = request.value;
        if (request.op == Op::kAdd) value = uint32_t(before + request.value);
        if (request.op == Op::kOr) value = before | request.value;
        if (request.op == Op::kSwap and before != request.expected) value = before;
        View& gpu = scratch_[0];
        View& system = scratch_[1];
        copy(gpu, request.releases ? thread.now : thread.release_gpu);
        copy(system, request.releases and request.scope == Scope::kSystem ? thread.now
                                                                          : thread.release_system);
        if (request.op != Op::kStore) {
            join(gpu, last.gpu);
            join(system, last.system);
            if (request.returns) {
                join(last.rank == thread.rank ? thread.acquire_gpu : thread.acquire_system,
                     last.rank == thread.rank ? last.gpu : last.system);
            }
            location.is_counter |= request.op == Op::kAdd;
        }
        if (location.is_complete and not is_void_) {
            running_ = &thread;
            describe_failure(location, "is counted on after somebody took it for complete");
            return;
        }
        learn(thread, request);
        ++location.version;
        put(location, value, thread.rank, &gpu, &system);
        thread.now.version[at] = location.version;
        thread.reply = before;
        log_.push_back({thread.id, at, request.op, value});
    }

    // One run; `choose` gets the number of choices, and ends the run with -1.
    template <class Choose>
    bool run(Choose choose) {
        reset();
        std::vector<Option> options;
        Thread* last = nullptr;
        for (;;) {
            for (Thread* thread : threads_) {
                while (not thread->is_finished and not thread->is_joining and
                       not thread->has_request) {
                    if (not resume(*thread)) return false;
                }
            }
            // A join may have let a thread go on that came earlier in the list.
            bool is_settled = true, is_finished = true;
            for (Thread* thread : threads_) {
                is_finished &= thread->is_finished;
                is_settled &= thread->is_finished or thread->is_joining or thread->has_request;
            }
            if (is_finished) return true;
            if (not is_settled) continue;
            options.clear();
            last_choice_ = -1;
            for (Thread* thread : threads_) {
                if (not is_reducing_ or not thread->has_request or not commutes(*thread)) continue;
                collect(*thread, &options);
                if (not options.empty()) break;
            }
            if (not failure_.empty()) return false;
            if (not options.empty()) {
                if (not step(options, choose)) return failure_.empty();
                continue;
            }
            for (Thread* thread : threads_) {
                if (not thread->has_request) continue;
                if (thread == last) last_choice_ = int(options.size());
                collect(*thread, &options);
                if (thread == last and last_choice_ == int(options.size())) last_choice_ = -1;
            }
            if (not failure_.empty()) return false;
            // Time passes until a wait has had enough; that has to suffice for all.
            if (options.empty() and has_timeouts_ and not is_void_) {
                for (Thread* thread : threads_) {
                    if (thread->has_request and thread->request.escape >= 0) {
                        options.push_back({thread, nullptr, false});
                    }
                }
            }
            if (options.empty()) {
                failure_ = "nobody can go on:";
                for (Thread* thread : threads_) {
                    if (thread->is_finished) continue;
                    failure_ +=
                        " " + thread->name + " (" +
                        (thread->is_joining ? "joins its launch or CTA" : thread->request.what) +
                        ")";
                }
                return false;
            }
            if (not step(options, choose)) return failure_.empty();
            last = chosen_;
        }
    }

    // False if the run ends here.
    template <class Choose>
    bool step(const std::vector<Option>& options, Choose& choose) {
        const int choice = choose(int(options.size()));
        if (choice < 0) return false;
        chosen_ = options[choice].thread;
        apply(options[choice]);
        return failure_.empty();
    }

    // Everything that what can still happen depends on. Versions count back from the latest, and
    // what every thread knows already is left out: to be told of it again changes nothing.
    uint64_t state() {
        const size_t count = locations_.size();
        uint16_t latest[kMaxLocations], common[kMaxLocations], unknown_readers[kMaxLocations];
        for (size_t i = 0; i < count; ++i) {
            latest[i] = common[i] = locations_[i].version;
            uint16_t readers = locations_[i].readers;
            for (const Thread* thread : threads_) {
                if (thread->is_finished) continue;
                common[i] = std::min(common[i], thread->now.version[i]);
                readers &= readers_in(thread->now, i);
            }
            unknown_readers[i] = locations_[i].readers & ~readers;
        }
        uint64_t all = 7 + uint64_t(timeouts_left_) * 2 + is_void_;
        static const View nothing{};
        auto add_view = [&](const View& view, const View& known) {
            uint64_t sum = 0;
            for (size_t i = 0; i < count; ++i) {
                const uint16_t floor = last_plain_[i];
                const uint16_t version =
                    std::max(std::max(view.version[i], known.version[i]), common[i]);
                const uint16_t told = view.version[i] >= floor ? view.readers[i] : 0;
                const uint16_t own = known.version[i] >= floor ? known.readers[i] : 0;
                const uint32_t readers = told & ~own & unknown_readers[i];
                sum +=
                    uint64_t(uint32_t(uint16_t(latest[i] - version)) << 16 | readers) * weights_[i];
            }
            all = hash(all, sum);
        };
        for (const Thread* thread : threads_) {
            all = hash(all, thread->history);
            all = hash(all, uint64_t(thread->is_finished) | uint64_t(thread->is_joining) << 1 |
                                uint64_t(thread->has_request) << 2);
            if (thread->is_finished) continue;
            if (thread->has_request) {
                all = hash(all,
                           uint64_t(thread->request.op) << 32 | uint64_t(thread->request.location));
            }
            add_view(thread->now, nothing);
            add_view(thread->release_gpu, nothing);
            add_view(thread->release_system, nothing);
            add_view(thread->acquire_gpu, thread->now);
            add_view(thread->acquire_system, thread->now);
            for (size_t i = 0; i < count; ++i) {
                if (thread->async.version[i] != locations_[i].version) {
                    all = hash(
                        all, i << 32 | uint64_t(locations_[i].version - thread->async.version[i]));
                }
            }
            for (int copy : thread->copies) all = hash(all, uint64_t(copy));
        }
        for (size_t i = 0; i < count; ++i) {
            const Location& location = locations_[i];
            all = hash(all, unknown_readers[i]);
            all = hash(all, location.is_complete);
            if (location.messages.empty()) {
                all = hash(all, location.value);
                continue;
            }
            for (const Message* message : location.messages) {
                if (message != location.messages.back() and
                    (location.is_counter or message->version < readable_from(location, i))) {
                    continue;
                }
                all = hash(all, message->value);
                all = hash(all, uint64_t(location.version - message->version) << 8 |
                                    uint64_t(message->rank));
                add_view(message->gpu, nothing);
                add_view(message->system, nothing);
            }
        }
        return all;
    }

    uint16_t readers_in(const View& view, size_t i) const {
        return view.version[i] >= last_plain_[i] ? view.readers[i] : 0;
    }

    // Heap words are read by their owner alone, the words of a GPU by nobody else.
    uint16_t readable_from(const Location& location, size_t i) const {
        uint16_t from = uint16_t(-1);
        for (const Thread* thread : threads_) {
            if (thread->rank != location.rank or thread->is_finished) continue;
            from = std::min(from, thread->now.version[i]);
        }
        return from;
    }

    std::vector<Word> words_;
    std::vector<Location> locations_;  // each is a word that some run has used
    std::vector<Thread*> threads_;
    std::vector<JoinState> joins_;
    std::vector<Message*> messages_;
    size_t messages_used_ = 0;
    uint16_t last_plain_[kMaxLocations] = {};
    View scratch_[2] = {};
    uint64_t weights_[kMaxLocations];
    Thread* running_ = nullptr;
    Thread* chosen_ = nullptr;
    jmp_buf scheduler_;
    uint64_t steps_ = 0, ahead_ = 0;
    int early_timeouts_ = 0, timeouts_left_ = 0;
    bool has_timeouts_ = false, is_void_ = false;
    int last_choice_ = -1, stubbornness_ = 0;
    bool is_complete_ = false, is_reducing_ = false, has_learnt_ = false;
    std::vector<Habit> habits_[kMaxThreads][kMaxStages];
    int num_stages_ = 0;
    std::string failure_;
    std::vector<Event> log_;
};

extern template class EngineTemplate<void>;
using Engine = EngineTemplate<void>;

}  // namespace explorer
