// Batch norm in training with what follows it: y = act(x̂ · weight + bias + residual), act(z) = z > 0 ? z : SLOPE · z.
// Activations are [rows][channels] in bfloat16 or float32; a row is a pixel of a sample. Each way takes two kernels: one
// sums, one applies. Every block of the second adds up the first one's parts for itself: that is less than the launch of
// a third kernel. With few rows the second kernel does it all (WHOLE): a block has all rows of a few channels then.
// Sums are taken in an order that depends on the shapes alone.
// A block has WIDTH channels, blockIdx.y says which. A thread has eight of them, VECTORS threads a row; VECTORS is a power
// of two that divides a warp.

typedef long long int64;

#define VECTORS (WIDTH / 8)
#define ROWS (THREADS / VECTORS)
#define WARPS (THREADS / 32)
// Threads that share a column while parts are added up: 2 · WIDTH columns.
#define SHARES (THREADS / (2 * WIDTH))

#include "eight.cuh"
#include "order.cuh"

__device__ __forceinline__ float slope(float z) { return SLOPE == 1.0f || z > 0 ? 1.0f : SLOPE; }

// Writes the sums of what all threads of a channel have, for two quantities: part[i][channel].
__device__ __forceinline__ void add_up(Eight (&own)[2], float* part, int64 channels) {
  __shared__ float sums[2][WARPS][WIDTH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
      for (int other = VECTORS; other < 32; other *= 2) own[i].v[j] += __shfl_xor_sync(~0u, own[i].v[j], other);
      if (lane < VECTORS) sums[i][warp][8 * lane + j] = own[i].v[j];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < 2 * WIDTH; at += THREADS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[at / WIDTH][w][at % WIDTH];
    part[at / WIDTH * channels + at % WIDTH] = sum;
  }
}

// totals[i][c]: the sums over all parts, of this block's channels.
__device__ __forceinline__ void gather(const float* parts, int64 slices, int64 channels, float (&totals)[2][WIDTH]) {
  __shared__ float shares[SHARES][2 * WIDTH];
  const int column = threadIdx.x % (2 * WIDTH), share = threadIdx.x / (2 * WIDTH);
  const float* from = parts + column / WIDTH * channels + blockIdx.y * WIDTH + column % WIDTH;
  float sum = 0;
#pragma unroll 16
  for (int64 slice = share; slice < slices; slice += SHARES) sum += from[slice * 2 * channels];
  shares[share][column] = sum;
  __syncthreads();
  if (share == 0) {
#pragma unroll
    for (int s = 1; s < SHARES; s++) sum += shares[s][column];
    totals[column / WIDTH][column % WIDTH] = sum;
  }
  __syncthreads();
}

// Sums of x − k and (x − k)², where k is the channel's first value: near the mean, digits are not lost.
__device__ __forceinline__ void sum_forward(const Number* x, float* part, int64 pitch, int64 rows, int64 channels) {
  const int64 channel = blockIdx.y * WIDTH + threadIdx.x % VECTORS * 8;
  const Eight k = load(x + channel);
  Eight own[2] = {};
#pragma unroll 4
  for (int64 row = (int64)blockIdx.x * ROWS + threadIdx.x / VECTORS; row < rows; row += (int64)gridDim.x * ROWS) {
    const Eight e = load(x + row * channels + channel);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float d = e.v[j] - k.v[j];
      own[0].v[j] += d, own[1].v[j] += d * d;
    }
  }
  add_up(own, part, pitch);
}

extern "C" __global__ void __launch_bounds__(THREADS)
forward_sums(const Number* x, float* parts, int64 rows, int64 channels) {
  await_others();
  sum_forward(x, parts + blockIdx.x * 2 * channels + blockIdx.y * WIDTH, channels, rows, channels);
}

// moments: [2][channels], mean and 1 / deviation.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
forward_apply(const Number* x, const Number* residual, const float* weight, const float* bias, const float* parts,
              Number* y, float* moments, float* running_mean, float* running_var, int64 rows, int64 channels,
              int64 slices) {
  await_others();
  __shared__ float totals[2][WIDTH];
  if (WHOLE) {
    sum_forward(x, totals[0], WIDTH, rows, channels);
    __syncthreads();
  } else {
    gather(parts, slices, channels, totals);
  }
  if (threadIdx.x < WIDTH) {
    const int c = threadIdx.x, at = blockIdx.y * WIDTH + c;
#if BF16
    const float k = __uint_as_float((unsigned)x[at] << 16);
#else
    const float k = x[at];
#endif
    const float from_k = totals[0][c] / rows, mean = k + from_k;
    const float var = fmaxf(totals[1][c] / rows - from_k * from_k, 0.0f), rstd = rsqrtf(var + EPS);
    totals[0][c] = weight[at] * rstd;
    totals[1][c] = bias[at] - mean * totals[0][c];
    if (blockIdx.x == 0) {
      moments[at] = mean, moments[channels + at] = rstd;
      const float unbiased = var * ((float)rows / fmaxf((float)rows - 1, 1.0f));
      running_mean[at] += MOMENTUM * (mean - running_mean[at]);
      running_var[at] += MOMENTUM * (unbiased - running_var[at]);
    }
  }
  __syncthreads();
  const int v = threadIdx.x % VECTORS;
  const int64 channel = blockIdx.y * WIDTH + 8 * v;
  const Eight scale = load_floats(totals[0] + 8 * v), offset = load_floats(totals[1] + 8 * v);
#pragma unroll 4
  for (int64 row = (int64)blockIdx.x * ROWS + threadIdx.x / VECTORS; row < rows; row += (int64)gridDim.x * ROWS) {
    Eight e = load(x + row * channels + channel), r;
    if (RESIDUAL) r = load(residual + row * channels + channel);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float z = e.v[j] * scale.v[j] + offset.v[j];
      if (RESIDUAL) z += r.v[j];
      e.v[j] = z * slope(z);
    }
    store(y + row * channels + channel, e);
  }
}

