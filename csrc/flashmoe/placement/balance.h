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
#define FLASHMOE_PLACEMENT_LOOP _Pragma("unroll 1")
#else
#define FLASHMOE_PLACEMENT inline
#define FLASHMOE_PLACEMENT_LOOP
#endif

namespace flashmoe::placement {

constexpr int kBlockRows = 128;
constexpr int kGoodPercent = 101;
constexpr int kStepsPerSlot = 4;
constexpr int kMaxRanks = 8;
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
    int empty[kMaxRanks];
    int total[kMaxRanks];
    int blocks[kMaxRanks];
    int order[kMaxRanks];  // ranks by ascending load
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
    Preference preference;
    int most_rows;
    int most_blocks;
    int aim;
    int most_steps;

    FLASHMOE_PLACEMENT static int num_blocks(int rows) {
        return (rows + kBlockRows - 1) / kBlockRows;
    }

    // `hosts` is [rank][spare_slots], -1 behind a rank's last replica, or null if they are to be
    // chosen.
    FLASHMOE_PLACEMENT void begin(int spare_slots, const int* hosts, Preference chosen) {
        preference = chosen;
        const int local = num_experts / num_ranks;
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
            int total = 0, blocks = 0;
            FLASHMOE_PLACEMENT_LOOP
            for (int expert = Team::lane(); expert < num_experts; expert += Team::kLanes) {
                const bool is_home = expert / local == rank;
                int sum = 0;
                for (int source = 0; is_home && source < num_ranks; ++source) {
                    sum += counts[source * num_experts + expert];
                }
                rows[rank * num_experts + expert] = sum;
                rank_of[rank * num_experts + expert] = uint8_t(expert / local);
                if (is_home) holders[expert] = uint8_t(1 << rank);
                total += sum;
                blocks += num_blocks(sum);
            }
            total = Team::sum(total);
            blocks = Team::sum(blocks);
            if (Team::lane() == 0) {
                loads->empty[rank] = hosts ? 0 : spare_slots;
                loads->total[rank] = total;
                loads->blocks[rank] = blocks;
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

    FLASHMOE_PLACEMENT void run() {
        FLASHMOE_PLACEMENT_LOOP
        for (int i = 0; i < most_steps; ++i) {
            if (is_good() || !step()) return;
        }
    }

    FLASHMOE_PLACEMENT int64_t load(int rank) const {
        return int64_t(loads->blocks[rank]) * kBlockRows + loads->total[rank];
    }

    FLASHMOE_PLACEMENT int64_t most() const {
        int64_t greatest = 0;
        for (int rank = 0; rank < num_ranks; ++rank) {
            greatest = load(rank) > greatest ? load(rank) : greatest;
        }
        return greatest;
    }

    FLASHMOE_PLACEMENT bool is_good() const {
        int64_t sum = 0;
        for (int rank = 0; rank < num_ranks; ++rank) sum += load(rank);
        return most() * num_ranks * 100 <= sum * kGoodPercent;
    }

 private:
    // Each round proposes a move for each taker, and one of them is accepted, or the next round
    // begins. What threads write behind a round's sync they have read before it.
    FLASHMOE_PLACEMENT bool step() {
        FLASHMOE_PLACEMENT_LOOP
        for (int rank = Team::index(); rank < num_ranks; rank += Team::size()) {
            int place = 0;  // of equal ones the first rank is the last
            for (int other = 0; other < num_ranks; ++other) {
                const int64_t more = load(rank) - load(other);
                place += more > 0 || (more == 0 && other > rank);
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
        Move best{taker, 0, 0, 0, false, false};
        FLASHMOE_PLACEMENT_LOOP
        for (int expert = Team::lane(); most_moved > 0 && expert < num_experts;
             expert += Team::kLanes) {
            const bool is_new = !(holders[expert] >> taker & 1);
            if (!rows[giver * num_experts + expert] || (is_new && !loads->empty[taker])) continue;
            uint32_t sources = 0;
            int moved = 0;
            FLASHMOE_PLACEMENT_LOOP
            for (int i = 0; i < num_ranks; ++i) {
                int source = taker + i * preference.step;
                source += source < 0 ? num_ranks : source >= num_ranks ? -num_ranks : 0;
                const int piece = counts[source * num_experts + expert];
                if (rank_of[source * num_experts + expert] == giver && piece &&
                    moved + piece <= most_moved) {
                    moved += piece;
                    sources |= 1u << source;
                }
            }
            if (moved > best.rows || (moved && moved == best.rows && best.is_new && !is_new)) {
                best = {taker, expert, sources, moved, is_new, false};
            }
        }
        const int most = Team::max(best.rows);
        const bool may_be = most > 0 && best.rows == most;
        const int key = may_be ? (best.is_new ? kNew : 0) + best.expert : INT32_MAX;
        const int least = Team::min(key);
        best.sources = uint32_t(Team::max(key == least ? int(best.sources) : 0));
        best.rows = most;
        best.expert = most > 0 ? least % kNew : 0;
        best.is_new = most > 0 && least >= kNew;
        return best;
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
        const int64_t left = int64_t(blocks_left) * kBlockRows + loads->total[giver] - move.rows;
        const int64_t there = int64_t(blocks_there) * kBlockRows + rows_there;
        return left < load(giver) && there < load(giver) && blocks_left <= most_blocks &&
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
        FLASHMOE_PLACEMENT_LOOP
        for (int source = 0; source < num_ranks; ++source) {
            if (move.sources >> source & 1) {
                rank_of[source * num_experts + move.expert] = uint8_t(taker);
            }
        }
        if (move.is_new) {
            holders[move.expert] |= uint8_t(1 << taker);
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
    for (int rank = Team::group(); rank < num_ranks; rank += Team::num_groups()) {
        const int first_slot = rank * (local + spare_slots);
        int used = 0;
        FLASHMOE_PLACEMENT_LOOP
        for (int first = 0; first < num_experts; first += Team::kLanes) {
            const int expert = first + Team::lane();
            uint32_t sources = 0;
            for (int source = 0; source < num_ranks && expert < num_experts; ++source) {
                sources |= uint32_t(rank_of[source * num_experts + expert] == rank) << source;
            }
            const bool is_replica = sources && expert / local != rank;
            const int spare = used + Team::before(is_replica);
            const int slot = is_replica ? local + spare : expert - rank * local;
            for (int source = 0; source < num_ranks; ++source) {
                if (!(sources >> source & 1)) continue;
                slot_of[source * num_experts + expert] = uint16_t(first_slot + slot);
            }
            if (is_replica && hosts) hosts[rank * spare_slots + spare] = expert;
            used += Team::count(is_replica);
        }
        for (int i = used + Team::lane(); i < spare_slots && hosts; i += Team::kLanes) {
            hosts[rank * spare_slots + i] = -1;
        }
    }
    Team::sync();
}

}  // namespace flashmoe::placement
