// Cross-entropy of tokens with its gradient, in the memory of the logits: a language model's largest tensor is there once.

typedef long long int64;

#if BF16
typedef unsigned short Number;

__device__ __forceinline__ float read(Number x) { return __uint_as_float((unsigned)x << 16); }

__device__ __forceinline__ Number rounded(float x) {
  Number bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#else
typedef float Number;

__device__ __forceinline__ float read(Number x) { return x; }
__device__ __forceinline__ Number rounded(float x) { return x; }
#endif

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

// Replaces a token's logits by the gradient of its client's mean loss, and leaves the token's loss in losses[token].
// A client has `tokens` of them in a row, counts[client] with a target; one without, below 0, counts nothing.
// A block is a token.
extern "C" __global__ void next_token(Number* logits, float* losses, const int64* targets, const int64* counts,
                                      int64 tokens) {
  const int64 token = blockIdx.x, target = targets[token];
  Number* x = logits + token * VOCABULARY;
  if (target < 0) {
    // Not a product with 0: padded slots may hold NaN.
    for (int k = threadIdx.x; k < VOCABULARY; k += blockDim.x) x[k] = 0;
    if (threadIdx.x == 0) losses[token] = 0;
    return;
  }
  const float at_target = read(x[target]);
  float most = NOTHING, all = 0;
  for (int k = threadIdx.x; k < VOCABULARY; k += blockDim.x) most = fmaxf(most, read(x[k]));
  most = over_block(most, NOTHING, largest);
  for (int k = threadIdx.x; k < VOCABULARY; k += blockDim.x) all += expf(read(x[k]) - most);
  // This waits for all threads, so none writes before all have read the target's logit.
  all = over_block(all, 0, sum);
  const float count = counts[token / tokens];
  for (int k = threadIdx.x; k < VOCABULARY; k += blockDim.x)
    x[k] = rounded((expf(read(x[k]) - most) / all - (k == target)) / count);
  if (threadIdx.x == 0) losses[token] = logf(all) + most - at_target;
}
