// Cross-entropy of tokens with its gradient, in the memory of the logits: a language model's largest tensor is there once.

typedef long long int64;

#include "eight.cuh"
#include "order.cuh"

#define NOTHING __int_as_float(0xff800000)  // −∞, the largest of no numbers

#if VOCABULARY % 8 == 0
#define AT_ONCE 8
__device__ Eight part(const Number* x) { return load(x); }
__device__ void put(Number* x, const Eight& e) { store(x, e); }
#else
#define AT_ONCE 1
__device__ Eight part(const Number* x) { return {{number(*x)}}; }
__device__ void put(Number* x, const Eight& e) { *x = rounded(e.v[0]); }
#endif

// exp(x − shift). In bfloat16 the result is rounded to far fewer digits than this has.
#if BF16
#define LOG2_E 1.4426950408889634f
struct Exponential {
  float shift;
  __device__ Exponential(float shift) : shift(-LOG2_E * shift) {}
  __device__ float operator()(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(LOG2_E, x, shift)));
    return y;
  }
};
#else
struct Exponential {
  float shift;
  __device__ Exponential(float shift) : shift(shift) {}
  __device__ float operator()(float x) const { return expf(x - shift); }
};
#endif

// Σ exp(x − most) of some numbers, of which `most` is the largest.
struct Sum {
  float most, all;
};

__device__ Sum over_warp(Sum own) {
  float most = own.most;
  for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, offset));
  // Not of −∞ − −∞, which is NaN: whoever met no number has the sum 0.
  float all = own.all ? own.all * Exponential(most)(own.most) : 0;
  for (int offset = 16; offset; offset /= 2) all += __shfl_xor_sync(0xffffffff, all, offset);
  return {most, all};
}

// Every thread of the block gets the result. `of_warps` must not be that of the call before: its threads may still read.
__device__ Sum over_block(Sum own, Sum* of_warps) {
  own = over_warp(own);
  if (THREADS == 32) return own;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  return over_warp(threadIdx.x % 32 < THREADS / 32 ? of_warps[threadIdx.x % 32] : Sum{NOTHING, 0});
}

#define EACH_PART for (int k = AT_ONCE * threadIdx.x; k < VOCABULARY; k += AT_ONCE * THREADS)

// Begins to copy a part of a token's logits, which this thread alone will read.
__device__ void fetch(Number* to, const Number* from) {
  constexpr int whole = 16 / sizeof(Number);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i += whole)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to + i)),
                 "l"(from + i)
                 : "memory");
}

extern __shared__ uint4 row_of_token[];

// Replaces a token's logits by the gradient of its client's mean loss, and leaves the token's loss in losses[token].
// A client has `tokens` of them in a row, counts[client] with a target; one without, below 0, counts nothing.
// A block takes token by token. Logits are read once if a row fits in shared memory (KEPT): there the next token's take
// the place of this one's as soon as these are done. Otherwise they are read twice.
extern "C" __global__ void __launch_bounds__(THREADS)
    next_token(Number* logits, float* losses, const int64* targets, const int64* counts, int64 tokens, int64 end) {
  await_others();
  __shared__ Sum of_warps[2][32];
  Number* kept = (Number*)row_of_token;
  bool turn = false;  // whose half of `of_warps` it is
  if (KEPT) EACH_PART fetch(kept + k, logits + blockIdx.x * (int64)VOCABULARY + k);
  for (int64 token = blockIdx.x; token < end; token += gridDim.x) {
    Number* x = logits + token * VOCABULARY;
    const Number* from = KEPT ? kept : x;
    if (KEPT) asm volatile("cp.async.wait_all;" ::: "memory");
    const Number* next = KEPT && token + gridDim.x < end ? x + gridDim.x * (int64)VOCABULARY : nullptr;
    turn = !turn;
    const int64 target = targets[token];
    if (target < 0) {
      // Not a product with 0: padded slots may hold NaN.
      const Eight zeros = {};
      EACH_PART {
        if (next) fetch(kept + k, next + k);
        put(x + k, zeros);
      }
      if (threadIdx.x == 0) losses[token] = 0;
      // Rows without a target do not sum up, and two sums in a row need different memory.
      __syncthreads();
      continue;
    }
    Sum own = {NOTHING, 0};
#pragma unroll 4
    EACH_PART {
      const Eight e = part(from + k);
      float larger = own.most;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) larger = fmaxf(larger, e.v[i]);
      if (larger > own.most) own = {larger, own.all ? own.all * Exponential(larger)(own.most) : 0};
      // −∞ − −∞ would be NaN.
      const Exponential exponential(own.most > NOTHING ? own.most : 0);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) own.all += exponential(e.v[i]);
    }
    const Sum sum = over_block(own, of_warps[turn]);
    const float count = counts[token / tokens], scale = 1 / (sum.all * count);
    const Exponential exponential(sum.most);
    // Before its logit is replaced; one thread has read it.
    const bool met = target / AT_ONCE % THREADS == threadIdx.x;
    const float at_target = met ? number(from[target]) : 0;
#pragma unroll 4
    EACH_PART {
      Eight e = part(from + k);
      if (next) fetch(kept + k, next + k);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) e.v[i] = exponential(e.v[i]) * scale;
      put(x + k, e);
    }
    if (met) {
      x[target] = rounded(exponential(at_target) * scale - 1 / count);
      losses[token] = logf(sum.all) + sum.most - at_target;
    }
  }
}
