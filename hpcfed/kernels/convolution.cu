// Convolutions of many clients at once, each with its own weights, for networks with few channels.
//
// The kernels share one idea: the images at work lie in shared memory, with the zeros of the padding around them, and
// the tensor cores' operands are gathered from there. Patches, the convolution's own output and its gradient never
// exist in device memory.
//
//   gather_product    forward:             y = act(pool(patches · w + b)), and its marks
//                     gradient of inputs:  patches of the output's gradient · flipped w
//   weight_gradient   patchesᵀ · gradient of the output; blocks that share a client leave a part of its sums each
//   half_product, half_weight_gradient   the same of operands in halves; the first on Hopper's warp-group instructions
//
// A mark says, for the backward pass, which of the four pixels of a pooling has won (0 to 3), and whether the output is
// positive (4): a byte where the output itself would be four.
//
// Images are channels-last; weights are rows [n][row][column][channel]. A client is a row of weights and `slots` images.
// The shapes are macros, set when the layer is first seen; convolution_plan.py explains and computes them.
//
// mma.m16n8k8: lane = 4 g + t holds A[g | g+8][t | t+4], B[t | t+4][g], D[g | g+8][2t | 2t+1].

#include "order.cuh"
#include "parts.cuh"

#ifdef GATHER_PRODUCT
#define PAIRED 1
#else
#define PAIRED 0
#endif

#define THREADS (32 * WARPS)
#define STEP (POOL ? 2 : 1)      // pixels of the convolution per pixel of the result, in each direction
#define BANDS ((OUT_H + BAND - 1) / BAND)
#define ROWS (BAND * STEP + KH - 1)
#define COLS (OUT_W * STEP + KW - 1)
#define PITCH ((COLS * PIXEL + 1) / 2 * 2)  // floats of a row in shared memory
#define UNIT (ROWS * PITCH)                 // and of a unit: one band of one image
#define TAPS (KH * KW * SRC_C)

__device__ __forceinline__ float rounded(float x) {  // to TensorFloat-32
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

__device__ __forceinline__ void mma(float (&d)[4], const float (&a)[4], const float2 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                 "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}

__device__ __forceinline__ float slope(float x) { return SLOPE == 1.0f || x > 0 ? x : SLOPE * x; }  // the activation

__device__ __forceinline__ float slope(float g, int mark) {  // a gradient through the activation
  return SLOPE == 1.0f || mark & 4 ? g : SLOPE * g;
}

__device__ __forceinline__ signed char marked(int winner, float y) { return winner | (y > 0 ? 4 : 0); }

// A pair of floats must be aligned: where pixels have an odd size, a second copy of the images is shifted by one float.
#define COPIES (PAIRED && SRC_C % 2 ? 2 : 1)
// Columns of the source that the shared images hold, after LEAD columns of zeros.
#define HELD (SRC_W < COLS - LEAD ? SRC_W : COLS - LEAD)

__device__ __forceinline__ void copy16(float* to, const float* from) {  // without waiting
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}

__device__ __forceinline__ void copy4(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}

__device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Sets shared memory, which begins at a multiple of 16 bytes, to zero. Kernels do it before they wait for others.
__device__ __forceinline__ void clear(void* memory, int floats) {
  for (int i = threadIdx.x; i < floats / 4; i += THREADS) ((uint4*)memory)[i] = make_uint4(0, 0, 0, 0);
  for (int i = floats / 4 * 4 + threadIdx.x; i < floats; i += THREADS) ((float*)memory)[i] = 0;
}

#if defined(GATHER_PRODUCT) || defined(WEIGHT_GRADIENT)

// Starts to copy units [first, first + count) of a client's images. Columns of zeros are there already.
__device__ __forceinline__ void load_images(float* images, const float* src, int first, int count) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < count * ROWS; i += WARPS) {
    const int u = first + i / ROWS, y = u % BANDS * BAND * STEP + i % ROWS - LEAD;
    const float* from = src + (int64)(u / BANDS * SRC_H + y) * (SRC_W * SRC_C);
    const int at = i * PITCH + LEAD * PIXEL;
    float* to = images + at;
    if (y < 0 || y >= SRC_H) {
      for (int j = lane; j < HELD * PIXEL; j += 32) {
        to[j] = 0;
        if (COPIES == 2 && at + j > 0) to[BATCH * UNIT + j - 1] = 0;
      }
      continue;
    }
    if (SRC_C % 4 == 0) {
      for (int j = lane; j < HELD * (SRC_C / 4); j += 32)
        copy16(to + j / (SRC_C / 4) * PIXEL + j % (SRC_C / 4) * 4, from + j * 4);
    } else if (PIXEL == SRC_C && LEAD == 0 && SRC_W * SRC_C % 4 == 0 && PITCH % 4 == 0 && HELD * PIXEL % 4 == 0) {
      for (int j = lane * 4; j < HELD * PIXEL; j += 128) copy16(to + j, from + j);
    } else {
      for (int j = lane; j < HELD * SRC_C; j += 32) copy4(to + j / SRC_C * PIXEL + j % SRC_C, from + j);
    }
    if (COPIES == 2)  // and shifted by one float, so that every pair of neighbours is aligned in one of the copies
      for (int j = lane; j < HELD * SRC_C; j += 32)
        if (at + j > 0) copy4(to + BATCH * UNIT + j - 1, from + j);
  }
}

#endif

__device__ __forceinline__ float4 rounded(const float4 v) {
  return make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
}

__device__ __forceinline__ float4 slope(const float4 g, const char4 mark) {
  return make_float4(slope(g.x, mark.x), slope(g.y, mark.y), slope(g.z, mark.z), slope(g.w, mark.w));
}

__device__ __forceinline__ float4 won(const float4 v, const char4 mark, int position) {
  return make_float4((mark.x & 3) == position ? v.x : 0, (mark.y & 3) == position ? v.y : 0,
                     (mark.z & 3) == position ? v.z : 0, (mark.w & 3) == position ? v.w : 0);
}

#ifdef GATHER_PRODUCT

