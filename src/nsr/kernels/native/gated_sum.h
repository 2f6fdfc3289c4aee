// The gated residual sum, forward and backward; see gated_sum.py for the formula, gated_sum_plain.py for its plain twin.
//
// A block of members goes from its gathered rows to what it adds to the tables without leaving the cache. The backward
// pass computes every member's values anew.

#pragma once

#include "members.h"
#include "products.h"

namespace {

// One replica's, each row behind the one before.
struct Tables {
    const float *messages, *source_gate, *target_gate, *mean, *mean_gate, *weight, *bias;
};

struct Gradients {
    float *messages, *source_gate, *target_gate, *mean, *mean_gate, *weight, *bias;
};

// What a thread keeps of its block.
struct Space {
    std::vector<float> hidden, slope, gate, residual, share;
    std::vector<float> d_weight, d_bias;

    Space(int64_t width, bool backward)
        : hidden(BLOCK * width), slope(backward ? BLOCK * width : 0), gate(BLOCK * width), residual(BLOCK * width),
          share(backward ? BLOCK * width : 0), d_weight(backward ? width * width : 0), d_bias(backward ? width : 0) {}
};

class GatedSum {
  public:
    GatedSum(const Sizes& sizes, const Tables& tables, const Graph& graph)
        : n(sizes), in(tables), graph(graph), vectors(n.width / LANES), per_head(vectors / n.heads),
          scale(scale_of_rows(graph.target, n.members, n.targets)), transposed(n.width * n.width) {
        transpose(transposed.data(), in.weight, n.width);
    }

    void forward(int threads, float* out) {
        std::vector<Space> space(threads, Space(n.width, false));
#pragma omp parallel num_threads(threads)
        {
            const int me = omp_get_thread_num(), all = omp_get_num_threads();
            for (int64_t first = 0; first < n.members; first += all * BLOCK) {
                gated(space[me], block_of(me, first, n.members));
#pragma omp barrier
                for (int other = 0; other < all; ++other)
                    add_by_target(out, space[other], block_of(other, first, n.members), me, all);
#pragma omp barrier
            }
            for (int64_t v = me; v < n.targets; v += all)
                for (int64_t c = 0; c < vectors; ++c) vec(out + v * n.width)[c] *= scale[v];
        }
    }

    void backward(int threads, const float* grad, const Gradients& d, float* d_coefficient) {
        std::vector<Space> space(threads, Space(n.width, true));
#pragma omp parallel num_threads(threads)
        {
            const int me = omp_get_thread_num(), all = omp_get_num_threads();
            for (int64_t first = 0; first < n.members; first += all * BLOCK) {
                gradients(space[me], block_of(me, first, n.members), grad, d_coefficient);
#pragma omp barrier
                for (int other = 0; other < all; ++other)
                    add_gradients(d, space[other], block_of(other, first, n.members), me, all);
#pragma omp barrier
            }
        }
        for (const Space& part : space) {
            add_row(d.weight, part.d_weight.data(), n.width * vectors);
            add_row(d.bias, part.d_bias.data(), vectors);
        }
    }

  private:
    // What a member will read of the tables, or add to their gradients. It has no effect that a compiler sees, so it must
    // be inlined: a call to it would be dropped.
    template <typename Rows>
    [[gnu::always_inline]] void fetch_rows(const Rows& of, int64_t member) {
        const int64_t from = graph.source[member] * n.width, row = graph.target[member] * n.width;
        fetch(of.source_gate + from, n.width), fetch(of.messages + from, n.width);
        fetch(of.target_gate + row, n.width), fetch(of.mean + row, n.width);
        fetch(of.mean_gate + row * n.heads, n.width * n.heads);
    }

