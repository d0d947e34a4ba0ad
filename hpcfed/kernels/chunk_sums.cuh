// Sums of two quantities over a chunk of a client's row. A block has chunk blockIdx.x of client blockIdx.y.

__device__ __forceinline__ float sum_of_warp(float x) {
  for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Writes the sums of what all threads of the block have, in an order that depends on THREADS alone.
__device__ __forceinline__ void write_sums(float sum, float masked_sum, float* plain, float* masked) {
  __shared__ float parts[2][THREADS / 32];
  sum = sum_of_warp(sum), masked_sum = sum_of_warp(masked_sum);
  if (threadIdx.x % 32 == 0) parts[0][threadIdx.x / 32] = sum, parts[1][threadIdx.x / 32] = masked_sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / 32; ++warp) sum += parts[0][warp], masked_sum += parts[1][warp];
    plain[blockIdx.y * gridDim.x + blockIdx.x] = sum;
    masked[blockIdx.y * gridDim.x + blockIdx.x] = masked_sum;
  }
}
