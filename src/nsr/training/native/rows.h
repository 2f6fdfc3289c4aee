// Rows of D numbers: products, norms and activations, each a pass over a block of rows that stays in the cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "vectors.h"

namespace {

constexpr int D = NSR_WIDTH;
constexpr int VECTORS = D / LANES;
constexpr float EPS = 1e-5f;
static_assert(D % LANES == 0, "a row is whole vectors");

using Row = float[D];
using Matrix = float[D][D];

// y[n] (+)= sum_k x[n][k] w[k]
template <int ROWS>
inline void multiply_rows(Row* y, const Row* x, const Matrix& w, bool add) {
    Vector sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = add ? vec(y[r])[v] : Vector{};
    for (int k = 0; k < D; ++k) {
        const Vector* row = vec(w[k]);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sum[r][v] += x[r][k] * row[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) vec(y[r])[v] = sum[r][v];
}

void multiply(Row* y, const Row* x, const Matrix& w, int64_t rows, bool add = false) {
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) multiply_rows<8>(y + r, x + r, w, add);
    for (; r < rows; ++r) multiply_rows<1>(y + r, x + r, w, add);
}

// dw[j] += sum_n dy[n][j] x[n], the gradient of W in y = x W^T
void outer(Matrix& dw, const Row* dy, const Row* x, int64_t rows) {
    constexpr int HEIGHT = 8;
    for (int j = 0; j < D; j += HEIGHT) {
        Vector sum[HEIGHT][VECTORS];
        for (int h = 0; h < HEIGHT; ++h)
            for (int v = 0; v < VECTORS; ++v) sum[h][v] = vec(dw[j + h])[v];
        for (int64_t n = 0; n < rows; ++n) {
            const Vector* row = vec(x[n]);
            for (int h = 0; h < HEIGHT; ++h)
                for (int v = 0; v < VECTORS; ++v) sum[h][v] += dy[n][j + h] * row[v];
        }
        for (int h = 0; h < HEIGHT; ++h)
            for (int v = 0; v < VECTORS; ++v) vec(dw[j + h])[v] = sum[h][v];
    }
}

void add_rows(float* sum, const Row* x, int64_t rows) {
    Vector total[VECTORS] = {};
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) total[v] += vec(x[n])[v];
    for (int v = 0; v < VECTORS; ++v) vec(sum)[v] += total[v];
}

// Matrices among the weights, as they stand (for gradients) or the other way round (for y = x W^T).
void load(Matrix& to, const float* from, int64_t stride, bool transposed) {
    for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) (transposed ? to[j][i] : to[i][j]) = from[i * stride + j];
}

void add_matrix(float* to, const Matrix& from, int64_t stride) {
    for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) to[i * stride + j] += from[i][j];
}

void set_rows(Row* y, const float* bias, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) vec(y[n])[v] = vec(bias)[v];
}

void gelu(Row* y, const Row* x, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) vec(y[n])[v] = vec(x[n])[v] * normal(vec(x[n])[v]).below;
}

// GELU of x, and its slope there.
void gelu_and_slope(Row* y, Row* slope, const Row* x, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) {
            const Vector at = vec(x[n])[v];
            const Normal found = normal(at);
            vec(y[n])[v] = at * found.below;
            vec(slope[n])[v] = found.below + at * found.density;
        }
}

void multiply_each(Row* y, const Row* x, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) vec(y[n])[v] *= vec(x[n])[v];
}

inline float sum_of_row(const Vector* x) {
    Vector total = x[0];
    for (int v = 1; v < VECTORS; ++v) total += x[v];
    return sum_of(total);
}

// (x - mean) / std of each row, in place; 1 / std.
void normalise(Row* x, float* scale, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n) {
        Vector own[VECTORS], square[VECTORS];
        const float mean = sum_of_row(vec(x[n])) / D;
        for (int v = 0; v < VECTORS; ++v) {
            own[v] = vec(x[n])[v] - mean;
            square[v] = own[v] * own[v];
        }
        scale[n] = 1.0f / std::sqrt(sum_of_row(square) / D + EPS);
        for (int v = 0; v < VECTORS; ++v) vec(x[n])[v] = own[v] * scale[n];
    }
}

// The gradient of x from that of its normed rows, in place.
void normalise_back(Row* grad, const Row* hat, const float* scale, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n) {
        Vector product[VECTORS];
        for (int v = 0; v < VECTORS; ++v) product[v] = vec(grad[n])[v] * vec(hat[n])[v];
        const float mean = sum_of_row(vec(grad[n])) / D, along = sum_of_row(product) / D;
        for (int v = 0; v < VECTORS; ++v)
            vec(grad[n])[v] = scale[n] * (vec(grad[n])[v] - mean - vec(hat[n])[v] * along);
    }
}

void scale_and_shift(Row* y, const Row* hat, const float* weight, const float* bias, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) vec(y[n])[v] = vec(hat[n])[v] * vec(weight)[v] + vec(bias)[v];
}

// Gradients of weight and bias; grad becomes that of the normed rows.
void scale_and_shift_back(
    Row* grad, const Row* hat, const float* weight, float* d_weight, float* d_bias, int64_t rows
) {
    Vector of_weight[VECTORS] = {}, of_bias[VECTORS] = {};
    for (int64_t n = 0; n < rows; ++n)
        for (int v = 0; v < VECTORS; ++v) {
            of_weight[v] += vec(grad[n])[v] * vec(hat[n])[v];
            of_bias[v] += vec(grad[n])[v];
            vec(grad[n])[v] *= vec(weight)[v];
        }
    for (int v = 0; v < VECTORS; ++v) vec(d_weight)[v] += of_weight[v], vec(d_bias)[v] += of_bias[v];
}

// Rows on the heap, as they are found there.
struct Table {
    std::unique_ptr<float[]> values;
    explicit Table(int64_t rows) : values(new float[rows * D]) {}
    operator Row*() const { return reinterpret_cast<Row*>(values.get()); }
};

Table zeros(int64_t rows) {
    Table table(rows);
    std::fill_n(table.values.get(), rows * D, 0.0f);
    return table;
}

}  // namespace
