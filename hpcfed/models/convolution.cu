// Convolutions of many clients at once, each with its own weights, for networks with few channels.
//
// Three kernels share one idea: the images at work lie in shared memory, with the zeros of the padding around them, and
// the tensor cores' operands are gathered from there. Patches, the convolution's own output and its gradient never
// exist in device memory.
//
//   gather_product    forward:             y = pool(act(patches · w + b)), and which of the four pixels has won
//                     gradient of inputs:  patches of the output's gradient · flipped w
//   weight_gradient   patchesᵀ · gradient of the output, one partial sum per group of pixels
//
// Images are channels-last; weights are rows [n][row][column][channel]. A client is a row of weights and `slots` images.
// The shapes are macros, set when the layer is first seen; convolution.py explains and computes them.
//
// mma.m16n8k8: lane = 4 g + t holds A[g | g+8][t | t+4], B[t | t+4][g], D[g | g+8][2t | 2t+1].

typedef long long int64;

#define THREADS (32 * WARPS)
#define STEP (POOL ? 2 : 1)      // pixels of the convolution per pixel of the result, in each direction
#define BANDS ((OUT_H + BAND - 1) / BAND)
#define ROWS (BAND * STEP + KH - 1)
#define COLS (OUT_W * STEP + KW - 1)
#define UNIT (ROWS * COLS * PIXEL)  // floats of a unit: one band of one image
#define TAPS (KH * KW * SRC_C)

__device__ __forceinline__ float rounded(float x) {  // to TensorFloat-32
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return __uint_as_float(y);
}

__device__ __forceinline__ void mma(float (&d)[4], const float (&a)[4], const float2 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                 "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}

__device__ __forceinline__ float slope(float g, float act) {  // gradient through the activation
  return SLOPE == 1.0f || act > 0 ? g : SLOPE * g;
}

// The units [first, first + count) of a client's images, into shared memory.
__device__ __forceinline__ void load_images(float* image, const float* src, int first, int count) {
#if SRC_C % 4 == 0
  constexpr int QUADS = SRC_C / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < count * ROWS * COLS * QUADS; i += THREADS) {
    const int c = i % QUADS * 4, column = i / QUADS % COLS, row = i / (QUADS * COLS) % ROWS, u = i / (QUADS * COLS * ROWS);
    const int slot = (first + u) / BANDS, y = (first + u) % BANDS * BAND * STEP + row - LEAD, x = column - LEAD;
    float4 v = make_float4(0, 0, 0, 0);
    if (y >= 0 && y < SRC_H && x >= 0 && x < SRC_W)
      v = *(const float4*)(src + (int64)((slot * SRC_H + y) * SRC_W + x) * SRC_C + c);
    *(float4*)(image + u * UNIT + (row * COLS + column) * PIXEL + c) =
        make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
  }
#else
#pragma unroll 4
  for (int i = threadIdx.x; i < count * ROWS * COLS * SRC_C; i += THREADS) {
    const int c = i % SRC_C, column = i / SRC_C % COLS, row = i / (SRC_C * COLS) % ROWS, u = i / (SRC_C * COLS * ROWS);
    const int slot = (first + u) / BANDS, y = (first + u) % BANDS * BAND * STEP + row - LEAD, x = column - LEAD;
    float v = 0;
    if (y >= 0 && y < SRC_H && x >= 0 && x < SRC_W) v = src[(int64)((slot * SRC_H + y) * SRC_W + x) * SRC_C + c];
    image[u * UNIT + (row * COLS + column) * PIXEL + c] = rounded(v);
  }
#endif
}

#ifdef GATHER_PRODUCT

// What an element of the source is: a value of an image, or (SPREAD) the gradient of the convolution's own output at
// that pixel, from the gradient `src` of the layer's output, that output itself, and the winners of the pooling.
__device__ __forceinline__ float4 spread4(const float* src, const float* act, const signed char* winner, int slot,
                                          int y, int x, int c) {
  constexpr int P = SPREAD_POOL ? 2 : 1;
  float4 v = make_float4(0, 0, 0, 0);
  if (y < 0 || x < 0 || y / P >= SRC_H / P || x / P >= SRC_W / P) return v;
  const int64 at = (int64)((slot * (SRC_H / P) + y / P) * (SRC_W / P) + x / P) * SRC_C + c;
  const float4 g = *(const float4*)(src + at), a = *(const float4*)(act + at);
  v = make_float4(slope(g.x, a.x), slope(g.y, a.y), slope(g.z, a.z), slope(g.w, a.w));
  if (SPREAD_POOL) {
    const char4 w = *(const char4*)(winner + at);
    const int here = y % 2 * 2 + x % 2;
    v.x = w.x == here ? v.x : 0;
    v.y = w.y == here ? v.y : 0;
    v.z = w.z == here ? v.z : 0;
    v.w = w.w == here ? v.w : 0;
  }
  return v;
}

