// A step of SGD on rows that may be drawn to references, in one pass over memory. A row is cut into chunks, none of which
// reaches over the end of a layer. d = row − reference.
//   gradient ← gradient + (slope of the layer + slope of the row + SQUARED + mask · slope of the masked) · d
//   gradient ← gradient + DECAY · row;  velocity ← MOMENTUM · velocity + gradient
//   row ← row − lr · velocity, or by Nesterov − lr · (gradient + MOMENTUM · velocity)
// The new row is also written rounded to bfloat16, and per client and chunk Σ d² and Σ (mask · d)² of it, from which the
// next step makes its slopes: see pull.cu.

#include "chunk_sums.cuh"
#include "order.cuh"

__device__ __forceinline__ unsigned pair(float low, float high) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

struct Four {
  float v[4];
};

__device__ __forceinline__ Four load(const float* from) {
  const float4 f = *(const float4*)from;
  return {{f.x, f.y, f.z, f.w}};
}

__device__ __forceinline__ void store(float* to, const Four& f) {
  *(float4*)to = make_float4(f.v[0], f.v[1], f.v[2], f.v[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
descend(float* rows, const float* gradient, float* velocity, const float* lr, const float* reference,
        const unsigned char* mask, const float* found, float* plain, float* masked, unsigned short* half,
        const int* starts, const int* layer_of, long long columns, long long layers) {
  await_others();
  const long long row = blockIdx.y * columns;
  const float rate = lr[RATE_EACH ? blockIdx.y : 0];
  float slope = 0, masked_slope = 0, sum = 0, masked_sum = 0;
  if (PULLED) {
    const float* own = found + blockIdx.y * (layers + 2);
    slope = own[layer_of[blockIdx.x]] + own[layers] + SQUARED, masked_slope = own[layers + 1];
  }
#pragma unroll 2
  for (int i = starts[blockIdx.x] + 4 * threadIdx.x; i < starts[blockIdx.x + 1]; i += 4 * THREADS) {
    Four r = load(rows + row + i), g = load(gradient + row + i), v, to;
    if (MOMENTUM > 0) v = load(velocity + row + i);
    if (PULLED) to = load(reference + row + i);
    uchar4 m = make_uchar4(0, 0, 0, 0);
    if (MASKED) m = *(const uchar4*)(mask + row + i);
    const bool counts[4] = {m.x != 0, m.y != 0, m.z != 0, m.w != 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (PULLED) g.v[j] += (slope + (counts[j] ? masked_slope : 0.0f)) * (r.v[j] - to.v[j]);
      g.v[j] += DECAY * r.v[j];
      if (MOMENTUM > 0) {
        v.v[j] = MOMENTUM * v.v[j] + g.v[j];
        g.v[j] = NESTEROV ? g.v[j] + MOMENTUM * v.v[j] : v.v[j];
      }
      r.v[j] -= rate * g.v[j];
      if (PULLED) {
        const float d = r.v[j] - to.v[j];
        sum += d * d;
        if (counts[j]) masked_sum += d * d;
      }
    }
    store(rows + row + i, r);
    if (MOMENTUM > 0) store(velocity + row + i, v);
    if (HALVES) *(uint2*)(half + row + i) = make_uint2(pair(r.v[0], r.v[1]), pair(r.v[2], r.v[3]));
  }
  if (!PULLED) return;
  write_sums(sum, masked_sum, plain, masked);
}
