// Normalisation and activation of activations [samples][length][CHANNELS], in bfloat16 or float32, each way in two passes
// over memory: one sums, one applies. Sums are taken in an order that depends on the shapes alone.
// A thread has eight channels that follow each other; a block has WIDTH channels, VECTORS threads for each position.
// WIDTH is a multiple of 8, and THREADS, the size of a block, one of VECTORS: neither has to be a power of two.

typedef long long int64;

#define VECTORS (WIDTH / 8)
#define ROWS (THREADS / VECTORS)

#include "eight.cuh"
#include "order.cuh"

// Of a block's channels: sums[i][c] becomes the sum of what all threads of channel c have, for two quantities.
__device__ __forceinline__ void add_up(const Eight (&own)[2], float (&sums)[2][WIDTH]) {
  __shared__ float parts[ROWS][WIDTH];
  const int v = threadIdx.x % VECTORS, r = threadIdx.x / VECTORS;
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < 8; j++) parts[r][8 * v + j] = own[i].v[j];
    __syncthreads();
    for (int c = threadIdx.x; c < WIDTH; c += THREADS) {
      float sum = 0;
#pragma unroll 8
      for (int row = 0; row < ROWS; row++) sum += parts[row][c];
      sums[i][c] = sum;
    }
    __syncthreads();
  }
}

#ifdef BATCH
// Batch norm and leaky ReLU. Here a block has all channels and a part of the positions of all samples.

__device__ __forceinline__ float slope(float z) { return z > 0 ? 1 : SLOPE; }

// parts[block][0..1][channel]: sums of x and x² or, backwards, of d and d x̂, where d is the gradient before the activation.
extern "C" __global__ void __launch_bounds__(THREADS)
batch_sums(const Number* x, const Number* dy, const float* mean, const float* rstd, const float* weight,
           const float* bias, float* parts, int64 rows) {
  await_others();
  __shared__ float sums[2][WIDTH];
  const int v = threadIdx.x % VECTORS, r = threadIdx.x / VECTORS;
  const int64 begin = rows * blockIdx.x / gridDim.x, end = rows * (blockIdx.x + 1) / gridDim.x;
  Eight own[2] = {}, m, s, g, b;
  if (BACKWARD) {
    m = load_floats(mean + 8 * v), s = load_floats(rstd + 8 * v);
    g = load_floats(weight + 8 * v), b = load_floats(bias + 8 * v);
  }
#pragma unroll 4
  for (int64 row = begin + r; row < end; row += ROWS) {
    const Eight e = load(x + row * WIDTH + 8 * v);
    Eight d;
    if (BACKWARD) d = load(dy + row * WIDTH + 8 * v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (BACKWARD) {
        const float hat = (e.v[j] - m.v[j]) * s.v[j], before = d.v[j] * slope(hat * g.v[j] + b.v[j]);
        own[0].v[j] += before, own[1].v[j] += before * hat;
      } else {
        own[0].v[j] += e.v[j], own[1].v[j] += e.v[j] * e.v[j];
      }
    }
  }
  add_up(own, sums);
  for (int i = threadIdx.x; i < 2 * WIDTH; i += THREADS)
    parts[(int64)blockIdx.x * 2 * WIDTH + i] = sums[i / WIDTH][i % WIDTH];
}

// y = leaky(x̂ · weight + bias) or, backwards, dx = weight · rstd · (d − mean of d − x̂ · mean of d x̂).
extern "C" __global__ void __launch_bounds__(THREADS)
batch_apply(const Number* x, const Number* dy, const float* mean, const float* rstd, const float* weight,
            const float* bias, const float* means, Number* result, int64 rows) {
  await_others();
  const int v = threadIdx.x % VECTORS, r = threadIdx.x / VECTORS;
  const Eight m = load_floats(mean + 8 * v), s = load_floats(rstd + 8 * v);
  const Eight g = load_floats(weight + 8 * v), b = load_floats(bias + 8 * v);
  Eight mean_d, mean_dx;
  if (BACKWARD) mean_d = load_floats(means + 8 * v), mean_dx = load_floats(means + WIDTH + 8 * v);
#pragma unroll 4
  for (int64 row = (int64)blockIdx.x * ROWS + r; row < rows; row += (int64)gridDim.x * ROWS) {
    Eight e = load(x + row * WIDTH + 8 * v), d;
    if (BACKWARD) d = load(dy + row * WIDTH + 8 * v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float hat = (e.v[j] - m.v[j]) * s.v[j], z = hat * g.v[j] + b.v[j];
      e.v[j] = BACKWARD ? g.v[j] * s.v[j] * (d.v[j] * slope(z) - mean_d.v[j] - hat * mean_dx.v[j]) : z * slope(z);
    }
    store(result + row * WIDTH + 8 * v, e);
  }
}
#endif

#ifdef GROUP
// Group norm, a shift for every channel of a sample, and SiLU. A block has WIDTH channels of sample blockIdx.y, which are
// one group of PER channels or several.
#define HERE (WIDTH / PER)