// The source of SPREAD is the gradient of the convolution's own output, made from the gradient `dy` of the layer's
// output and the output's marks. SRC is the size of the convolution's output.
__device__ __forceinline__ void load_spread(float* images, const float* dy, const signed char* marks, int first,
                                            int count) {
  constexpr int P = SPREAD_POOL ? 2 : 1, WIDE = SRC_W / P, HIGH = SRC_H / P, QUADS = SRC_C / 4;
  constexpr int TALL = (ROWS + P - 1) / P + P - 1;  // rows of dy that a unit may touch
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < count * TALL; i += WARPS) {
    const int u = first + i / TALL, top = u % BANDS * BAND - LEAD;  // the unit's first row
    const int row = (top + 64 * P) / P - 64 + i % TALL;             // rounded down, also below zero
    float* unit = images + i / TALL * UNIT + LEAD * PIXEL;
    const int64 at = (int64)(u / BANDS * HIGH + row) * (WIDE * SRC_C);
    const bool inside = row >= 0 && row < HIGH;
    for (int j = lane; j < WIDE * QUADS; j += 32) {
      float4 v = make_float4(0, 0, 0, 0);
      char4 w = make_char4(0, 0, 0, 0);
      if (inside) {
        if (MARKS) w = *(const char4*)(marks + at + j * 4);
        v = rounded(slope(*(const float4*)(dy + at + j * 4), w));
      }
#pragma unroll
      for (int p = 0; p < P * P; p++) {
        const int y = row * P + p / 2 - top, x = j / QUADS * P + p % 2;
        if (y >= 0 && y < ROWS)
          *(float4*)(unit + j % QUADS * 4 + y * PITCH + x * PIXEL) = SPREAD_POOL ? won(v, w, p) : v;
      }
    }
  }
}

// Starts to copy the images of units [first, first + count) of a client, or spreads the gradient of their outputs.
__device__ __forceinline__ void load_units(float* to, const float* src, const signed char* marks, int64 slots,
                                           int64 client, int first, int count) {
  if (SPREAD) {
    constexpr int P = SPREAD_POOL ? 2 : 1;
    const int64 at = client * slots * ((SRC_H / P) * (SRC_W / P) * SRC_C);
    load_spread(to, src + at, marks + at, first, count);
  } else {
    load_images(to, src + client * slots * (SRC_H * SRC_W * SRC_C), first, count);
  }
}

#define ROW_PAIRS ((KW * SRC_C + 1) / 2)   // pairs of neighbouring taps of a kernel's row
#define STEPS ((KH * ROW_PAIRS + 3) / 4)   // of four pairs
#define FRAGMENTS ((DST_C + 7) / 8)      // of eight output channels
#define NF (FRAGMENTS < 4 ? FRAGMENTS : 4)
#define PARTS ((FRAGMENTS + NF - 1) / NF)
#define OUTPUTS (BAND * OUT_W)           // of a unit
#define GROUP (POOL ? 16 : 64)           // outputs that a warp computes together: 64 pixels of the convolution

// A block works on units [b, b + 1) · total / blocks of all clients, BATCH at a time; a batch never spans two clients.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gather_product(const float* src, const signed char* marks_in, const float* w, const float* b, float* y,
               signed char* marks, int64 w_stride, int64 b_stride, int64 clients, int64 slots) {
  extern __shared__ __align__(16) float shared[];
  float* weights = shared;                               // [STEPS][FRAGMENTS][32 lanes][2]
  int* pairs = (int*)(weights + STEPS * FRAGMENTS * 64);  // [STEPS][4]: where a pair of taps lies in an image
  float* images = (float*)(pairs + STEPS * 4);            // [COPIES][BATCH][UNIT]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int per_client = slots * BANDS;
  const int end = first_unit(blockIdx.x + 1, gridDim.x, clients * per_client);
  for (int i = threadIdx.x; i < STEPS * 4; i += THREADS) {
    const int k = i % ROW_PAIRS * 2;
    pairs[i] = i < KH * ROW_PAIRS ? i / ROW_PAIRS * PITCH + k / SRC_C * PIXEL + k % SRC_C : 0;
  }
  clear(images, COPIES * BATCH * UNIT);
  await_others();
  int loaded = -1;
  for (int unit = first_unit(blockIdx.x, gridDim.x, clients * per_client); unit < end;) {
    const int client = unit / per_client;
    const int first = unit % per_client;
    int count = per_client - first < end - unit ? per_client - first : end - unit;
    count = count < BATCH ? count : BATCH;
    __syncthreads();
    load_units(images, src, marks_in, slots, client, first, count);
    if (client != loaded) {
      const float* own = w + client * w_stride;
#pragma unroll 8
      for (int i = threadIdx.x; i < STEPS * FRAGMENTS * 64; i += THREADS) {
        // neighbouring threads read neighbouring weights
        const int slot = SPREAD ? i / (FRAGMENTS * 8) : i % (STEPS * 8);
        const int n = SPREAD ? i % (FRAGMENTS * 8) : i / (STEPS * 8);
        const int r = slot / (2 * ROW_PAIRS), k = slot % (2 * ROW_PAIRS);
        float v = 0;
        if (r < KH && k < KW * SRC_C && n < DST_C)
          v = SPREAD ? own[(int64)((k % SRC_C * KH + KH - 1 - r) * KW + KW - 1 - k / SRC_C) * DST_C + n]
                     : own[n * TAPS + r * (KW * SRC_C) + k];
        weights[((slot / 8 * FRAGMENTS + n / 8) * 32 + n % 8 * 4 + slot % 8 / 2) * 2 + slot % 2] = rounded(v);
      }
      loaded = client;
    }
    arrive();
    __syncthreads();
    const int groups = (count * OUTPUTS + GROUP - 1) / GROUP;
    for (int task = warp; task < groups * PARTS; task += WARPS) {
      const int part = task % PARTS, group = task / PARTS;
      int base[4][2];  // of the patches of rows g and g + 8 of the four products
#pragma unroll
      for (int f = 0; f < 4; f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int o = group * GROUP + (POOL ? 0 : f * 16) + h * 8 + g;
          o = o < count * OUTPUTS ? o : 0;
          const int row = o % OUTPUTS / OUT_W * STEP + (POOL ? f / 2 : 0), column = o % OUT_W * STEP + (POOL ? f % 2 : 0);
          base[f][h] = o / OUTPUTS * UNIT + row * PITCH + column * PIXEL;
          if (COPIES == 2 && base[f][h] % 2) base[f][h] += BATCH * UNIT - 1;
        }
      float acc[4][NF][4] = {};
      const float2* wt = (const float2*)weights + part * NF * 32 + lane;
      float2 a[2][4][2], bw[2][NF];  // of this step and of the next, which is under way meanwhile
      const auto fetch = [&](int to, int step, int pair) {
#pragma unroll
        for (int n = 0; n < NF; n++) bw[to][n] = wt[(step * FRAGMENTS + n) * 32];
#pragma unroll
        for (int f = 0; f < 4; f++)
#pragma unroll
          for (int h = 0; h < 2; h++) a[to][f][h] = *(const float2*)(images + base[f][h] + pair);
      };
      int pair = pairs[t];
      fetch(0, 0, pair);
      pair = pairs[(STEPS > 1 ? 4 : 0) + t];
#pragma unroll 2
      for (int step = 0; step < STEPS; step++) {
        const int now = step % 2;
        if (step + 1 < STEPS) {
          fetch(1 - now, step + 1, pair);
          pair = pairs[(step + 2 < STEPS ? step + 2 : step + 1) * 4 + t];
        }
#pragma unroll
        for (int f = 0; f < 4; f++) {
          const float rows[4] = {a[now][f][0].x, a[now][f][1].x, a[now][f][0].y, a[now][f][1].y};
#pragma unroll
          for (int n = 0; n < NF; n++) mma(acc[f][n], rows, bw[now][n]);
        }
      }
      float2 bias[NF];  // loaded before the first store, which they would have to wait for
#pragma unroll
      for (int n = 0; n < NF && BIAS; n++) {
        const float* from = b + client * b_stride + ((part * NF + n) * 8 + 2 * t) % DST_C;
        bias[n] = make_float2(__ldg(from), __ldg(from + 1));
      }
#pragma unroll
      for (int f = 0; f < (POOL ? 1 : 4); f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int o = group * GROUP + (POOL ? 0 : f * 16) + h * 8 + g;
          const int u = first + o / OUTPUTS, row = u % BANDS * BAND + o % OUTPUTS / OUT_W;
          if (o >= count * OUTPUTS || row >= OUT_H) continue;
          const int64 at = ((client * slots + u / BANDS) * OUT_H + row) * OUT_W + o % OUT_W;
#pragma unroll
          for (int n = 0; n < NF; n++) {
            const int channel = (part * NF + n) * 8 + 2 * t;
            if (channel >= DST_C) continue;
            float2 v;
            char2 best = make_char2(0, 0);
            v.x = acc[f][n][2 * h], v.y = acc[f][n][2 * h + 1];
            if (POOL) {
#pragma unroll
              for (int p = 1; p < 4; p++) {
                if (acc[p][n][2 * h] > v.x) v.x = acc[p][n][2 * h], best.x = p;
                if (acc[p][n][2 * h + 1] > v.y) v.y = acc[p][n][2 * h + 1], best.y = p;
              }
            }
            if (BIAS) v.x += bias[n].x, v.y += bias[n].y;
            if (!SPREAD) v.x = slope(v.x), v.y = slope(v.y);
            v.x = rounded(v.x), v.y = rounded(v.y);  // for the next layer, which would have to do it otherwise
            if (DST_C % 2 == 0) {
              *(float2*)(y + at * DST_C + channel) = v;
              if (MARKS && !SPREAD)
                *(char2*)(marks + at * DST_C + channel) = make_char2(marked(best.x, v.x), marked(best.y, v.y));
            } else {
              y[at * DST_C + channel] = v.x;
              if (channel + 1 < DST_C) y[at * DST_C + channel + 1] = v.y;
            }
          }
        }
    }
    unit += count;
  }
}

