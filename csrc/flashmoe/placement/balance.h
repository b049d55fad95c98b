// The placement with the least load of the busiest rank, in plain C++ for a launch and for the
// host. flashmoe_megatron/replicas/balance.py is the same program, says what it does and why, and
// has the same results bit for bit: a change of one is a change of both.
//
// A team of threads runs it together: its groups take ranks, and a group's lanes take experts. A
// Team has index() of size() threads, sync() of all; group() of num_groups(), lane() of kLanes in
// each; and for a group's lanes sum, max and min of an int, count of the lanes where something is
// true, and before, the number of such lanes with smaller indices. All threads return the same.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_PLACEMENT __host__ __device__ __forceinline__
#define FLASHMOE_PLACEMENT_LOOP _Pragma("unroll 1")  // what runs once is written for its size
#define FLASHMOE_PLACEMENT_UNROLLED _Pragma("unroll")
#else
#define FLASHMOE_PLACEMENT inline
#define FLASHMOE_PLACEMENT_LOOP
#define FLASHMOE_PLACEMENT_UNROLLED
#endif

namespace flashmoe::placement {

constexpr int kBlockRows = 128;
constexpr int kGoodPercent = 101;
constexpr int kStepsPerSlot = 4;
constexpr int kMaxRanks = 8;
constexpr int kMaxSlots = 64;  // spare ones of a rank
constexpr int kNumPreferences = 16;

struct Preference {
    int aim_percent;
    int reserve;
    int step;
};

FLASHMOE_PLACEMENT Preference preference(int number) {
    const int over = number / 4;  // 100, 101, 102 and 104 percent
    return {100 + (over == 3 ? 4 : over), 1 + number / 2 % 2, number % 2 ? -1 : 1};
}

// A group's proposal for a taker.
struct alignas(16) Proposal {
    static constexpr int kNew = 1 << 24;

    int rows;          // 0: there is no such move
    int key;           // the expert, and kNew if the taker has no slot yet that holds it
    uint32_t sources;  // a bit for each
    int place;         // the taker's among the ranks by ascending load
};

// A team's shared state besides the tables.
struct Loads {
    int load[kMaxRanks];  // rows of blocks plus rows
    int blocks[kMaxRanks];
    int total[kMaxRanks];
    int empty[kMaxRanks];
    int num_held[kMaxRanks];
    int16_t held[kMaxRanks][kMaxSlots];  // experts of other ranks that a rank has slots for
    Proposal proposals[2][kMaxRanks];    // [first or second][taker]
    int first_of[kMaxRanks][kMaxRanks];  // [taker][nth]: where counts of its nth source begin
    bool is_accepted;                    // a proposal
};

// One attempt, over memory of the caller's.
template <class Team>
struct Attempt {
    int* counts;  // [source rank][expert] routes
    int num_ranks;
    int num_experts;
    uint8_t* sources;  // [rank][expert], a bit for each source rank whose tokens it computes
    int* rows;         // [rank][expert]
    uint8_t* holders;  // [expert], a bit for each rank
    Loads* loads;
    int least_rows;  // that a replica takes
    Preference preference;
    int spare_slots;
    const int* hosts;
    uint32_t all_rows;
    int most_rows;
    int most_blocks;
    int aim;
    bool is_laid_out;  // tables are filled; without, every expert is at home
    int most;          // load of the busiest rank

    FLASHMOE_PLACEMENT static int num_blocks(int rows) {
        return (rows + kBlockRows - 1) / kBlockRows;
    }

    FLASHMOE_PLACEMENT static int load_of(int blocks, int rows) {
        return blocks * kBlockRows + rows;
    }

    // `given` is [rank][spare_slots], -1 after a rank's last replica, or null if they are to be
    // chosen. A source's routes to an expert are at `from`, with `stride` between sources; they are
    // copied to `counts`, which may be the same.
    FLASHMOE_PLACEMENT void begin(
        int slots, const int* given, Preference chosen, const int* from, int stride) {
        preference = chosen, spare_slots = slots, hosts = given, is_laid_out = false;
        const int local = num_experts / num_ranks;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
            int total = 0, blocks = 0;
            FLASHMOE_PLACEMENT_LOOP
            for (int i = Team::lane(); i < local; i += Team::kLanes) {
                const int expert = rank * local + i;
                int routes[kMaxRanks], sum = 0;
                // All loads are on their way at once.
                FLASHMOE_PLACEMENT_UNROLLED
                for (int source = 0; source < kMaxRanks; ++source) {
                    routes[source] = source < num_ranks ? from[source * stride + expert] : 0;
                }
                FLASHMOE_PLACEMENT_UNROLLED
                for (int source = 0; source < kMaxRanks; ++source) {
                    if (source < num_ranks) counts[source * num_experts + expert] = routes[source];
                    sum += routes[source];
                }
                rows[rank * num_experts + expert] = sum;
                total += sum;
                blocks += num_blocks(sum);
            }
            total = Team::sum(total);
            blocks = Team::sum(blocks);
            if (Team::lane() == 0) {
                loads->load[rank] = load_of(blocks, total);
                loads->blocks[rank] = blocks;
                loads->total[rank] = total;
            }
        }
        Team::sync();
        int total = 0;
        each_rank([&](int, int rank) { total += loads->total[rank]; });
        all_rows = uint32_t(Team::sum(total));
    }

