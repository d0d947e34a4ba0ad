// The hash of many numbers.

#include "order.cuh"
#include "splitmix.cuh"

extern "C" __global__ void mix(const uint64* from, uint64* to, long long total) {
  await_others();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < total) to[i] = mixed(from[i]);
}