#endif
#if defined(HALF_PRODUCT) || defined(HALF_WEIGHT_GRADIENT)

// Operands in halves have the precision of TensorFloat-32 in half the space, and are multiplied twice as fast. Their
// range is smaller: gradients, which are at most about 1, are scaled up by SCALE.
//
// Images lie in shared memory as elements of eight channels, 16 bytes each.
#define OCTETS (SRC_C / 8)
#ifdef HALF_PRODUCT
#define PLANES OCTETS
// Pixels of a plane. Neighbouring planes begin in other banks, so that the octets of a pixel do not collide.
#define PLANE ((BATCH * ROWS * COLS + 64 + (KH - 1) * COLS + KW) / 8 * 8 + 8 + 8 / (PLANES < 8 ? PLANES : 8))
enum { UNIT_STRIDE = ROWS * COLS, ROW_STRIDE = COLS, PIXEL_STRIDE = 1, OCTET_STRIDE = PLANE };
#elif SRC_C > 4
enum { PIXEL_STRIDE = PIXEL / 8, ROW_STRIDE = COLS * PIXEL_STRIDE, UNIT_STRIDE = ROWS * ROW_STRIDE, OCTET_STRIDE = 1 };
#else
// Pixels of up to four channels take 8 bytes. An element may begin at any pixel, but must be aligned: a second copy is
// shifted by one pixel. It begins 64 bytes off, so that neighbours lie in other banks.
enum { ROW_STRIDE = (COLS + 2) / 2, UNIT_STRIDE = ROWS * ROW_STRIDE, COPY = (BATCH * UNIT_STRIDE + 7) / 8 * 8 + 4 };
#endif
#ifdef HALF_PRODUCT
#define AT_ONCE 4  // elements that a thread loads before it stores the first
#define SPREADS 2  // and of those that are spread
#else
#define AT_ONCE 2  // fewer beside the sums in registers
#define SPREADS 1
#endif

__device__ __forceinline__ unsigned halves(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ uint4 eight(const float4 a, const float4 b) {
  return make_uint4(halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w));
}

#if SRC_C > 4

// Copies units [first, first + count) of a client's images. Columns of zeros are there already.
__device__ __forceinline__ void load_images(uint4* images, const float* src, int first, int count) {
  constexpr int OF_ROW = HELD * OCTETS, OF_UNIT = ROWS * OF_ROW;
  for (int i = threadIdx.x; i < count * OF_UNIT; i += AT_ONCE * THREADS) {
    float4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int k = i + j * THREADS, u = first + k / OF_UNIT, y = u % BANDS * BAND * STEP + k % OF_UNIT / OF_ROW - LEAD;
      low[j] = high[j] = make_float4(0, 0, 0, 0);
      if (k >= count * OF_UNIT || y < 0 || y >= SRC_H) continue;
      const float4* from = (const float4*)(src + (int64)(u / BANDS * SRC_H + y) * (SRC_W * SRC_C) + k % OF_ROW * 8);
      low[j] = __ldg(from), high[j] = __ldg(from + 1);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int k = i + j * THREADS, row = k % OF_UNIT / OF_ROW, column = k % OF_ROW / OCTETS + LEAD;
      if (k < count * OF_UNIT)
        images[k / OF_UNIT * UNIT_STRIDE + row * ROW_STRIDE + column * PIXEL_STRIDE + k % OCTETS * OCTET_STRIDE] =
            eight(low[j], high[j]);
    }
  }
}

