// circle SCENARIO RESERVED CTAS QUEUES: kernels that wait for each other's peers and share the
// multiprocessors of their GPUs, started in every order that these allow.
//
// A kernel begins on a GPU once all of its CTAs find room there, and ends everywhere once it has
// begun on all of its GPUs: a launch needs its host's ranks, an exchange its rail's, a reduction
// its replicas'. Kernels of one stream follow one another. With one hardware queue, a kernel begins
// only behind all that its GPU's host has issued before; with several, in any order. Whether GPUs
// do so behind a launch that waits for room is measured by tests/gpu/test_queues.py.
//
// Scenarios, on two hosts of two GPUs:
//   overlap   a launch within each host, beside exchanges of CTAS CTAs along both rails
//   reduce    the same launches, beside a reduction of gradients of CTAS CTAs over all GPUs
//   both      launches, exchanges of two CTAs, and such a reduction
//
// Prints one line of JSON; exits with 1 if some order ends in a circle of waits, which it shows.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kGpus = 4, kSms = 132;

struct Kernel {
    const char* name;
    unsigned gpus;  // a mask
    int ctas;
    int stream;
};

struct State {
    std::vector<unsigned> begun;  // masks of GPUs, by kernel
    bool operator<(const State& other) const { return begun < other.begun; }
};

class Search {
 public:
    Search(std::vector<Kernel> kernels, bool has_one_queue)
        : kernels_(std::move(kernels)), has_one_queue_(has_one_queue) {}

    // Whether every order ends with all kernels ended.
    bool run(const State& state) {
        if (not seen_.insert(state).second) return true;
        bool is_stuck = true, is_done = true;
        for (int kernel = 0; kernel < int(kernels_.size()); ++kernel) {
            is_done = is_done and has_ended(state, kernel);
            for (int gpu = 0; gpu < kGpus; ++gpu) {
                if (not can_begin(state, kernel, gpu)) continue;
                is_stuck = false;
                State next = state;
                next.begun[kernel] |= 1u << gpu;
                if (not run(next)) return false;
            }
        }
        if (is_stuck and not is_done) tell(state);
        return is_done or not is_stuck;
    }

    size_t states() const { return seen_.size(); }

 private:
    bool has_ended(const State& state, int kernel) const {
        return state.begun[kernel] == kernels_[kernel].gpus;
    }

    bool can_begin(const State& state, int kernel, int gpu) const {
        const Kernel& own = kernels_[kernel];
        const unsigned bit = 1u << gpu;
        if (not(own.gpus & bit) or (state.begun[kernel] & bit)) return false;
        int held = 0;
        for (int other = 0; other < int(kernels_.size()); ++other) {
            const Kernel& its = kernels_[other];
            if (not(its.gpus & bit)) continue;
            const bool has_begun = state.begun[other] & bit;
            if (other < kernel) {
                if (has_one_queue_ and not has_begun) return false;
                if (its.stream == own.stream and not has_ended(state, other)) return false;
            }
            if (has_begun and not has_ended(state, other)) held += its.ctas;
        }
        return held + own.ctas <= kSms;
    }

    void tell(const State& state) const {
        for (int kernel = 0; kernel < int(kernels_.size()); ++kernel) {
            if (has_ended(state, kernel)) continue;
            std::fprintf(stderr, "%s has begun on", kernels_[kernel].name);
            for (int gpu = 0; gpu < kGpus; ++gpu) {
                if (state.begun[kernel] >> gpu & 1) std::fprintf(stderr, " %d", gpu);
            }
            std::fprintf(stderr, " and waits for the others\n");
        }
    }

    std::vector<Kernel> kernels_;
    bool has_one_queue_;
    std::set<State> seen_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: circle overlap|reduce|both RESERVED CTAS QUEUES\n");
        return 2;
    }
    const std::string scenario = argv[1];
    const int reserved = std::atoi(argv[2]), ctas = std::atoi(argv[3]);
    const bool has_one_queue = std::atoi(argv[4]) == 1;
    const bool has_exchanges = scenario != "reduce", has_reduction = scenario != "overlap";
    const int exchange = scenario == "overlap" ? ctas : 2;
    // In the order of issue, twice: the second launches follow the exchanges that bring their rows.
    std::vector<Kernel> kernels;
    for (int round = 0; round < 2; ++round) {
        if (has_exchanges) {
            kernels.push_back({"the exchange of rail 0", 0b0101, exchange, 1});
            kernels.push_back({"the exchange of rail 1", 0b1010, exchange, 1});
        }
        kernels.push_back({"the launch of host 0", 0b0011, kSms - reserved, 0});
        kernels.push_back({"the launch of host 1", 0b1100, kSms - reserved, 0});
        if (has_reduction) kernels.push_back({"the reduction", 0b1111, ctas, 2});
    }
    Search search(kernels, has_one_queue);
    const bool ok = search.run({std::vector<unsigned>(kernels.size(), 0)});
    std::printf("{\"scenario\": \"%s\", \"ok\": %s, \"states\": %zu}\n", scenario.c_str(),
                ok ? "true" : "false", search.states());
    return ok ? 0 : 1;
}
