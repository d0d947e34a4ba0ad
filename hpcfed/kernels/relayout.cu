// Copies columns of all clients' rows to other places, by a table of where each comes from; -1: from nowhere.
// Clients are in the grid's second direction, and a thread keeps its part of the table for all of them.

#include "order.cuh"

typedef long long int64;

#define AT_ONCE 4  // clients that a thread loads before it stores the first

// Every column of `to` gets a value, 0 where it comes from nowhere; four columns a thread.
extern "C" __global__ void fill_columns(const float* from, float* to, const int* table, int64 columns, int64 from_stride,
                                        int64 to_stride, int64 clients) {
  await_others();
  const int64 column = 4 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
  if (column >= columns) return;
  const int4 source = *(const int4*)(table + column);
  for (int64 first = blockIdx.y; first < clients; first += AT_ONCE * gridDim.y) {
    float4 v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int64 client = first + i * gridDim.y;
      if (client >= clients) break;
      const float* row = from + client * from_stride;
      v[i] = make_float4(source.x < 0 ? 0 : row[source.x], source.y < 0 ? 0 : row[source.y],
                         source.z < 0 ? 0 : row[source.z], source.w < 0 ? 0 : row[source.w]);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int64 client = first + i * gridDim.y;
      if (client < clients) *(float4*)(to + client * to_stride + column) = v[i];
    }
  }
}

// Columns of `to` that come from nowhere stay as they are; one column a thread, because rows may begin anywhere.
extern "C" __global__ void set_columns(const float* from, float* to, const int* table, int64 columns, int64 from_stride,
                                       int64 to_stride, int64 clients) {
  await_others();
  const int64 column = (int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const int source = table[column];
  if (source < 0) return;
  for (int64 first = blockIdx.y; first < clients; first += AT_ONCE * gridDim.y) {
    float v[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int64 client = first + i * gridDim.y;
      if (client < clients) v[i] = from[client * from_stride + source];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int64 client = first + i * gridDim.y;
      if (client < clients) to[client * to_stride + column] = v[i];
    }
  }
}
