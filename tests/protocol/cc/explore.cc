// explore NAME MAX_STATES            every order of a small scenario, or as many as that
// explore walk RUNS SEED             random orders of larger ones, with random routings
// explore late RUNS SEED             the same, with ranks that are late or absent
// explore order MOST                 the order of tiles, for all sizes up to MOST
//
// Prints one line of JSON; exits with 1 and the way there if a rule broke.
#include <cstdlib>

#include "explorer.h"
#include "scenarios.h"

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

// Every tile has one ticket, and GEMM1 of a unit has larger ones than all of its GEMM0: a wait for
// tiles is a wait for those who came before.
template <class UnitsBefore>
const char* fault_of(const protocol::TileOrder& order, UnitsBefore units_before) {
    protocol::TileWalk<UnitsBefore> walk(order, units_before);
    const int units = order.num_units, (&n_tiles)[2] = order.num_n_tiles;
    const int count = units * (n_tiles[0] + n_tiles[1]);
    std::vector<int> done(units), seen(count);
    for (int ticket = 0; ticket < count; ++ticket) {
        const protocol::TilePlace place = walk.at(ticket);
        const bool is_tile = place.gemm >= 0 and place.gemm < 2 and place.unit >= 0 and
                             place.unit < units and place.n >= 0 and place.n < n_tiles[place.gemm];
        if (not is_tile) return "no tile";
        const int first = place.gemm * units * n_tiles[0];
        if (seen[first + place.unit * n_tiles[place.gemm] + place.n]++) {
            return "a tile has two tickets";
        }
        if (place.gemm == 0) ++done[place.unit];
        if (place.gemm == 1 and done[place.unit] != n_tiles[0]) {
            return "GEMM1 comes before its GEMM0";
        }
    }
    if (walk.at(count).gemm != protocol::TilePlace::kNone) return "the order has no end";
    return nullptr;
}

// Within a step of both products that is mixed, each product has its share of any tickets that
// follow one another, to within one.
const char* fault_of_mix(const protocol::TileOrder& order) {
    const int gemm0 = order.group_units * order.num_n_tiles[0];
    const int gemm1 = order.group_units * order.num_n_tiles[1], in_step = gemm0 + gemm1;
    const auto units_before = [&](int group) { return order.units_before(group); };
    protocol::TileWalk<decltype(units_before)> walk(order, units_before);
    int found = 0;
    for (int i = 0; i < in_step; ++i) {  // the first step that has GEMM1
        found += walk.at(order.lag * gemm0 + i).gemm;
        if (std::abs(found * in_step - (i + 1) * gemm1) >= in_step) return "products are apart";
    }
    return nullptr;
}

// Groups that are cut at experts' ends: none is empty or too large, an expert with enough units has
// groups of its own, and their tiles have an order. `tickets` counts them.
const char* fault_of_cut(const std::vector<int>& ends, int least, int most, long& tickets) {
    std::vector<int> groups;
    bool are_in_order = true;
    protocol::cut_groups(
        int(ends.size()), least, most, [&](int expert) { return ends[expert]; },
        [&](int group, int unit) {
            are_in_order &= group == int(groups.size());
            groups.push_back(unit);
        });
    const int units = ends.back(), count = int(groups.size()) - protocol::kMostLag - 1;
    if (not are_in_order or count < 0 or groups[0] != 0) return "groups are not in order";
    for (int group = 0; group < count; ++group) {
        const int size = groups[group + 1] - groups[group];
        if (size < 1 or size > most) return "a group is empty or too large";
    }
    for (int i = 0; i <= protocol::kMostLag; ++i) {
        if (groups[count + i] != units) return "groups have no end";
    }
    for (size_t expert = 0; expert < ends.size(); ++expert) {
        const int own = ends[expert] - (expert == 0 ? 0 : ends[expert - 1]);
        const bool is_end = std::count(groups.begin(), groups.end(), ends[expert]) > 0;
        if (own >= least and not is_end) return "a group has the rest of an expert and others";
    }
    const int lag = 1 + (units + least + most) % protocol::kMostLag;
    const protocol::TileOrder order{units, 1, lag, least % 2 == 0, {1 + most % 3, 1 + units % 3}};
    tickets += order.num_tickets();
    return fault_of(order, [&](int group) { return groups.at(group); });
}

