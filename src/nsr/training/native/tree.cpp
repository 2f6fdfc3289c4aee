// The model on trees on a CPU, as functions over replicas, which are shared out among threads.

#include "gin_stage.h"
#include "tree_ends.h"
#include "tree_layer.h"

extern "C" {

// Numbers that a replica leaves for the backward pass.
int64_t tree_layer_saved_size(int64_t nodes) { return (nodes + BLOCK - 1) / BLOCK * (sizeof(Saved) / sizeof(float)); }

void tree_layer_forward(
    int threads, const Layer* layer, const Row* rows, const int32_t* members, const float* t, const int64_t* place,
    const float* w, Row* out, Row* aggregates, Row* messages, float* saved
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < layer->replicas; ++r) {
        const Input in{
            rows + r * layer->read, members, t, place + r * 3 * layer->pairs, w + r * layer->weight_stride
        };
        auto* kept = reinterpret_cast<Saved*>(saved + r * tree_layer_saved_size(layer->nodes));
        Forward(
            *layer, in, out + r * layer->nodes, aggregates + r * layer->nodes, messages + r * layer->read, kept
        ).run();
    }
}

// Writes d_rows; adds to dw, which has `weights` numbers a replica.
void tree_layer_backward(
    int threads, const Layer* layer, const Row* rows, const int32_t* members, const float* t, const int64_t* place,
    const float* w, const Row* messages, const float* saved, const Row* grad, const Row* d_aggregates, Row* d_rows,
    float* dw, int64_t weights
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < layer->replicas; ++r) {
        const Input in{
            rows + r * layer->read, members, t, place + r * 3 * layer->pairs, w + r * layer->weight_stride
        };
        const auto* kept = reinterpret_cast<const Saved*>(saved + r * tree_layer_saved_size(layer->nodes));
        Backward(
            *layer, in, messages + r * layer->read, kept, grad + r * layer->nodes, d_aggregates + r * layer->nodes,
            d_rows + r * layer->read, dw + r * weights
        ).run();
    }
}

// Of each replica: x, hat and y [rows], weights and moments at their strides of whole matrices and rows.
void gin_stage_forward(
    int threads, int64_t replicas, int64_t rows, const Row* x, const float* w, const Row* bias, const Row* gamma,
    const Row* beta, const float* count, Row* hat, Row* y, Row* mean, Row* variance, Row* scale
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r)
        stage_forward(
            rows, x + r * rows, w + r * D * D, bias[r], gamma[r], beta[r], count + r * rows, hat + r * rows,
            y + r * rows, mean[r], variance[r], scale[r]
        );
}

void gin_stage_backward(
    int threads, int64_t replicas, int64_t rows, const Row* x, const float* w, const Row* gamma, const float* count,
    const Row* hat, const Row* y, const Row* scale, const Row* grad, Row* dx, float* dw, Row* d_bias, Row* d_gamma,
    Row* d_beta
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r)
        stage_backward(
            rows, x + r * rows, w + r * D * D, gamma[r], count + r * rows, hat + r * rows, y + r * rows, scale[r],
            grad + r * rows, dx + r * rows, dw + r * D * D, d_bias[r], d_gamma[r], d_beta[r]
        );
}

void tree_encode_forward(
    int threads, int64_t replicas, int64_t places, int64_t leaves, const float* w, const Row* bias,
    const int64_t* values, Row* rows
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r)
        encode_forward(
            places, leaves, w + r * D * 2 * (leaves + 1), bias[r], values + r * places, rows + r * (places + leaves + 1)
        );
}

void tree_encode_backward(
    int threads, int64_t replicas, int64_t places, int64_t leaves, const int64_t* values, const Row* grad,
    float* dw, Row* d_bias
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r)
        encode_backward(
            places, leaves, values + r * places, grad + r * (places + leaves + 1), dw + r * D * 2 * (leaves + 1),
            d_bias[r]
        );
}

// The roots are the last of `rows` rows.
void tree_head_and_loss(
    int threads, int64_t replicas, int64_t rows, int64_t pairs, int64_t leaves, const Row* x, const float* w,
    const float* bias, const int64_t* label, const float* count, float* loss, float* right, Row* d_roots, float* dw,
    float* d_bias
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r)
        head_and_loss(
            pairs, leaves, x + (r + 1) * rows - pairs, w + r * leaves * D, bias + r * leaves, label + r * pairs,
            count + r * pairs, loss + r, right + r, d_roots + r * pairs, dw + r * leaves * D, d_bias + r * leaves
        );
}
}
