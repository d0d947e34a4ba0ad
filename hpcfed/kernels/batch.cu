// The two ends of a training step, each as one kernel: the images of a batch, and the loss with its gradient.
// A step is a row of the table of samples [steps][capacity][width]; which one, stands in device memory.

#include "order.cuh"

typedef long long int64;

// out[client][slot] = images[samples[*step][client][slot]], four bytes at a time; FLOATS is the size of an image.
extern "C" __global__ void gather_images(const float* images, float* out, const int64* samples, const int64* step,
                                         int64 capacity, int64 width, int64 slots) {
  await_others();
  const int64 client = blockIdx.y, slot = blockIdx.x;
  const float* from = images + samples[(*step * capacity + client) * width + slot] * FLOATS;
  float* to = out + (client * slots + slot) * FLOATS;
#if FLOATS % 4 == 0
  for (int i = threadIdx.x; i < FLOATS / 4; i += blockDim.x) ((float4*)to)[i] = ((const float4*)from)[i];
#else
  for (int i = threadIdx.x; i < FLOATS; i += blockDim.x) to[i] = from[i];
#endif
}

// The same, each image shifted by rows and columns and perhaps mirrored, as shifts[*step][client][slot] says.
extern "C" __global__ void gather_shifted(const float* images, float* out, const int64* samples, const int64* step,
                                          int64 capacity, int64 width, int64 slots, const int64* shifts,
                                          const float* blank) {
  await_others();
  constexpr int PER_AXIS = 2 * REACH + 1, SIZE = HEIGHT * WIDTH * CHANNELS;
  const int64 client = blockIdx.y, slot = blockIdx.x, at = (*step * capacity + client) * width + slot;
  const int shift = shifts[at], down = shift % PER_AXIS - REACH, right = shift / PER_AXIS % PER_AXIS - REACH;
  const bool mirrored = shift / (PER_AXIS * PER_AXIS) == 1;
  const float* from = images + samples[at] * SIZE;
  float* to = out + (client * slots + slot) * SIZE;
  for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
    const int c = i % CHANNELS, column = i / CHANNELS % WIDTH;
    const int y = i / (CHANNELS * WIDTH) + down, x = (mirrored ? WIDTH - 1 - column : column) + right;
    to[i] = y >= 0 && y < HEIGHT && x >= 0 && x < WIDTH ? from[(y * WIDTH + x) * CHANNELS + c] : blank[c];
  }
}

// Cross-entropy of each client's samples: adds their sum to total[client], and leaves the gradient of their mean in
// `gradient`, zero for slots beyond the client's samples of this step. A block is a client.
extern "C" __global__ void cross_entropy(const float* logits, float* gradient, float* total, const int64* labels,
                                         const int64* samples, const int64* counts, const int64* step, int64 capacity,
                                         int64 width, int64 slots) {
  await_others();
  __shared__ float sums[32];
  const int64 client = blockIdx.x, row = *step * capacity + client, count = counts[row];
  float sum = 0;
  for (int64 slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    const float* x = logits + (client * slots + slot) * CLASSES;
    float* g = gradient + (client * slots + slot) * CLASSES;
    if (slot >= count) {
      for (int k = 0; k < CLASSES; k++) g[k] = 0;
      continue;
    }
    const int64 label = labels[samples[row * width + slot]];
    float most = x[0], all = 0;
    for (int k = 1; k < CLASSES; k++) most = fmaxf(most, x[k]);
    for (int k = 0; k < CLASSES; k++) all += expf(x[k] - most);
    sum += logf(all) + most - x[label];
    for (int k = 0; k < CLASSES; k++) g[k] = (expf(x[k] - most) / all - (k == label)) / count;
  }
  for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < blockDim.x / 32; i++) sum += sums[i];
    total[client] += sum;
  }
}
