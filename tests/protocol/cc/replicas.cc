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
    return {
        // A replica in each launch, then none, then one again.
        {"forwards", two, {{false, {{-1}, {0}}}, {false, {{-1}, {0}}}, {false, {{1}, {-1}}}}},
        {"training", two, {{false, {{-1}, {0}}}, {true, {{-1}, {0}}}, {true, {{-1}, {0}}}}},
        // The last rank has a replica, then none, so that it may be one launch ahead of its owner.
        {"one_ahead", two, {{true, {{-1}, {0}}}, {true, {{-1}, {-1}}}}},
        // The slot of the last rank has another owner in each launch; the owner before may be late.
        {"owners_change", three, {{true, {{-1}, {-1}, {0}}}, {true, {{-1}, {-1}, {1}}}}},
        // An expert on all ranks, whose gradients are added in the order of ranks.
        {"everywhere", three, {{true, {{-1}, {0}, {0}}}}},
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
