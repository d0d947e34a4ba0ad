// One step of Adam, or of AdamW where decay is decoupled, on all clients' rows in one pass: four columns at a time.
//   g ← scale[client] · gradient, and + decay · row for Adam;
//   mean ← β₁ · mean + (1 − β₁) · g;  square ← β₂ · square + (1 − β₂) · g²;
//   row ← row − lr / c₁ · mean / (√square / √c₂ + ε), where the column is trainable; AdamW first takes lr · decay · row off.
// c₁ = 1 − β₁ᵗ and √c₂ = √(1 − β₂ᵗ) come from a table by step: float32 has too few digits to compute them here.

#include "order.cuh"

__device__ __forceinline__ void step(float& row, float g, float& mean, float& square, bool trainable, float lr, float c1,
                                     float root2) {
  if (!DECOUPLED) g += DECAY * row;
  mean += KEEP1 * (g - mean);
  square = BETA2 * square + KEEP2 * g * g;
  if (!trainable) return;
  if (DECOUPLED) row *= 1 - lr * DECAY;
  row -= lr / c1 * (mean / (sqrtf(square) / root2 + EPSILON));
}

extern "C" __global__ void adam(float* rows, const float* gradient, float* means, float* squares, const float* lr,
                                const float* bias, const long long* at_step, const float* scale,
                                const unsigned char* trainable, long long columns, long long stride, long long total) {
  await_others();
  const float c1 = bias[2 * *at_step], root2 = bias[2 * *at_step + 1];
  for (long long at = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x); at < total;
       at += 4ll * gridDim.x * blockDim.x) {
    const long long client = at / columns, i = client * stride + at % columns;
    const float rate = lr[RATE_EACH ? client : 0];
    float4 row = *(float4*)(rows + i), g = *(const float4*)(gradient + i);
    float4 mean = *(float4*)(means + i), square = *(float4*)(squares + i);
    uchar4 trains = make_uchar4(1, 1, 1, 1);
    if (MASKED) trains = *(const uchar4*)(trainable + at % columns);
    if (CLIPPED) {
      const float s = scale[client];
      g.x *= s, g.y *= s, g.z *= s, g.w *= s;
    }
    step(row.x, g.x, mean.x, square.x, trains.x, rate, c1, root2);
    step(row.y, g.y, mean.y, square.y, trains.y, rate, c1, root2);
    step(row.z, g.z, mean.z, square.z, trains.z, rate, c1, root2);
    step(row.w, g.w, mean.w, square.w, trains.w, rate, c1, root2);
    *(float4*)(rows + i) = row;
    *(float4*)(means + i) = mean;
    *(float4*)(squares + i) = square;
  }
}
