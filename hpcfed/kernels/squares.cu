// Squares of the gradients that single samples have, summed over samples, in bfloat16 with sums in float32. No sample's
// gradient is ever in memory: a block keeps its part of one in registers, squares it, and goes on to the next sample.
// x is [samples][HEIGHT][WIDTH][channels], dy [samples][OUT_HEIGHT][OUT_WIDTH][outputs].

#include "order.cuh"

typedef long long int64;
typedef unsigned short Number;  // bfloat16

#ifdef CONVOLUTION
// Weights of a convolution: squares[part][output][tap][channel] = Σ over samples of (Σ over positions of dy · x)².
// A block has 64 outputs, CHANNELS channels with all taps, and a part of the samples. For each sample it multiplies
// dyᵀ [64][positions] with patches [positions][taps · CHANNELS]. Positions are taken 64 at a time or so: some rows of a
// large image (BAND rows of it), or a few small images (GROUP of them). A stage of shared memory holds dy and the pixels
// under it, from where ldmatrix picks the pixels of a tap: patches are never formed.
// Warp w has outputs 16 · (w % 4) on, and half of the channels.

#define TAPS (KERNEL * KERNEL)
#define PLACES (BAND * OUT_WIDTH)                    // positions of an image in a stage
#define STEPS ((PLACES + 15) / 16)                   // steps of 16 positions, the last one padded
#define ROWS (GROUP * STEPS * 16)                    // rows of dy in a stage
#define DEPTH ((BAND - 1) * STRIDE + KERNEL)         // rows of pixels under a band
#define BREADTH ((OUT_WIDTH - 1) * STRIDE + KERNEL)  // pixels of each
#define PIXELS (GROUP * DEPTH * BREADTH)
#define DY_PITCH (64 + 8)         // numbers: eight more, so that rows of a matrix begin in different banks
#define X_PITCH (CHANNELS + 8)
#define STAGE (ROWS * DY_PITCH + PIXELS * X_PITCH)
#define BANDS ((OUT_HEIGHT + BAND - 1) / BAND)
#define TILES (TAPS * CHANNELS / 16)  // of 8 columns, a warp's

__device__ __forceinline__ void copy16(Number* to, const Number* from, bool there) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = there ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Fetch stage `chunk` of samples begin … end: GROUP samples, or a band of one.
__device__ __forceinline__ void fetch(Number* stage, const Number* x, const Number* dy, int chunk, int begin, int end,
                                      int channels, int outputs) {
  const int first = begin + chunk / BANDS * GROUP, top = chunk % BANDS * BAND;
  for (int i = threadIdx.x; i < ROWS * 8; i += THREADS) {
    const int row = i / 8, piece = i % 8, sample = first + row / (STEPS * 16), place = row % (STEPS * 16);
    const int y = top + place / OUT_WIDTH;
    const bool there = place < PLACES && y < OUT_HEIGHT && sample < end;
    const int64 position = ((int64)sample * OUT_HEIGHT + y) * OUT_WIDTH + place % OUT_WIDTH;
    const Number* from = there ? dy + position * outputs + blockIdx.x * 64 + 8 * piece : dy;
    copy16(stage + row * DY_PITCH + 8 * piece, from, there);
  }
  Number* pixels = stage + ROWS * DY_PITCH;
  for (int i = threadIdx.x; i < PIXELS * (CHANNELS / 8); i += THREADS) {
    const int pixel = i / (CHANNELS / 8), piece = i % (CHANNELS / 8), sample = first + pixel / (DEPTH * BREADTH);
    const int y = top * STRIDE - PADDING + pixel / BREADTH % DEPTH, c = pixel % BREADTH - PADDING;
    const bool there = y >= 0 && y < HEIGHT && c >= 0 && c < WIDTH && sample < end;
    const int64 position = ((int64)sample * HEIGHT + y) * WIDTH + c;
    const Number* from = there ? x + position * channels + blockIdx.y % (channels / CHANNELS) * CHANNELS + 8 * piece : x;
    copy16(pixels + pixel * X_PITCH + 8 * piece, from, there);
  }
}

__device__ __forceinline__ void square(float (&sums)[TILES][4], float (&squares)[TILES][4]) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int i = 0; i < 4; i++) squares[t][i] += sums[t][i] * sums[t][i], sums[t][i] = 0;
  }
}