#else

// The same for pixels of three or four channels, four of them at a time.
__device__ __forceinline__ void load_images(uint4* images, const float* src, int first, int count) {
  constexpr int OF_ROW = SRC_W / 4, OF_UNIT = ROWS * OF_ROW;
  uint2* pixels = (uint2*)images;
  for (int i = threadIdx.x; i < count * OF_UNIT; i += AT_ONCE * THREADS) {
    float v[AT_ONCE][4 * SRC_C];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int k = i + j * THREADS, u = first + k / OF_UNIT, y = u % BANDS * BAND * STEP + k % OF_UNIT / OF_ROW - LEAD;
      const bool inside = k < count * OF_UNIT && y >= 0 && y < SRC_H;
      const float4* from = (const float4*)(src + (int64)(u / BANDS * SRC_H + y) * (SRC_W * SRC_C)) + k % OF_ROW * SRC_C;
#pragma unroll
      for (int c = 0; c < SRC_C; c++) {
        const float4 four = inside ? __ldg(from + c) : make_float4(0, 0, 0, 0);
        v[j][4 * c] = four.x, v[j][4 * c + 1] = four.y, v[j][4 * c + 2] = four.z, v[j][4 * c + 3] = four.w;
      }
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int k = i + j * THREADS, row = k / OF_ROW, column = k % OF_ROW * 4 + LEAD;
      if (k >= count * OF_UNIT) break;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float* own = v[j] + q * SRC_C;
        const uint2 pixel = make_uint2(halves(own[0], own[1]), halves(own[2], SRC_C == 4 ? own[3] : 0));
        const int at = row * (2 * ROW_STRIDE) + column + q;
        if (column + q >= COLS) break;
        pixels[at] = pixel;
        if (at > 0) pixels[2 * COPY + at - 1] = pixel;
      }
    }
  }
}

#endif

struct Gradient {  // of eight channels of a layer's output, and their marks
  float4 dy[2];
  uint2 marks;
};

__device__ __forceinline__ Gradient load_gradient(const float* dy, const signed char* marks, int64 at) {
  Gradient g;
  g.dy[0] = __ldg((const float4*)(dy + at)), g.dy[1] = __ldg((const float4*)(dy + at) + 1);
  g.marks = MARKS ? __ldg((const uint2*)(marks + at)) : make_uint2(0, 0);
  return g;
}

__device__ __forceinline__ float4 scaled(const float4 dy, unsigned marks) {
  return make_float4(SCALE * slope(dy.x, marks), SCALE * slope(dy.y, marks >> 8), SCALE * slope(dy.z, marks >> 16),
                     SCALE * slope(dy.w, marks >> 24));
}

__device__ __forceinline__ uint4 scaled(const Gradient& g) {
  return eight(scaled(g.dy[0], g.marks.x), scaled(g.dy[1], g.marks.y));
}

// Keeps the halves of channels whose winner is at this position of the four.
__device__ __forceinline__ uint4 won(const uint4 v, const uint2 marks, unsigned position) {
  const unsigned low = __vcmpeq4(marks.x & 0x03030303u, position * 0x01010101u);
  const unsigned high = __vcmpeq4(marks.y & 0x03030303u, position * 0x01010101u);
  return make_uint4(v.x & __byte_perm(low, 0, 0x1100), v.y & __byte_perm(low, 0, 0x3322),
                    v.z & __byte_perm(high, 0, 0x1100), v.w & __byte_perm(high, 0, 0x3322));
}

#endif
#ifdef HALF_PRODUCT

// Spreads the gradient of outputs over the pixels of the convolution; see gather_product's.
__device__ __forceinline__ void load_spread(uint4* images, const float* dy, const signed char* marks, int first,
                                            int count) {
  constexpr int P = SPREAD_POOL ? 2 : 1, WIDE = SRC_W / P, HIGH = SRC_H / P;
  constexpr int TALL = (ROWS + P - 1) / P + P - 1;  // rows of dy that a unit may touch
  constexpr int OF_ROW = WIDE * OCTETS, OF_UNIT = TALL * OF_ROW;
  for (int i = threadIdx.x; i < count * OF_UNIT; i += SPREADS * THREADS) {
    Gradient loaded[SPREADS];
    bool inside[SPREADS];
#pragma unroll
    for (int j = 0; j < SPREADS; j++) {
      const int k = i + j * THREADS, u = first + k / OF_UNIT, top = u % BANDS * BAND - LEAD;  // the unit's first row
      const int row = (top + 64 * P) / P - 64 + k % OF_UNIT / OF_ROW;  // rounded down, also below zero
      inside[j] = k < count * OF_UNIT && row >= 0 && row < HIGH;
      const int64 at = (int64)(u / BANDS * HIGH + row) * (WIDE * SRC_C) + k % OF_ROW * 8;
      if (inside[j]) loaded[j] = load_gradient(dy, marks, at);
    }
#pragma unroll
    for (int j = 0; j < SPREADS; j++) {
      const int k = i + j * THREADS, u = first + k / OF_UNIT, top = u % BANDS * BAND - LEAD;
      const int row = (top + 64 * P) / P - 64 + k % OF_UNIT / OF_ROW;
      if (k >= count * OF_UNIT) break;
      const uint4 v = inside[j] ? scaled(loaded[j]) : make_uint4(0, 0, 0, 0);
      uint4* to = images + k / OF_UNIT * UNIT_STRIDE + LEAD * PIXEL_STRIDE + k % OCTETS * OCTET_STRIDE;
#pragma unroll
      for (int p = 0; p < P * P; p++) {
        const int y = row * P + p / 2 - top, x = k % OF_ROW / OCTETS * P + p % 2;
        if (y >= 0 && y < ROWS)
          to[y * ROW_STRIDE + x * PIXEL_STRIDE] = SPREAD_POOL && inside[j] ? won(v, loaded[j].marks, p) : v;
      }
    }
  }
}

