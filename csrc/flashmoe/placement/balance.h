// The placement with the least load of the busiest rank, in plain C++ for a launch and for the
// host. flashmoe_megatron/replicas/balance.py is the same program, says what it does and why, and
// has the same results bit for bit: whoever changes one changes both.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FLASHMOE_PLACEMENT __host__ __device__ inline
#else
#define FLASHMOE_PLACEMENT inline
#endif

namespace flashmoe::placement {

constexpr int kBlockRows = 128;
constexpr int kGoodPercent = 101;
constexpr int kStepsPerSlot = 4;
constexpr int kMaxRanks = 8;
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

struct Move {
    int giver;
    int taker;
    int expert;
    uint32_t sources;  // a bit for each
    int rows;          // 0: there is no such move
    bool is_new;       // the taker has no slot yet that holds the expert
};

// One attempt, over memory of the caller's.
struct Attempt {
    const int* counts;  // [source rank][expert] routes
    int num_ranks;
    int num_experts;
    uint8_t* rank_of;  // [source rank][expert]
    int* rows;         // [rank][expert]
    uint8_t* holders;  // [expert], a bit for each rank
    Preference preference;
    int empty[kMaxRanks];
    int total[kMaxRanks];
    int blocks[kMaxRanks];
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
        int64_t all = 0;
        most_rows = most_blocks = 0;
        for (int rank = 0; rank < num_ranks; ++rank) {
            empty[rank] = hosts ? 0 : spare_slots;
            total[rank] = blocks[rank] = 0;
            for (int expert = 0; expert < num_experts; ++expert) {
                const bool is_home = expert / local == rank;
                int sum = 0;
                for (int source = 0; is_home && source < num_ranks; ++source) {
                    sum += counts[source * num_experts + expert];
                }
                rows[rank * num_experts + expert] = sum;
                rank_of[rank * num_experts + expert] = uint8_t(expert / local);
                if (is_home) holders[expert] = uint8_t(1 << rank);
                total[rank] += sum;
                blocks[rank] += num_blocks(sum);
            }
            all += total[rank];
            most_rows = total[rank] > most_rows ? total[rank] : most_rows;
            most_blocks = blocks[rank] > most_blocks ? blocks[rank] : most_blocks;
        }
        for (int slot = 0; hosts && slot < num_ranks * spare_slots; ++slot) {
            if (hosts[slot] >= 0) holders[hosts[slot]] |= uint8_t(1 << slot / spare_slots);
        }
        const int64_t hundreds = 100 * num_ranks;
        aim = int((all * preference.aim_percent + hundreds - 1) / hundreds);
        most_steps = kStepsPerSlot * num_ranks * (spare_slots > 1 ? spare_slots : 1);
    }

    FLASHMOE_PLACEMENT void run() {
        for (int i = 0; i < most_steps; ++i) {
            if (is_good() || !step()) return;
        }
    }

    FLASHMOE_PLACEMENT int64_t load(int rank) const {
        return int64_t(blocks[rank]) * kBlockRows + total[rank];
    }

    FLASHMOE_PLACEMENT int64_t most() const {
        int64_t greatest = 0;
        for (int rank = 0; rank < num_ranks; ++rank) {
            greatest = load(rank) > greatest ? load(rank) : greatest;
        }
        return greatest;
    }

    FLASHMOE_PLACEMENT bool is_good() const {
        int64_t loads = 0;
        for (int rank = 0; rank < num_ranks; ++rank) loads += load(rank);
        return most() * num_ranks * 100 <= loads * kGoodPercent;
    }

 private:
    FLASHMOE_PLACEMENT bool step() {
        int ranks[kMaxRanks];  // by ascending load; of equal ones the first rank is the last
        for (int rank = 0; rank < num_ranks; ++rank) {
            int place = rank;
            while (place > 0 && load(ranks[place - 1]) >= load(rank)) {
                ranks[place] = ranks[place - 1];
                --place;
            }
            ranks[place] = rank;
        }
        const int num_takers = num_ranks - 1;
        const int giver = ranks[num_takers], idlest = ranks[0];
        const int excess = total[giver] - aim, room = aim - total[idlest];
        const bool is_reserved = 1 <= empty[idlest] && empty[idlest] <= preference.reserve;
        if (num_takers && is_reserved && empty[giver] && 0 < excess && excess < room &&
            accept(largest(giver, idlest, room))) {
            return true;
        }
        Move greatest{};
        for (int i = 0; i < num_takers; ++i) {
            const int left = aim - total[ranks[i]];
            const Move move = largest(giver, ranks[i], excess < left ? excess : left);
            if (move.rows > greatest.rows) greatest = move;
        }
        if (accept(greatest)) return true;
        for (int i = 0; i < num_takers; ++i) {
            if (accept(largest(giver, ranks[i], (total[giver] - total[ranks[i]]) / 2))) return true;
        }
        for (int i = 0; i < num_takers; ++i) {
            if (accept(largest(giver, ranks[i], total[giver] - total[ranks[i]] - 1))) return true;
        }
        return false;
    }

    FLASHMOE_PLACEMENT Move largest(int giver, int taker, int most_moved) const {
        Move best{};
        for (int expert = 0; most_moved > 0 && expert < num_experts; ++expert) {
            const bool is_new = !(holders[expert] >> taker & 1);
            if (!rows[giver * num_experts + expert] || (is_new && !empty[taker])) continue;
            Move move{giver, taker, expert, 0, 0, is_new};
            for (int i = 0; i < num_ranks; ++i) {
                const int source = (taker + i * preference.step + num_ranks) % num_ranks;
                const int piece = counts[source * num_experts + expert];
                if (rank_of[source * num_experts + expert] == giver && piece &&
                    move.rows + piece <= most_moved) {
                    move.rows += piece;
                    move.sources |= 1u << source;
                }
            }
            if (move.rows > best.rows ||
                (move.rows && move.rows == best.rows && best.is_new && !is_new)) {
                best = move;
            }
        }
        return best;
    }

    FLASHMOE_PLACEMENT bool accept(const Move& move) {
        if (!move.rows) return false;
        const int giver = move.giver, taker = move.taker;
        int& given = rows[giver * num_experts + move.expert];
        int& taken = rows[taker * num_experts + move.expert];
        const int blocks_left = blocks[giver] - num_blocks(given) + num_blocks(given - move.rows);
        const int blocks_there = blocks[taker] - num_blocks(taken) + num_blocks(taken + move.rows);
        const int64_t left = int64_t(blocks_left) * kBlockRows + total[giver] - move.rows;
        const int64_t there = int64_t(blocks_there) * kBlockRows + total[taker] + move.rows;
        if (left >= load(giver) || there >= load(giver) || blocks_left > most_blocks ||
            blocks_there > most_blocks || total[taker] + move.rows > most_rows) {
            return false;
        }
        blocks[giver] = blocks_left;
        blocks[taker] = blocks_there;
        total[giver] -= move.rows;
        total[taker] += move.rows;
        given -= move.rows;
        taken += move.rows;
        for (int source = 0; source < num_ranks; ++source) {
            if (move.sources >> source & 1) {
                rank_of[source * num_experts + move.expert] = uint8_t(taker);
            }
        }
        if (move.is_new) {
            holders[move.expert] |= uint8_t(1 << taker);
            --empty[taker];
        }
        return true;
    }
};

}  // namespace flashmoe::placement
