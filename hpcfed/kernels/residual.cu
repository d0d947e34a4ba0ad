// Norms over the last dimension of [rows][WIDTH] in bfloat16, with the sum that comes before and the sum of gradients
// that comes after: y = x̂ · weight + bias of x = branch + residual. A block is a row, a thread has every THREADS-th
// vector of eight numbers.

#define BF16 1
#include "eight.cuh"
#include "order.cuh"

typedef long long int64;

#define VECTORS (WIDTH / 8)
#define OWN ((VECTORS + THREADS - 1) / THREADS)

// The sum over all threads of the block, the same in each of them.
__device__ __forceinline__ float over_row(float value) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
  if (THREADS == 32) return value;
  __shared__ float of_warps[THREADS / 32];
  // Threads may still read what an earlier call has left here.
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) total += of_warps[warp];
  return total;
}

__device__ __forceinline__ float in_halves(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float((unsigned)bits << 16);
}

__device__ __forceinline__ int at(int i) { return 8 * (threadIdx.x + i * THREADS); }

// `sum` and `residual` may be null. moments[row] = mean (0 for RMS norms) and 1 / deviation.
extern "C" __global__ void __launch_bounds__(THREADS)
forward(const Number* branch, const Number* residual, const Number* weight, const Number* bias, Number* sum, Number* y,
        float2* moments) {
  await_others();
  const int64 row = (int64)blockIdx.x * WIDTH;
  Eight x[OWN];
  float total = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    x[i] = {};
    if (at(i) >= WIDTH) continue;
    x[i] = load(branch + row + at(i));
    if (residual) {
      const Eight r = load(residual + row + at(i));
#pragma unroll
      for (int j = 0; j < 8; j++) x[i].v[j] += r.v[j];
      store(sum + row + at(i), x[i]);
      // The norm is that of the rounded sum, which the backward pass reads.
#pragma unroll
      for (int j = 0; j < 8; j++) x[i].v[j] = in_halves(x[i].v[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) total += x[i].v[j];
  }
  const float mean = RMS ? 0 : over_row(total) / WIDTH;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (at(i) >= WIDTH) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) squares += (x[i].v[j] - mean) * (x[i].v[j] - mean);
  }
  const float rstd = rsqrtf(over_row(squares) / WIDTH + EPS);
  if (threadIdx.x == 0) moments[blockIdx.x] = make_float2(mean, rstd);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (at(i) >= WIDTH) continue;
    const Eight g = load(weight + at(i));
    Eight b = {};
    if (bias) b = load(bias + at(i));
#pragma unroll
    for (int j = 0; j < 8; j++) x[i].v[j] = (x[i].v[j] - mean) * rstd * g.v[j] + b.v[j];
    store(y + row + at(i), x[i]);
  }
}

// dx = d_sum + rstd · (d − mean of d − x̂ · mean of d x̂) with d = weight · dy; `d_sum` may be null.
extern "C" __global__ void __launch_bounds__(THREADS)
backward(const Number* x, const Number* dy, const Number* d_sum, const Number* weight, const float2* moments,
         Number* dx) {
  await_others();
  const int64 row = (int64)blockIdx.x * WIDTH;
  const float2 moment = moments[blockIdx.x];
  Eight hat[OWN], d[OWN];
  float sum_d = 0, sum_dx = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (at(i) >= WIDTH) continue;
    hat[i] = load(x + row + at(i)), d[i] = load(dy + row + at(i));
    const Eight g = load(weight + at(i));
#pragma unroll
    for (int j = 0; j < 8; j++) {
      hat[i].v[j] = (hat[i].v[j] - moment.x) * moment.y, d[i].v[j] *= g.v[j];
      sum_d += d[i].v[j], sum_dx += d[i].v[j] * hat[i].v[j];
    }
  }
  const float mean_d = RMS ? 0 : over_row(sum_d) / WIDTH, mean_dx = over_row(sum_dx) / WIDTH;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (at(i) >= WIDTH) continue;
    Eight more = {};
    if (d_sum) more = load(d_sum + row + at(i));
#pragma unroll
    for (int j = 0; j < 8; j++) d[i].v[j] = more.v[j] + moment.y * (d[i].v[j] - mean_d - hat[i].v[j] * mean_dx);
    store(dx + row + at(i), d[i]);
  }
}
