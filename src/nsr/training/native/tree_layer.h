// One layer on trees, forward and backward; names follow tree_layer.py, its plain twin.
//
// A layer of width 32 is some forty small operators forward and ninety backward, whose time is that of calling them.
// Here the rows of a block of nodes stay in the cache from the gathered states to the result.
//
// With W1 = [Ws | Wd | Wz] the gate's hidden layer is  Ws x_i + Wd x_0 + Wz z_i + b1 = a_i + q - s_i e,  where
//     m = W x and a = (Ws + Wz W) x   are made once a row that is read,
//     q = Wd x_0 + b1 and e = Wz u    once a node, u = sum_i s_i m_i, z_i = m_i - s_i u.
// Member 0 is the node itself, 1 and 2 are its children; s are the coefficients t at unit length.

#pragma once

#include "rows.h"

namespace {

constexpr int BLOCK = 32;  // nodes

// Where matrices and vectors begin in a replica's weights, in the order of PLACES in
// tree_sections.py; 0 for what a layer does not have.
struct Places {
    int64_t message, hidden, hidden_bias, gate, gate_bias, norm, norm_bias, first, first_bias, second, second_bias;
    int64_t conv, conv_bias, root, update, update_bias;
};

// What a layer reads and makes; see LayerPlan in tree_plan.py.
struct Layer {
    const int32_t* members;
    const float* t;
    int64_t read, nodes, first_pair, pairs, own_moves;  // rows that are read, rows that are made
    int64_t copies, branch, host, sage;
    Places at;
};

// What the backward pass takes from the forward pass, a block of nodes at a time. Of `count` nodes the members stand
// one after the other: all nodes themselves, all left and all right children.
struct Saved {
    Row hidden[3 * BLOCK], gate[3 * BLOCK];
    Row hat[BLOCK], inner[BLOCK];  // the branch: normed sum, hidden layer of the output network
    Row conv_hat[BLOCK];           // the host: normed conv
    float scale[BLOCK], conv_scale[BLOCK];
};

// A block of nodes: which rows they read, with which coefficients.
struct Members {
    int64_t count;
    int64_t row[3][BLOCK];  // -1: not there
    float t[2][BLOCK];      // of the node and of each child
    float s[3][BLOCK];      // at unit length
    float times[3];         // how often each is a member
    float per_root[BLOCK];  // K^{-1/2}
    bool lone;              // every node is its own only member, so that all residuals are 0
};

void find_members(Members& found, const Layer& layer, const int64_t* place, int64_t first) {
    found.count = std::min<int64_t>(BLOCK, layer.nodes - first);
    found.times[0] = layer.copies, found.times[1] = found.times[2] = 1;
    found.lone = true;
    for (int64_t n = 0; n < found.count; ++n) {
        const int64_t node = first + n, pair = node - layer.first_pair;
        for (int i = 0; i < 3; ++i) found.row[i][n] = layer.members[3 * node + i];
        if (pair >= 0) {
            if (layer.own_moves) found.row[0][n] += place[pair];
            for (int i = 1; i < 3; ++i) found.row[i][n] += place[layer.pairs + 2 * pair + i - 1];
        }
        const float own = layer.t[2 * node], child = layer.t[2 * node + 1];
        const float length = std::sqrt(layer.copies * own * own + 2 * child * child);
        found.t[0][n] = own, found.t[1][n] = child;
        found.s[0][n] = own / length, found.s[1][n] = found.s[2][n] = child / length;
        found.lone = found.lone && child == 0;
        found.per_root[n] = 1.0f / std::sqrt(layer.copies + (child != 0 ? 2.0f : 0.0f));
    }
}

const Row NOTHING = {};

inline const Row& at(const Row* table, int64_t row) { return row < 0 ? NOTHING : table[row]; }

void aggregate_members(Row* aggregate, Row* own, const Members& found, const Row* rows) {
    for (int64_t n = 0; n < found.count; ++n) {
        const Row &x0 = at(rows, found.row[0][n]), &x1 = at(rows, found.row[1][n]), &x2 = at(rows, found.row[2][n]);
        const float of_own = found.times[0] * found.t[0][n], of_child = found.t[1][n];
        for (int v = 0; v < VECTORS; ++v) {
            vec(own[n])[v] = vec(x0)[v];
            vec(aggregate[n])[v] = of_own * vec(x0)[v] + of_child * (vec(x1)[v] + vec(x2)[v]);
        }
    }
}

// u of each node, and z of each member
void project(Row* u, Row* z, const Members& found, const Row* messages) {
    for (int64_t n = 0; n < found.count; ++n) {
        const Row *m[3];
        for (int i = 0; i < 3; ++i) m[i] = &at(messages, found.row[i][n]);
        for (int v = 0; v < VECTORS; ++v) {
            Vector sum = {};
            for (int i = 0; i < 3; ++i) sum += found.times[i] * found.s[i][n] * vec(*m[i])[v];
            vec(u[n])[v] = sum;
            for (int i = 0; i < 3; ++i) vec(z[i * found.count + n])[v] = vec(*m[i])[v] - found.s[i][n] * sum;
        }
    }
}

// A layer's matrices, as they stand, which is what gradients need, or the other way round, for y = x W^T.
struct Weights {
    Matrix message, source, combined, target, residual, gate, first, second, conv, root;
};

void load_weights(Weights& to, const Layer& layer, const float* w, bool transposed) {
    const Places& p = layer.at;
    if (layer.branch) {
        load(to.message, w + p.message, D, transposed);
        load(to.source, w + p.hidden, 3 * D, transposed);
        load(to.target, w + p.hidden + D, 3 * D, transposed);
        load(to.residual, w + p.hidden + 2 * D, 3 * D, transposed);
        load(to.gate, w + p.gate, D, transposed);
        load(to.first, w + p.first, D, transposed);
        load(to.second, w + p.second, D, transposed);
        std::memcpy(to.combined, to.source, sizeof(Matrix));  // Ws + Wz W
        if (transposed)
            multiply(to.combined, to.message, to.residual, D, true);
        else
            multiply(to.combined, to.residual, to.message, D, true);
    }
    if (layer.host) load(to.conv, w + p.conv, D, transposed);
    if (layer.sage) load(to.root, w + p.root, D, transposed);
}

// What both passes over a replica read.
struct Input {
    const Row* rows;
    const int64_t* place;
    const float* w;
};

class Forward {
  public:
    Forward(const Layer& layer, const Input& in, Row* out, Row* aggregates, Row* messages, Saved* saved)
        : layer(layer), p(layer.at), in(in), out(out), aggregates(aggregates), messages(messages), saved(saved),
          sources(layer.branch ? layer.read : 0) {
        load_weights(weights, layer, in.w, true);
    }