    // Runs all steps; true if the load is even afterwards.
    FLASHMOE_PLACEMENT bool run() {
        const int most_steps = kStepsPerSlot * num_ranks * (spare_slots > 1 ? spare_slots : 1);
        FLASHMOE_PLACEMENT_LOOP
        for (int i = 0;; ++i) {
            const Spread now = spread();
            most = now.most;
            if (is_good(now)) return true;
            if (i == 0) lay_out();
            if (i == most_steps || !step(now)) return false;
        }
    }

    // Fills the tables, all experts being at home.
    FLASHMOE_PLACEMENT void lay_out() {
        const int local = num_experts / num_ranks;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
            FLASHMOE_PLACEMENT_LOOP
            for (int i = Team::lane(); i < local; i += Team::kLanes) {
                const int expert = rank * local + i;
                holders[expert] = uint8_t(1 << rank);
                FLASHMOE_PLACEMENT_LOOP
                for (int other = 0; other < num_ranks; ++other) {
                    const bool is_home = other == rank;
                    sources[other * num_experts + expert] =
                        uint8_t(is_home ? ~(~0u << num_ranks) : 0);
                    if (!is_home) rows[other * num_experts + expert] = 0;
                }
            }
            int num_held = 0;
            for (int slot = 0; hosts && slot < spare_slots; ++slot) {
                const int expert = hosts[rank * spare_slots + slot];
                if (expert < 0) break;
                if (Team::lane() == 0) loads->held[rank][num_held] = int16_t(expert);
                ++num_held;
            }
            FLASHMOE_PLACEMENT_LOOP
            for (int nth = Team::lane(); nth < num_ranks; nth += Team::kLanes) {
                const int source = rank + nth * preference.step;
                const int wrap = source < 0 ? num_ranks : source >= num_ranks ? -num_ranks : 0;
                loads->first_of[rank][nth] = (source + wrap) * num_experts;
            }
            if (Team::lane() == 0) {
                loads->empty[rank] = hosts ? 0 : spare_slots;
                loads->num_held[rank] = num_held;
            }
        }
        most_rows = most_blocks = 0;
        each_rank([&](int, int rank) {
            const int total = loads->total[rank], blocks = loads->blocks[rank];
            most_rows = total > most_rows ? total : most_rows;
            most_blocks = blocks > most_blocks ? blocks : most_blocks;
        });
        most_rows = Team::max(most_rows);
        most_blocks = Team::max(most_blocks);
        // Rows of a rank, rounded up; in two parts, since a long division takes long.
        const uint32_t hundreds = 100 * uint32_t(num_ranks);
        const uint32_t percent = uint32_t(preference.aim_percent);
        const uint32_t whole = all_rows / hundreds, left = all_rows - whole * hundreds;
        aim = int(whole * percent + (left * percent + hundreds - 1) / hundreds);
        is_laid_out = true;
        Team::sync();
        if (hosts) {
            for (int i = 0; Team::index() == 0 && i < num_ranks * spare_slots; ++i) {
                if (hosts[i] >= 0) holders[hosts[i]] |= uint8_t(1 << i / spare_slots);
            }
            Team::sync();
        }
    }

 private:
    static constexpr int kRanks =
        (kMaxRanks + Team::kLanes - 1) / Team::kLanes;  // a lane has so many

    // Calls `do_it` for each rank of a lane, with its number among them.
    template <class Do>
    FLASHMOE_PLACEMENT void each_rank(Do do_it) const {
        FLASHMOE_PLACEMENT_UNROLLED
        for (int nth = 0; nth < kRanks; ++nth) {
            const int rank = Team::lane() + nth * Team::kLanes;
            if (rank < num_ranks) do_it(nth, rank);
        }
    }

    // How loads are spread over the ranks: a lane's own, the most and the least, and all blocks.
    struct Spread {
        int load[kRanks];
        int most;
        int least;
        int blocks;
    };

    FLASHMOE_PLACEMENT Spread spread() const {
        Spread now{{}, 0, INT32_MAX, 0};
        each_rank([&](int nth, int rank) {
            const int load = loads->load[rank];
            now.load[nth] = load;
            now.most = load > now.most ? load : now.most;
            now.least = load < now.least ? load : now.least;
            now.blocks += loads->blocks[rank];
        });
        now.most = Team::max(now.most);
        now.least = Team::min(now.least);
        now.blocks = Team::sum(now.blocks);
        return now;
    }

    FLASHMOE_PLACEMENT bool is_good(const Spread& now) const {
        const int64_t sum = int64_t(uint32_t(now.blocks)) * kBlockRows + all_rows;
        const int64_t over = int64_t(uint32_t(now.most)) * uint32_t(num_ranks) - sum;
        // A row counts twice in a load: once itself, and once in its block.
        const int64_t uneven = sum * (kGoodPercent - 100);
        const int64_t unpaid = int64_t(200 * num_ranks) * least_rows;
        return over * 100 <= (uneven > unpaid ? uneven : unpaid);
    }

    // Takes pieces of one expert from the busiest rank to another; false if there is no move left.
    // There are two rounds: each proposes two moves for each taker, and one of them is accepted, or
    // the next round begins. Threads write after a sync only what they have read before it.
    FLASHMOE_PLACEMENT bool step(const Spread& now) {
        int busiest = kMaxRanks, idlest = -1;  // the first of equal ranks is the last to take
        each_rank([&](int nth, int rank) {
            if (now.load[nth] == now.most && rank < busiest) busiest = rank;
            if (now.load[nth] == now.least) idlest = rank;
        });
        const int giver = Team::min(busiest);
        idlest = Team::max(idlest);
        const int given = loads->total[giver], excess = given - aim;
        const int room = aim - loads->total[idlest], empty = loads->empty[idlest];
        const bool is_reserved = 1 <= empty && empty <= preference.reserve && loads->empty[giver] &&
                                 0 < excess && excess < room;
        const int reserved = is_reserved ? idlest : -1;
        FLASHMOE_PLACEMENT_LOOP
        for (int round = 0; round < 2; ++round) {
            const int num_first = round == 1 ? num_ranks : is_reserved;
            FLASHMOE_PLACEMENT_LOOP
            for (int i = Team::group(); i < num_ranks + num_first; i += Team::num_groups()) {
                const bool is_first = i >= num_ranks;
                const int taker = !is_first ? i : round == 0 ? idlest : i - num_ranks;
                if (taker == giver) continue;
                const int left = aim - loads->total[taker], more = given - loads->total[taker];
                const int fair = is_first ? room : excess < left ? excess : left;
                const int most = is_first ? more / 2 : more - 1;
                propose(giver, taker, round == 0 ? fair : most, now,
                        loads->proposals[!is_first][taker]);
            }
            Team::sync();
            if (Team::group() == 0) choose(giver, round, reserved);
            Team::sync();
            if (loads->is_accepted) return true;
        }
        return false;
    }

    // Proposes the move of most rows that has no more than `bound`; of equal ones the first without
    // a new slot. Scope: a group.
    FLASHMOE_PLACEMENT void propose(
        int giver, int taker, int bound, const Spread& now, Proposal& into) {
        const int local = num_experts / num_ranks, num_candidates = local + loads->num_held[giver];
        const bool has_slot = loads->empty[taker] > 0;
        const int load = loads->load[taker], most_moved = bound > 0 ? bound : 0;
        int place = 0;
        each_rank([&](int nth, int rank) {
            const int other = now.load[nth];
            place += (other < load) | ((other == load) & (rank > taker));
        });
        place = Team::sum(place);
        int first_of[kMaxRanks];
        FLASHMOE_PLACEMENT_UNROLLED
        for (int nth = 0; nth < kMaxRanks; ++nth) first_of[nth] = loads->first_of[taker][nth];
        int best_rows = 0, best_key = INT32_MAX;
        uint32_t best_taken = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int i = Team::lane(); i < num_candidates; i += Team::kLanes) {
            const int expert = i < local ? giver * local + i : loads->held[giver][i - local];
            const bool is_new = !(holders[expert] >> taker & 1);
            const uint32_t given = in_order(sources[giver * num_experts + expert], taker);
            const int* of_expert = counts + expert;
            int pieces[kMaxRanks];
            FLASHMOE_PLACEMENT_UNROLLED
            for (int nth = 0; nth < kMaxRanks; ++nth) {
                pieces[nth] = given >> nth & 1 ? of_expert[first_of[nth]] : 0;
            }
            uint32_t left = uint32_t(most_moved), taken = 0;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int nth = 0; nth < kMaxRanks; ++nth) {
                if (uint32_t(pieces[nth] - 1) >= left) continue;  // nothing, or too much
                left -= uint32_t(pieces[nth]);
                taken |= 1u << nth;
            }
            int moved = most_moved - int(left);
            if (is_new && (!has_slot || moved < least_rows)) moved = 0;
            const int key = (is_new ? Proposal::kNew : 0) + expert;
            if (moved > best_rows || (moved && moved == best_rows && key < best_key)) {
                best_rows = moved, best_key = key, best_taken = taken;
            }
        }
        const int most = Team::max(best_rows);
        const int least = Team::min(best_rows == most ? best_key : INT32_MAX);
        if (most ? best_rows == most && best_key == least : Team::lane() == 0) {
            into = {most, best_key, of_order(best_taken, taker), place};
        }
    }

    // Pieces are taken from the taker's own tokens first: bits of sources in the order in which it
    // takes from them, and back.
    FLASHMOE_PLACEMENT uint32_t in_order(uint32_t bits, int taker) const {
        const bool is_up = preference.step > 0;
        return rotated(is_up ? bits : reversed(bits), is_up ? taker : num_ranks - 1 - taker);
    }
    FLASHMOE_PLACEMENT uint32_t of_order(uint32_t bits, int taker) const {
        const bool is_up = preference.step > 0;
        const uint32_t back = rotated(bits, is_up ? num_ranks - taker : taker + 1);
        return is_up ? back : reversed(back);
    }
    FLASHMOE_PLACEMENT uint32_t rotated(uint32_t bits, int down) const {
        return (bits >> down | bits << (num_ranks - down)) & ~(~0u << num_ranks);
    }
    FLASHMOE_PLACEMENT uint32_t reversed(uint32_t bits) const {
        bits = (bits & 0x55) << 1 | (bits >> 1 & 0x55);
        bits = (bits & 0x33) << 2 | (bits >> 2 & 0x33);
        bits = (bits & 0x0f) << 4 | bits >> 4;
        return bits >> (kMaxRanks - num_ranks);
    }

    // The loads after a move.
    struct Outcome {
        int rows;  // that move; 0: there is no such move
        int taker;
        int expert;
        int key;           // moves are accepted in its order
        int given, taken;  // the expert's rows on both ranks
        int blocks_left, blocks_there;
        int rows_left, rows_there;
        uint32_t sources;
        bool is_new;
        bool is_better;  // the busier of the two ranks has less load
    };
    static constexpr int kMoves = 2 * kMaxRanks;

    // The outcome of the proposal of that number, also if there is no such move.
    FLASHMOE_PLACEMENT Outcome outcome(int giver, int number, bool is_there) const {
        const int each = is_there ? number / kMaxRanks : 0;
        const int taker = is_there ? number % kMaxRanks : 0;
        const Proposal move = loads->proposals[each][taker];
        is_there &= move.rows > 0;
        Outcome after;
        after.rows = is_there ? move.rows : 0;
        after.taker = taker;
        after.expert = is_there ? move.key % Proposal::kNew : 0;
        after.key = is_there ? each * kMaxRanks + move.place : kMoves;
        after.sources = move.sources;
        after.is_new = move.key >= Proposal::kNew;
        const int given = rows[giver * num_experts + after.expert];
        const int taken = rows[taker * num_experts + after.expert];
        after.given = given - after.rows;
        after.taken = taken + after.rows;
        after.blocks_left = loads->blocks[giver] - num_blocks(given) + num_blocks(after.given);
        after.blocks_there = loads->blocks[taker] - num_blocks(taken) + num_blocks(after.taken);
        after.rows_left = loads->total[giver] - after.rows;
        after.rows_there = loads->total[taker] + after.rows;
        const int load = loads->load[giver];
        after.is_better = is_there & (load_of(after.blocks_left, after.rows_left) < load) &
                          (load_of(after.blocks_there, after.rows_there) < load) &
                          (after.blocks_left <= most_blocks) & (after.blocks_there <= most_blocks) &
                          (after.rows_there <= most_rows);
        return after;
    }

    // Accepts the first better move in the order of takers, of the first moves or else of the
    // second ones; in the first round only the largest of the second ones may be. Scope: a group.
    FLASHMOE_PLACEMENT void choose(int giver, int round, int reserved) {
        constexpr int kMine = (kMoves + Team::kLanes - 1) / Team::kLanes;
        Outcome mine[kMine];
        int most = 0;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int nth = 0; nth < kMine; ++nth) {
            const int number = Team::lane() + nth * Team::kLanes, taker = number % kMaxRanks;
            const bool is_first = number < kMaxRanks;
            mine[nth] = outcome(giver, number,
                                (number < kMoves) & (taker < num_ranks) & (taker != giver) &
                                    ((round != 0) | !is_first | (taker == reserved)));
            if (!is_first && mine[nth].rows > most) most = mine[nth].rows;
        }
        int largest = kMoves;
        if (round == 0) {
            most = Team::max(most);
            FLASHMOE_PLACEMENT_UNROLLED
            for (int nth = 0; nth < kMine; ++nth) {
                const int key = mine[nth].key;
                if (key >= kMaxRanks && mine[nth].rows == most && key < largest) largest = key;
            }
            largest = Team::min(largest);
        }
        int accepted = kMoves;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int nth = 0; nth < kMine; ++nth) {
            const int key = mine[nth].key;
            const bool may_be = (round != 0) | (key < kMaxRanks) | (key == largest);
            if (may_be & mine[nth].is_better & (key < accepted)) accepted = key;
        }
        accepted = Team::min(accepted);
        FLASHMOE_PLACEMENT_UNROLLED
        for (int nth = 0; nth < kMine; ++nth) {
            if (accepted < kMoves && mine[nth].key == accepted) make(giver, mine[nth]);
        }
        if (Team::lane() == 0) loads->is_accepted = accepted < kMoves;
    }

    // Scope: one thread.
    FLASHMOE_PLACEMENT void make(int giver, const Outcome& after) {
        const int taker = after.taker, expert = after.expert;
        uint8_t& left = sources[giver * num_experts + expert];
        uint8_t& there = sources[taker * num_experts + expert];
        const uint8_t all_left = left, all_there = there, all_holders = holders[expert];
        const int num_held = loads->num_held[taker], empty = loads->empty[taker];
        loads->load[giver] = load_of(after.blocks_left, after.rows_left);
        loads->load[taker] = load_of(after.blocks_there, after.rows_there);
        loads->blocks[giver] = after.blocks_left;
        loads->blocks[taker] = after.blocks_there;
        loads->total[giver] = after.rows_left;
        loads->total[taker] = after.rows_there;
        rows[giver * num_experts + expert] = after.given;
        rows[taker * num_experts + expert] = after.taken;
        left = uint8_t(all_left & ~after.sources);
        there = uint8_t(all_there | after.sources);
        if (after.is_new) {
            holders[expert] = uint8_t(all_holders | 1 << taker);
            loads->held[taker][num_held] = int16_t(expert);
            loads->num_held[taker] = num_held + 1;
            loads->empty[taker] = empty - 1;
        }
    }
};

