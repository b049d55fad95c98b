// order MOST: the order of tiles, for all sizes up to MOST.
//
// Prints one line of JSON; exits with 1 if a rule broke.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flashmoe/protocol/order.h"

namespace {

namespace protocol = flashmoe::protocol;

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

int check(int most) {
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

int main(int argc, char** argv) { return argc == 2 ? check(std::atoi(argv[1])) : 2; }
