// The life of replicas over some launches: weights that come to slots, gradients that go back. What
// else a launch does is in forward.h; of that there is here what orders the two, the row signals.
//
// A rank has two agents: dispatch, which pushes, and tiles, which read and store. Both add
// fc2's gradients, as they have nothing else to do then; fc1's are added behind the launch. Weights
// are numbers that tell their launch and expert, gradients also who computed them. A launch may
// settle on the replicas of the next one, and push their weights ahead of it: then that one, if it
// is a forward, pushes none.
#pragma once

#include <cstdint>
#include <vector>

#include "flashmoe/protocol/grid.h"
#include "flashmoe/protocol/queue.h"
#include "flashmoe/protocol/replicas.h"
#include "flashmoe/protocol/signals.h"
#include "forward.h"

namespace protocol_test {

constexpr int kProducts = 2;  // fc2, whose gradients come first, and fc1

struct ReplicaSizes {
    int ranks;
    int local;   // experts of a rank
    int slots;   // spare ones of a rank
    int pieces;  // of a gradient, each added for a ticket; both agents add if there are some
};

enum class ReplicaKind { kForward, kBackward, kSettle };

struct ReplicaLaunch {
    ReplicaKind kind;
    std::vector<std::vector<int>> hosts;  // [rank][slot], the expert or -1
};

inline uint64_t weight_value(uint32_t epoch, int expert) { return mix(epoch, 3u << 20 | expert); }
inline uint64_t slot_grad_value(uint32_t epoch, int rank, int expert, int piece) {
    return mix(mix(epoch, uint64_t(rank) << 8 | piece), 5u << 20 | expert);
}

template <class A>
struct ReplicaMemory {
    // The symmetric heap.
    typename A::template Array<typename A::U32> row_signals, weights_ready, grads_ready, gave_up;
    typename A::template Array<typename A::Plain> slot_weights, slot_grads;
    // This GPU's own.
    typename A::template Array<typename A::Plain> weights, grads, epoch, settled;
    typename A::template Array<typename A::U32> tickets;  // pulled, added, and stored of fc2
    typename A::Join launch_join, end_join;

    ReplicaMemory(const ReplicaSizes& s, int rank)
        : row_signals(s.ranks, "row_signal", rank),
          weights_ready(s.slots, "weights_ready", rank),
          grads_ready(kProducts * s.ranks, "grads_ready", rank),
          gave_up(1, "gave_up", rank),
          slot_weights(s.slots, "slot_weights", rank),
          slot_grads(kProducts * s.pieces * s.slots, "slot_grads", rank),
          weights(s.local, "weights", rank),
          grads(kProducts * s.pieces * s.local, "grads", rank),
          epoch(1, "epoch", rank),
          settled(1, "settled", rank),
          tickets(3, "tickets", rank),
          launch_join(2),
          end_join(2) {}
};

template <class A>
struct ReplicaWorld {
    ReplicaSizes sizes;
    std::vector<ReplicaLaunch> launches;
    std::vector<ReplicaMemory<A>*> ranks;
};

template <class A>
class ReplicaAgent {
 public:
    ReplicaAgent(ReplicaWorld<A>& world, int rank, bool is_dispatch)
        : s_(world.sizes),
          world_(world),
          here_(*world.ranks[rank]),
          rank_(rank),
          is_dispatch_(is_dispatch) {}

    void run() {
        for (size_t i = 0; i < world_.launches.size(); ++i) {
            A::join(here_.launch_join, true);
            const auto forget = [=](int step) { A::forget(int(i) * 16 + step, int(i) * 3 + step); };
            forget(0);
            const ReplicaLaunch& launch = world_.launches[i];
            const uint32_t epoch = uint32_t(A::read(&here_.epoch[0])) + 1;
            const bool is_settled = uses_settled(i);
            const bool is_backward = launch.kind == ReplicaKind::kBackward;
            if (is_dispatch_) {
                begin(epoch);
                if (not is_settled) push_weights(launch, epoch);
                hear_all(epoch);
            } else if (launch.kind != ReplicaKind::kSettle) {
                const uint32_t pushed = is_settled ? uint32_t(A::read(&here_.settled[0])) : epoch;
                read_weights(launch, pushed);
                if (is_backward) store_grads(launch, epoch);
            }
            forget(1);
            const bool adds = is_backward and (is_dispatch_ or s_.pieces > 1);
            if (adds) add_fc2_replicas(launch, epoch);
            A::join(here_.end_join, true);
            forget(2);
            if (is_dispatch_) leave(launch, epoch);
        }
    }

