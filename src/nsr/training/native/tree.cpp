// Training on trees on a CPU: a step of every replica, which are shared out among threads.

#include "tree_step.h"

extern "C" {

// Weights and gradients are rows of `model->weights` numbers; the gradients are written.
void tree_step(
    int threads, const Model* model, const TreeLayer* layers, const Batch* batch, const float* weights,
    float* gradient, float* loss, float* right
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < model->replicas; ++r)
        Step(*model, layers, *batch, weights + r * model->weights, gradient + r * model->weights, r)
            .run(loss + r, right + r);
}
}
