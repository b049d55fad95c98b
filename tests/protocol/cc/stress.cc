// stress LAUNCHES SEED [BOUND]: virtual ranks on host threads, random routings and delays, to be
// compiled with ThreadSanitizer. A wait of more than BOUND seconds is a hang.
// stress race: two threads and a word that nothing orders, to show that races are reported.
//
// Prints one line of JSON; exits with 3 if a rule broke, with ThreadSanitizer's 66 after a race.
#include <memory>

#include "host_atomics.h"
#include "scenarios.h"

extern template class protocol_test::Agent<host::Atomics>;  // stressed_agent.cc

namespace {

using namespace protocol_test;

#if not defined(__SANITIZE_THREAD__)
#error "compile with -fsanitize=thread"
#endif

int race() {
    uint64_t word = 0;
    std::thread other([&] { word = 1; });
    word = 2;
    other.join();
    return 0;
}

uint64_t run(const Sizes& sizes, const std::vector<Launch>& launches, uint64_t seed) {
    World<host::Atomics> world{sizes, launches, {}};
    std::vector<std::unique_ptr<Memory<host::Atomics>>> memory;
    for (int rank = 0; rank < sizes.ranks; ++rank) {
        memory.push_back(std::make_unique<Memory<host::Atomics>>(sizes, rank));
        world.ranks.push_back(memory.back().get());
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < sizes.ranks; ++rank) {
        for (int cta = 0; cta < sizes.ctas; ++cta) {
            for (int role = 0; role < sizes.agents; ++role) {
                const uint64_t own_seed = seed * 1000 + threads.size();
                threads.emplace_back([&world, rank, cta, role, own_seed] {
                    host::Delays::seed(own_seed);
                    Agent<host::Atomics>(world, rank, cta, role).run();
                });
            }
        }
    }
    for (std::thread& thread : threads) thread.join();
    return threads.size();
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 2 and std::strcmp(argv[1], "race") == 0) return race();
    if (argc < 3) return 2;
    const int wanted = std::atoi(argv[1]);
    const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    if (argc > 3) host::Atomics::bound() = std::chrono::seconds(std::atoi(argv[3]));
    int launches = 0, groups = 0;
    size_t most_threads = 0;
    Random random(seed);
    while (launches < wanted) {
        Sizes s{};
        s.ranks = 1 + random.below(kMaxRanks);
        s.ctas = 1 + random.below(2);
        s.agents = 1 + random.below(3);
        s.experts = s.ranks * (1 + random.below(3));
        s.topk = 1 + random.below(s.experts < kMaxTopk ? s.experts : kMaxTopk);
        s.tokens = 1 + random.below(12);
        s.block_rows = 1 + random.below(4), s.warps = 1 + random.below(2);
        s.group_units = 1 + random.below(3), s.lag = 1 + s.group_units % 2;
        s.is_mixed = groups % 2 == 1;
        s.n_tiles[0] = 1 + random.below(3), s.n_tiles[1] = 1 + random.below(3);
        s.rows_per_ticket = 1 + random.below(4), s.chunk_tokens = 1 + random.below(4);
        s.unit_rows = 1 + random.below(4), s.finishers_combine = random.below(2) == 0;
        s.has_slots = random.below(2) == 0, s.idle_looks = kManyLooks;
        if (s.ranks == 1) {
            s.row_access = RowAccess(random.below(4));
        } else if (random.below(2) == 0) {
            s.row_access = RowAccess::kOwnInPlace;
        }
        s.has_own_routes = s.ranks == 1 and not s.has_slots and random.below(2) == 0;
        s.quantizes = s.row_access < RowAccess::kInPlaceUntilCopied and random.below(3) == 0;
        s.plans_few = s.has_own_routes and not s.quantizes and random.below(2) == 0;
        const auto sequence = random_launches(s, 20, random());
        const size_t threads = run(s, sequence, random());
        most_threads = threads > most_threads ? threads : most_threads;
        launches += int(sequence.size());
        ++groups;
    }
    std::printf("{\"launches\": %d, \"groups\": %d, \"threads\": %zu}\n", launches, groups,
                most_threads);
    return 0;
}
