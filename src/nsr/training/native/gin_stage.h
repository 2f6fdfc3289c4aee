// One stage of GIN's conv on trees; the plain twin is host_update in tree_layer.py.

#pragma once

#include "rows.h"

namespace {

// One stage of GIN's conv, y = ReLU(BatchNorm(x W^T + b)), over rows that count as often as `count` says.
void stage_forward(
    int64_t rows, const Row* x, const float* w, const float* bias, const float* gamma, const float* beta,
    const float* count, Row* hat, Row* y, float* mean, float* variance, float* scale
) {
    Matrix weight;
    load(weight, w, D, true);
    set_rows(hat, bias, rows);
    multiply(hat, x, weight, rows, true);
    double total = 0, sum[D] = {}, squares[D] = {};  // thousands of rows: single precision would cost three digits
    for (int64_t n = 0; n < rows; ++n) {
        total += count[n];
        for (int d = 0; d < D; ++d) sum[d] += count[n] * hat[n][d];
    }
    for (int d = 0; d < D; ++d) mean[d] = sum[d] / total;
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) {
            hat[n][d] -= mean[d];
            squares[d] += count[n] * hat[n][d] * hat[n][d];
        }
    for (int d = 0; d < D; ++d) variance[d] = squares[d] / total;
    for (int d = 0; d < D; ++d) scale[d] = 1.0f / std::sqrt(variance[d] + EPS);
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) {
            hat[n][d] *= scale[d];
            y[n][d] = std::max(0.0f, hat[n][d] * gamma[d] + beta[d]);
        }
}

void stage_backward(
    int64_t rows, const Row* x, const float* w, const float* gamma, const float* count, const Row* hat, const Row* y,
    const float* scale, const Row* grad, Row* dx, float* dw, float* d_bias, float* d_gamma, float* d_beta
) {
    float total = 0;
    for (int64_t n = 0; n < rows; ++n) total += count[n];
    Table d_linear(rows);
    std::fill_n(d_gamma, D, 0.0f);
    std::fill_n(d_beta, D, 0.0f);
    std::fill_n(d_bias, D, 0.0f);
    for (int64_t n = 0; n < rows; ++n)
        for (int d = 0; d < D; ++d) {
            const float g = y[n][d] > 0 ? grad[n][d] : 0.0f;
            d_linear[n][d] = g;
            d_gamma[d] += g * hat[n][d];
            d_beta[d] += g;
        }
    for (int64_t n = 0; n < rows; ++n)  // mean and variance depend on a row as often as it counts
        for (int d = 0; d < D; ++d)
            d_linear[n][d] = gamma[d] * scale[d]
                * (d_linear[n][d] - count[n] / total * (d_beta[d] + hat[n][d] * d_gamma[d]));
    Matrix weight, d_weight = {};
    load(weight, w, D, false);
    multiply(dx, d_linear, weight, rows);
    outer(d_weight, d_linear, x, rows);
    add_rows(d_bias, d_linear, rows);
    std::memcpy(dw, d_weight, sizeof(Matrix));
}

}  // namespace
