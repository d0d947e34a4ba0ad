// Dropout whose mask is a hash of the client's key and the position of a value, computed where it is used.
// The same numbers as randomness.uniform: a value stays when hash(key + position · golden) / 2^24 is at least p.

typedef unsigned long long uint64;

__device__ __forceinline__ uint64 mixed(uint64 x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// y = x / (1 - p) where kept, else 0. Values lie [..., pixel, channel]; their positions count [..., channel, pixel].
extern "C" __global__ void dropout(const float* x, float* y, const uint64* keys, long long per_client, long long total) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  const long long channel = i % CHANNELS, pixel = i / CHANNELS % PIXELS, sample = i / (CHANNELS * PIXELS);
  const uint64 position = (sample * CHANNELS + channel) * PIXELS + pixel;
  const uint64 bits = mixed(keys[position / per_client] + (position % per_client + 1) * 0x9E3779B97F4A7C15ull);
  y[i] = (bits >> 40) >= THRESHOLD ? x[i] * SCALE : 0.0f;
}
