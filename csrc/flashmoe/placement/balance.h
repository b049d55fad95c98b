// The placement with the least load of the busiest rank, in plain C++ for a launch and for the
// host. flashmoe_megatron/replicas/balance.py is the same program, says what it does and why, and
// has the same results bit for bit: whoever changes one changes both.
//
// A team of threads runs it together: its groups take ranks, and a group's lanes take experts. A
// Team has index() of size() threads, sync() of all; group() of num_groups(), lane() of kLanes in
// each; and of a group's lanes sum, max and min of an int, count of those for which something is
// true, and before, how many of these have smaller numbers. All threads return the same.
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
constexpr int kNumRounds = 4;

struct Preference {
    int aim_percent;
    int reserve;
    int step;
};

FLASHMOE_PLACEMENT Preference preference(int number) {
    const int over = number / 4;  // 100, 101, 102 and 104 percent
    return {100 + (over == 3 ? 4 : over), 1 + number / 2 % 2, number % 2 ? -1 : 1};
}

struct Move {
    int taker;
    int expert;
    uint32_t sources;  // a bit for each
    int rows;          // 0: there is no such move
    bool is_new;       // the taker has no slot yet that holds the expert
    bool is_better;    // the busier of the two ranks has less load behind it
};

// What a team shares beside the tables.
struct Loads {
    int64_t load[kMaxRanks];  // rows of blocks plus rows
    int empty[kMaxRanks];
    int total[kMaxRanks];
    int blocks[kMaxRanks];
    int order[kMaxRanks];  // ranks by ascending load
    int num_held[kMaxRanks];
    int16_t held[kMaxRanks][kMaxSlots];  // experts of other ranks that a rank has slots for
    Move moves[kNumRounds][kMaxRanks];
};

// One attempt, over memory of the caller's.
template <class Team>
struct Attempt {
    const int* counts;  // [source rank][expert] routes
    int num_ranks;
    int num_experts;
    uint8_t* rank_of;  // [source rank][expert]
    int* rows;         // [rank][expert]
    uint8_t* holders;  // [expert], a bit for each rank
    Loads* loads;
    int least_rows;  // that a replica takes
    Preference preference;
    int most_rows;
    int most_blocks;
    int aim;
    int most_steps;

    FLASHMOE_PLACEMENT static int num_blocks(int rows) {
        return (rows + kBlockRows - 1) / kBlockRows;
    }

    FLASHMOE_PLACEMENT static int64_t load_of(int blocks, int rows) {
        return int64_t(blocks) * kBlockRows + rows;
    }

