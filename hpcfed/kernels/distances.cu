// Sums of (a[i][k] - b[i][k])², one partial sum per chunk of a row: two rows are read once, and nothing else is written.

#include "order.cuh"

typedef long long int64;

// A block has chunk blockIdx.x of row blockIdx.y.
extern "C" __global__ void __launch_bounds__(THREADS)
squared_distances(const float* a, const float* b, float* parts, int64 columns, int64 a_stride, int64 b_stride) {
  await_others();
  __shared__ float sums[THREADS / 32];
  const int64 first = (int64)blockIdx.x * CHUNK, stop = first + CHUNK < columns ? first + CHUNK : columns;
  a += blockIdx.y * a_stride;
  b += blockIdx.y * b_stride;
  float sum = 0;
#pragma unroll 8
  for (int64 k = first + threadIdx.x; k < stop; k += THREADS) {
    const float d = a[k] - b[k];
    sum += d * d;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < THREADS / 32; warp++) sum += sums[warp];
  parts[blockIdx.y * (int64)gridDim.x + blockIdx.x] = sum;
}
