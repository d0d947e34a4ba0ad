// The pass between two linear layers with adapters, in bfloat16 with float32 in between. It adds what an adapter adds to
// a product, inner · factor of every client, and applies GELU (by tanh) or its derivative.

#define BF16 1
#include "eight.cuh"
#include "order.cuh"

typedef long long int64;

#define AT_ONCE 4  // rows of a thread, which share what it reads of the factor
#define WIDTH 256  // columns of a block: eight of each of 32 threads
#define ROWS 128   // of a block
#define WARPS 8

// √(8/π) (y + 0.044715 y³), so that GELU is y · sigmoid(of this).
#define SLOPE 1.5957691216057308f
#define CUBE (0.044715f * SLOPE)

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }

__device__ __forceinline__ float gelu(float y) { return y * sigmoid(y * (SLOPE + CUBE * y * y)); }

__device__ __forceinline__ float derivative(float y) {
  const float s = sigmoid(y * (SLOPE + CUBE * y * y));
  return s + y * s * (1 - s) * (SLOPE + 3 * CUBE * y * y);
}

// `sums` [clients, rows, columns] become sums + inner · factor. FORWARD: `other` becomes GELU of that.
// Otherwise sums are then multiplied by GELU's derivative at `other`.
// A factor is [columns, RANK] of a client for FORWARD, and [RANK, columns] otherwise; clients are `stride` apart.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    between(Number* sums, Number* other, const Number* inner, const Number* factor, int64 rows, int64 columns,
            int64 stride) {
  await_others();
  // The first four of a thread's columns, and the other four: so that neighbours read neighbouring numbers.
  __shared__ float4 of_factor[RANK][2][32];
  __shared__ float of_inner[ROWS][RANK];
  const int blocks = (rows + ROWS - 1) / ROWS;
  const int64 client = blockIdx.y / blocks, first_row = blockIdx.y % blocks * (int64)ROWS;
  const int64 first_column = blockIdx.x * (int64)WIDTH;
  factor += client * stride;
  for (int i = threadIdx.x; i < RANK * WIDTH; i += 32 * WARPS) {
    // Neighbouring threads read neighbouring numbers.
    const int r = FORWARD ? i % RANK : i / WIDTH, c = FORWARD ? i / RANK : i % WIDTH;
    const int64 column = first_column + c;
    ((float*)&of_factor[r][c / 4 % 2][c / 8])[c % 4] =
        column < columns ? number(factor[FORWARD ? column * RANK + r : r * columns + column]) : 0;
  }
  inner += (client * rows + first_row) * RANK;
  for (int i = threadIdx.x; i < ROWS * RANK; i += 32 * WARPS)
    of_inner[i / RANK][i % RANK] = first_row + i / RANK < rows ? number(inner[i]) : 0;
  __syncthreads();
  const int c = 8 * (threadIdx.x % 32), warp = threadIdx.x / 32;
  if (first_column + c >= columns) return;
  const int64 start = (client * rows + first_row) * columns + first_column + c;
  // What comes next is on its way while this is worked on.
  uint4 next[AT_ONCE], next_at[AT_ONCE];
  const auto fetch = [&](int row) {
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      if (row + t >= ROWS || first_row + row + t >= rows) break;
      next[t] = *(const uint4*)(sums + start + (row + t) * columns);
      if (!FORWARD) next_at[t] = *(const uint4*)(other + start + (row + t) * columns);
    }
  };
  fetch(warp * AT_ONCE);
  for (int row = warp * AT_ONCE; row < ROWS && first_row + row < rows; row += WARPS * AT_ONCE) {
    Eight sum[AT_ONCE];
    uint4 at[AT_ONCE];
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      sum[t] = load((const Number*)&next[t]);
      at[t] = next_at[t];
    }
    fetch(row + WARPS * AT_ONCE);
#pragma unroll 2
    for (int r = 0; r < RANK; r++) {
      const float4 a = of_factor[r][0][threadIdx.x % 32], b = of_factor[r][1][threadIdx.x % 32];
      const Eight by = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        const float x = of_inner[row + t][r];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[t].v[i] = fmaf(x, by.v[i], sum[t].v[i]);
      }
    }
#pragma unroll
    for (int t = 0; t < AT_ONCE; t++) {
      if (first_row + row + t >= rows) break;
      const int64 place = start + (row + t) * columns;
      if (FORWARD) {
        store(sums + place, sum[t]);
        // Of what is stored, for which the derivative is taken later.
        Eight y;
#pragma unroll
        for (int i = 0; i < 8; i++) y.v[i] = gelu(number(rounded(sum[t].v[i])));
        store(other + place, y);
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) sum[t].v[i] *= derivative(load((const Number*)&at[t]).v[i]);
        store(sums + place, sum[t]);
      }
    }
  }
}
