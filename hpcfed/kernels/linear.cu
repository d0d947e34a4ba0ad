// The backward pass of a linear layer with many weights and few samples, for every client, in one pass over the weights:
//   dx[s][k] = Σₙ dy[s][n] w[n][k], and w[n][k] takes its step of SGD down the gradient Σₛ dy[s][n] x[s][k].
// Memory is what such a layer costs: the weights are read once and written once, and their gradient never exists.
// A thread has four columns; a block has 4 · blockDim.x of them, of client blockIdx.y.

typedef long long int64;

#define PADDED ((SLOTS + 3) / 4 * 4)

__device__ __forceinline__ void add(float4& sum, float factor, const float4 v) {
  sum.x += factor * v.x, sum.y += factor * v.y, sum.z += factor * v.z, sum.w += factor * v.w;
}

extern "C" __global__ void linear_backward(const float* dy, const float* x, float* w, float* velocity, float* dx,
                                           const float* lr, int64 inputs, int64 stride) {
  __shared__ __align__(16) float slopes[OUTPUTS][PADDED];
  const int64 client = blockIdx.y;
  dy += client * SLOTS * OUTPUTS;
  for (int i = threadIdx.x; i < OUTPUTS * PADDED; i += blockDim.x)
    slopes[i / PADDED][i % PADDED] = i % PADDED < SLOTS ? dy[i % PADDED * OUTPUTS + i / PADDED] : 0;
  __syncthreads();
  const int64 k = 4 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= inputs) return;
  const float rate = lr[RATE_EACH ? client : 0];
  float4 own[SLOTS], sums[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    own[s] = *(const float4*)(x + (client * SLOTS + s) * inputs + k);
    sums[s] = make_float4(0, 0, 0, 0);
  }
  float* row = w + client * stride + k;
  float* speed = velocity + client * stride + k;
#pragma unroll 4
  for (int n = 0; n < OUTPUTS; n++) {
    float4 weight = *(const float4*)(row + n * inputs), g = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      add(sums[s], slopes[n][s], weight);
      add(g, slopes[n][s], own[s]);
    }
    add(g, DECAY, weight);
    if (MOMENTUM > 0) {
      add(g, MOMENTUM, *(const float4*)(speed + n * inputs));
      *(float4*)(speed + n * inputs) = g;
    }
    add(weight, -rate, g);
    *(float4*)(row + n * inputs) = weight;
  }
#pragma unroll
  for (int s = 0; s < SLOTS; s++) *(float4*)(dx + (client * SLOTS + s) * inputs + k) = sums[s];
}