    void run() {
        Row of_nothing[1] = {};  // the branch's update where all residuals are 0
        if (layer.branch) {
            multiply(messages, in.rows, weights.message, layer.read);
            multiply(sources, in.rows, weights.combined, layer.read);
            Row hat[1] = {}, inner[1];
            float scale;
            output(of_nothing, hat, inner, &scale, 1);
        }
        for (int64_t first = 0; first < layer.nodes; first += BLOCK, ++saved, out += BLOCK) {
            find_members(found, layer, in.place, first);
            aggregate_members(aggregate, own, found, in.rows);
            std::memcpy(out, own, found.count * sizeof(Row));
            if (layer.host)
                host();
            else
                std::memcpy(aggregates + first, aggregate, found.count * sizeof(Row));
            if (layer.branch && found.lone) {
                for (int64_t n = 0; n < found.count; ++n)
                    for (int v = 0; v < VECTORS; ++v) vec(out[n])[v] += vec(of_nothing[0])[v];
            } else if (layer.branch) {
                gated_sum();
                output(out, saved->hat, saved->inner, saved->scale, found.count);
            }
        }
    }

  private:
    // out += GELU(LayerNorm(conv))
    void host() {
        Row* conv = saved->conv_hat;
        set_rows(conv, in.w + p.conv_bias, found.count);
        multiply(conv, aggregate, weights.conv, found.count, true);
        if (layer.sage) multiply(conv, own, weights.root, found.count, true);
        normalise(conv, saved->conv_scale, found.count);
        scale_and_shift(normed, conv, in.w + p.update, in.w + p.update_bias, found.count);
        gelu(normed, normed, found.count);
        add(out, normed, found.count);
    }

