// The gradient of terms that draw rows to references, in two passes over memory. A row is cut into chunks, none of
// which reaches over the end of a layer. d = row − reference.
//   sums:   per client and chunk, Σ d² and Σ (mask · d)²
//   slopes: per client and layer, and of the whole row, strength / √(Σ + ε), summed in a fixed order
//   add:    gradient += (slope of the layer + slope of the row + SQUARED + mask · slope of the masked) · d

#include "chunk_sums.cuh"
#include "order.cuh"

__device__ __forceinline__ float4 load(const float* from, long long at) { return *(const float4*)(from + at); }

__device__ __forceinline__ float4 difference(const float* rows, const float* reference, long long at) {
  const float4 row = load(rows, at), to = load(reference, at);
  return make_float4(row.x - to.x, row.y - to.y, row.z - to.z, row.w - to.w);
}

__device__ __forceinline__ float square(float4 d) { return d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w; }

// 1 where the mask counts, 0 elsewhere.
__device__ __forceinline__ float4 load_mask(const unsigned char* mask, long long at) {
  const uchar4 m = *(const uchar4*)(mask + at);
  return make_float4(m.x, m.y, m.z, m.w);
}

extern "C" __global__ void sums(const float* rows, const float* reference, const unsigned char* mask, float* plain,
                                float* masked, const int* starts, long long columns) {
  await_others();
  const long long row = blockIdx.y * columns;
  float sum = 0, masked_sum = 0;
  for (int i = starts[blockIdx.x] + 4 * threadIdx.x; i < starts[blockIdx.x + 1]; i += 4 * THREADS) {
    float4 d = difference(rows, reference, row + i);
    sum += square(d);
    if (MASKED > 0) {
      const float4 m = load_mask(mask, row + i);
      masked_sum += square(make_float4(m.x * d.x, m.y * d.y, m.z * d.z, m.w * d.w));
    }
  }
  write_sums(sum, masked_sum, plain, masked);
}

// The last two blocks of the grid are for the whole row: its plain and its masked sum.
extern "C" __global__ void slopes(const float* plain, const float* masked, float* found, const int* first_chunks,
                                  long long chunks) {
  await_others();
  const int layers = gridDim.x - 2, layer = blockIdx.x;
  const bool whole = layer >= layers;
  const float* of = (layer == layers + 1 ? masked : plain) + blockIdx.y * chunks;
  const int begin = whole ? 0 : first_chunks[layer], end = whole ? chunks : first_chunks[layer + 1];
  float sum = 0;
  for (int chunk = begin + threadIdx.x; chunk < end; chunk += 32) sum += of[chunk];
  sum = sum_of_warp(sum);
  const float strength = layer == layers + 1 ? MASKED : whole ? WHOLE : LAYERS;
  if (threadIdx.x == 0) found[blockIdx.y * gridDim.x + layer] = strength / sqrtf(sum + SMOOTHING);
}

extern "C" __global__ void add(const float* rows, const float* reference, const unsigned char* mask,
                               const float* found, float* gradient, const int* starts, const int* layer_of, long long columns,
                               long long layers) {
  await_others();
  const float* own = found + blockIdx.y * (layers + 2);
  const float slope = own[layer_of[blockIdx.x]] + own[layers] + SQUARED, masked_slope = own[layers + 1];
  const long long row = blockIdx.y * columns;
  for (int i = starts[blockIdx.x] + 4 * threadIdx.x; i < starts[blockIdx.x + 1]; i += 4 * THREADS) {
    const float4 d = difference(rows, reference, row + i);
    float4 factor = make_float4(slope, slope, slope, slope), g = load(gradient, row + i);
    if (MASKED > 0) {
      const float4 m = load_mask(mask, row + i);
      factor.x += masked_slope * m.x, factor.y += masked_slope * m.y;
      factor.z += masked_slope * m.z, factor.w += masked_slope * m.w;
    }
    g.x += factor.x * d.x, g.y += factor.y * d.y, g.z += factor.z * d.z, g.w += factor.w * d.w;
    *(float4*)(gradient + row + i) = g;
  }
}
