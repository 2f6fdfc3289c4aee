// Rows of D numbers: products, norms and activations, each a pass over a block of rows that stays in the cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int D = NSR_WIDTH;
constexpr int LANES = 16;
constexpr int VECTORS = D / LANES;
constexpr float EPS = 1e-5f;
static_assert(D % LANES == 0, "a row is whole vectors");

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));
using Row = float[D];
using Matrix = float[D][D];

// A row as vectors. What is written with them is done in the order in which it stands, so that the compiler need not
// ask whether rows overlap each time it meets two.
inline Vector* vec(float* row) { return reinterpret_cast<Vector*>(row); }
inline const Vector* vec(const float* row) { return reinterpret_cast<const Vector*>(row); }

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

// e^x, to the rounding of x: x = n ln 2 + f, and 2^n is made of bits. What is no number stays so, which is seen in its
// bits alone: -ffast-math takes comparisons for true.
inline Vector exponential(Vector exponent) {
    const Integers number = (reinterpret_cast<const Integers&>(exponent) & 0x7fffffff) <= 0x7f800000;
    Vector x = exponent < -87.0f ? Vector{} - 87.0f : exponent;
    x = x > 88.0f ? Vector{} + 88.0f : x;
    const Vector y = x * 1.44269504f + 0.5f;
    Integers n = __builtin_convertvector(y, Integers);  // towards 0
    n += __builtin_convertvector(n, Vector) > y;         // downwards: true is -1
    const Vector f = x - __builtin_convertvector(n, Vector) * 0.693147181f;
    const Vector e = 1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f / 720)))));
    const Integers bits = (n + 127) << 23;
    return number ? e * reinterpret_cast<const Vector&>(bits) : exponent;
}

// The normal distribution: density and share below x, both from one exponential. Abramowitz and Stegun 7.1.26, to 1e-7.
struct Normal {
    Vector density, below;
};

inline Normal normal(Vector x) {
    const Vector size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.23164189f * size);
    const Vector sum = t * (0.31938154f + t * (-0.35656378f + t * (1.7814779f + t * (-1.8212559f + t * 1.3302744f))));
    const Vector density = 0.39894228f * exponential(-0.5f * x * x), above = density * sum;  // above |x|
    return {density, x < 0.0f ? above : 1.0f - above};
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

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

inline float sum_of(Vector x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
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