    // saved->hat: K^{-1/2} sum_i g_i z_i, not normed yet
    void gated_sum() {
        Row* sum = saved->hat;
        std::fill_n(sum[0], found.count * D, 0.0f);
        const int64_t count = found.count, all = 3 * count;
        project(u, z, found, messages);
        set_rows(target, in.w + p.hidden_bias, count);
        multiply(target, own, weights.target, count, true);
        multiply(shift, u, weights.residual, count);
        for (int i = 0; i < 3; ++i)
            for (int64_t n = 0; n < count; ++n) {
                const Row& a = at(sources, found.row[i][n]);
                Row& hidden = saved->hidden[i * count + n];
                for (int v = 0; v < VECTORS; ++v)
                    vec(hidden)[v] = vec(a)[v] + vec(target[n])[v] - found.s[i][n] * vec(shift[n])[v];
            }
        gelu(active, saved->hidden, all);
        set_rows(saved->gate, in.w + p.gate_bias, all);
        multiply(saved->gate, active, weights.gate, all, true);
        for (int i = 0; i < 3; ++i)
            for (int64_t n = 0; n < count; ++n) {
                const float weight = found.times[i] * found.per_root[n];
                Row &gate = saved->gate[i * count + n], &residual = z[i * count + n];
                for (int v = 0; v < VECTORS; ++v) {
                    vec(gate)[v] = sigmoid(vec(gate)[v]);
                    vec(sum[n])[v] += weight * vec(gate)[v] * vec(residual)[v];
                }
            }
    }

    // out += W4 GELU(W3 LayerNorm(sum) + b3) + b4; the sum becomes `hat`, the normed one
    void output(Row* out, Row* hat, Row* inner, float* scale, int64_t count) {
        normalise(hat, scale, count);
        scale_and_shift(normed, hat, in.w + p.norm, in.w + p.norm_bias, count);
        set_rows(inner, in.w + p.first_bias, count);
        multiply(inner, normed, weights.first, count, true);
        gelu(active, inner, count);
        set_rows(normed, in.w + p.second_bias, count);
        multiply(normed, active, weights.second, count, true);
        add(out, normed, count);
    }

    void add(Row* to, const Row* x, int64_t count) {
        for (int64_t n = 0; n < count; ++n)
            for (int v = 0; v < VECTORS; ++v) vec(to[n])[v] += vec(x[n])[v];
    }

    const Layer& layer;
    const Places& p;
    const Input& in;
    Row *out, *aggregates, *messages;
    Saved* saved;
    Weights weights;
    Members found;
    Table sources;  // a of each row that is read
    Table aggregate{BLOCK}, own{BLOCK}, u{BLOCK}, target{BLOCK}, shift{BLOCK}, normed{BLOCK};
    Table z{3 * BLOCK}, active{3 * BLOCK};
};

class Backward {
  public:
    Backward(
        const Layer& layer, const Input& in, const Row* messages, const Saved* saved, const Row* grad,
        const Row* d_aggregates, Row* d_rows, float* dw
    )
        : layer(layer), p(layer.at), in(in), messages(messages), d_out(grad), saved(saved), d_rows(d_rows), dw(dw),
          d_aggregates(d_aggregates), d_messages(zeros(layer.branch ? layer.read : 0)),
          d_sources(zeros(layer.branch ? layer.read : 0)) {
        load_weights(weights, layer, in.w, false);
    }

