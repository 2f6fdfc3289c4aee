// A training step but for Adam: loss, right answers and gradient of one replica. The plain twin is TreeModel.

#pragma once

#include <numeric>

#include "gin_stage.h"
#include "tree_ends.h"
#include "tree_layer.h"

namespace {

constexpr int MOST_HEIGHTS = 8;
constexpr float MOMENTUM = 0.1f;  // of BatchNorm's running statistics, torch's default

// Where a stage of GIN's conv has its weights, and the running statistics of its BatchNorm [replicas].
struct Stage {
    int64_t weight, bias, norm, norm_bias;
    Row *running_mean, *running_variance;
};

struct TreeLayer {
    Layer layer;
    int64_t heights, nodes_of_height[MOST_HEIGHTS], blanks;  // see LayerPlan
    Stage stages[2];
};

struct Model {
    int64_t replicas, weights, layers, trees, leaves, pairs;
    int64_t encoder, encoder_bias, head, head_bias;
};

// See Queries in tree_batches.py.
struct Batch {
    const int64_t *values, *place, *label;
    const float* count;
};

class Step {
  public:
    Step(const Model& model, const TreeLayer* layers, const Batch& all, const float* w, float* dw, int64_t replica)
        : model(model), layers(layers), w(w), dw(dw), replica(replica),
          batch{all.values + replica * places(), all.place + replica * 3 * model.pairs,
                all.label + replica * model.pairs, all.count + replica * model.pairs} {}

    void run(float* loss, float* right) {
        std::fill_n(dw, model.weights, 0.0f);
        encode_forward(places(), model.leaves, w + model.encoder, w + model.encoder_bias, batch.values, first_rows());
        tally();
        for (int64_t l = 0; l < model.layers; ++l) forward(layers[l]);

        const int64_t roots = layers[model.layers - 1].layer.nodes - model.pairs;
        Table d_rows = zeros(roots + model.pairs);
        head_and_loss(
            model.pairs, model.leaves, rows.back() + roots, w + model.head, w + model.head_bias, batch.label,
            batch.count, loss, right, d_rows + roots, dw + model.head, dw + model.head_bias
        );
        for (int64_t l = model.layers - 1; l >= 0; --l) d_rows = backward(layers[l], passed[l], rows[l], d_rows);
        encode_backward(places(), model.leaves, batch.values, d_rows, dw + model.encoder, dw + model.encoder_bias);
    }

  private:
    // What the backward pass takes from a layer's forward pass.
    struct Passed {
        Table messages;
        std::unique_ptr<Saved[]> saved;
        // Of GIN: how often each row that is made occurs in the batch; what each stage reads, and at the end what the
        // last one makes; of each stage what it has normed, and 1 / std.
        std::vector<float> count;
        std::vector<Table> x, hat;
        Table scale;
    };

    int64_t places() const { return model.trees * model.leaves; }

    Row* first_rows() {
        rows.emplace_back(places() + 1 + model.leaves);
        return rows.back();
    }

    void forward(const TreeLayer& at) {
        const Layer& layer = at.layer;
        const Input in{rows.back(), batch.place, w};
        const int64_t blocks = (layer.nodes + BLOCK - 1) / BLOCK;
        Passed kept{
            Table(layer.branch ? layer.read : 0), std::unique_ptr<Saved[]>(new Saved[blocks]), {}, {}, {}, Table(2)
        };
        Table made(layer.nodes), aggregate(layer.host ? 0 : layer.nodes);
        Forward(layer, in, made, aggregate, kept.messages, kept.saved.get()).run();
        if (!layer.host) {
            kept.count = counts(at);
            kept.x.push_back(std::move(aggregate));
            for (int s = 0; s < 2; ++s) stage(at.stages[s], s, layer.nodes, kept);
            for (int64_t n = 0; n < layer.nodes; ++n)
                for (int v = 0; v < VECTORS; ++v) vec(made[n])[v] += vec(kept.x[2][n])[v];
        }
        rows.push_back(std::move(made));
        passed.push_back(std::move(kept));
    }

    // Stage s of GIN's conv; the running statistics follow those of the batch.
    void stage(const Stage& at, int s, int64_t nodes, Passed& kept) {
        Row mean, variance;
        kept.hat.emplace_back(nodes);
        kept.x.emplace_back(nodes);
        stage_forward(
            nodes, kept.x[s], w + at.weight, w + at.bias, w + at.norm, w + at.norm_bias, kept.count.data(),
            kept.hat[s], kept.x[s + 1], mean, variance, kept.scale[s]
        );
        const float all = std::accumulate(kept.count.begin(), kept.count.end(), 0.0f);
        for (int d = 0; d < D; ++d) {
            float &running_mean = at.running_mean[replica][d], &running_variance = at.running_variance[replica][d];
            running_mean += MOMENTUM * (mean[d] - running_mean);
            running_variance += MOMENTUM * (variance[d] * (all / (all - 1)) - running_variance);
        }
    }

    // The gradient of what a layer reads.
    Table backward(const TreeLayer& at, const Passed& kept, const Row* read, const Row* grad) {
        const Layer& layer = at.layer;
        const int64_t nodes = layer.nodes;
        Table d_aggregate(layer.host ? 0 : nodes), d_read(layer.read);
        if (!layer.host) {
            Table d_hidden(nodes);
            const auto back = [&](int s, const Row* d_y, Row* d_x) {
                const Stage& stage = at.stages[s];
                stage_backward(
                    nodes, kept.x[s], w + stage.weight, w + stage.norm, kept.count.data(), kept.hat[s], kept.x[s + 1],
                    kept.scale[s], d_y, d_x, dw + stage.weight, dw + stage.bias, dw + stage.norm, dw + stage.norm_bias
                );
            };
            back(1, grad, d_hidden);
            back(0, d_hidden, d_aggregate);
        }
        const Input in{read, batch.place, w};
        Backward(layer, in, kept.messages, kept.saved.get(), grad, d_aggregate, d_read, dw).run();
        return d_read;
    }

    // How many pairs have each tree and each query.
    void tally() {
        by_tree.assign(model.trees, 0.0f);
        by_query.assign(model.leaves, 0.0f);
        total = 0;
        for (int64_t pair = 0; pair < model.pairs; ++pair) {
            by_tree[batch.place[model.pairs + 2 * pair] / 2] += batch.count[pair];
            by_query[batch.place[pair]] += batch.count[pair];
            total += batch.count[pair];
        }
    }

    // How often each row that a layer makes occurs among the nodes of the batch.
    std::vector<float> counts(const TreeLayer& at) const {
        std::vector<float> count;
        count.reserve(at.layer.nodes);
        for (int64_t height = 0; height < at.heights; ++height)
            for (const float of_tree : by_tree) count.insert(count.end(), at.nodes_of_height[height], of_tree);
        if (at.blanks) count.push_back(total * at.blanks);
        if (at.layer.first_pair < at.layer.nodes)
            count.insert(count.end(), batch.count, batch.count + model.pairs);
        else
            count.insert(count.end(), by_query.begin(), by_query.end());
        return count;
    }

    const Model& model;
    const TreeLayer* layers;
    const float* w;
    float* dw;
    const int64_t replica;
    const Batch batch;
    std::vector<Table> rows;  // what each layer reads, and at the end what the last one makes
    std::vector<Passed> passed;
    std::vector<float> by_tree, by_query;
    float total;
};

}  // namespace