int order(int most) {
    long tickets = 0;
    const auto fail = [](const char* fault) {
        std::printf("{\"scenario\": \"order\", \"failure\": \"%s\"}\n", fault);
        return 1;
    };
    struct Mixed {
        bool keeps_nothing;
        int gemm0_stages, gemm1_stages;
        bool is_mixed;
    };
    for (const Mixed& one :
         {Mixed{true, 12, 1, true}, Mixed{true, 12, 4, true}, Mixed{true, 32, 4, true},
          Mixed{true, 33, 4, false}, Mixed{true, 64, 4, false}, Mixed{true, 12, 5, false},
          Mixed{true, 32, 8, false}, Mixed{false, 12, 1, false}, Mixed{false, 32, 4, false}}) {
        if (protocol::mixes_products(one.keeps_nothing, one.gemm0_stages, one.gemm1_stages) !=
            one.is_mixed) {
            return fail("the wrong products are mixed");
        }
    }
    struct Cut {
        bool is_alone, is_in_fp8, may_mix;
        int64_t mean_rows;
        bool is_cut;
    };
    for (const Cut& one : {Cut{true, false, false, 513, true}, Cut{true, false, false, 512, false},
                           Cut{false, false, false, 513, false}, Cut{true, true, false, 513, false},
                           Cut{true, false, true, 513, false}}) {
        if (protocol::cuts_groups(one.is_alone, one.is_in_fp8, one.may_mix, one.mean_rows, 128) !=
            one.is_cut) {
            return fail("the wrong groups are cut");
        }
    }
    for (const bool is_backward : {false, true}) {
        for (const int stages : {16, 17}) {
            if (protocol::follows_cut_groups(is_backward, stages) ==
                (is_backward and stages == 16)) {
                return fail("the wrong passes follow cut groups");
            }
        }
    }
    for (int units = 0; units <= most; ++units) {
        for (int group = 1; group <= most; ++group) {
            for (int n = 2; n <= 2 * most * most + 1; ++n) {
                const int lag = 1 + n % 2;
                const int n_tiles[2] = {1 + n / 2 % most, 1 + n / 2 / most % most};
                for (const bool is_mixed : {false, true}) {
                    const protocol::TileOrder order{
                        units, group, lag, is_mixed, {n_tiles[0], n_tiles[1]}};
                    const bool has_whole_step = is_mixed and units >= (lag + 1) * group;
                    const char* fault =
                        fault_of(order, [&](int group) { return order.units_before(group); });
                    if (fault == nullptr and has_whole_step) fault = fault_of_mix(order);
                    if (fault != nullptr) return fail(fault);
                    tickets += order.num_tickets();
                }
            }
        }
    }
    for (int sizes = 0; sizes < most * most * most; ++sizes) {  // units of each of three experts
        const int first = sizes % most, second = sizes / most % most, third = sizes / most / most;
        for (int least = 1; least <= most / 2; ++least) {
            for (int largest = least; largest <= most; ++largest) {
                const std::vector<int> ends{first, first + second, first + second + third};
                const char* fault = fault_of_cut(ends, least, largest, tickets);
                if (fault != nullptr) return fail(fault);
            }
        }
    }
    for (int num_m = 1; num_m <= 40; ++num_m) {
        for (int num_n = 1; num_n <= 40; ++num_n) {
            const protocol::BandOrder order{num_m, num_n};
            std::vector<int> seen(num_m * num_n);
            for (int index = 0; index < num_m * num_n; ++index, ++tickets) {
                const auto [m, n] = order.at(index);
                const bool is_tile = m >= 0 and m < num_m and n >= 0 and n < num_n;
                if (not is_tile or seen[n * num_m + m]++) {
                    return fail("a weight gradient's tile is lost");
                }
            }
        }
    }
    std::printf("{\"scenario\": \"order\", \"tickets\": %ld}\n", tickets);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return 2;
    const uint64_t bound = std::strtoull(argv[2], nullptr, 10);
    if (std::strcmp(argv[1], "order") == 0) return order(int(bound));
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