    void run() {
        std::fill_n(d_rows[0], layer.read * D, 0.0f);
        Row d_of_nothing[1] = {};  // of the branch's update where all residuals are 0
        for (int64_t first = 0; first < layer.nodes; first += BLOCK, ++saved, d_out += BLOCK) {
            find_members(found, layer, in.place, first);
            aggregate_members(aggregate, own, found, in.rows);
            std::memcpy(d_own, d_out, found.count * sizeof(Row));
            if (layer.branch && found.lone) {
                add_rows(d_of_nothing[0], d_out, found.count);
            } else if (layer.branch) {
                output(d_out, saved->hat, saved->inner, saved->scale, found.count);
                gated_sum();
            }
            if (layer.host)
                host();
            else
                std::memcpy(d_aggregate, d_aggregates + first, found.count * sizeof(Row));
            to_rows();
        }
        if (layer.branch) {
            output_of_nothing(d_of_nothing);
            rows_of_the_branch();
        }
        if (layer.host) add_matrix(dw + p.conv, d.conv, D);
        if (layer.sage) add_matrix(dw + p.root, d.root, D);
    }

  private:
    // d_sum: the gradient of the gated sum
    void output(const Row* grad, const Row* hat, const Row* inner, const float* scale, int64_t count) {
        gelu_and_slope(active, slope, inner, count);
        outer(d.second, grad, active, count);
        add_rows(dw + p.second_bias, grad, count);
        multiply(d_inner, grad, weights.second, count);
        multiply_each(d_inner, slope, count);
        scale_and_shift(normed, hat, in.w + p.norm, in.w + p.norm_bias, count);
        outer(d.first, d_inner, normed, count);
        add_rows(dw + p.first_bias, d_inner, count);
        multiply(d_sum, d_inner, weights.first, count);
        scale_and_shift_back(d_sum, hat, in.w + p.norm, dw + p.norm, dw + p.norm_bias, count);
        normalise_back(d_sum, hat, scale, count);
    }

    void output_of_nothing(const Row* grad) {
        Row hat[1] = {}, inner[1];
        Matrix first;
        load(first, in.w + p.first, D, true);
        set_rows(inner, in.w + p.first_bias, 1);
        multiply(inner, reinterpret_cast<const Row*>(in.w + p.norm_bias), first, 1, true);
        const float scale = 0;  // nothing is behind it
        output(grad, hat, inner, &scale, 1);
    }

    // Of the gates, and of what they let through
    void gated_sum() {
        const int64_t count = found.count, all = 3 * count;
        project(u, z, found, messages);
        for (int i = 0; i < 3; ++i)
            for (int64_t n = 0; n < count; ++n) {
                const float weight = found.times[i] * found.per_root[n];
                const int64_t member = i * count + n;
                for (int v = 0; v < VECTORS; ++v) {
                    const Vector gate = vec(saved->gate[member])[v], through = weight * vec(d_sum[n])[v] * gate;
                    vec(d_residuals[member])[v] = through;
                    vec(d_logits[member])[v] = through * vec(z[member])[v] * (1.0f - gate);
                }
            }
        gelu_and_slope(active, slope, saved->hidden, all);
        outer(d.gate, d_logits, active, all);
        add_rows(dw + p.gate_bias, d_logits, all);
        multiply(d_hidden, d_logits, weights.gate, all);
        multiply_each(d_hidden, slope, all);

        for (int64_t n = 0; n < count; ++n) {
            const float s0 = found.s[0][n], s1 = found.s[1][n];
            for (int v = 0; v < VECTORS; ++v) {
                const Vector own = vec(d_hidden[n])[v];
                const Vector children = vec(d_hidden[count + n])[v] + vec(d_hidden[2 * count + n])[v];
                const Vector z_children = vec(d_residuals[count + n])[v] + vec(d_residuals[2 * count + n])[v];
                vec(d_target[n])[v] = own + children;
                vec(d_shift[n])[v] = -(s0 * own + s1 * children);
                vec(d_u[n])[v] = -(s0 * vec(d_residuals[n])[v] + s1 * z_children);
            }
        }
        outer(d.target, d_target, own, count);
        add_rows(dw + p.hidden_bias, d_target, count);
        multiply(d_own, d_target, weights.target, count, true);
        outer(d.residual, d_shift, u, count);
        multiply(d_u, d_shift, weights.residual, count, true);
        for (int i = 0; i < 3; ++i)
            for (int64_t n = 0; n < count; ++n) {
                const int64_t row = found.row[i][n], member = i * count + n;
                if (row < 0) continue;
                const float weight = found.times[i] * found.s[i][n];
                Row &d_message = d_messages[row], &d_source = d_sources[row];
                for (int v = 0; v < VECTORS; ++v) {
                    vec(d_message)[v] += vec(d_residuals[member])[v] + weight * vec(d_u[n])[v];
                    vec(d_source)[v] += vec(d_hidden[member])[v];
                }
            }
    }