__device__ __forceinline__ void load_spread(float* image, const float* src, const float* act, const signed char* winner,
                                            int first, int count) {
  constexpr int QUADS = SRC_C / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < count * ROWS * COLS * QUADS; i += THREADS) {
    const int c = i % QUADS * 4, column = i / QUADS % COLS, row = i / (QUADS * COLS) % ROWS, u = i / (QUADS * COLS * ROWS);
    const float4 v = spread4(src, act, winner, (first + u) / BANDS, (first + u) % BANDS * BAND + row - LEAD,
                             column - LEAD, c);
    *(float4*)(image + u * UNIT + (row * COLS + column) * PIXEL + c) =
        make_float4(rounded(v.x), rounded(v.y), rounded(v.z), rounded(v.w));
  }
}

#define VECTOR (SRC_C % 8 == 0)          // a lane's two operands of a step are neighbouring channels
#define STEPS ((TAPS + 7) / 8)           // of eight taps
#define FRAGMENTS ((DST_C + 7) / 8)      // of eight output channels
#define NF (FRAGMENTS < 4 ? FRAGMENTS : 4)
#define PARTS ((FRAGMENTS + NF - 1) / NF)
#define OUTPUTS (BAND * OUT_W)           // of a unit
#define GROUP (POOL ? 16 : 64)           // outputs that a warp computes together: 64 pixels of the convolution