    // `hosts` is [rank][spare_slots], -1 behind a rank's last replica, or null if they are to be
    // chosen.
    FLASHMOE_PLACEMENT void begin(int spare_slots, const int* hosts, Preference chosen) {
        preference = chosen;
        const int local = num_experts / num_ranks;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
            int total = 0, blocks = 0, num_held = 0;
            FLASHMOE_PLACEMENT_LOOP
            for (int i = Team::lane(); i < local; i += Team::kLanes) {
                FLASHMOE_PLACEMENT_LOOP
                for (int home = 0; home < num_ranks; ++home) {
                    rows[rank * num_experts + home * local + i] = 0;
                    rank_of[rank * num_experts + home * local + i] = uint8_t(home);
                }
                const int expert = rank * local + i;
                int sum = 0;
                FLASHMOE_PLACEMENT_UNROLLED
                for (int source = 0; source < kMaxRanks; ++source) {
                    if (source < num_ranks) sum += counts[source * num_experts + expert];
                }
                rows[rank * num_experts + expert] = sum;
                holders[expert] = uint8_t(1 << rank);
                total += sum;
                blocks += num_blocks(sum);
            }
            total = Team::sum(total);
            blocks = Team::sum(blocks);
            for (int slot = 0; hosts && slot < spare_slots; ++slot) {
                const int expert = hosts[rank * spare_slots + slot];
                if (expert < 0) break;
                if (Team::lane() == 0) loads->held[rank][num_held] = int16_t(expert);
                ++num_held;
            }
            if (Team::lane() == 0) {
                loads->load[rank] = load_of(blocks, total);
                loads->empty[rank] = hosts ? 0 : spare_slots;
                loads->total[rank] = total;
                loads->blocks[rank] = blocks;
                loads->num_held[rank] = num_held;
            }
        }
        Team::sync();
        if (hosts) {
            for (int i = 0; Team::index() == 0 && i < num_ranks * spare_slots; ++i) {
                if (hosts[i] >= 0) holders[hosts[i]] |= uint8_t(1 << i / spare_slots);
            }
            Team::sync();
        }
        int64_t all = 0;
        most_rows = most_blocks = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = 0; rank < num_ranks; ++rank) {
            const int total = loads->total[rank], blocks = loads->blocks[rank];
            all += total;
            most_rows = total > most_rows ? total : most_rows;
            most_blocks = blocks > most_blocks ? blocks : most_blocks;
        }
        const int64_t hundreds = 100 * num_ranks;
        aim = int((all * preference.aim_percent + hundreds - 1) / hundreds);
        most_steps = kStepsPerSlot * num_ranks * (spare_slots > 1 ? spare_slots : 1);
    }

    // Whether the load is even behind it.
    FLASHMOE_PLACEMENT bool run() {
        FLASHMOE_PLACEMENT_LOOP
        for (int i = 0;; ++i) {
            if (is_good()) return true;
            if (i == most_steps || !step()) return false;
        }
    }

    FLASHMOE_PLACEMENT int64_t most() const {
        int64_t greatest = 0;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int rank = 0; rank < kMaxRanks; ++rank) {
            const int64_t load = rank < num_ranks ? loads->load[rank] : 0;
            greatest = load > greatest ? load : greatest;
        }
        return greatest;
    }

    FLASHMOE_PLACEMENT bool is_good() const {
        int64_t sum = 0;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int rank = 0; rank < kMaxRanks; ++rank)
            sum += rank < num_ranks ? loads->load[rank] : 0;
        const int64_t over = most() * num_ranks - sum;
        // A row counts twice in a load: once itself, and once in its block.
        const int64_t uneven = sum * (kGoodPercent - 100);
        const int64_t unpaid = int64_t(200) * least_rows * num_ranks;
        return over * 100 <= (uneven > unpaid ? uneven : unpaid);
    }

 private:
    // Each round proposes a move for each taker, and one of them is accepted, or the next round
    // begins. What threads write behind a round's sync they have read before it.
    FLASHMOE_PLACEMENT bool step() {
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::index(); rank < num_ranks; rank += Team::size()) {
            const int64_t load = loads->load[rank];
            int place = 0;  // the first of equal ranks is the last
            FLASHMOE_PLACEMENT_UNROLLED
            for (int other = 0; other < kMaxRanks; ++other) {
                const int64_t less = other < num_ranks ? loads->load[other] : INT64_MAX;
                place += less < load || (less == load && other > rank);
            }
            loads->order[place] = rank;
        }
        Team::sync();
        const int num_takers = num_ranks - 1;
        const int giver = loads->order[num_takers], idlest = loads->order[0];
        const int given = loads->total[giver], excess = given - aim;
        const int room = aim - loads->total[idlest], empty = loads->empty[idlest];
        const bool is_reserved = 1 <= empty && empty <= preference.reserve && loads->empty[giver] &&
                                 0 < excess && excess < room;
        FLASHMOE_PLACEMENT_LOOP
        for (int round = is_reserved && num_takers ? 0 : 1; round < kNumRounds; ++round) {
            Move* moves = loads->moves[round];
            const int num_moves = round == 0 ? 1 : num_takers;
            FLASHMOE_PLACEMENT_LOOP
            for (int i = Team::group(); i < num_moves; i += Team::num_groups()) {
                const int taker = loads->order[i], more = given - loads->total[taker];
                const int left = aim - loads->total[taker];
                const int most_moved = round == 0   ? room
                                       : round == 1 ? (excess < left ? excess : left)
                                       : round == 2 ? more / 2
                                                    : more - 1;
                Move move = largest(giver, taker, most_moved);
                move.is_better = is_better(giver, move);
                if (Team::lane() == 0) moves[i] = move;
            }
            Team::sync();
            int accepted = -1, greatest = 0;
            for (int i = 0; i < num_moves; ++i) {
                if (round == 1) {
                    if (moves[i].rows <= greatest) continue;
                    greatest = moves[i].rows;
                    accepted = moves[i].is_better ? i : -1;
                } else if (accepted < 0 && moves[i].is_better) {
                    accepted = i;
                }
            }
            if (accepted >= 0) {
                if (Team::index() == 0) make(giver, moves[accepted]);
                Team::sync();
                return true;
            }
        }
        return false;
    }

    // The move of most rows; of equal ones the first without a new slot. Scope: a group.
    FLASHMOE_PLACEMENT Move largest(int giver, int taker, int most_moved) const {
        constexpr int kNew = 1 << 24;
        const int local = num_experts / num_ranks;
        const int num_candidates = most_moved > 0 ? local + loads->num_held[giver] : 0;
        const bool has_slot = loads->empty[taker] > 0;
        int best_rows = 0, best_key = INT32_MAX, best_sources = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int i = Team::lane(); i < num_candidates; i += Team::kLanes) {
            const int expert = i < local ? giver * local + i : loads->held[giver][i - local];
            const bool is_new = !(holders[expert] >> taker & 1);
            if (!rows[giver * num_experts + expert] || (is_new && !has_slot)) continue;
            int pieces[kMaxRanks];
            FLASHMOE_PLACEMENT_UNROLLED
            for (int nth = 0; nth < kMaxRanks; ++nth) {
                const int at = source_of(taker, nth) * num_experts + expert;
                pieces[nth] = nth < num_ranks && rank_of[at] == giver ? counts[at] : 0;
            }
            int moved = 0, sources = 0;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int nth = 0; nth < kMaxRanks; ++nth) {
                if (pieces[nth] && moved + pieces[nth] <= most_moved) {
                    moved += pieces[nth];
                    sources |= 1 << source_of(taker, nth);
                }
            }
            if (is_new && moved < least_rows) continue;
            const int key = (is_new ? kNew : 0) + expert;
            if (moved > best_rows || (moved && moved == best_rows && key < best_key)) {
                best_rows = moved, best_key = key, best_sources = sources;
            }
        }
        const int most = Team::max(best_rows);
        const int least = Team::min(best_rows == most ? best_key : INT32_MAX);
        const int sources = Team::max(best_rows == most && best_key == least ? best_sources : 0);
        if (most == 0) return {taker, 0, 0, 0, false, false};
        return {taker, least % kNew, uint32_t(sources), most, least >= kNew, false};
    }

    // Pieces are taken from the taker's own tokens first. Behind the last rank it is the taker.
    FLASHMOE_PLACEMENT int source_of(int taker, int nth) const {
        if (nth >= num_ranks) return taker;
        const int source = taker + nth * preference.step;
        return source + (source < 0 ? num_ranks : source >= num_ranks ? -num_ranks : 0);
    }

    FLASHMOE_PLACEMENT bool is_better(int giver, const Move& move) const {
        if (!move.rows) return false;
        const int taker = move.taker;
        const int given = rows[giver * num_experts + move.expert];
        const int taken = rows[taker * num_experts + move.expert];
        const int blocks_left =
            loads->blocks[giver] - num_blocks(given) + num_blocks(given - move.rows);
        const int blocks_there =
            loads->blocks[taker] - num_blocks(taken) + num_blocks(taken + move.rows);
        const int rows_there = loads->total[taker] + move.rows;
        const int64_t left = load_of(blocks_left, loads->total[giver] - move.rows);
        const int64_t there = load_of(blocks_there, rows_there), load = loads->load[giver];
        return left < load && there < load && blocks_left <= most_blocks &&
               blocks_there <= most_blocks && rows_there <= most_rows;
    }

    // Scope: one thread.
    FLASHMOE_PLACEMENT void make(int giver, const Move& move) {
        const int taker = move.taker;
        int& given = rows[giver * num_experts + move.expert];
        int& taken = rows[taker * num_experts + move.expert];
        loads->blocks[giver] += num_blocks(given - move.rows) - num_blocks(given);
        loads->blocks[taker] += num_blocks(taken + move.rows) - num_blocks(taken);
        loads->total[giver] -= move.rows;
        loads->total[taker] += move.rows;
        given -= move.rows;
        taken += move.rows;
        loads->load[giver] = load_of(loads->blocks[giver], loads->total[giver]);
        loads->load[taker] = load_of(loads->blocks[taker], loads->total[taker]);
        FLASHMOE_PLACEMENT_LOOP
        for (uint32_t left = move.sources, source = 0; left; left >>= 1, ++source) {
            if (left & 1) rank_of[source * num_experts + move.expert] = uint8_t(taker);
        }
        if (move.is_new) {
            holders[move.expert] |= uint8_t(1 << taker);
            loads->held[taker][loads->num_held[taker]++] = int16_t(move.expert);
            --loads->empty[taker];
        }
    }
};