    void host() {
        const int64_t count = found.count;
        const Row* hat = saved->conv_hat;
        scale_and_shift(normed, hat, in.w + p.update, in.w + p.update_bias, count);
        gelu_and_slope(active, d_sum, normed, count);
        multiply_each(d_sum, d_out, count);
        scale_and_shift_back(d_sum, hat, in.w + p.update, dw + p.update, dw + p.update_bias, count);
        normalise_back(d_sum, hat, saved->conv_scale, count);
        outer(d.conv, d_sum, aggregate, count);
        add_rows(dw + p.conv_bias, d_sum, count);
        multiply(d_aggregate, d_sum, weights.conv, count);
        if (layer.sage) {
            outer(d.root, d_sum, own, count);
            multiply(d_own, d_sum, weights.root, count, true);
        }
    }

    void to_rows() {
        for (int64_t n = 0; n < found.count; ++n) {
            Row& to = d_rows[found.row[0][n]];
            const float weight = found.times[0] * found.t[0][n];
            for (int v = 0; v < VECTORS; ++v) vec(to)[v] += vec(d_own[n])[v] + weight * vec(d_aggregate[n])[v];
            for (int i = 1; i < 3; ++i) {
                if (found.row[i][n] < 0) continue;
                Row& child = d_rows[found.row[i][n]];
                for (int v = 0; v < VECTORS; ++v) vec(child)[v] += found.t[1][n] * vec(d_aggregate[n])[v];
            }
        }
    }

    // What was made once a row: m = W x and a = (Ws + Wz W) x
    void rows_of_the_branch() {
        multiply(d_rows, d_messages, weights.message, layer.read, true);
        multiply(d_rows, d_sources, weights.combined, layer.read, true);
        outer(d.message, d_messages, in.rows, layer.read);
        outer(d.combined, d_sources, in.rows, layer.read);
        Matrix transposed;  // of Ws + Wz W: the gradient of Wz is dA W^T, that of W is Wz^T dA
        load(transposed, in.w + p.message, D, true);
        multiply(d.residual, d.combined, transposed, D, true);
        load(transposed, in.w + p.hidden + 2 * D, 3 * D, true);
        multiply(d.message, transposed, d.combined, D, true);
        add_matrix(dw + p.message, d.message, D);
        add_matrix(dw + p.hidden, d.combined, 3 * D);
        add_matrix(dw + p.hidden + D, d.target, 3 * D);
        add_matrix(dw + p.hidden + 2 * D, d.residual, 3 * D);
        add_matrix(dw + p.gate, d.gate, D);
        add_matrix(dw + p.first, d.first, D);
        add_matrix(dw + p.second, d.second, D);
    }

    const Layer& layer;
    const Places& p;
    const Input& in;
    const Row *messages, *d_out;
    const Saved* saved;
    Row* d_rows;
    float* dw;
    const Row* d_aggregates;
    Weights weights, d = {};  // d: gradients, added to dw at the end
    Members found;
    Table d_messages, d_sources;  // of each row that is read
    Table aggregate{BLOCK}, own{BLOCK}, u{BLOCK}, normed{BLOCK}, d_inner{BLOCK}, d_sum{BLOCK}, d_target{BLOCK};
    Table d_shift{BLOCK}, d_u{BLOCK}, d_aggregate{BLOCK}, d_own{BLOCK};
    Table z{3 * BLOCK}, active{3 * BLOCK}, slope{3 * BLOCK}, d_logits{3 * BLOCK}, d_hidden{3 * BLOCK};
    Table d_residuals{3 * BLOCK};
};

}  // namespace