 private:
    // What the hosts of all ranks know: the last launch was for this one.
    bool uses_settled(size_t i) const {
        const bool is_ahead = i > 0 and world_.launches[i - 1].kind == ReplicaKind::kSettle;
        return is_ahead and world_.launches[i].kind == ReplicaKind::kForward;
    }

    // A launch of this GPU's before this one has changed the weights, as an optimizer does.
    void begin(uint32_t epoch) {
        for (int i = 0; i < s_.local; ++i) {
            A::write(&here_.weights[i], weight_value(epoch, rank_ * s_.local + i));
        }
        A::template fence<protocol::Scope::kSystem>();
        protocol::publish_rows<A>(
            s_.ranks, epoch, [&](int rank) { return &world_.ranks[rank]->row_signals[rank_]; });
    }

    template <class Visit>
    void for_replicas(const ReplicaLaunch& launch, Visit visit) {
        for (int host = 0; host < s_.ranks; ++host) {
            for (int slot = 0; slot < s_.slots; ++slot) {
                const int expert = launch.hosts[host][slot];
                if (expert >= 0 and expert / s_.local == rank_) visit(host, slot, expert);
            }
        }
    }

    void push_weights(const ReplicaLaunch& launch, uint32_t epoch) {
        for_replicas(launch, [&](int host, int slot, int expert) {
            protocol::await_left<A>(&here_.row_signals[host], epoch, waiting("a push"));
            ReplicaMemory<A>& there = *world_.ranks[host];
            A::write_by_bulk(&there.slot_weights[slot], A::read(&here_.weights[expert % s_.local]));
            protocol::publish_weights<A>(&there.weights_ready[slot], epoch);
        });
    }

    // In any case: a rank is at most one launch ahead of another.
    void hear_all(uint32_t epoch) {
        for (int src = 0; src < s_.ranks; ++src) {
            protocol::await_left<A>(&here_.row_signals[src], epoch, waiting("a row signal"));
        }
    }

    void read_weights(const ReplicaLaunch& launch, uint32_t epoch) {
        for (int slot = 0; slot < s_.slots; ++slot) {
            const int expert = launch.hosts[rank_][slot];
            if (expert < 0) continue;
            protocol::await_weights<A>(&here_.weights_ready[slot], epoch, waiting("a tile"));
            A::check(A::read_by_tma(&here_.slot_weights[slot]) == weight_value(epoch, expert),
                     "a replica has other weights than its owner");
        }
    }

    int place_of(int product, int piece, int index, int count) const {
        return (product * s_.pieces + piece) * count + index;
    }
    auto* slot_grad(int host, int product, int piece, int slot) {
        return &world_.ranks[host]->slot_grads[place_of(product, piece, slot, s_.slots)];
    }
    auto* own_grad(int product, int piece, int expert) {
        return &here_.grads[place_of(product, piece, expert % s_.local, s_.local)];
    }

    void store_grads(const ReplicaLaunch& launch, uint32_t epoch) {
        bool is_host = false;
        for (int expert : launch.hosts[rank_]) is_host |= expert >= 0;
        if (is_host) hear_all(epoch);
        for (int product = 0; product < kProducts; ++product) {
            store_in_slots(launch, epoch, product);
            if (product == 0) publish_slot_grads(epoch, product);
            store_own(epoch, product);
            A::bulk_wait_complete();
            if (product == 0) protocol::publish<A>(&here_.tickets[2]);
        }
    }
    void store_in_slots(const ReplicaLaunch& launch, uint32_t epoch, int product) {
        for (int piece = 0; piece < s_.pieces; ++piece) {
            for (int slot = 0; slot < s_.slots; ++slot) {
                const int expert = launch.hosts[rank_][slot], part = product * s_.pieces + piece;
                if (expert < 0) continue;
                A::write_by_bulk(slot_grad(rank_, product, piece, slot),
                                 slot_grad_value(epoch, rank_, expert, part));
            }
        }
    }
    void store_own(uint32_t epoch, int product) {
        for (int piece = 0; piece < s_.pieces; ++piece) {
            for (int i = 0; i < s_.local; ++i) {
                const int expert = rank_ * s_.local + i, part = product * s_.pieces + piece;
                A::write_by_bulk(own_grad(product, piece, expert),
                                 slot_grad_value(epoch, rank_, expert, part));
            }
        }
    }