    // The hidden layer and, where asked for, its slope; the gate; the residual.
    void members(Space& s, const Block& block, bool with_slope) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t member = block.begin + i, row = graph.target[member] * n.width;
            const int64_t from = graph.source[member] * n.width;
            if (i + AHEAD < block.count) fetch_rows(in, member + AHEAD);
            const float* t = graph.coefficient + member * n.heads;
            const Vector *a = vec(in.source_gate + from), *b = vec(in.target_gate + row);
            const Vector *m = vec(in.messages + from), *u = vec(in.mean + row);
            const float* c = in.mean_gate + row * n.heads;
            for (int64_t v = 0; v < vectors; ++v) {
                Vector before = a[v] + b[v];
                for (int64_t h = 0; h < n.heads; ++h) before -= t[h] * vec(c + h * n.width)[v];
                const Normal at = normal(before);
                vec(&s.hidden[i * n.width])[v] = before * at.below;
                if (with_slope) vec(&s.slope[i * n.width])[v] = at.below + before * at.density;
                vec(&s.residual[i * n.width])[v] = m[v] - t[v / per_head] * u[v];
            }
        }
        multiply(s.gate.data(), s.hidden.data(), transposed.data(), in.bias, block.count, n.width);
        for (int64_t v = 0; v < block.count * vectors; ++v) vec(s.gate.data())[v] = sigmoid(vec(s.gate.data())[v]);
    }

    void gated(Space& s, const Block& block) {
        members(s, block, false);
        for (int64_t v = 0; v < block.count * vectors; ++v) vec(s.residual.data())[v] *= vec(s.gate.data())[v];
    }

    void add_by_target(float* out, const Space& s, const Block& block, int me, int all) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t row = graph.target[block.begin + i];
            if (row % all == me) add_row(out + row * n.width, &s.residual[i * n.width], vectors);
        }
    }

    // After this `hidden` is the gradient before GELU, `residual` that of the residual.
    void gradients(Space& s, const Block& block, const float* grad, float* d_coefficient) {
        members(s, block, true);
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t row = graph.target[block.begin + i];
            for (int64_t v = 0; v < vectors; ++v) {
                const Vector g = vec(&s.gate[i * n.width])[v];
                const Vector from_sum = scale[row] * vec(grad + row * n.width)[v];
                Vector& z = vec(&s.residual[i * n.width])[v];
                const Vector d_logit = g * (1.0f - g) * z * from_sum;
                vec(&s.share[i * n.width])[v] = d_logit;
                vec(s.d_bias.data())[v] += d_logit;
                z = g * from_sum;
            }
        }
        outer(s.d_weight.data(), s.share.data(), s.hidden.data(), block.count, n.width);
        multiply(s.hidden.data(), s.share.data(), in.weight, nullptr, block.count, n.width);
        for (int64_t v = 0; v < block.count * vectors; ++v) vec(s.hidden.data())[v] *= vec(s.slope.data())[v];
        if (d_coefficient) add_coefficients(d_coefficient, s, block);
    }

    void add_coefficients(float* d_coefficient, const Space& s, const Block& block) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t member = block.begin + i, row = graph.target[member] * n.width;
            for (int64_t h = 0; h < n.heads; ++h) {
                Vector sum = {};
                for (int64_t v = h * per_head; v < (h + 1) * per_head; ++v)
                    sum += vec(&s.residual[i * n.width])[v] * vec(in.mean + row)[v];
                for (int64_t v = 0; v < vectors; ++v)
                    sum += vec(&s.hidden[i * n.width])[v] * vec(in.mean_gate + (row * n.heads + h * n.width))[v];
                d_coefficient[member * n.heads + h] -= sum_of(sum);
            }
        }
    }

    void add_gradients(const Gradients& d, const Space& s, const Block& block, int me, int all) {
        for (int64_t i = 0; i < block.count; ++i) {
            const int64_t member = block.begin + i, from = graph.source[member], row = graph.target[member];
            if (i + AHEAD < block.count) fetch_rows(d, member + AHEAD);
            const float *before = &s.hidden[i * n.width], *residual = &s.residual[i * n.width];
            const float* t = graph.coefficient + member * n.heads;
            if (from % all == me) {
                add_row(d.source_gate + from * n.width, before, vectors);
                add_row(d.messages + from * n.width, residual, vectors);
            }
            if (row % all != me) continue;
            add_row(d.target_gate + row * n.width, before, vectors);
            for (int64_t h = 0; h < n.heads; ++h) {
                const int64_t channel = h * per_head * LANES;
                add_row_times(d.mean + row * n.width + channel, -t[h], residual + channel, per_head);
                add_row_times(d.mean_gate + (row * n.heads + h) * n.width, -t[h], before, vectors);
            }
        }
    }

    const Sizes& n;
    const Tables& in;
    const Graph& graph;
    const int64_t vectors, per_head;  // of a row, and of a head's share of it
    std::vector<float> scale, transposed;
};

}  // namespace
