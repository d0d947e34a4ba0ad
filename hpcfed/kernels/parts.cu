// Adds up what blocks have left of each client's sums, in an order that never changes.

#include "order.cuh"
#include "parts.cuh"

#define AT_ONCE 8  // parts that a thread loads before it adds the first

__device__ __forceinline__ void add(float4& sum, const float4 v) {
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

// A thread has four columns of client blockIdx.y, and every `groups`-th part. A block that was alone with a client has
// written the result itself.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
add_parts(const float* parts, float* result, int64 stride, int64 columns, int64 per_client, int64 blocks, int64 groups) {
  await_others();
  __shared__ int64 ends[2];  // the first and the last block that had units of the client
  __shared__ float4 sums[THREADS];
  const int64 client = blockIdx.y;
  if (threadIdx.x < 2)
    ends[threadIdx.x] = block_of(client * per_client + threadIdx.x * (per_client - 1), blocks, gridDim.y * per_client);
  __syncthreads();
  const int64 first = ends[0] + client, last = ends[1] + client;
  if (first == last) return;
  const int wide = THREADS / (int)groups, group = threadIdx.x / wide;
  const int64 column = 4 * ((int64)blockIdx.x * wide + threadIdx.x % wide);
  const bool inside = column < columns;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int64 part = first + group; part <= last; part += AT_ONCE * groups) {
    float4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const bool there = inside && part + i * groups <= last;
      v[i] = there ? __ldcg((const float4*)(parts + (part + i * groups) * columns + column)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) add(sum, v[i]);
  }
  if (groups > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int other = 1; other < groups && group == 0; other++) add(sum, sums[threadIdx.x + other * wide]);
  }
  if (inside && group == 0) __stcg((float4*)(result + client * stride + column), sum);
}
