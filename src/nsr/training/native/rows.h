// Rows of D numbers: products, norms and activations, each a pass over a block of rows that stays in the cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int D = NSR_WIDTH;
constexpr int LANES = 16;
constexpr int VECTORS = D / LANES;
constexpr float EPS = 1e-5f;
static_assert(D % LANES == 0, "a row is whole vectors");

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
using Row = float[D];
using Matrix = float[D][D];

// y[n] (+)= sum_k x[n][k] w[k]
template <int ROWS>
inline void multiply_rows(Row* y, const Row* x, const Matrix& w, bool add) {
    Vector sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = add ? reinterpret_cast<const Vector*>(y[r])[v] : Vector{};
    for (int k = 0; k < D; ++k) {
        const Vector* row = reinterpret_cast<const Vector*>(w[k]);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sum[r][v] += x[r][k] * row[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) reinterpret_cast<Vector*>(y[r])[v] = sum[r][v];
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
            for (int v = 0; v < VECTORS; ++v) sum[h][v] = reinterpret_cast<const Vector*>(dw[j + h])[v];
        for (int64_t n = 0; n < rows; ++n) {
            const Vector* row = reinterpret_cast<const Vector*>(x[n]);
            for (int h = 0; h < HEIGHT; ++h)
                for (int v = 0; v < VECTORS; ++v) sum[h][v] += dy[n][j + h] * row[v];
        }
        for (int h = 0; h < HEIGHT; ++h)
            for (int v = 0; v < VECTORS; ++v) reinterpret_cast<Vector*>(dw[j + h])[v] = sum[h][v];
    }
}

void add_rows(float* sum, const Row* x, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) sum[d] += x[n][d];
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
        for (int d = 0; d < D; ++d) y[n][d] = bias[d];
}

// The normal distribution: density and share below x from one exponential, where erff takes as long as all else of GELU.
// Abramowitz and Stegun 7.1.26: within 1e-7, which is single precision.
struct Normal {
    float density, below;
};

inline Normal normal(float x) {
    const float bell = expf(-0.5f * x * x), t = 1.0f / (1.0f + 0.23164189f * std::fabs(x));
    const float sum = t * (0.31938154f + t * (-0.35656378f + t * (1.7814779f + t * (-1.8212559f + t * 1.3302744f))));
    const float density = 0.39894228f * bell, above = density * sum;  // above |x|
    return {density, x < 0 ? above : 1.0f - above};
}

void gelu(float* y, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] * normal(x[i]).below;
}

// GELU of x, and its slope there.
void gelu_and_slope(float* y, float* slope, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const Normal at = normal(x[i]);
        y[i] = x[i] * at.below;
        slope[i] = at.below + x[i] * at.density;
    }
}

void sigmoid(float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = 1.0f / (1.0f + expf(-x[i]));
}

// (x - mean) / std of each row, in place; 1 / std.
void normalise(Row* x, float* scale, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n) {
        float mean = 0, variance = 0;
        for (int d = 0; d < D; ++d) mean += x[n][d];
        mean /= D;
        for (int d = 0; d < D; ++d) x[n][d] -= mean;
        for (int d = 0; d < D; ++d) variance += x[n][d] * x[n][d];
        scale[n] = 1.0f / std::sqrt(variance / D + EPS);
        for (int d = 0; d < D; ++d) x[n][d] *= scale[n];
    }
}

// The gradient of x from that of its normed rows, in place.
void normalise_back(Row* grad, const Row* hat, const float* scale, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n) {
        float mean = 0, along = 0;
        for (int d = 0; d < D; ++d) mean += grad[n][d], along += grad[n][d] * hat[n][d];
        mean /= D, along /= D;
        for (int d = 0; d < D; ++d) grad[n][d] = scale[n] * (grad[n][d] - mean - hat[n][d] * along);
    }
}

void scale_and_shift(Row* y, const Row* hat, const float* weight, const float* bias, int64_t rows) {
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) y[n][d] = hat[n][d] * weight[d] + bias[d];
}

// Gradients of weight and bias; grad becomes that of the normed rows.
void scale_and_shift_back(
    Row* grad, const Row* hat, const float* weight, float* d_weight, float* d_bias, int64_t rows
) {
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) {
            d_weight[d] += grad[n][d] * hat[n][d];
            d_bias[d] += grad[n][d];
            grad[n][d] *= weight[d];
        }
}

// Rows on the heap.
struct Table {
    std::vector<float> values;
    explicit Table(int64_t rows) : values(rows * D, 0.0f) {}
    operator Row*() { return reinterpret_cast<Row*>(values.data()); }
};

}  // namespace
