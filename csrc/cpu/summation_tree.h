// The order of sums that must be the same however their summands are dealt out to processes. Neighbours are added two
// by two, then the sums of neighbours, and so on; the sums that are left in the end are added from the last to the
// first. If processes have equal shares of the summands, and a share is a power of two, or one, or all of them, each
// share's sum is a node of this tree.
#pragma once

namespace octavo {

// The most summands: parts of a product's k, or of experts.
constexpr int kMaxSegments = 8;
// The most sums that exist at a time with so many summands: those that wait and the one that is being made.
constexpr int kTreeDepth = 4;

// Adds `count` summands. make(index, depth) makes a summand at a depth of the stack of waiting sums; add(depth) adds
// the sum at that depth to the one below. In the end the sum is at depth 0.
template <class Make, class Add>
inline void in_tree(int count, Make make, Add add) {
    int depth = 0;
    for (int index = 0; index < count; ++index) {
        make(index, depth++);
        for (int pair = index; pair % 2 != 0; pair /= 2) add(--depth);
    }
    while (depth > 1) add(--depth);
}

}  // namespace octavo
