// Dropout on a CPU whose mask is a hash of the client's key and the position of a value.
// It drops what dropout.cu and randomness.uniform drop.

typedef unsigned long long uint64;

static inline uint64 mixed(uint64 x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Values of one client that a thread takes at once.
#define PIECE 1024

static void drop(const float* restrict x, float* restrict y, uint64 key, long first,
                 long count, unsigned threshold, float share_kept) {
    // Apart, so that divisions are vectors also where such products are not.
    unsigned drawn[PIECE];
    for (long i = 0; i < count; i++)
        drawn[i] = mixed(key + (first + i + 1) * 0x9E3779B97F4A7C15ull) >> 40;
    for (long i = 0; i < count; i++) {
        float kept = x[i] / share_kept;
        y[i] = drawn[i] >= threshold ? kept : 0;
    }
}

// Values [clients, values]; those stay whose number of 24 bits is at least `threshold`.
void dropout(const float* x, float* y, const uint64* keys, long clients, long values,
             long threshold, float share_kept) {
    long pieces = (values + PIECE - 1) / PIECE;
#pragma omp parallel for collapse(2)
    for (long client = 0; client < clients; client++)
        for (long piece = 0; piece < pieces; piece++) {
            long first = piece * PIECE, at = client * values + first;
            long count = values - first < PIECE ? values - first : PIECE;
            drop(x + at, y + at, keys[client], first, count, (unsigned)threshold, share_kept);
        }
}