// Makes slots of ranks: which slot computes an expert for each source's tokens, and which experts
// the spare slots hold, in ascending order. `hosts` is [rank][spare_slots] as above, or null if it
// is not needed.
template <class Team>
FLASHMOE_PLACEMENT void number_slots(const uint8_t* sources,
                                     int num_ranks,
                                     int num_experts,
                                     int spare_slots,
                                     int* hosts,
                                     uint16_t* slot_of) {
    const int local = num_experts / num_ranks;
    FLASHMOE_PLACEMENT_LOOP
    for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
        const int first_slot = rank * (local + spare_slots);
        int used = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int first = 0; first < num_experts; first += Team::kLanes) {
            const int expert = first + Team::lane(), of_home = expert - rank * local;
            const uint32_t here = expert < num_experts ? sources[rank * num_experts + expert] : 0;
            const bool is_spare = here && !(0 <= of_home && of_home < local);
            const int spare = used + Team::before(is_spare);
            const int slot = first_slot + (is_spare ? local + spare : of_home);
            FLASHMOE_PLACEMENT_LOOP
            for (uint32_t left = here, source = 0; left; left >>= 1, ++source) {
                if (left & 1) slot_of[source * num_experts + expert] = uint16_t(slot);
            }
            if (is_spare && hosts) hosts[rank * spare_slots + spare] = expert;
            used += Team::count(is_spare);
        }
        for (int i = used + Team::lane(); i < spare_slots && hosts; i += Team::kLanes) {
            hosts[rank * spare_slots + i] = -1;
        }
    }
    Team::sync();
}

}  // namespace flashmoe::placement