// Sums of d and d x̂, where d is the gradient before the activation. With a residual d is its gradient and is written; the
// activation's side is known from y then, and otherwise from x.
__device__ __forceinline__ void sum_backward(const Number* x, const Number* y, const Number* dy, const float* weight,
                                             const float* bias, const float* moments, Number* residual, float* part,
                                             int64 pitch, int64 rows, int64 channels) {
  const int64 channel = blockIdx.y * WIDTH + threadIdx.x % VECTORS * 8;
  const Eight mean = load_floats(moments + channel), rstd = load_floats(moments + channels + channel);
  Eight scale = load_floats(weight + channel), offset = load_floats(bias + channel), own[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) scale.v[j] *= rstd.v[j], offset.v[j] -= mean.v[j] * scale.v[j];
#pragma unroll 2
  for (int64 row = (int64)blockIdx.x * ROWS + threadIdx.x / VECTORS; row < rows; row += (int64)gridDim.x * ROWS) {
    const int64 at = row * channels + channel;
    const Eight e = load(x + at);
    Eight d = load(dy + at), out;
    if (RESIDUAL) out = load(y + at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      d.v[j] *= slope(RESIDUAL ? out.v[j] : e.v[j] * scale.v[j] + offset.v[j]);
      own[0].v[j] += d.v[j], own[1].v[j] += d.v[j] * (e.v[j] - mean.v[j]);
    }
    if (RESIDUAL) store(residual + at, d);
  }
#pragma unroll
  for (int j = 0; j < 8; j++) own[1].v[j] *= rstd.v[j];
  add_up(own, part, pitch);
}

extern "C" __global__ void __launch_bounds__(THREADS)
backward_sums(const Number* x, const Number* y, const Number* dy, const float* weight, const float* bias,
              const float* moments, Number* residual, float* parts, int64 rows, int64 channels) {
  await_others();
  float* part = parts + blockIdx.x * 2 * channels + blockIdx.y * WIDTH;
  sum_backward(x, y, dy, weight, bias, moments, residual, part, channels, rows, channels);
}

// dx = weight · rstd · (d − mean of d − x̂ · mean of d x̂), taken as scale · d + slant · x + level: fewer numbers to hold.
// With a residual its gradient is d; a thread reads back what it may have written itself.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
backward_apply(const Number* x, const Number* y, const Number* dy, const float* weight, const float* bias,
               const float* moments, Number* residual, const float* parts, Number* dx, float* d_weight, float* d_bias,
               int64 rows, int64 channels, int64 slices) {
  await_others();
  __shared__ float totals[2][WIDTH];
  if (WHOLE) {
    sum_backward(x, y, dy, weight, bias, moments, residual, totals[0], WIDTH, rows, channels);
    __syncthreads();
  } else {
    gather(parts, slices, channels, totals);
  }
  if (blockIdx.x == 0 && threadIdx.x < WIDTH) {
    d_bias[blockIdx.y * WIDTH + threadIdx.x] = totals[0][threadIdx.x];
    d_weight[blockIdx.y * WIDTH + threadIdx.x] = totals[1][threadIdx.x];
  }
  const int v = threadIdx.x % VECTORS;
  const int64 channel = blockIdx.y * WIDTH + 8 * v;
  Eight scale = load_floats(weight + channel), offset = load_floats(bias + channel), slant, level;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float mean = moments[channel + j], rstd = moments[channels + channel + j];
    scale.v[j] *= rstd, offset.v[j] -= mean * scale.v[j];
    slant.v[j] = -scale.v[j] * rstd * totals[1][8 * v + j] / rows;
    level.v[j] = -scale.v[j] * totals[0][8 * v + j] / rows - slant.v[j] * mean;
  }
#pragma unroll 2
  for (int64 row = (int64)blockIdx.x * ROWS + threadIdx.x / VECTORS; row < rows; row += (int64)gridDim.x * ROWS) {
    const int64 at = row * channels + channel;
    const Eight e = load(x + at);
    Eight d = load((RESIDUAL ? residual : dy) + at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (!RESIDUAL) d.v[j] *= slope(e.v[j] * scale.v[j] + offset.v[j]);
      d.v[j] = scale.v[j] * d.v[j] + (slant.v[j] * e.v[j] + level.v[j]);
    }
    store(dx + at, d);
  }
}