// Of a block's channels: totals[i][group] becomes the sum of sums[i] over the group's channels.
__device__ __forceinline__ void add_groups(const float (&sums)[2][WIDTH], float (&totals)[2][HERE]) {
  for (int i = threadIdx.x; i < 2 * HERE; i += THREADS) {
    float total = 0;
#pragma unroll 8
    for (int c = 0; c < PER; c++) total += sums[i / HERE][i % HERE * PER + c];
    totals[i / HERE][i % HERE] = total;
  }
  __syncthreads();
}

// y = silu(x̂ · weight + bias + shift); moments[sample][group] = mean and 1 / deviation.
extern "C" __global__ void __launch_bounds__(THREADS)
group_forward(const Number* x, const float* weight, const float* bias, const float* shift, Number* y, float2* moments,
              int64 length) {
  await_others();
  __shared__ float sums[2][WIDTH], totals[2][HERE];
  const int v = threadIdx.x % VECTORS, r = threadIdx.x / VECTORS, channel = blockIdx.x * WIDTH + 8 * v;
  const int64 sample = blockIdx.y, first = sample * length * CHANNELS + channel;
  Eight own[2] = {};
#pragma unroll 4
  for (int64 row = r; row < length; row += ROWS) {
    const Eight e = load(x + first + row * CHANNELS);
#pragma unroll
    for (int j = 0; j < 8; j++) own[0].v[j] += e.v[j], own[1].v[j] += e.v[j] * e.v[j];
  }
  add_up(own, sums);
  add_groups(sums, totals);
  const int group = 8 * v / PER;
  const float count = (float)length * PER, mean = totals[0][group] / count;
  const float rstd = rsqrtf(fmaxf(totals[1][group] / count - mean * mean, 0.0f) + EPS);
  if (r == 0 && 8 * v % PER == 0) moments[sample * (CHANNELS / PER) + channel / PER] = make_float2(mean, rstd);
  Eight scale, offset;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    scale.v[j] = rstd * weight[channel + j];
    offset.v[j] = bias[channel + j] + shift[sample * CHANNELS + channel + j] - mean * scale.v[j];
  }
#pragma unroll 4
  for (int64 row = r; row < length; row += ROWS) {
    Eight e = load(x + first + row * CHANNELS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float u = e.v[j] * scale.v[j] + offset.v[j];
      e.v[j] = u / (1 + __expf(-u));
    }
    store(y + first + row * CHANNELS, e);
  }
}

// dx, and for every sample and channel the sums over positions of d (the shift's gradient) and of d x̂.
extern "C" __global__ void __launch_bounds__(THREADS)
group_backward(const Number* x, const Number* dy, const float* weight, const float* bias, const float* shift,
               const float2* moments, Number* dx, float* d_shift, float* d_weight, int64 length) {
  await_others();
  __shared__ float sums[2][WIDTH], totals[2][HERE];
  const int v = threadIdx.x % VECTORS, r = threadIdx.x / VECTORS, channel = blockIdx.x * WIDTH + 8 * v;
  const int64 sample = blockIdx.y, first = sample * length * CHANNELS + channel;
  const float2 moment = moments[sample * (CHANNELS / PER) + channel / PER];
  const float mean = moment.x, rstd = moment.y;
  const Eight g = load_floats(weight + channel);
  Eight offset = load_floats(bias + channel), own[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) offset.v[j] += shift[sample * CHANNELS + channel + j];
#pragma unroll 2
  for (int64 row = r; row < length; row += ROWS) {
    const Eight e = load(x + first + row * CHANNELS), d = load(dy + first + row * CHANNELS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float hat = (e.v[j] - mean) * rstd, u = hat * g.v[j] + offset.v[j], open = 1 / (1 + __expf(-u));
      const float before = d.v[j] * open * (1 + u * (1 - open));
      own[0].v[j] += before, own[1].v[j] += before * hat;
    }
  }
  add_up(own, sums);
  for (int c = threadIdx.x; c < WIDTH; c += THREADS) {
    const int64 at = sample * CHANNELS + blockIdx.x * WIDTH + c;
    d_shift[at] = sums[0][c], d_weight[at] = sums[1][c];
    const float own_weight = weight[blockIdx.x * WIDTH + c];
    sums[0][c] *= own_weight, sums[1][c] *= own_weight;
  }
  __syncthreads();
  add_groups(sums, totals);
  const float count = (float)length * PER, mean_d = totals[0][8 * v / PER] / count;
  const float mean_dx = totals[1][8 * v / PER] / count;
#pragma unroll 2
  for (int64 row = r; row < length; row += ROWS) {
    const Eight e = load(x + first + row * CHANNELS);
    Eight d = load(dy + first + row * CHANNELS);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float hat = (e.v[j] - mean) * rstd, u = hat * g.v[j] + offset.v[j], open = 1 / (1 + __expf(-u));
      d.v[j] = rstd * (d.v[j] * open * (1 + u * (1 - open)) * g.v[j] - mean_d - hat * mean_dx);
    }
    store(dx + first + row * CHANNELS, d);
  }
}
#endif
