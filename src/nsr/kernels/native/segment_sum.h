// The weighted sum over the members of each row; see segment_sum.py, and segment_sum_plain.py for its plain twin.

#pragma once

#include "members.h"

namespace {

// out[target] += t m[source], each head with its own coefficients. Each thread has rows of its own.
void weighted_sum(
    int threads, const Sizes& n, const float* messages, const Graph& graph, float* out
) {
    const int64_t per_head = n.width / n.heads;
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t i = 0; i < n.members; ++i) {
            if (graph.target[i] % all != me) continue;
            const float *from = messages + graph.source[i] * n.width, *t = graph.coefficient + i * n.heads;
            float* to = out + graph.target[i] * n.width;
            for (int64_t h = 0; h < n.heads; ++h)
                add_row_times(to + h * per_head, t[h], from + h * per_head, per_head / LANES);
        }
    }
}

// d_t += m[source] . grad[target], over the channels of each head
void weighted_sum_coefficient(
    int threads, const Sizes& n, const float* messages, const float* grad, const Graph& graph, float* d_coefficient
) {
    const int64_t per_head = n.width / n.heads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < n.members; ++i)
        for (int64_t h = 0; h < n.heads; ++h) {
            const Vector* m = vec(messages + graph.source[i] * n.width + h * per_head);
            const Vector* g = vec(grad + graph.target[i] * n.width + h * per_head);
            Vector sum = {};
            for (int64_t v = 0; v < per_head / LANES; ++v) sum += m[v] * g[v];
            d_coefficient[i * n.heads + h] += sum_of(sum);
        }
}

}  // namespace
