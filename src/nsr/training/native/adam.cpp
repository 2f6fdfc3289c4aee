// Adam on rows of weights, one a replica: one pass where plain operators take twelve. See adam_rows in replicas.py.

#include <cmath>
#include <cstdint>

extern "C" {

// `first_seen` and `second_seen` are 1 - beta^steps.
void adam(
    int threads, int64_t replicas, int64_t length, float* weights, const float* gradient, float* first, float* second,
    const float* rate, float first_seen, float second_seen, float decay, float beta1, float beta2, float eps
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < replicas; ++r) {
        const float size = rate[r] / first_seen;
        for (int64_t i = r * length; i < (r + 1) * length; ++i) {
            const float g = gradient[i] + decay * weights[i];
            first[i] += (1 - beta1) * (g - first[i]);
            second[i] = beta2 * second[i] + (1 - beta2) * g * g;
            weights[i] -= size * first[i] / (std::sqrt(second[i] / second_seen) + eps);
        }
    }
}
}
