// What stands before and after the layers on trees: encoder and loss; the plain twin is PlainParts in tree_model.py.

#pragma once

#include "rows.h"

namespace {

// The rows before the first layer: one-hot key and value through a linear layer, w [D, 2 (L + 1)], as sums of columns.
void encode_forward(
    int64_t places, int64_t leaves, const float* w, const float* bias, const int64_t* values, Row* rows
) {
    const int64_t columns = 2 * (leaves + 1);
    Table table(columns);  // keys with the bias, then values
    for (int d = 0; d < D; ++d)
        for (int64_t c = 0; c < columns; ++c) table[c][d] = w[d * columns + c] + (c <= leaves ? bias[d] : 0.0f);
    const Row *keys = table, *by_value = table + leaves + 1;
    for (int64_t place = 0; place < places; ++place) {
        const Row &key = keys[place % leaves + 1], &value = by_value[values[place] + 1];
        for (int d = 0; d < D; ++d) rows[place][d] = key[d] + value[d];
    }
    for (int64_t key = 0; key <= leaves; ++key)  // the blank, then the roots of all queries
        for (int d = 0; d < D; ++d) rows[places + key][d] = keys[key][d] + by_value[0][d];
}

void encode_backward(
    int64_t places, int64_t leaves, const int64_t* values, const Row* grad, float* dw, float* d_bias
) {
    const int64_t columns = 2 * (leaves + 1);
    const Table table = zeros(columns);
    Row *keys = table, *by_value = table + leaves + 1;
    const auto add = [](Row& to, const Row& x) {
        for (int d = 0; d < D; ++d) to[d] += x[d];
    };
    for (int64_t place = 0; place < places; ++place) {
        add(keys[place % leaves + 1], grad[place]);
        add(by_value[values[place] + 1], grad[place]);
    }
    for (int64_t key = 0; key <= leaves; ++key) {
        add(keys[key], grad[places + key]);
        add(by_value[0], grad[places + key]);
    }
    std::fill_n(d_bias, D, 0.0f);
    add_rows(d_bias, keys, leaves + 1);
    for (int d = 0; d < D; ++d)
        for (int64_t c = 0; c < columns; ++c) dw[d * columns + c] = table[c][d];
}

// Mean cross-entropy of the pairs that count and the number of right answers; the gradients of the first with it.
void head_and_loss(
    int64_t pairs, int64_t leaves, const Row* roots, const float* w, const float* bias, const int64_t* label,
    const float* count, float* loss, float* right, Row* d_roots, float* dw, float* d_bias
) {
    const int64_t vectors = (leaves + LANES - 1) / LANES, width = vectors * LANES;  // filled up with answers that
    std::vector<float> by_input(D * width), biases(width, -1e30f), logits(width);   // nobody gives
    for (int64_t c = 0; c < leaves; ++c) {
        biases[c] = bias[c];
        for (int k = 0; k < D; ++k) by_input[k * width + c] = w[c * D + k];
    }
    double sum = 0;
    float total = 0, correct = 0;
    for (int64_t n = 0; n < pairs; ++n) total += count[n];
    std::fill_n(dw, leaves * D, 0.0f);
    std::fill_n(d_bias, leaves, 0.0f);
    for (int64_t n = 0; n < pairs; ++n) {
        const Row& x = roots[n];
        for (int64_t v = 0; v < vectors; ++v) {
            Vector logit = vec(biases.data())[v];
            for (int k = 0; k < D; ++k) logit += x[k] * vec(&by_input[k * width])[v];
            vec(logits.data())[v] = logit;
        }
        const int64_t best = std::max_element(logits.begin(), logits.end()) - logits.begin();
        const float highest = logits[best], of_label = logits[label[n]];
        float below = 0;
        for (int64_t v = 0; v < vectors; ++v) {
            const Vector share = exponential(vec(logits.data())[v] - highest);
            vec(logits.data())[v] = share;
            below += sum_of(share);
        }
        sum += count[n] * (std::log(below) + highest - of_label);
        correct += best == label[n] ? count[n] : 0.0f;
        const float scale = count[n] / (total * below);  // from here on logits are their gradients
        for (int64_t v = 0; v < vectors; ++v) vec(logits.data())[v] *= scale;
        logits[label[n]] -= count[n] / total;
        Vector dx[VECTORS] = {};
        for (int64_t c = 0; c < leaves; ++c) {
            d_bias[c] += logits[c];
            for (int v = 0; v < VECTORS; ++v) {
                dx[v] += logits[c] * vec(w + c * D)[v];
                vec(dw + c * D)[v] += logits[c] * vec(x)[v];
            }
        }
        for (int v = 0; v < VECTORS; ++v) vec(d_roots[n])[v] = dx[v];
    }
    *loss = sum / total;
    *right = correct;
}

}  // namespace
