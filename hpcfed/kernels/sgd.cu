// One step of SGD on all clients' rows in one pass: four columns at a time.
//   gradient ← scale[client] · gradient + decay · row;  velocity ← momentum · velocity + gradient;
//   row ← row − lr · velocity, or by Nesterov − lr · (gradient + momentum · velocity), where the column is trainable;
//   lr is one number, or one per client

#include "order.cuh"

__device__ __forceinline__ void step(float& row, float g, float* velocity, bool trainable, float lr) {
  g += DECAY * row;
  if (MOMENTUM > 0) {
    *velocity = MOMENTUM * *velocity + g;
    g = NESTEROV ? g + MOMENTUM * *velocity : *velocity;
  }
  if (trainable) row -= lr * g;
}

extern "C" __global__ void sgd(float* rows, const float* gradient, float* velocity, const float* lr, const float* scale,
                               const unsigned char* trainable, long long columns, long long stride, long long total) {
  await_others();
  for (long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x); at < total;
       at += 4ll * gridDim.x * blockDim.x) {
    const long long client = at / columns, i = client * stride + at % columns;
    const float rate = lr[RATE_EACH ? client : 0];
    float4 row = *(float4*)(rows + i), g = *(const float4*)(gradient + i), v = make_float4(0, 0, 0, 0);
    if (MOMENTUM > 0) v = *(float4*)(velocity + i);
    uchar4 trains = make_uchar4(1, 1, 1, 1);
    if (MASKED) trains = *(const uchar4*)(trainable + at % columns);
    if (CLIPPED) {
      const float s = scale[client];
      g.x *= s, g.y *= s, g.z *= s, g.w *= s;
    }
    step(row.x, g.x, &v.x, trains.x, rate);
    step(row.y, g.y, &v.y, trains.y, rate);
    step(row.z, g.z, &v.z, trains.z, rate);
    step(row.w, g.w, &v.w, trains.w, rate);
    *(float4*)(rows + i) = row;
    if (MOMENTUM > 0) *(float4*)(velocity + i) = v;
  }
}
