// explore NAME MAX_STATES            every order of a small scenario, or as many as that
// explore walk RUNS SEED             random orders of larger ones, with random routings
// explore late RUNS SEED             the same, with ranks that are late or absent
//
// Prints one line of JSON; exits with 1 and the way there if a rule broke.
#include <cstdlib>

#include "explorer.h"
#include "scenarios.h"

extern template class protocol_test::Agent<explorer::Atomics>;  // explored_agent.cc

namespace {

using namespace protocol_test;

struct Setup {
    explorer::Engine engine;
    World<explorer::Atomics> world;
    std::vector<Agent<explorer::Atomics>*> agents;

    Setup(const Sizes& sizes, const std::vector<Launch>& launches) : world{sizes, launches, {}} {
        for (int rank = 0; rank < sizes.ranks; ++rank) {
            world.ranks.push_back(new Memory<explorer::Atomics>(sizes, rank));
        }
        static const char* const roles[] = {"dispatch", "tiles", "reduce"};
        for (int rank = 0; rank < sizes.ranks; ++rank) {
            for (int cta = 0; cta < sizes.ctas; ++cta) {
                for (int role = 0; role < sizes.agents; ++role) {
                    std::string name = "rank " + std::to_string(rank);
                    if (sizes.ctas > 1) name += " CTA " + std::to_string(cta);
                    if (sizes.agents > 1) name += std::string(" ") + roles[role];
                    engine.add_thread(rank, name, [this, rank, cta, role] {
                        Agent<explorer::Atomics>(world, rank, cta, role).run();
                    });
                }
            }
        }
    }
};

int report(const char* name,
           const Setup& setup,
           bool ok,
           const explorer::Statistics& statistics,
           uint64_t launches) {
    std::printf(
        "{\"scenario\": \"%s\", \"ok\": %s, \"complete\": %s, \"states\": %llu, \"runs\": %llu, "
        "\"steps\": %llu, \"ahead\": %llu, \"threads\": %d, \"launches\": %llu, "
        "\"failure\": \"%s\"}\n",
        name, ok ? "true" : "false", setup.engine.is_complete() ? "true" : "false",
        (unsigned long long)statistics.states, (unsigned long long)statistics.runs,
        (unsigned long long)statistics.steps, (unsigned long long)statistics.ahead,
        setup.world.sizes.ranks * setup.world.sizes.ctas * setup.world.sizes.agents,
        (unsigned long long)launches, setup.engine.failure().c_str());
    if (not ok) std::fprintf(stderr, "%s", setup.engine.trace().c_str());
    return ok ? 0 : 1;
}

int walk(const char* name, uint64_t runs, uint64_t seed, bool is_late) {
    Random random(seed);
    explorer::Statistics sum;
    uint64_t launches = 0;
    constexpr uint64_t kRunsEach = 20;
    for (uint64_t done = 0;; done += kRunsEach) {
        Sizes s{};
        s.ranks = 1 + random.below(3);
        s.ctas = 1 + random.below(2);
        s.agents = 1 + random.below(s.ranks * s.ctas > 4 ? 2 : 3);
        s.experts = s.ranks * (1 + random.below(2));
        s.topk = 1 + random.below(s.experts < 3 ? s.experts : 3);
        s.tokens = 1 + random.below(3);
        s.block_rows = 2, s.warps = 1 + random.below(2), s.group_units = 1 + random.below(2);
        s.lag = 1 + s.group_units % 2, s.is_mixed = done / kRunsEach % 2 == 1;
        s.n_tiles[0] = 1 + random.below(2), s.n_tiles[1] = 1 + random.below(2);
        s.rows_per_ticket = 1 + random.below(3), s.chunk_tokens = 1 + random.below(2);
        s.unit_rows = 1 + random.below(3), s.finishers_combine = random.below(2) == 0;
        s.has_slots = random.below(2) == 0, s.idle_looks = kManyLooks;
        if (s.ranks == 1) {
            s.row_access = RowAccess(random.below(4));
        } else if (random.below(2) == 0) {
            s.row_access = RowAccess::kOwnInPlace;
        }
        s.cuts_groups = s.ranks == 1 and done / kRunsEach % 3 == 2;
        s.has_own_routes = s.ranks == 1 and not s.has_slots and random.below(2) == 0;
        s.quantizes = s.row_access < RowAccess::kInPlaceUntilCopied and random.below(3) == 0;
        s.plans_few = s.has_own_routes and not s.quantizes and random.below(2) == 0;
        if (is_late) {  // few threads, so that what is rare is met
            s.ranks = 2 + random.below(2), s.agents = 1, s.experts = s.ranks;
            s.topk = 1 + random.below(2), s.tokens = 1, s.n_tiles[0] = s.n_tiles[1] = 1;
            s.rows_per_ticket = s.unit_rows = 4, s.row_access = RowAccess::kCopied;
            s.has_own_routes = s.plans_few = false;
        }
        auto sequence = random_launches(s, is_late ? 1 : 4, random());
        if (is_late and random.below(4) == 0) {
            sequence[random.below(int(sequence.size()))].absent_rank = random.below(s.ranks);
        }
        auto* setup = new Setup(s, sequence);
        if (is_late) setup->engine.allow_timeouts(1);
        explorer::Statistics statistics;
        const bool ok = setup->engine.walk(kRunsEach, random(), &statistics);
        sum.runs += statistics.runs;
        sum.steps += statistics.steps;
        sum.ahead += statistics.ahead;
        launches += sequence.size() * statistics.runs;
        if (not ok or done + kRunsEach >= runs) return report(name, *setup, ok, sum, launches);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const uint64_t bound = std::strtoull(argv[2], nullptr, 10);
    const bool is_late = std::strcmp(argv[1], "late") == 0;
    if (is_late or std::strcmp(argv[1], "walk") == 0) {
        return walk(argv[1], bound, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1, is_late);
    }
    for (const Scenario& scenario : small_scenarios()) {
        if (std::strcmp(scenario.name, argv[1]) != 0) continue;
        auto* setup = new Setup(scenario.sizes, scenario.launches);
        if (scenario.early_timeouts >= 0) setup->engine.allow_timeouts(scenario.early_timeouts);
        explorer::Statistics statistics;
        const bool ok = setup->engine.explore(bound, &statistics);
        return report(scenario.name, *setup, ok, statistics, scenario.launches.size());
    }
    std::fprintf(stderr, "no scenario '%s'\n", argv[1]);
    return 2;
}
