// Seeded dropout in one pass, where plain operators take fifteen over 32-bit numbers. See masked in noise.py.

#include <cstdint>

#pragma GCC optimize("no-fast-math")  // divided as torch divides, to the bit

namespace {

constexpr uint32_t MIX_A = 2246822507u, MIX_B = 3266489909u;  // as in noise.py, without a sign

inline uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * MIX_A;
    x = (x ^ (x >> 13)) * MIX_B;
    return x ^ (x >> 16);
}

}  // namespace

extern "C" {

// x / share where its bits are `least` or more, else 0; each row has a key.
void seeded_dropout(
    int threads, int64_t rows, int64_t length, const float* x, const int32_t* keys, int32_t least, float share, float* y
) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; ++r) {
        const uint32_t key = keys[r];
        const float* from = x + r * length;
        float* to = y + r * length;
        for (int64_t i = 0; i < length; ++i) {
            const int32_t half = (mix(i) ^ key) * MIX_A;
            const int32_t bits = (half ^ (half >> 15)) * MIX_B;  // the shift keeps the sign, as torch's does
            to[i] = bits >= least ? from[i] / share : 0.0f;
        }
    }
}
}
