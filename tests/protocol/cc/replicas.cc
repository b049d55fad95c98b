// replicas NAME MAX_STATES   every order of a scenario of replicas, or as many as that
//
// Prints one line of JSON; exits with 1 and the way there if a rule broke.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "explorer.h"
#include "replicas.h"

namespace {

using namespace protocol_test;

struct ReplicaScenario {
    const char* name;
    ReplicaSizes sizes;
    std::vector<ReplicaLaunch> launches;
};

std::vector<ReplicaScenario> scenarios() {
    const ReplicaSizes two{2, 1, 1, 2}, three{3, 1, 1, 1};
    constexpr ReplicaKind forward = ReplicaKind::kForward, backward = ReplicaKind::kBackward,
                          settle = ReplicaKind::kSettle;
    const auto on = [](int expert) { return std::vector<std::vector<int>>{{-1}, {expert}}; };
    const auto on_last = [](int expert) {
        return std::vector<std::vector<int>>{{-1}, {-1}, {expert}};
    };
    return {
        // A replica in each launch, then none, then one again.
        {"forwards", two, {{forward, on(0)}, {forward, on(0)}, {forward, {{1}, {-1}}}}},
        {"training", two, {{forward, on(0)}, {backward, on(0)}, {backward, on(0)}}},
        // The last rank has a replica, then none, so that it may be one launch ahead of its owner.
        {"one_ahead", two, {{backward, on(0)}, {backward, on(-1)}}},
        // The slot of the last rank has another owner in each launch; the owner before may be late.
        {"owners_change", three, {{backward, on_last(0)}, {backward, on_last(1)}}},
        // An expert on all ranks, whose gradients are added in the order of ranks.
        {"everywhere", three, {{backward, {{-1}, {0}, {0}}}}},
        // Ahead of a forward that uses what was settled on, of one that leaves it unused, and of
        // one between which and its settlement another launch has come.
        {"ahead", two, {{forward, on(0)}, {settle, on(0)}, {forward, on(0)}}},
        {"ahead_again",
         two,
         {{settle, on(0)}, {forward, on(0)}, {settle, on(0)}, {forward, on(0)}}},
        {"ahead_unused", two, {{settle, on(0)}, {forward, on(-1)}, {forward, on(0)}}},
        {"ahead_of_another", two, {{settle, on(0)}, {backward, on(0)}, {forward, on(0)}}},
        {"owners_ahead",
         three,
         {{forward, on_last(0)}, {settle, on_last(1)}, {forward, on_last(1)}}},
    };
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    using Policy = explorer::Atomics;
    for (const ReplicaScenario& scenario : scenarios()) {
        if (std::strcmp(scenario.name, argv[1]) != 0) continue;
        auto* engine = new explorer::Engine;
        auto* world = new ReplicaWorld<Policy>{scenario.sizes, scenario.launches, {}};
        for (int rank = 0; rank < scenario.sizes.ranks; ++rank) {
            world->ranks.push_back(new ReplicaMemory<Policy>(scenario.sizes, rank));
        }
        for (int rank = 0; rank < scenario.sizes.ranks; ++rank) {
            for (const bool is_dispatch : {true, false}) {
                const std::string role = is_dispatch ? " dispatch" : " tiles";
                engine->add_thread(rank, "rank " + std::to_string(rank) + role,
                                   [=] { ReplicaAgent<Policy>(*world, rank, is_dispatch).run(); });
            }
        }
        explorer::Statistics statistics;
        const bool ok = engine->explore(std::strtoull(argv[2], nullptr, 10), &statistics);
        std::printf(
            "{\"scenario\": \"%s\", \"complete\": %s, \"states\": %llu, \"failure\": \"%s\"}\n",
            argv[1], engine->is_complete() ? "true" : "false",
            (unsigned long long)statistics.states, engine->failure().c_str());
        if (not ok) std::fprintf(stderr, "%s", engine->trace().c_str());
        return ok ? 0 : 1;
    }
    std::fprintf(stderr, "no scenario '%s'\n", argv[1]);
    return 2;
}
