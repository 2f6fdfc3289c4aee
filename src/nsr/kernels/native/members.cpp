// The sums over members. Tables are those of one replica, each row behind the one before; an index that was not checked
// here goes only to the pass that follows one in which it was.

#include "gated_sum.h"
#include "segment_sum.h"

extern "C" {

// Whether source and target name only rows that there are.
int members_are_there(const Sizes* n, const Graph* graph) {
    return within(graph->source, n->members, n->sources) && within(graph->target, n->members, n->targets);
}

// `out` is given as zeros.
void gated_sum_forward(int threads, const Sizes* n, const Tables* tables, const Graph* graph, float* out) {
    GatedSum(*n, *tables, *graph).forward(threads, out);
}

// Adds to the gradients; `d_coefficient` may be null, it is then not wanted.
void gated_sum_backward(
    int threads, const Sizes* n, const Tables* tables, const Graph* graph, const float* grad,
    const Gradients* gradients, float* d_coefficient
) {
    GatedSum(*n, *tables, *graph).backward(threads, grad, *gradients, d_coefficient);
}

// `out` is given as zeros.
void segment_sum(int threads, const Sizes* n, const float* messages, const Graph* graph, float* out) {
    weighted_sum(threads, *n, messages, *graph, out);
}

// Adds to the gradient.
void segment_sum_coefficient(
    int threads, const Sizes* n, const float* messages, const float* grad, const Graph* graph, float* d_coefficient
) {
    weighted_sum_coefficient(threads, *n, messages, grad, *graph, d_coefficient);
}
}