// The same product in halves on Hopper's warp-group instructions, which read both operands from shared memory by
// themselves. An image is cut into planes of eight channels, [plane][pixel][8]: eight pixels that follow each other are
// then 128 bytes in a row, which is what the instructions take for eight rows of an operand, and a tap of the kernel is
// an offset. A tile is 64 pixels of the padded image that follow each other, those at the rows' ends for nothing.
#define HEIGHT (BAND * STEP)
#define TILES ((HEIGHT * COLS + 63) / 64)  // of a unit
#define PARTS (DST_C / NT)                 // of the output channels, NT at once
#define STAGED (DST_C + 8)                 // floats of a pixel, staged for the pooling
#define TEAMS (WARPS / 4)

__device__ __forceinline__ unsigned long long operand(const void* start, int next_eight_deep, int next_eight_rows) {
  // Bytes to the operand's next eight columns, and to its next eight rows.
  const unsigned long long at = (unsigned)__cvta_generic_to_shared(start) >> 4;
  return at | (unsigned long long)(next_eight_deep >> 4) << 16 | (unsigned long long)(next_eight_rows >> 4) << 32;
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA(N, REGISTERS, A, B) \
  "{.reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" N "k16.f32.f16.f16 {" REGISTERS "}, " A ", " B \
  ", p, 1, 1, 0, 0;}"

__device__ __forceinline__ void multiply(float (&d)[NT / 2], unsigned long long a, unsigned long long b) {
#if NT == 8
  asm volatile(WGMMA("8", "%0,%1,%2,%3", "%4", "%5") : D4(0) : "l"(a), "l"(b));
#elif NT == 16
  asm volatile(WGMMA("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9") : D4(0), D4(4) : "l"(a), "l"(b));
#elif NT == 32
  asm volatile(WGMMA("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17")
               : D4(0), D4(4), D4(8), D4(12) : "l"(a), "l"(b));
#else
  asm volatile(WGMMA("64",
                     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
                     "%27,%28,%29,%30,%31", "%32", "%33")
               : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28) : "l"(a), "l"(b));
#endif
}