// A block works on units [b, b + 1) · total / blocks of all clients, BATCH at a time; a batch never spans two clients.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
gather_product(const float* src, const float* act, const signed char* winner_in, const float* w, const float* b,
               float* y, signed char* winner, int64 w_stride, int64 b_stride, int64 clients,
               int64 slots) {
  extern __shared__ float shared[];
  float* weights = shared;                                   // [STEPS][FRAGMENTS][32 lanes][2]
  int* taps = (int*)(weights + STEPS * FRAGMENTS * 64);      // [STEPS][4 t][2]: offset of a tap in an image
  float* images = (float*)(taps + (VECTOR ? 0 : STEPS * 8));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int per_client = slots * BANDS;
  const int64 total = clients * per_client;
  const int64 begin = total * blockIdx.x / gridDim.x, end = total * (blockIdx.x + 1) / gridDim.x;
  if (!VECTOR)
    for (int i = threadIdx.x; i < STEPS * 8; i += THREADS) {
      const int k = i / 8 * 8 + i % 8 / 2 + i % 2 * 4;
      taps[i] = k < TAPS ? (k / (KW * SRC_C) * COLS + k / SRC_C % KW) * PIXEL + k % SRC_C : 0;
    }
  int64 loaded = -1;
  for (int64 unit = begin; unit < end;) {
    const int64 client = unit / per_client;
    const int first = unit % per_client;
    int count = per_client - first < end - unit ? per_client - first : end - unit;
    count = count < BATCH ? count : BATCH;
    __syncthreads();
    if (client != loaded) {
      const float* own = w + client * w_stride;
#pragma unroll 4
      for (int i = threadIdx.x; i < STEPS * FRAGMENTS * 64; i += THREADS) {
        // i counts the taps of an output channel fastest where that is how they lie in memory
        const int k = i % (STEPS * 8), n = i / (STEPS * 8);
        float v = 0;
        if (k < TAPS && n < DST_C) {
          const int c = k % SRC_C, s = k / SRC_C % KW, r = k / (SRC_C * KW);
          v = SPREAD ? own[(int64)((c * KH + KH - 1 - r) * KW + KW - 1 - s) * DST_C + n] : own[n * TAPS + k];
        }
        const int j = VECTOR ? k % 2 : k % 8 / 4, tt = VECTOR ? k % 8 / 2 : k % 4;
        weights[((k / 8 * FRAGMENTS + n / 8) * 32 + n % 8 * 4 + tt) * 2 + j] = rounded(v);
      }
      loaded = client;
    }
    if (SPREAD) {
      constexpr int P = SPREAD_POOL ? 2 : 1;
      const int64 at = client * slots * ((SRC_H / P) * (SRC_W / P) * SRC_C);
      load_spread(images, src + at, act + at, winner_in + at, first, count);
    } else {
      load_images(images, src + client * slots * (SRC_H * SRC_W * SRC_C), first, count);
    }
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
          base[f][h] = o / OUTPUTS * UNIT + (row * COLS + column) * PIXEL + (VECTOR ? 2 * t : 0);
        }
      float acc[4][NF][4] = {};
      const float2* wt = (const float2*)weights + part * NF * 32 + lane;
#if VECTOR
#pragma unroll 1
      for (int tap = 0; tap < KH * KW; tap++) {
        const float* at = images + (tap / KW * COLS + tap % KW) * PIXEL;
#pragma unroll
        for (int c = 0; c < SRC_C; c += 8) {
          float2 bw[NF];
#pragma unroll
          for (int n = 0; n < NF; n++) bw[n] = wt[((tap * SRC_C + c) / 8 * FRAGMENTS + n) * 32];
#pragma unroll
          for (int f = 0; f < 4; f++) {
            const float2 lo = *(const float2*)(at + base[f][0] + c), hi = *(const float2*)(at + base[f][1] + c);
            const float a[4] = {lo.x, hi.x, lo.y, hi.y};
#pragma unroll
            for (int n = 0; n < NF; n++) mma(acc[f][n], a, bw[n]);
          }
        }
      }
#else
#pragma unroll 2
      for (int step = 0; step < STEPS; step++) {
        const int2 k = ((const int2*)taps)[step * 4 + t];
        float2 bw[NF];
#pragma unroll
        for (int n = 0; n < NF; n++) bw[n] = wt[(step * FRAGMENTS + n) * 32];
#pragma unroll
        for (int f = 0; f < 4; f++) {
          const float *lo = images + base[f][0], *hi = images + base[f][1];
          const float a[4] = {lo[k.x], hi[k.x], lo[k.y], hi[k.y]};
#pragma unroll
          for (int n = 0; n < NF; n++) mma(acc[f][n], a, bw[n]);
        }
      }
#endif
#pragma unroll
      for (int f = 0; f < (POOL ? 1 : 4); f++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int o = group * GROUP + (POOL ? 0 : f * 16) + h * 8 + g;
          const int u = first + o / OUTPUTS, row = u % BANDS * BAND + o % OUTPUTS / OUT_W;
          if (o >= count * OUTPUTS || row >= OUT_H) continue;
          const int64 at = ((client * slots + u / BANDS) * OUT_H + row) * OUT_W + o % OUT_W;
#pragma unroll
          for (int n = 0; n < NF; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
              const int channel = (part * NF + n) * 8 + 2 * t + j;
              if (channel >= DST_C) continue;
              float v = acc[f][n][2 * h + j];
              if (POOL) {
                int best = 0;
#pragma unroll
                for (int p = 1; p < 4; p++)
                  if (acc[p][n][2 * h + j] > v) v = acc[p][n][2 * h + j], best = p;
                winner[at * DST_C + channel] = best;
              }
              if (BIAS) v += b[client * b_stride + channel];
              if (!SPREAD) v = slope(v, v);
              y[at * DST_C + channel] = v;
            }
        }
    }
    unit += count;
  }
}

#endif
#ifdef WEIGHT_GRADIENT

#define FRAGMENTS ((DST_C + 7) / 8)
#define KFRAGMENTS ((TAPS + 15) / 16)                  // of sixteen taps
#define KF ((KFRAGMENTS + TAP_WARPS - 1) / TAP_WARPS)      // of a warp
#define PIXEL_WARPS (WARPS / TAP_WARPS)                      // warps that share a group of taps and divide the pixels
#define WIDTH (OUT_W * STEP)
#define PIXELS ((BAND * STEP * WIDTH + 7) / 8 * 8)     // of a unit, filled up with zeros
#define GRADIENT (FRAGMENTS * 8 + (FRAGMENTS * 8 % 32 == 24 ? 0 : (40 - FRAGMENTS * 8 % 32) % 32))  // 8 or 24 mod 32

