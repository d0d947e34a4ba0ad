// A linear layer with many weights and few samples, for every client. Memory is what such a layer costs.
//
//   linear_forward    y[s][n] = Σₖ x[s][k] w[n][k], a partial sum per chunk of k; the weights are read once
//   linear_sum        adds the partial sums and the bias, in a fixed order
//   linear_backward   dx[s][k] = Σₙ dy[s][n] w[n][k], and w[n][k] takes its step of SGD down the gradient
//                     Σₛ dy[s][n] x[s][k]: the weights are read once and written once, their gradient never exists

#include "order.cuh"
#include "tf32.cuh"

typedef long long int64;

#ifdef LINEAR_FORWARD

#define TILES ((SLOTS + 7) / 8)  // of eight samples
#define PITCH (CHUNK + 16)       // floats of a sample in shared memory: rows of a tile begin in two halves of the banks

// A block has chunk blockIdx.x of the columns of client blockIdx.y; a warp has sixteen outputs at a time.
// Columns may be taken in any order, so a lane loads four neighbours at once, and an instruction takes two of them.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
linear_forward(const float* x, const float* w, float* parts, int64 inputs, int64 stride, int64 clients) {
  await_others();
  __shared__ __align__(16) unsigned samples[TILES * 8 * PITCH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64 client = blockIdx.y, first = (int64)blockIdx.x * CHUNK;
  for (int i = 4 * threadIdx.x; i < TILES * 8 * CHUNK; i += 4 * THREADS) {
    const int s = i / CHUNK, k = i % CHUNK;
    float4 v = make_float4(0, 0, 0, 0);
    if (s < SLOTS && first + k < inputs) v = *(const float4*)(x + (client * SLOTS + s) * inputs + first + k);
    *(uint4*)(samples + s * PITCH + k) = make_uint4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
  }
  __syncthreads();
  for (int tile = warp; tile < OUTPUTS / 16; tile += THREADS / 32) {
    const float* low = w + client * stride + (int64)(tile * 16 + g) * inputs + first + 4 * t;
    const float* high = low + 8 * inputs;
    float d[TILES][4] = {};
#pragma unroll 1
    for (int k = 0; k < CHUNK; k += 16 * DEPTH) {
      float4 a[DEPTH][2];
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        a[i][0] = a[i][1] = make_float4(0, 0, 0, 0);
        if (k + 16 * i < CHUNK && first + k + 16 * i + 4 * t < inputs) {
          a[i][0] = __ldcs((const float4*)(low + k + 16 * i));
          a[i][1] = __ldcs((const float4*)(high + k + 16 * i));
        }
      }
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (k + 16 * i >= CHUNK) break;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          const uint4 b = *(const uint4*)(samples + (n * 8 + g) * PITCH + k + 16 * i + 4 * t);
          mma(d[n], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b.x, b.y);
          mma(d[n], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b.z, b.w);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int s = n * 8 + 2 * t + i % 2, output = tile * 16 + i / 2 * 8 + g;
        if (s < SLOTS) parts[((blockIdx.x * clients + client) * SLOTS + s) * OUTPUTS + output] = d[n][i];
      }
  }
}

// parts: [chunks][clients][SLOTS][OUTPUTS]
extern "C" __global__ void linear_sum(const float* parts, const float* bias, float* y, int64 chunks, int64 stride,
                                      int64 total) {
  await_others();
  const int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  float sum = bias ? bias[i / (SLOTS * OUTPUTS) * stride + i % OUTPUTS] : 0;
#pragma unroll 8
  for (int64 c = 0; c < chunks; c++) sum += parts[c * total + i];
  y[i] = sum;
}

#else

#define PADDED ((SLOTS + 3) / 4 * 4)

__device__ __forceinline__ void add(float2& sum, float factor, const float2 v) {
  sum.x += factor * v.x, sum.y += factor * v.y;
}

// A thread has two columns; a block has 2 · blockDim.x of them, of client blockIdx.y.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
linear_backward(const float* dy, const float* x, float* w, float* velocity, float* dx, const float* lr, int64 inputs,
                int64 stride) {
  await_others();
  __shared__ __align__(16) float slopes[OUTPUTS][PADDED];
  const int64 client = blockIdx.y;
  dy += client * SLOTS * OUTPUTS;
  for (int i = threadIdx.x; i < OUTPUTS * PADDED; i += blockDim.x)
    slopes[i / PADDED][i % PADDED] = i % PADDED < SLOTS ? dy[i % PADDED * OUTPUTS + i / PADDED] : 0;
  __syncthreads();
  const int64 k = 2 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= inputs) return;
  const float rate = lr[RATE_EACH ? client : 0];
  float2 own[SLOTS], sums[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    own[s] = *(const float2*)(x + (client * SLOTS + s) * inputs + k);
    sums[s] = make_float2(0, 0);
  }
  float* row = w + client * stride + k;
  float* speed = velocity + client * stride + k;
  // DEPTH rows are under way before the first is used.
  for (int n = 0; n < OUTPUTS; n += DEPTH) {
    float2 weight[DEPTH], v[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      if (n + i < OUTPUTS) {
        weight[i] = __ldcs((const float2*)(row + (n + i) * inputs));
        if (MOMENTUM > 0) v[i] = __ldcs((const float2*)(speed + (n + i) * inputs));
      }
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      if (n + i < OUTPUTS) {
        float2 gradient = make_float2(0, 0);
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
          add(sums[s], slopes[n + i][s], weight[i]);
          add(gradient, slopes[n + i][s], own[s]);
        }
        add(gradient, DECAY, weight[i]);
        if (MOMENTUM > 0) {
          const float2 slope = gradient;
          add(gradient, MOMENTUM, v[i]);
          __stcs((float2*)(speed + (n + i) * inputs), gradient);
          if (NESTEROV) gradient = make_float2(slope.x + MOMENTUM * gradient.x, slope.y + MOMENTUM * gradient.y);
        }
        add(weight[i], -rate, gradient);
        __stcs((float2*)(row + (n + i) * inputs), weight[i]);
      }
  }
#pragma unroll
  for (int s = 0; s < SLOTS; s++) *(float2*)(dx + (client * SLOTS + s) * inputs + k) = sums[s];
}

#endif
