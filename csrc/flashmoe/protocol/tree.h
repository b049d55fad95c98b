// The order of sums whose bits do not depend on the number of ranks. Experts are divided into
// eighths, and a rank has one, two, four or all of them. The rows that a token has in one eighth
// are summed in float32 and rounded; then pairs of eighths are added and rounded, and pairs of
// pairs. So a rank's share is a node of one tree, whatever the number of ranks: what a rank adds
// itself here, others add there, with the same roundings.
//
// Sums begin with -0.0, which changes no value that it is added to, not even -0.0. So an eighth, or
// a rank, without a row of the token is as if it were not there.
#pragma once

#include "flashmoe/protocol/atomics.h"

namespace flashmoe::protocol {

constexpr int kTreeLeaves = 8, kTreeLevels = 3;
constexpr float kNoSum = -0.0f;

// True for numbers of ranks and experts that the tree can be shared out over.
FLASHMOE_PROTOCOL_CONST bool can_share_tree(int num_ranks, int num_experts) {
    return kTreeLeaves % num_ranks == 0 and num_experts % kTreeLeaves == 0;
}

FLASHMOE_PROTOCOL_CONST int leaves_of_rank(int num_ranks) { return kTreeLeaves / num_ranks; }

// The leaf of a rank's expert, among those of the rank.
FLASHMOE_PROTOCOL_CONST int leaf_of(int local_expert, int num_experts) {
    return local_expert / (num_experts / kTreeLeaves);
}

// Adds up `num_leaves`, a power of two up to 8, in pairs. leaf(i) gives the leaves in their order,
// and add(left, right) the sum of two nodes.
template <class Node, class Leaf, class Add>
FLASHMOE_PROTOCOL Node sum_tree(int num_leaves, Leaf leaf, Add add) {
    Node waiting[kTreeLevels];  // for their right neighbours, the last one first
    Node sum;
    FLASHMOE_KEEP_LOOP
    for (int i = 0; i < num_leaves; ++i) {
        sum = leaf(i);
        FLASHMOE_KEEP_LOOP
        for (int left = i; left & 1; left >>= 1) {
            sum = add(waiting[0], sum);
            waiting[0] = waiting[1];
            waiting[1] = waiting[2];
        }
        waiting[2] = waiting[1];
        waiting[1] = waiting[0];
        waiting[0] = sum;
    }
    return sum;
}

}  // namespace flashmoe::protocol
