// Products of blocks of rows with square matrices, of any width that is whole vectors.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int HEIGHT = 8, COLUMNS = 2;  // a tile: 8 rows of 2 vectors stay in registers

// y[n] = start + sum_k x[n][k] w[k], for 8 rows and some vectors of theirs
template <int COUNT>
inline void multiply_tile(float* y, const float* x, const float* w, const float* start, int64_t width) {
    Vector sum[HEIGHT][COUNT];
    for (int r = 0; r < HEIGHT; ++r)
        for (int v = 0; v < COUNT; ++v) sum[r][v] = start ? vec(start)[v] : Vector{};
    for (int64_t k = 0; k < width; ++k)
        for (int r = 0; r < HEIGHT; ++r)
            for (int v = 0; v < COUNT; ++v) sum[r][v] += x[r * width + k] * vec(w + k * width)[v];
    for (int r = 0; r < HEIGHT; ++r)
        for (int v = 0; v < COUNT; ++v) vec(y + r * width)[v] = sum[r][v];
}

// y = start + x w. There must be memory up to a whole tile of rows; what follows `rows` there is of no meaning.
void multiply(float* y, const float* x, const float* w, const float* start, int64_t rows, int64_t width) {
    for (int64_t c = 0; c < width;) {
        const float* from = start ? start + c : nullptr;
        const bool whole = c + COLUMNS * LANES <= width;
        for (int64_t r = 0; r < rows; r += HEIGHT)
            (whole ? multiply_tile<COLUMNS> : multiply_tile<1>)(y + r * width + c, x + r * width, w + c, from, width);
        c += whole ? COLUMNS * LANES : LANES;
    }
}

// dw[j][c] += sum_n dy[n][j] x[n][c], for 8 rows of dw and some vectors of theirs
template <int COUNT>
inline void outer_tile(float* dw, const float* dy, const float* x, int64_t rows, int64_t width) {
    Vector sum[HEIGHT][COUNT];
    for (int h = 0; h < HEIGHT; ++h)
        for (int v = 0; v < COUNT; ++v) sum[h][v] = vec(dw + h * width)[v];
    for (int64_t n = 0; n < rows; ++n)
        for (int h = 0; h < HEIGHT; ++h)
            for (int v = 0; v < COUNT; ++v) sum[h][v] += dy[n * width + h] * vec(x + n * width)[v];
    for (int h = 0; h < HEIGHT; ++h)
        for (int v = 0; v < COUNT; ++v) vec(dw + h * width)[v] = sum[h][v];
}

// dw += dy^T x, the gradient of W in y = x W^T
void outer(float* dw, const float* dy, const float* x, int64_t rows, int64_t width) {
    for (int64_t c = 0; c < width;) {
        const bool whole = c + COLUMNS * LANES <= width;
        for (int64_t j = 0; j < width; j += HEIGHT)
            (whole ? outer_tile<COLUMNS> : outer_tile<1>)(dw + j * width + c, dy + j, x + c, rows, width);
        c += whole ? COLUMNS * LANES : LANES;
    }
}

void transpose(float* to, const float* from, int64_t width) {
    for (int64_t i = 0; i < width; ++i)
        for (int64_t j = 0; j < width; ++j) to[j * width + i] = from[i * width + j];
}

}  // namespace
