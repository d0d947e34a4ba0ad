// Rotary positions: y = x · cos + turned(x) · sin, where turned(x) = (−second half, first half) of a head's numbers; or,
// backwards, the transposed map. x is [texts][heads][positions][2 · HALF] in bfloat16 with any strides of the first
// three; y is [texts][positions][heads][2 · HALF]. A block is a position of a text; a thread has eight numbers of each half.

#define BF16 1
#include "eight.cuh"
#include "order.cuh"

typedef long long int64;

extern "C" __global__ void rotate(const Number* x, const Number* cosines, const Number* sines, Number* y, int64 heads,
                                  int64 positions, int64 by_text, int64 by_head, int64 by_position, int64 of_text) {
  await_others();
  const int64 text = blockIdx.x / positions, position = blockIdx.x % positions;
  const Number* from = x + text * by_text + position * by_position;
  const int64 angle = text * of_text + position * 2 * HALF;
  for (int i = threadIdx.x; i < heads * (HALF / 8); i += blockDim.x) {
    const int head = i / (HALF / 8), k = 8 * (i % (HALF / 8));
    const Eight a = load(from + head * by_head + k), b = load(from + head * by_head + k + HALF);
    const Eight c = load(cosines + angle + k), d = load(cosines + angle + k + HALF);
    const Eight s = load(sines + angle + k), t = load(sines + angle + k + HALF);
    Eight first, second;
#pragma unroll
    for (int j = 0; j < 8; j++) {
#if BACKWARD
      first.v[j] = a.v[j] * c.v[j] + b.v[j] * t.v[j];
      second.v[j] = b.v[j] * d.v[j] - a.v[j] * s.v[j];
#else
      first.v[j] = a.v[j] * c.v[j] - b.v[j] * s.v[j];
      second.v[j] = b.v[j] * d.v[j] + a.v[j] * t.v[j];
#endif
    }
    Number* to = y + ((int64)blockIdx.x * heads + head) * 2 * HALF + k;
    store(to, first), store(to + HALF, second);
  }
}