// Makes slots of ranks: which slot computes an expert for each source's tokens, and which experts
// the spare slots hold, in ascending order. `hosts` is [rank][spare_slots] as above, or null if
// nobody wants to know.
template <class Team>
FLASHMOE_PLACEMENT void number_slots(const uint8_t* rank_of,
                                     int num_ranks,
                                     int num_experts,
                                     int spare_slots,
                                     int* hosts,
                                     uint16_t* slot_of) {
    const int local = num_experts / num_ranks;
    FLASHMOE_PLACEMENT_LOOP
    for (int expert = Team::index(); expert < num_experts; expert += Team::size()) {
        const int home = expert / local;
        FLASHMOE_PLACEMENT_UNROLLED
        for (int source = 0; source < kMaxRanks; ++source) {
            if (source < num_ranks && rank_of[source * num_experts + expert] == home) {
                slot_of[source * num_experts + expert] = uint16_t(expert + home * spare_slots);
            }
        }
    }
    FLASHMOE_PLACEMENT_LOOP
    for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
        const int first_spare = rank * (local + spare_slots) + local;
        int used = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int first = 0; first < num_experts; first += Team::kLanes) {
            const int expert = first + Team::lane();
            const bool is_foreign = expert < num_experts && expert / local != rank;
            uint32_t sources = 0;
            FLASHMOE_PLACEMENT_UNROLLED
            for (int source = 0; source < kMaxRanks; ++source) {
                if (source < num_ranks && is_foreign) {
                    sources |= uint32_t(rank_of[source * num_experts + expert] == rank) << source;
                }
            }
            const int count = Team::count(sources);
            if (!count) continue;
            const int spare = used + Team::before(sources);
            FLASHMOE_PLACEMENT_LOOP
            for (uint32_t left = sources, source = 0; left; left >>= 1, ++source) {
                if (left & 1) {
                    slot_of[source * num_experts + expert] = uint16_t(first_spare + spare);
                }
            }
            if (sources && hosts) hosts[rank * spare_slots + spare] = expert;
            used += count;
        }
        for (int i = used + Team::lane(); i < spare_slots && hosts; i += Team::kLanes) {
            hosts[rank * spare_slots + i] = -1;
        }
    }
    Team::sync();
}

}  // namespace flashmoe::placement
