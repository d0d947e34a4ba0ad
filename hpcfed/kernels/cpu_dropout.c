// Dropout on a CPU whose mask is a hash of the client's key and the position of a value.
// It drops what dropout.cu and randomness.uniform drop.

typedef unsigned long long uint64;

static inline uint64 mixed(uint64 x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Values [clients, values]; those stay whose number of 24 bits is at least `threshold`.
void dropout(const float* restrict x, float* restrict y, const uint64* restrict keys,
             long clients, long values, long threshold, float share_kept) {
#pragma omp parallel for collapse(2)
    for (long client = 0; client < clients; client++)
        for (long i = 0; i < values; i++) {
            uint64 drawn = mixed(keys[client] + (i + 1) * 0x9E3779B97F4A7C15ull) >> 40;
            long at = client * values + i;
            y[at] = drawn >= (uint64)threshold ? x[at] / share_kept : 0;
        }
}