// blockIdx.y counts channels / CHANNELS blocks for each part of the samples.
extern "C" __global__ void __launch_bounds__(THREADS)
convolution_squares(const Number* x, const Number* dy, float* squares_out, int64 samples, int64 all_channels,
                    int64 all_outputs) {
  await_others();
  extern __shared__ __align__(16) Number stages[];
  const int channels = all_channels, outputs = all_outputs, across = channels / CHANNELS;
  const int part = blockIdx.y / across, parts = gridDim.y / across, block = blockIdx.y % across;
  const int begin = samples * part / parts, end = samples * (part + 1) / parts;
  const int chunks = (end - begin + GROUP - 1) / GROUP * BANDS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, upper = warp / 4;

  // Where the lane's rows of matrices are in a stage, in numbers. Of dy: 8 positions × 8 outputs, four such.
  const int of_dy = (lane % 8 + lane / 16 * 8) * DY_PITCH + warp % 4 * 16 + lane / 8 % 2 * 8;
  int of_x[GROUP * STEPS];
#pragma unroll
  for (int step = 0; step < GROUP * STEPS; step++) {
    const int place = min(step % STEPS * 16 + lane % 16, PLACES - 1);  // dy is zero beyond
    const int pixel = (step / STEPS * DEPTH + place / OUT_WIDTH * STRIDE) * BREADTH + place % OUT_WIDTH * STRIDE;
    of_x[step] = ROWS * DY_PITCH + pixel * X_PITCH + upper * (CHANNELS / 2);
  }

  float sums[TILES][4] = {}, squares[TILES][4] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < chunks) fetch(stages + s * STAGE, x, dy, s, begin, end, channels, outputs);
    asm volatile("cp.async.commit_group;");
  }
  for (int chunk = 0; chunk < chunks; chunk++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    const int next = chunk + STAGES - 1;
    if (next < chunks) fetch(stages + next % STAGES * STAGE, x, dy, next, begin, end, channels, outputs);
    asm volatile("cp.async.commit_group;");
    const unsigned stage = (unsigned)__cvta_generic_to_shared(stages + chunk % STAGES * STAGE);
#pragma unroll
    for (int step = 0; step < GROUP * STEPS; step++) {
      unsigned a[4];
      load_matrices(a, stage + 2 * (of_dy + step * 16 * DY_PITCH));
#pragma unroll
      for (int t = 0; t < TILES; t += 2) {
        // Two tiles at once: lanes from 16 on have the second one's rows.
        const int tile = t + 1 < TILES ? t + lane / 16 : t, tap = tile / (CHANNELS / 16), c = tile % (CHANNELS / 16) * 8;
        const int shift = (tap / KERNEL * BREADTH + tap % KERNEL) * X_PITCH + c;
        unsigned b[4];
        load_matrices(b, stage + 2 * (of_x[step] + shift));
        multiply(sums[t], a, b[0], b[1]);
        if (t + 1 < TILES) multiply(sums[t + 1], a, b[2], b[3]);
      }
      if (GROUP > 1 && step % STEPS == STEPS - 1) square(sums, squares);
    }
    if (GROUP == 1 && chunk % BANDS == BANDS - 1) square(sums, squares);
  }
  const int output = blockIdx.x * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int tap = t / (CHANNELS / 16), c = block * CHANNELS + upper * (CHANNELS / 2) + t % (CHANNELS / 16) * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64 weight = (((int64)part * outputs + output + 8 * i) * TAPS + tap) * channels + c;
      *(float2*)(squares_out + weight) = make_float2(squares[t][2 * i], squares[t][2 * i + 1]);
    }
  }
}
#endif

#ifdef SAMPLE_SUMS
// sums[sample][0..1][channel]: sums over positions of dy, and of dy · (x − mean) · rstd.
// A block has WIDTH channels of one sample, a thread eight of them; rows of threads share the positions.
#define VECTORS (WIDTH / 8)

#define BF16 1
#include "eight.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
sample_sums(const Number* x, const Number* dy, const float* mean, const float* rstd, float* sums, int64 positions,
            int64 channels) {
  await_others();
  __shared__ float parts[2][THREADS / 32][WIDTH];
  const int v = threadIdx.x % VECTORS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64 sample = blockIdx.y, channel = blockIdx.x * WIDTH + 8 * v;
  float own[2][8] = {};
#pragma unroll 2
  for (int64 row = threadIdx.x / VECTORS; row < positions; row += THREADS / VECTORS) {
    const int64 at = (sample * positions + row) * channels + channel;
    const Eight e = load(x + at), d = load(dy + at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      own[0][j] += d.v[j];
      own[1][j] += d.v[j] * (e.v[j] - mean[channel + j]) * rstd[channel + j];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
      for (int other = VECTORS; other < 32; other *= 2) own[i][j] += __shfl_xor_sync(~0u, own[i][j], other);
      if (lane < VECTORS) parts[i][warp][8 * lane + j] = own[i][j];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < 2 * WIDTH; at += THREADS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) sum += parts[at / WIDTH][w][at % WIDTH];
    sums[(sample * 2 + at / WIDTH) * channels + blockIdx.x * WIDTH + at % WIDTH] = sum;
  }
}
#endif