// A block sums over units [i, i + 1) · slots · BANDS / gridDim.x of client blockIdx.y.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
weight_gradient(const float* src, const float* dy, const float* act, const signed char* winner, float* parts,
                int64 clients, int64 slots) {
  extern __shared__ float shared[];
  int* offsets = (int*)shared;                 // [PIXELS] of a pixel's patch in its image
  float* images = shared + PIXELS;
  float* gradients = images + BATCH * UNIT;    // [BATCH][PIXELS][GRADIENT]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int tapixel_warp = warp % TAP_WARPS, pixel_warp = warp / TAP_WARPS;
  const int64 client = blockIdx.y;
  const int per_client = slots * BANDS;
  const int begin = per_client * blockIdx.x / gridDim.x, end = per_client * (blockIdx.x + 1) / gridDim.x;
  src += client * slots * (SRC_H * SRC_W * SRC_C);
  const int64 outputs = client * slots * (OUT_H * OUT_W * DST_C);
  for (int i = threadIdx.x; i < PIXELS; i += THREADS)
    offsets[i] = i < BAND * STEP * WIDTH ? (i / WIDTH * COLS + i % WIDTH) * PIXEL : 0;
  for (int i = threadIdx.x; i < BATCH * PIXELS * GRADIENT; i += THREADS) gradients[i] = 0;
  int taps[KF][2];
#pragma unroll
  for (int f = 0; f < KF; f++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int k = (tapixel_warp * KF + f) * 16 + h * 8 + g;
      taps[f][h] = k < TAPS ? (k / (KW * SRC_C) * COLS + k / SRC_C % KW) * PIXEL + k % SRC_C : 0;
    }
  float acc[KF][FRAGMENTS][4] = {}, sums[FRAGMENTS] = {};
  for (int first = begin; first < end; first += BATCH) {
    const int count = end - first < BATCH ? end - first : BATCH;
    __syncthreads();
    load_images(images, src, first, count);
    constexpr int QUADS = DST_C / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < count * BAND * OUT_W * QUADS; i += THREADS) {
      const int c = i % QUADS * 4, column = i / QUADS % OUT_W, row = i / (QUADS * OUT_W) % BAND;
      const int u = i / (QUADS * OUT_W * BAND), slot = (first + u) / BANDS, y = (first + u) % BANDS * BAND + row;
      float4 v = make_float4(0, 0, 0, 0);
      char4 won = make_char4(0, 0, 0, 0);
      if (y < OUT_H) {
        const int64 at = outputs + ((slot * OUT_H + y) * OUT_W + column) * DST_C + c;
        const float4 d = *(const float4*)(dy + at), a = *(const float4*)(act + at);
        v = make_float4(rounded(slope(d.x, a.x)), rounded(slope(d.y, a.y)), rounded(slope(d.z, a.z)),
                        rounded(slope(d.w, a.w)));
        if (POOL) won = *(const char4*)(winner + at);
      }
#pragma unroll
      for (int p = 0; p < STEP * STEP; p++) {
        const int pixel = u * PIXELS + (row * STEP + p / 2) * WIDTH + column * STEP + p % 2;
        *(float4*)(gradients + pixel * GRADIENT + c) =
            POOL ? make_float4(won.x == p ? v.x : 0, won.y == p ? v.y : 0, won.z == p ? v.z : 0, won.w == p ? v.w : 0) : v;
      }
    }
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
        if (BIAS && tapixel_warp == 0) sums[n] += bg[n].x + bg[n].y;
      }
#pragma unroll
      for (int f = 0; f < KF; f++) {
        const float a[4] = {lo[taps[f][0]], lo[taps[f][1]], hi[taps[f][0]], hi[taps[f][1]]};
#pragma unroll
        for (int n = 0; n < FRAGMENTS; n++) mma(acc[f][n], a, bg[n]);
      }
    }
  }
  // parts: [groups of pixels][clients][DST_C · TAPS weights, then DST_C biases]
  constexpr int LENGTH = DST_C * TAPS + (BIAS ? DST_C : 0);
  float* part = parts + ((int64)(blockIdx.x * PIXEL_WARPS + pixel_warp) * clients + client) * LENGTH;
#pragma unroll
  for (int f = 0; f < KF; f++)
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = (tapixel_warp * KF + f) * 16 + i / 2 * 8 + g, channel = n * 8 + 2 * t + i % 2;
        if (k < TAPS && channel < DST_C) part[channel * TAPS + k] = acc[f][n][i];
      }
  if (BIAS && tapixel_warp == 0) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++) {
      float sum = sums[n];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (t == 0 && n * 8 + g < DST_C) part[DST_C * TAPS + n * 8 + g] = sum;
    }
  }
}

#endif
