// Cross-entropy of tokens with its gradient, in the memory of the logits: a language model's largest tensor is there once.

typedef long long int64;

#include "eight.cuh"

#define NOTHING __int_as_float(0xff800000)  // −∞, the largest of no numbers

__device__ float largest(float a, float b) { return fmaxf(a, b); }
__device__ float sum(float a, float b) { return a + b; }

// Combines the values of all threads of a block; every thread gets the result.
template <typename Combine>
__device__ float over_block(float value, float neutral, Combine combine) {
  __shared__ float of_warps[32];
  for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, offset));
  // Threads may still read what an earlier call has left here.
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : neutral;
  for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffff, value, offset));
  return value;
}

#if BF16 && VOCABULARY % 8 == 0
#define AT_ONCE 8
__device__ Eight part(const Number* x) { return load(x); }
__device__ void put(Number* x, const Eight& e) { store(x, e); }
#else
#define AT_ONCE 1
#if BF16
__device__ float number(Number x) { return __uint_as_float((unsigned)x << 16); }
__device__ Number rounded(float x) {
  Number bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#else
__device__ float number(Number x) { return x; }
__device__ Number rounded(float x) { return x; }
#endif
__device__ Eight part(const Number* x) { return {{number(*x)}}; }
__device__ void put(Number* x, const Eight& e) { *x = rounded(e.v[0]); }
#endif

#if BF16
#define EXP __expf  // the result is rounded to far fewer digits
#else
#define EXP expf
#endif

extern __shared__ uint4 row_of_token[];

// Replaces a token's logits by the gradient of its client's mean loss, and leaves the token's loss in losses[token].
// A client has `tokens` of them in a row, counts[client] with a target; one without, below 0, counts nothing.
// A block is a token. Logits are read once if they fit in shared memory (KEPT), and twice otherwise.
extern "C" __global__ void next_token(Number* logits, float* losses, const int64* targets, const int64* counts,
                                      int64 tokens) {
  const int64 token = blockIdx.x, target = targets[token];
  const int first = AT_ONCE * threadIdx.x, step = AT_ONCE * blockDim.x;
  Number* x = logits + token * VOCABULARY;
  Number* kept = KEPT ? (Number*)row_of_token : x;
  if (target < 0) {
    // Not a product with 0: padded slots may hold NaN.
    const Eight zeros = {};
    for (int k = first; k < VOCABULARY; k += step) put(x + k, zeros);
    if (threadIdx.x == 0) losses[token] = 0;
    return;
  }
  // Σ exp(x − most) of the thread's logits, with the largest that it has met so far.
  float own = NOTHING, all = 0, at_target = 0;
#pragma unroll 4
  for (int k = first; k < VOCABULARY; k += step) {
    const Eight e = part(x + k);
    if (KEPT) put(kept + k, e);
    float larger = own;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) larger = fmaxf(larger, e.v[i]);
    if (larger > own) all *= EXP(own - larger), own = larger;
    // −∞ − −∞ would be NaN.
    const float base = own > NOTHING ? own : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      all += EXP(e.v[i] - base);
      if (k + i == target) at_target = e.v[i];
    }
  }
  const float most = over_block(own, NOTHING, largest);
  // A thread without logits has no largest one.
  all = over_block(all ? all * EXP(own - most) : 0, 0, sum);
  const float count = counts[token / tokens], scale = 1 / (all * count);
  // Only one thread has met the target.
  const bool met = target / AT_ONCE % blockDim.x == threadIdx.x;
#pragma unroll 4
  for (int k = first; k < VOCABULARY; k += step) {
    Eight e = part(kept + k);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) e.v[i] = EXP(e.v[i] - most) * scale - (k + i == target) / count;
    put(x + k, e);
  }
  if (met) losses[token] = logf(all) + most - at_target;
}