// The weight of tap k = (row, column, channel) and output n: the kernel is flipped for the gradient of inputs.
__device__ __forceinline__ float weight_of(const float* own, int k, int n) {
  const int c = k % SRC_C, s = k / SRC_C % KW, r = k / (SRC_C * KW);
  return SPREAD ? own[(int64)((c * KH + KH - 1 - r) * KW + KW - 1 - s) * DST_C + n] : own[n * TAPS + k];
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
half_product(const float* src, const signed char* marks_in, const float* w, const float* b, float* y, signed char* marks,
             int64 w_stride, int64 b_stride, int64 clients, int64 slots) {
  extern __shared__ __align__(128) float shared[];
  unsigned* weights = (unsigned*)shared;                        // [TAPS / 8][DST_C][8 halves]
  uint4* planes = (uint4*)(weights + TAPS / 2 * DST_C);         // [PLANES][PLANE]
  float* staged = (float*)(planes + PLANES * PLANE);            // [BATCH][TILES · 64][STAGED], for the pooling
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int team = __shfl_sync(0xffffffff, warp / 4, 0);  // the same in all lanes, and the compiler can see it
  const int per_client = slots * BANDS;
  const int end = first_unit(blockIdx.x + 1, gridDim.x, clients * per_client);
  clear(planes, PLANES * PLANE * 4);
  await_others();
  int loaded = -1;
  for (int unit = first_unit(blockIdx.x, gridDim.x, clients * per_client); unit < end;) {
    const int client = unit / per_client;
    const int first = unit % per_client;
    int count = per_client - first < end - unit ? per_client - first : end - unit;
    count = count < BATCH ? count : BATCH;
    __syncthreads();
    if (SPREAD) {
      constexpr int P = SPREAD_POOL ? 2 : 1;
      const int64 at = client * slots * ((SRC_H / P) * (SRC_W / P) * SRC_C);
      load_spread(planes, src + at, marks_in + at, first, count);
    } else {
      load_images(planes, src + client * slots * (SRC_H * SRC_W * SRC_C), first, count);
    }
    if (client != loaded) {
      const float* own = w + client * w_stride;
#pragma unroll 8
      for (int i = threadIdx.x; i < TAPS / 2 * DST_C; i += THREADS) {
        // Neighbouring threads read neighbouring weights.
        const int k = 2 * (SPREAD ? i / DST_C : i % (TAPS / 2)), n = SPREAD ? i % DST_C : i / (TAPS / 2);
        weights[(k / 8 * DST_C + n) * 4 + k % 8 / 2] = halves(weight_of(own, k, n), weight_of(own, k + 1, n));
      }
      loaded = client;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was stored is for the tensor cores to read
    __syncthreads();
    for (int task = team; task < count * TILES * PARTS; task += TEAMS) {
      const int part = task % PARTS, tile = task / PARTS % TILES, u = task / PARTS / TILES;
      float d[NT / 2] = {};
      const unsigned long long a = operand(planes + u * (ROWS * COLS) + tile * 64, PLANE * 16, 128);
      const unsigned long long bw = operand(weights + part * NT * 4, DST_C * 16, 128);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
      for (int r = 0; r < KH; r++)
#pragma unroll
        for (int i = 0; i < KW * (SRC_C / 16); i++) {
          const int s = i / (SRC_C / 16), c = i % (SRC_C / 16);
          multiply(d, a + r * COLS + s + c * 2 * PLANE, bw + (r * KW * (SRC_C / 16) + i) * 2 * DST_C);
        }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int q = tile * 64 + warp % 4 * 16 + h * 8 + g;  // pixel of the unit
        if (POOL) {
          float* to = staged + (u * TILES * 64 + q) * STAGED + part * NT + 2 * t;
#pragma unroll
          for (int j = 0; j < NT / 8; j++) *(float2*)(to + 8 * j) = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
          continue;
        }
        const int row = (first + u) % BANDS * BAND + q / COLS, column = q % COLS;
        if (q >= HEIGHT * COLS || row >= OUT_H || column >= OUT_W) continue;
        const int64 at = ((client * slots + (first + u) / BANDS) * OUT_H + row) * OUT_W + column;
#pragma unroll
        for (int j = 0; j < NT / 8; j++) {
          const int channel = part * NT + 8 * j + 2 * t;
          float2 v = make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
          if (SPREAD) v.x *= 1 / SCALE, v.y *= 1 / SCALE;
          if (BIAS) v.x += __ldg(b + client * b_stride + channel), v.y += __ldg(b + client * b_stride + channel + 1);
          if (!SPREAD) v.x = slope(v.x), v.y = slope(v.y);
          *(float2*)(y + at * DST_C + channel) = make_float2(rounded(v.x), rounded(v.y));
          if (MARKS && !SPREAD)
            *(char2*)(marks + at * DST_C + channel) = make_char2(marked(0, v.x), marked(0, v.y));
        }
      }
    }
    if (POOL) {
      __syncthreads();
      constexpr int QUADS = DST_C / 4;
      for (int i = threadIdx.x; i < count * BAND * OUT_W * QUADS; i += THREADS) {
        const int c = i % QUADS * 4, column = i / QUADS % OUT_W, band_row = i / (QUADS * OUT_W) % BAND;
        const int u = i / (QUADS * OUT_W * BAND), row = (first + u) % BANDS * BAND + band_row;
        if (row >= OUT_H) continue;
        const float* corner = staged + (u * TILES * 64 + 2 * band_row * COLS + 2 * column) * STAGED + c;
        float4 v = *(const float4*)corner;
        char4 best = make_char4(0, 0, 0, 0);
#pragma unroll
        for (int p = 1; p < 4; p++) {
          const float4 o = *(const float4*)(corner + (p / 2 * COLS + p % 2) * STAGED);
          if (o.x > v.x) v.x = o.x, best.x = p;
          if (o.y > v.y) v.y = o.y, best.y = p;
          if (o.z > v.z) v.z = o.z, best.z = p;
          if (o.w > v.w) v.w = o.w, best.w = p;
        }
        if (BIAS) {
          const float* bias = b + client * b_stride + c;
          v.x += __ldg(bias), v.y += __ldg(bias + 1), v.z += __ldg(bias + 2), v.w += __ldg(bias + 3);
        }
        v = rounded(make_float4(slope(v.x), slope(v.y), slope(v.z), slope(v.w)));
        const int64 at = (((client * slots + (first + u) / BANDS) * OUT_H + row) * OUT_W + column) * DST_C + c;
        __stcg((float4*)(y + at), v);  // in one store: the compiler may cut an assignment into four
        *(char4*)(marks + at) = make_char4(marked(best.x, v.x), marked(best.y, v.y), marked(best.z, v.z), marked(best.w, v.w));
      }
    }
    unit += count;
  }
}

#endif
#if defined(WEIGHT_GRADIENT) || defined(HALF_WEIGHT_GRADIENT)

// The sums of many taps and channels do not fit into the registers of a block: blocks divide the channels.
#define OWN_C (DST_C / SLICES)
#define FRAGMENTS ((OWN_C + 7) / 8)
#if defined(HALF_WEIGHT_GRADIENT) && SRC_C <= 4
#define OF_ROW_OCTETS ((KW + 1) / 2)                       // two pixels of four channels each, of a row of the kernel
#define KFRAGMENTS ((KH * OF_ROW_OCTETS + 1) / 2)
#else
#define KFRAGMENTS ((TAPS + 15) / 16)                      // of sixteen taps
#endif
#define KF ((KFRAGMENTS + TAP_WARPS - 1) / TAP_WARPS)      // of a warp
#define PIXEL_WARPS (WARPS / TAP_WARPS)                    // warps that share a group of taps and divide the pixels
#define WIDTH (OUT_W * STEP)
#define LENGTH (DST_C * TAPS + (BIAS ? DST_C : 0))         // of a part: weights, then biases

// The tap of a fragment's row, or -1 where there is none.
__device__ __forceinline__ int tap_of(int fragment, int row) {
#if defined(HALF_WEIGHT_GRADIENT) && SRC_C <= 4
  const int octet = fragment * 2 + row / 8, column = octet % OF_ROW_OCTETS * 2 + row % 8 / 4, channel = row % 4;
  const bool is_one = octet < KH * OF_ROW_OCTETS && column < KW && channel < SRC_C;
  return is_one ? (octet / OF_ROW_OCTETS * KW + column) * SRC_C + channel : -1;
#else
  return fragment * 16 + row < TAPS ? fragment * 16 + row : -1;
#endif
}

#define OF_WARP (32 * FRAGMENTS * (4 * KF + 1))             // floats of a warp's sums

// Adds up the sums of the warps that divide the pixels, in an order that never changes. The first of them have the
// result. What lay in `memory` is lost.
__device__ __forceinline__ void add_pixel_warps(float* memory, float (&acc)[KF][FRAGMENTS][4],
                                                float (&sums)[FRAGMENTS]) {
  if (PIXEL_WARPS == 1) return;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int half = PIXEL_WARPS / 2 * TAP_WARPS; half >= TAP_WARPS; half /= 2) {
    float* own = memory + warp % half * OF_WARP + threadIdx.x % 32;
    __syncthreads();
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < 4 * KF * FRAGMENTS; i++) own[32 * i] = acc[i / (4 * FRAGMENTS)][i / 4 % FRAGMENTS][i % 4];
#pragma unroll
      for (int n = 0; n < FRAGMENTS; n++) own[32 * (4 * KF * FRAGMENTS + n)] = sums[n];
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < 4 * KF * FRAGMENTS; i++) acc[i / (4 * FRAGMENTS)][i / 4 % FRAGMENTS][i % 4] += own[32 * i];
#pragma unroll
      for (int n = 0; n < FRAGMENTS; n++) sums[n] += own[32 * (4 * KF * FRAGMENTS + n)];
    }
  }
  __syncthreads();
}

// Where the i-th group of `wide` channels begins in a row of outputs, among the block's own.
__device__ __forceinline__ int own_channels(int i, int wide) {
  if (SLICES == 1) return i * wide;
  return i / (OWN_C / wide) * DST_C + blockIdx.y * OWN_C + i % (OWN_C / wide) * wide;
}

// Stores a warp's sums, divided by the scale of gradients.
__device__ __forceinline__ void store_part(float* part, const float (&acc)[KF][FRAGMENTS][4],
                                           const float (&sums)[FRAGMENTS], float factor) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tap_warp = threadIdx.x / 32 % TAP_WARPS;
  const int lead = SLICES == 1 ? 0 : blockIdx.y * OWN_C;
#pragma unroll
  for (int f = 0; f < KF; f++)
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = tap_of(tap_warp * KF + f, i / 2 * 8 + g), channel = n * 8 + 2 * t + i % 2;
        if (k >= 0 && channel < OWN_C) part[(lead + channel) * TAPS + k] = acc[f][n][i] * factor;
      }
  if (BIAS && tap_warp == 0) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++) {
      float sum = sums[n] * factor;
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (t == 0 && n * 8 + g < OWN_C) part[DST_C * TAPS + lead + n * 8 + g] = sum;
    }
  }
}

