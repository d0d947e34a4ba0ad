// Dropout whose mask is a hash of the client's key and the position of a value, computed where it is used.
// The same numbers as randomness.uniform: a value stays when hash(key + position · golden) / 2^24 is at least p.
// Positions count [sample, channel, pixel], however the values lie.

#include "order.cuh"
#include "splitmix.cuh"

// x / (1 - p) where kept, else 0.
__device__ __forceinline__ float dropped(float x, uint64 key, uint64 position) {
  return (mixed(key + (position + 1) * 0x9E3779B97F4A7C15ull) >> 40) >= THRESHOLD ? x * SCALE : 0.0f;
}

// Values lie [..., pixel, channel], before and after.
extern "C" __global__ void dropout(const float* x, float* y, const uint64* keys, long long per_client, long long total) {
  await_others();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  const long long channel = i % CHANNELS, pixel = i / CHANNELS % PIXELS, sample = i / (CHANNELS * PIXELS);
  const uint64 position = (sample * CHANNELS + channel) * PIXELS + pixel;
  y[i] = dropped(x[i], keys[position / per_client], position % per_client);
}

// Values lie [sample, pixel, channel] before and [sample, channel, pixel] after, or the other way round in the backward
// pass. A block has one sample, blockIdx.y, and turns squares of 32 × 32 values.
extern "C" __global__ void turning_dropout(const float* x, float* y, const uint64* keys, long long per_client) {
  await_others();
  __shared__ float square[32][33];
  constexpr int ROWS = BACKWARD ? CHANNELS : PIXELS, COLUMNS = BACKWARD ? PIXELS : CHANNELS;  // of x
  constexpr int ACROSS = (COLUMNS + 31) / 32;
  const long long start = (long long)blockIdx.y * (ROWS * COLUMNS);
  const uint64 key = keys[start / per_client];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = blockIdx.x / ACROSS * 32, left = blockIdx.x % ACROSS * 32;
#pragma unroll
  for (int i = warp; i < 32; i += 8)
    if (top + i < ROWS && left + lane < COLUMNS) square[i][lane] = x[start + (top + i) * COLUMNS + left + lane];
  __syncthreads();
#pragma unroll
  for (int i = warp; i < 32; i += 8) {
    const int row = top + lane, column = left + i;
    if (row >= ROWS || column >= COLUMNS) continue;
    const int place = column * ROWS + row, position = BACKWARD ? row * COLUMNS + column : place;
    y[start + place] = dropped(square[lane][i], key, start % per_client + position);
  }
}
