// The order in which sums are added up that have to be the same however they are dealt out: summands by two, neighbours
// first, then the sums of neighbours, and what is left over in the end from the last to the first. Equal shares of them
// that are each a power of two, or one, or all, are nodes of this tree.
#pragma once

namespace octavo {

// Parts of a product's k, or of experts, that are summands.
constexpr int kMaxSegments = 8;
// Sums of so many summands that wait for others, with the one that is being made.
constexpr int kTreeDepth = 4;

// The sum of `count` summands: make(index, depth) makes one at a depth of those that wait, add(depth) adds the sum
// there to the one below it. The sum is at depth 0 in the end.
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
