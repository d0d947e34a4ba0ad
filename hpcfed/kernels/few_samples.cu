// A linear layer and the activation after it, for clients with few samples in a step. Such a layer has little to do, so what
// counts is how long one has to wait: for launches, and for the memory. One kernel forward, one backward.
//
//   few_forward    y[s][n] = act(Σₖ x[s][k] w[n][k] + b[n])
//   few_backward   of g = the gradient of y through the activation:
//                  dx[s][k] = Σₙ g[s][n] w[n][k], dw[n][k] = Σₛ g[s][n] x[s][k], db[n] = Σₛ g[s][n]
//
// Weights and their gradients are rows [n][k]; a client's begin a stride apart. INPUTS is a multiple of four. Loads go past the
// first cache: nothing is read twice, and after an early launch that cache may hold what was there before.

#include "order.cuh"
#include "tf32.cuh"

typedef long long int64;

#define WARPS (THREADS / 32)

#ifdef FEW_FORWARD

#define TILES ((SLOTS + 7) / 8)       // of eight samples
#define GROUPS ((INPUTS + 15) / 16)   // of sixteen columns

// A block has sixteen outputs of a client, and its warps take groups of columns in turn.
// Columns may be taken in any order, so a lane loads four neighbours at once, and an instruction takes two of them.
extern "C" __global__ void __launch_bounds__(THREADS)
few_forward(const float* x, const float* w, const float* bias, float* y, int64 w_stride, int64 b_stride) {
  await_others();
  __shared__ float sums[WARPS][TILES * 8][17];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64 client = blockIdx.y, first = (int64)blockIdx.x * 16;
  x += client * SLOTS * INPUTS + 4 * t;
  w += client * w_stride + 4 * t;
  float d[TILES][4] = {};
#pragma unroll 1
  for (int group = warp; group < GROUPS; group += WARPS * DEPTH) {
    float4 a[DEPTH][2], b[DEPTH][TILES];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int k = 16 * (group + i * WARPS);
      const bool inside = k + 4 * t < INPUTS;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64 n = first + 8 * h + g;
        a[i][h] = inside && n < OUTPUTS ? __ldcg((const float4*)(w + n * INPUTS + k)) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int n = 0; n < TILES; n++)
        b[i][n] = inside && n * 8 + g < SLOTS ? __ldcg((const float4*)(x + (n * 8 + g) * INPUTS + k)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        mma(d[n], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, rounded(b[i][n].x), rounded(b[i][n].y));
        mma(d[n], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, rounded(b[i][n].z), rounded(b[i][n].w));
      }
  }
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][n * 8 + 2 * t + i % 2][i / 2 * 8 + g] = d[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * SLOTS; i += THREADS) {
    const int s = i / 16;
    const int64 n = first + i % 16;
    if (n >= OUTPUTS) continue;
    float sum = BIAS ? bias[client * b_stride + n] : 0;
#pragma unroll
    for (int j = 0; j < WARPS; j++) sum += sums[j][s][i % 16];
    y[(client * SLOTS + s) * OUTPUTS + n] = SLOPE == 1.0f || sum > 0 ? sum : SLOPE * sum;
  }
}

#else

#define PADDED ((SLOTS + 3) / 4 * 4)
#define SHARES (THREADS / PAIRS)  // of the outputs

__device__ __forceinline__ void add(float2& sum, float factor, const float2 v) {
  sum.x += factor * v.x, sum.y += factor * v.y;
}

// A block has PAIRS pairs of columns of a client. A thread has one pair, and a share of the outputs.
extern "C" __global__ void __launch_bounds__(THREADS)
few_backward(const float* dy, const float* y, const float* x, const float* w, float* dw, float* db, float* dx,
             int64 w_stride, int64 dw_stride, int64 db_stride) {
  await_others();
  extern __shared__ __align__(16) float shared[];
  float* slopes = shared;                                // [OUTPUTS][PADDED]
  float2* sums = (float2*)(shared + OUTPUTS * PADDED);   // [SHARES][SLOTS][PAIRS]
  const int64 client = blockIdx.y;
  const int pair = threadIdx.x % PAIRS, share = threadIdx.x / PAIRS;
  const int k = 2 * (blockIdx.x * PAIRS + pair);
  const bool inside = k < INPUTS;
  x += client * SLOTS * INPUTS + k;
  w += client * w_stride + k;
  float2 own[SLOTS], sum[SLOTS];
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    own[s] = inside ? __ldcg((const float2*)(x + s * INPUTS)) : make_float2(0, 0);
    sum[s] = make_float2(0, 0);
  }
  for (int i = threadIdx.x; i < OUTPUTS * PADDED; i += THREADS) {
    const int s = i / OUTPUTS, n = i % OUTPUTS;
    float g = 0;
    if (s < SLOTS) {
      const int64 at = (client * SLOTS + s) * OUTPUTS + n;
      g = dy[at];
      if (SLOPE != 1.0f && !(y[at] > 0)) g *= SLOPE;
    }
    slopes[n * PADDED + s] = g;
  }
  __syncthreads();
  if (BIAS && blockIdx.x == 0)
    for (int n = threadIdx.x; n < OUTPUTS; n += THREADS) {
      float total = 0;
#pragma unroll
      for (int s = 0; s < SLOTS; s++) total += slopes[n * PADDED + s];
      db[client * db_stride + n] = total;
    }
  dw += client * dw_stride + k;
  // DEPTH rows are under way before the first is used.
#pragma unroll 1
  for (int first = share; first < OUTPUTS; first += SHARES * DEPTH) {
    float2 weight[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH && NEEDS_X; i++) {
      const int n = first + i * SHARES;
      weight[i] = inside && n < OUTPUTS ? __ldcg((const float2*)(w + (int64)n * INPUTS)) : make_float2(0, 0);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int n = first + i * SHARES;
      if (n >= OUTPUTS) break;
      float2 gradient = make_float2(0, 0);
#pragma unroll
      for (int s = 0; s < SLOTS; s += 4) {
        const float4 four = *(const float4*)(slopes + n * PADDED + s);
        const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4 && s + j < SLOTS; j++) {
          add(gradient, g[j], own[s + j]);
          if (NEEDS_X) add(sum[s + j], g[j], weight[i]);
        }
      }
      if (inside) *(float2*)(dw + (int64)n * INPUTS) = gradient;
    }
  }
  if (!NEEDS_X) return;
#pragma unroll
  for (int s = 0; s < SLOTS; s++) sums[(share * SLOTS + s) * PAIRS + pair] = sum[s];
  __syncthreads();
  for (int i = threadIdx.x; i < SLOTS * PAIRS; i += THREADS) {
    const int s = i / PAIRS, column = 2 * (blockIdx.x * PAIRS + i % PAIRS);
    if (column >= INPUTS) continue;
    float2 total = sums[i];
    for (int j = 1; j < SHARES; j++) {
      const float2 more = sums[j * SLOTS * PAIRS + i];
      total.x += more.x, total.y += more.y;
    }
    *(float2*)(dx + (client * SLOTS + s) * INPUTS + column) = total;
  }
}

#endif