    void publish_slot_grads(uint32_t epoch, int product) {
        protocol::publish_slot_grads<A>(s_.ranks, epoch, [&](int rank) {
            return &world_.ranks[rank]->grads_ready[product * s_.ranks + rank_];
        });
    }

    void await_slot_grads(const ReplicaLaunch& launch, uint32_t epoch, int product) {
        for (int src = 0; src < s_.ranks; ++src) {
            bool is_awaited = false;
            for_replicas(launch, [&](int host, int, int) { is_awaited |= host == src; });
            if (not is_awaited) continue;
            protocol::await_slot_grads<A>(&here_.grads_ready[product * s_.ranks + src], epoch,
                                          waiting("an addition"));
        }
    }

    void add_piece(const ReplicaLaunch& launch, int product, int piece) {
        for_replicas(launch, [&](int host, int slot, int expert) {
            auto* grad = own_grad(product, piece, expert);
            const auto* there = slot_grad(host, product, piece, slot);
            A::write(grad, mix(A::read(grad), A::read(there)));  // in this order alone
        });
    }

    void add_fc2_replicas(const ReplicaLaunch& launch, uint32_t epoch) {
        bool has_replicas = false;
        for_replicas(launch, [&](int, int, int) { has_replicas = true; });
        const uint32_t count = has_replicas ? s_.pieces : 1;
        for (bool has_heard = false;; has_heard = true) {
            const uint32_t piece = protocol::take<A>(&here_.tickets[0], 1);
            if (piece >= count) return;
            if (not has_heard) {
                protocol::await<A>(&here_.tickets[2], 1, waiting("an addition"));
                await_slot_grads(launch, epoch, 0);
            }
            add_piece(launch, 0, int(piece));
            protocol::arrive<A>(&here_.tickets[1], count, [&] { tell_of_fc2(launch, epoch); });
        }
    }

    // A launch of its own.
    void add_fc1_replicas(const ReplicaLaunch& launch, uint32_t epoch) {
        publish_slot_grads(epoch, 1);
        await_slot_grads(launch, epoch, 1);
        for (int piece = 0; piece < s_.pieces; ++piece) add_piece(launch, 1, piece);
    }

    void tell_of_fc2(const ReplicaLaunch& launch, uint32_t epoch) {
        check_grads(launch, epoch, 0, "fc2's gradients are told of before replicas' are added");
    }

    void check_grads(const ReplicaLaunch& launch,
                     uint32_t epoch,
                     int product,
                     const char* message) {
        for (int i = 0; i < s_.local * s_.pieces; ++i) {
            const int own = rank_ * s_.local + i / s_.pieces, piece = i % s_.pieces;
            const int part = product * s_.pieces + piece;
            uint64_t sum = slot_grad_value(epoch, rank_, own, part);
            for_replicas(launch, [&](int host, int, int expert) {
                if (expert == own) sum = mix(sum, slot_grad_value(epoch, host, own, part));
            });
            A::check(A::read(own_grad(product, piece, own)) == sum, message);
        }
    }

    void leave(const ReplicaLaunch& launch, uint32_t epoch) {
        const bool is_backward = launch.kind == ReplicaKind::kBackward;
        if (is_backward) add_fc1_replicas(launch, epoch);
        for (int product = 0; product < kProducts and is_backward; ++product) {
            check_grads(launch, epoch, product, "a gradient is not the sum of all replicas'");
        }
        protocol::reset<A>(&here_.tickets[0], 0, 1, 3);
        if (launch.kind == ReplicaKind::kSettle) A::write(&here_.settled[0], epoch);
        A::write(&here_.epoch[0], epoch);
    }

    auto waiting(const char* what) {
        return [this, what](auto load, auto done) {
            uint32_t told_by = 0;
            A::wait(what, load, done, &here_.gave_up[0], &told_by);
        };
    }

    const ReplicaSizes s_;
    ReplicaWorld<A>& world_;
    ReplicaMemory<A>& here_;
    const int rank_;
    const bool is_dispatch_;
};

}  // namespace protocol_test
