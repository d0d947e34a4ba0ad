// silu(gate) · up, elementwise, and its gradients, in bfloat16 with float32 in between. A thread has eight numbers.

#define BF16 1
#include "eight.cuh"
#include "order.cuh"

typedef long long int64;

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

extern "C" __global__ void forward(const Number* gate, const Number* up, Number* y, int64 size) {
  await_others();
  const int64 at = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= size) return;
  const Eight g = load(gate + at), u = load(up + at);
  Eight result;
#pragma unroll
  for (int i = 0; i < 8; i++) result.v[i] = g.v[i] * sigmoid(g.v[i]) * u.v[i];
  store(y + at, result);
}

extern "C" __global__ void backward(const Number* gate, const Number* up, const Number* dy, Number* d_gate,
                                    Number* d_up, int64 size) {
  await_others();
  const int64 at = 8 * ((int64)blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= size) return;
  const Eight g = load(gate + at), u = load(up + at), d = load(dy + at);
  Eight of_gate, of_up;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float s = sigmoid(g.v[i]);
    of_up.v[i] = d.v[i] * g.v[i] * s;
    // (g s)′ = s + g s (1 − s)
    of_gate.v[i] = d.v[i] * u.v[i] * s * (1 + g.v[i] * (1 - s));
  }
  store(d_gate + at, of_gate);
  store(d_up + at, of_up);
}