#endif
#ifdef WEIGHT_GRADIENT

#define PIXELS ((BAND * STEP * WIDTH + 7) / 8 * 8)     // of a unit, filled up with zeros
#define GRADIENT (FRAGMENTS * 8 + (FRAGMENTS * 8 % 32 == 24 ? 0 : (40 - FRAGMENTS * 8 % 32) % 32))  // 8 or 24 mod 32

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_gradient(const float* src, const float* dy, const signed char* marks, float* parts, float* result, int64 stride,
                int64 clients, int64 slots) {
  extern __shared__ __align__(16) float shared[];
  int* offsets = (int*)shared;                 // [PIXELS] of a pixel's patch in its image
  float* images = shared + PIXELS;
  float* gradients = images + BATCH * UNIT;    // [BATCH][PIXELS][GRADIENT]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int tap_warp = warp % TAP_WARPS, pixel_warp = warp / TAP_WARPS;
  const int per_client = slots * BANDS;
  const int stop = first_unit(blockIdx.x + 1, gridDim.x, clients * per_client);
  for (int i = threadIdx.x; i < PIXELS; i += THREADS)
    offsets[i] = i < BAND * STEP * WIDTH ? i / WIDTH * PITCH + i % WIDTH * PIXEL : 0;
  const int start = first_unit(blockIdx.x, gridDim.x, clients * per_client);
  clear(images, BATCH * (UNIT + PIXELS * GRADIENT));
  await_others();
  int taps[KF][2];
#pragma unroll
  for (int f = 0; f < KF; f++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int k = (tap_warp * KF + f) * 16 + h * 8 + g;
      taps[f][h] = k < TAPS ? k / (KW * SRC_C) * PITCH + k / SRC_C % KW * PIXEL + k % SRC_C : 0;
    }
  for (int unit = start; unit < stop;) {
    const int64 client = unit / per_client, outputs = client * slots * (OUT_H * OUT_W * DST_C);
    const int begin = unit % per_client, end = stop - unit < per_client - begin ? begin + stop - unit : per_client;
    float acc[KF][FRAGMENTS][4] = {}, sums[FRAGMENTS] = {};
    // Zeros stay for the block's next client, unless warps have added up their sums there.
    if (PIXEL_WARPS > 1 && unit > start) clear(images, BATCH * (UNIT + PIXELS * GRADIENT));
    for (int first = begin; first < end; first += BATCH) {
      const int count = end - first < BATCH ? end - first : BATCH;
      __syncthreads();
      load_images(images, src + client * slots * (SRC_H * SRC_W * SRC_C), first, count);
      constexpr int QUADS = OWN_C / 4;
      for (int i = warp; i < count * BAND; i += WARPS) {
        const int u = first + i / BAND, row = i % BAND, y = u % BANDS * BAND + row;
        const int64 at = outputs + (int64)(u / BANDS * OUT_H + y) * (OUT_W * DST_C);
        float* to = gradients + i / BAND * (PIXELS * GRADIENT);
        for (int j = lane; j < OUT_W * QUADS; j += 32) {
          const int c = j % QUADS * 4;
          float4 v = make_float4(0, 0, 0, 0);
          char4 w = make_char4(0, 0, 0, 0);
          if (y < OUT_H) {
            if (MARKS) w = *(const char4*)(marks + at + own_channels(j, 4));
            v = rounded(slope(*(const float4*)(dy + at + own_channels(j, 4)), w));
          }
#pragma unroll
          for (int p = 0; p < STEP * STEP; p++) {
            const int pixel = (row * STEP + p / 2) * WIDTH + j / QUADS * STEP + p % 2;
            *(float4*)(to + pixel * GRADIENT + c) = POOL ? won(v, w, p) : v;
          }
        }
      }
      arrive();
      __syncthreads();
      for (int step = pixel_warp; step < count * (PIXELS / 8); step += PIXEL_WARPS) {
        const int q = step % (PIXELS / 8) * 8;
        const float* image = images + step / (PIXELS / 8) * UNIT;
        const float *lo = image + offsets[q + t], *hi = image + offsets[q + t + 4];
        const float* own = gradients + (step * 8 + t) * GRADIENT + g;
        float2 bg[FRAGMENTS];
#pragma unroll
        for (int n = 0; n < FRAGMENTS; n++) {
          bg[n] = make_float2(own[n * 8], own[n * 8 + 4 * GRADIENT]);
          if (BIAS && tap_warp == 0) sums[n] += bg[n].x + bg[n].y;
        }
#pragma unroll
        for (int f = 0; f < KF; f++) {
          const float a[4] = {lo[taps[f][0]], lo[taps[f][1]], hi[taps[f][0]], hi[taps[f][1]]};
#pragma unroll
          for (int n = 0; n < FRAGMENTS; n++) mma(acc[f][n], a, bg[n]);
        }
      }
    }
    add_pixel_warps((float*)images, acc, sums);
    // A block that is alone with a client needs no part.
    float* part = end - begin == per_client ? result + client * stride : parts + (blockIdx.x + client) * LENGTH;
    if (pixel_warp == 0) store_part(part, acc, sums, 1);
    unit += end - begin;
  }
}

#endif
#ifdef HALF_WEIGHT_GRADIENT

#define PIXELS ((BAND * STEP * WIDTH + 15) / 16 * 16)      // of a unit, filled up with zeros
#define GRADIENT (OWN_C + 8)                               // halves of a pixel: an odd number of 16 bytes, for the banks

