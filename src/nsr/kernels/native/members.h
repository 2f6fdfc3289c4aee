// Members of rows in any order, shared out among threads.
//
// Threads take blocks of members, a block each. What a block adds to rows of a table is kept until all of them have come
// as far; then each thread adds what belongs to its own rows, the members one after the other. So no two threads write
// to a row, and a row's sum is taken in the order of the members, however many threads there are.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

struct Sizes {
    int64_t sources, targets, members, width, heads;
};

struct Graph {
    const int64_t *source, *target;  // of each member
    const float* coefficient;        // of each member and head
};

constexpr int64_t BLOCK = 128;  // members: their tensors stay in the cache of a core

// Members `begin` to `begin + count`.
struct Block {
    int64_t begin, count;
};

// The block of a thread in the round that begins with member `first`.
inline Block block_of(int thread, int64_t first, int64_t members) {
    const int64_t begin = std::min(members, first + thread * BLOCK);
    return {begin, std::min(BLOCK, members - begin)};
}

// Whether an index has only rows that there are.
inline bool within(const int64_t* index, int64_t members, int64_t rows) {
    bool all = true;
    for (int64_t i = 0; i < members; ++i) all &= index[i] >= 0 && index[i] < rows;
    return all;
}

// K^{-1/2} of each row, 1 where it has no members
inline std::vector<float> scale_of_rows(const int64_t* target, int64_t members, int64_t rows) {
    std::vector<int64_t> count(rows, 0);
    for (int64_t i = 0; i < members; ++i) ++count[target[i]];
    std::vector<float> scale(rows);
    for (int64_t v = 0; v < rows; ++v) scale[v] = 1.0f / std::sqrt(float(std::max<int64_t>(1, count[v])));
    return scale;
}

constexpr int64_t AHEAD = 4;  // members, whose rows are on their way while this one's are worked on

[[gnu::always_inline]] inline void fetch(const float* row, int64_t width) {
    for (int64_t c = 0; c < width; c += LANES) __builtin_prefetch(row + c);
}

inline void add_row(float* to, const float* from, int64_t vectors) {
    for (int64_t v = 0; v < vectors; ++v) vec(to)[v] += vec(from)[v];
}

inline void add_row_times(float* to, float factor, const float* from, int64_t vectors) {
    for (int64_t v = 0; v < vectors; ++v) vec(to)[v] += factor * vec(from)[v];
}

}  // namespace