// mma.m16n8k16 of halves: lane = 4 g + t holds A[g | g+8][2t, 2t+1 | + 8], B[2t, 2t+1 | + 8][g], D[g | g+8][2t, 2t+1].
__device__ __forceinline__ void mma16(float (&d)[4], const uint4 a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Four matrices of 8 × 8 halves, transposed: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 transposed(unsigned address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float both(unsigned v) {  // the sum of two halves
  float low, high;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(v));
  return low + high;
}

// The element where the patch of a pixel begins, and the offset of an octet of taps in it.
#if SRC_C > 4
__device__ __forceinline__ int patch_of(int row, int column) { return row * ROW_STRIDE + column * PIXEL_STRIDE; }

__device__ __forceinline__ int octet_of(int octet) {
  const int tap = octet / OCTETS;
  return tap < KH * KW ? tap / KW * ROW_STRIDE + tap % KW * PIXEL_STRIDE + octet % OCTETS : 0;
}
#else
__device__ __forceinline__ int patch_of(int row, int column) { return row * ROW_STRIDE + column / 2 + column % 2 * COPY; }

__device__ __forceinline__ int octet_of(int octet) {
  return octet < KH * OF_ROW_OCTETS ? octet / OF_ROW_OCTETS * ROW_STRIDE + octet % OF_ROW_OCTETS : 0;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
half_weight_gradient(const float* src, const float* dy, const signed char* marks, float* parts, float* result,
                     int64 stride, int64 clients, int64 slots) {
  extern __shared__ __align__(128) float shared[];
#if SRC_C > 4
  constexpr int IMAGES = BATCH * UNIT_STRIDE;
#else
  constexpr int IMAGES = COPY + BATCH * UNIT_STRIDE;
#endif
  int* offsets = (int*)shared;                                  // [PIXELS]: bytes of a pixel's patch in its image
  uint4* images = (uint4*)(offsets + PIXELS);                   // [BATCH][ROWS][COLS][PIXEL halves]
  uint4* gradients = images + IMAGES;                           // [BATCH][PIXELS][GRADIENT halves]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tap_warp = warp % TAP_WARPS, pixel_warp = warp / TAP_WARPS;
  const int per_client = slots * BANDS;
  const int stop = first_unit(blockIdx.x + 1, gridDim.x, clients * per_client);
  for (int i = threadIdx.x; i < PIXELS; i += THREADS)
    offsets[i] = i < BAND * STEP * WIDTH ? 16 * patch_of(i / WIDTH, i % WIDTH) : 0;
  const int start = first_unit(blockIdx.x, gridDim.x, clients * per_client);
  clear(images, 4 * (IMAGES + BATCH * PIXELS * (GRADIENT / 8)));
  await_others();
  // Rows of the transposed operands are pixels: those of lanes 0 to 7 and 8 to 15 differ in channels for the images,
  // and in pixels for the gradients.
  const int image_pixel = lane % 8 + lane / 16 * 8, gradient_pixel = lane % 16;
  unsigned taps[KF];
#pragma unroll
  for (int f = 0; f < KF; f++) {
    taps[f] = (unsigned)__cvta_generic_to_shared(images + octet_of((tap_warp * KF + f) * 2 + lane / 8 % 2));
  }
  const unsigned own = (unsigned)__cvta_generic_to_shared(gradients + gradient_pixel * (GRADIENT / 8) + lane / 16);
  for (int unit = start; unit < stop;) {
    const int64 client = unit / per_client, outputs = client * slots * (OUT_H * OUT_W * DST_C);
    const int begin = unit % per_client, end = stop - unit < per_client - begin ? begin + stop - unit : per_client;
    float acc[KF][FRAGMENTS][4] = {}, sums[FRAGMENTS] = {};
    // Zeros stay for the block's next client, unless warps have added up their sums there.
    if (PIXEL_WARPS > 1 && unit > start) clear(images, 4 * (IMAGES + BATCH * PIXELS * (GRADIENT / 8)));
    for (int first = begin; first < end; first += BATCH) {
      const int count = end - first < BATCH ? end - first : BATCH;
      __syncthreads();
      load_images(images, src + client * slots * (SRC_H * SRC_W * SRC_C), first, count);
      constexpr int OF_ROW = OUT_W * (OWN_C / 8), OF_UNIT = BAND * OF_ROW;
      for (int i = threadIdx.x; i < count * OF_UNIT; i += SPREADS * THREADS) {
        Gradient loaded[SPREADS];
        bool inside[SPREADS];
#pragma unroll
        for (int j = 0; j < SPREADS; j++) {
          const int k = i + j * THREADS, u = first + k / OF_UNIT, y = u % BANDS * BAND + k % OF_UNIT / OF_ROW;
          inside[j] = k < count * OF_UNIT && y < OUT_H;
          const int64 at = outputs + (int64)(u / BANDS * OUT_H + y) * (OUT_W * DST_C) + own_channels(k % OF_ROW, 8);
          if (inside[j]) loaded[j] = load_gradient(dy, marks, at);
        }
#pragma unroll
        for (int j = 0; j < SPREADS; j++) {
          const int k = i + j * THREADS, row = k % OF_UNIT / OF_ROW;
          if (k >= count * OF_UNIT) break;
          const uint4 v = inside[j] ? scaled(loaded[j]) : make_uint4(0, 0, 0, 0);
          uint4* to = gradients + k / OF_UNIT * (PIXELS * (GRADIENT / 8)) + k % (OWN_C / 8);
#pragma unroll
          for (int p = 0; p < STEP * STEP; p++) {
            const int pixel = (row * STEP + p / 2) * WIDTH + k % OF_ROW / (OWN_C / 8) * STEP + p % 2;
            to[pixel * (GRADIENT / 8)] = POOL && inside[j] ? won(v, loaded[j].marks, p) : v;
          }
        }
      }
      __syncthreads();
      for (int step = pixel_warp; step < count * (PIXELS / 16); step += PIXEL_WARPS) {
        const unsigned patch =
            16 * (step / (PIXELS / 16)) * UNIT_STRIDE + offsets[step % (PIXELS / 16) * 16 + image_pixel];
        uint4 bg[FRAGMENTS / 2];
#pragma unroll
        for (int n = 0; n < FRAGMENTS / 2; n++) {
          bg[n] = transposed(own + step * (16 * 2 * GRADIENT) + n * 32);
          if (BIAS && tap_warp == 0) {
            sums[2 * n] += both(bg[n].x) + both(bg[n].y);
            sums[2 * n + 1] += both(bg[n].z) + both(bg[n].w);
          }
        }
#pragma unroll
        for (int f = 0; f < KF; f++) {
          const uint4 a = transposed(taps[f] + patch);
#pragma unroll
          for (int n = 0; n < FRAGMENTS; n++)
            mma16(acc[f][n], a, n % 2 ? bg[n / 2].z : bg[n / 2].x, n % 2 ? bg[n / 2].w : bg[n / 2].y);
        }
      }
    }
    add_pixel_warps((float*)images, acc, sums);
    // A block that is alone with a client needs no part.
    float* part = end - begin == per_client ? result + client * stride : parts + (blockIdx.x + client) * LENGTH;
    if (pixel_warp == 0) store_part(part, acc, sums, 1 / SCALE);
    unit += end - begin;
  }
}

#endif
