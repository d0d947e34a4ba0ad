// Convolution, activation and pooling of many clients on a CPU, forward and backward.
//
// Images are channels-last. So for one row of a kernel the values that a pixel needs lie
// side by side in the image, kernel · channels of them, and the convolution is a matrix
// product without any patches in memory. A tile of the product stays in registers: some
// rows by up to VECTORS vectors of outputs. Outputs are padded to whole vectors.
//
// cpu.py compiles this file with the machine's own compiler, for its own instructions.

#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4)
// Rows of tiles of 1, 2 or 4 vectors. Tiles fill the registers: AVX has 16, the others 32.
// With fewer sums, each would wait for the one before.
#if defined(__AVX__) && !defined(__AVX512F__)
#define VECTORS 2
static const int most_rows[] = {0, 10, 6}, picked_rows[] = {0, 8, 4};
#else
#define VECTORS 4
static const int most_rows[] = {0, 10, 12, 0, 6}, picked_rows[] = {0, 10, 10, 0, 5};
#endif
#define ROWS 12
// Floats of a gradient that stay in the nearest cache while weights' gradients are summed.
#define NEAR 6144

typedef float vector __attribute__((vector_size(BYTES), aligned(4)));
typedef int integers __attribute__((vector_size(BYTES)));
typedef short shorts __attribute__((vector_size(BYTES / 2)));
typedef signed char bytes __attribute__((vector_size(LANES), aligned(1)));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    long clients, slots;
    long height, width, channels;  // of the images, padding included
    long outputs, padded_outputs, padded_channels;
    long kernel, padding;
    long pool;  // 1: max pooling of 2 × 2 pixels before the activation
    long splits;  // parts of a client's samples whose gradients are summed apart
    float slope;  // of the activation below zero; 1: none
} Layer;

long lanes(void) { return LANES; }

// Memory of zeros in which no vector crosses a line of the cache.
static float* zeros(long count) {
    size_t size = (sizeof(float) * count + 63) / 64 * 64;
    float* memory = aligned_alloc(64, size);
    if (memory) memset(memory, 0, size);
    return memory;
}

// Where the values of one operand of a product lie, in floats.
typedef struct {
    long row;   // from one row of the tile to the next
    long step;  // from one term of the sum to the next
    long line;  // from one line of terms to the next
} Strides;

// Computes a tile of a product, or adds it to y. Each result is a sum over `lines` lines of
// `length` terms.
INLINE void tile_of(const float* x, Strides by, long lines, long length,
                    const float* weights, long stride, long line, float* y, long outputs,
                    const int adds, const int rows, const int vectors) {
    vector tile[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int p = 0; p < rows; p++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            tile[p][v] = adds ? *(vector*)(y + p * outputs + v * LANES) : (vector){0};
    for (long i = 0; i < lines; i++) {
        const float* values = x + i * by.line;
        const float* factors = weights + i * line;
        for (long q = 0; q < length; q++) {
            vector w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) w[v] = *(const vector*)(factors + v * LANES);
#pragma GCC unroll 12
            for (int p = 0; p < rows; p++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) tile[p][v] += values[p * by.row] * w[v];
            values += by.step;
            factors += stride;
        }
    }
#pragma GCC unroll 12
    for (int p = 0; p < rows; p++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(vector*)(y + p * outputs + v * LANES) = tile[p][v];
}

// Calls CALL with constants for the size of a tile, so that it can stay in registers.
#define TO_4(v, CALL) \
    case 1: CALL(1, v); break; \
    case 2: CALL(2, v); break; \
    case 3: CALL(3, v); break; \
    case 4: CALL(4, v); break;
#define TO_6(v, CALL) TO_4(v, CALL) case 5: CALL(5, v); break; case 6: CALL(6, v); break;
#define TO_8(v, CALL) TO_6(v, CALL) case 7: CALL(7, v); break; case 8: CALL(8, v); break;
#define TO_10(v, CALL) TO_8(v, CALL) case 9: CALL(9, v); break; case 10: CALL(10, v); break;
#define TO_12(v, CALL) TO_10(v, CALL) case 11: CALL(11, v); break; case 12: CALL(12, v); break;
#if VECTORS == 2
#define WITH_TILE(CALL) \
    if (vectors == 1) switch (rows) { TO_10(1, CALL) } \
    else switch (rows) { TO_6(2, CALL) }
#define WITH_PICKED_TILE(CALL) \
    if (vectors == 1) switch (rows) { TO_8(1, CALL) } \
    else switch (rows) { TO_4(2, CALL) }
#else
#define WITH_TILE(CALL) \
    if (vectors == 1) switch (rows) { TO_10(1, CALL) } \
    else if (vectors == 2) switch (rows) { TO_12(2, CALL) } \
    else switch (rows) { TO_6(4, CALL) }
#define WITH_PICKED_TILE(CALL) \
    if (vectors == 1) switch (rows) { TO_10(1, CALL) } \
    else if (vectors == 2) switch (rows) { TO_10(2, CALL) } \
    else switch (rows) { TO_6(4, CALL) }
#endif

// After max pooling all but one of four pixels have no gradient, each output its own one.
// So a product of the weights' gradient needs the one pixel of four that has won. All four
// lie side by side in `quads`, and a shuffle picks for each output: one step for four.
// clang has no such shuffles.
#ifndef __clang__
#define PICKS 1
typedef float quad __attribute__((vector_size(16), aligned(4)));
typedef unsigned char octets __attribute__((vector_size(BYTES)));

INLINE vector four_of(const float* values) {
    // Its other values do not matter.
#if defined(__AVX512F__)
    return __builtin_ia32_ps512_ps(*(const quad*)values);
#elif defined(__AVX__)
    return __builtin_ia32_ps256_ps(*(const quad*)values);
#else
    vector four;
    memcpy(&four, values, sizeof(quad));
    return four;
#endif
}

// Shuffles of ARM move bytes: those of a value's place come first.
INLINE integers order_of(integers places) {
    return BYTES == 16 ? places * 0x04040404 + 0x03020100 : places;
}
INLINE vector picked(vector four, integers order) {
#if BYTES == 16
    return (vector)__builtin_shuffle((octets)four, (octets)order);
#else
    return __builtin_shuffle(four, order);
#endif
}

INLINE void picked_tile(const float* quads, long step, long line, long height, long width,
                        const float* dy, const float* orders, long outputs, float* dw,
                        const int rows, const int vectors) {
    vector tile[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int p = 0; p < rows; p++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            tile[p][v] = *(vector*)(dw + p * outputs + v * LANES);
    for (long h = 0; h < height; h++) {
        const float* values = quads + h * line;
        for (long w = 0; w < width; w++) {
            vector gradient[VECTORS];
            integers order[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                gradient[v] = *(const vector*)(dy + v * LANES);
                order[v] = (integers)*(const vector*)(orders + v * LANES);
            }
#pragma GCC unroll 12
            for (int p = 0; p < rows; p++) {
                vector four = four_of(values + 4 * p);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++)
                    tile[p][v] += picked(four, order[v]) * gradient[v];
            }
            values += step;
            dy += outputs;
            orders += outputs;
        }
    }
#pragma GCC unroll 12
    for (int p = 0; p < rows; p++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            *(vector*)(dw + p * outputs + v * LANES) = tile[p][v];
}
#endif

// Number of tiles, and where the i-th begins, when `total` is cut into about equal tiles.
INLINE long tiles_of(long total, long most) { return (total + most - 1) / most; }
// Vectors of the next tiles, if so many outputs are left: a power of two.
INLINE long vectors_of(long outputs) {
    long vectors = outputs / LANES;
    return vectors >= VECTORS ? VECTORS : vectors >= 2 ? 2 : 1;
}
INLINE long begin_of(long i, long total, long tiles) { return i * total / tiles; }

// Computes a row of results: `width` pixels of `outputs`, from `lines` rows of an image.
static void row_of_results(const float* x, long step, long lines, long line, long length,
                           const float* weights, long outputs, float* y, long width) {
    for (long o = 0, vectors; o < outputs; o += vectors * LANES) {
        vectors = vectors_of(outputs - o);
        long tiles = tiles_of(width, most_rows[vectors]);
        for (long t = 0; t < tiles; t++) {
            long first = begin_of(t, width, tiles);
            int rows = (int)(begin_of(t + 1, width, tiles) - first);
#define CALL(r, v) \
    tile_of(x + first * step, (Strides){step, 1, line}, lines, length, weights + o, outputs, \
            length * outputs, y + first * outputs + o, outputs, 0, r, v)
            WITH_TILE(CALL)
#undef CALL
        }
    }
}

// Adds what `height` rows of pixels contribute to the gradient of one row of a kernel.
static void rows_of_gradient(const float* x, long step, long line, long length,
                             const float* dy, long dline, long outputs, long height,
                             long width, float* dw) {
    for (long o = 0, vectors; o < outputs; o += vectors * LANES) {
        vectors = vectors_of(outputs - o);
        long tiles = tiles_of(length, most_rows[vectors]);
        for (long t = 0; t < tiles; t++) {
            long first = begin_of(t, length, tiles);
            int rows = (int)(begin_of(t + 1, length, tiles) - first);
            // Pixels are what is summed over here.
#define CALL(r, v) \
    tile_of(x + first, (Strides){1, step, line}, height, width, dy + o, outputs, dline, \
            dw + first * outputs + o, outputs, 1, r, v)
            WITH_TILE(CALL)
#undef CALL
        }
    }
}

#ifdef PICKS
// Does so with pooled pixels, of which each output has one in a quad.
static void rows_of_picked_gradient(const float* quads, long step, long line, long length,
                                    const float* dy, const float* orders, long outputs,
                                    long height, long width, float* dw) {
    for (long o = 0, vectors; o < outputs; o += vectors * LANES) {
        vectors = vectors_of(outputs - o);
        long tiles = tiles_of(length, picked_rows[vectors]);
        for (long t = 0; t < tiles; t++) {
            long first = begin_of(t, length, tiles);
            int rows = (int)(begin_of(t + 1, length, tiles) - first);
#define CALL(r, v) \
    picked_tile(quads + 4 * first, step, line, height, width, dy + o, orders + o, outputs, \
                dw + first * outputs + o, r, v)
            WITH_PICKED_TILE(CALL)
#undef CALL
        }
    }
}

// Puts each value of an image beside those to the right, below, and below to the right.
static void write_quads(const Layer* l, const float* image, float* restrict quads) {
    long line = l->width * l->channels, channels = l->channels;
    for (long h = 0; h + 1 < l->height; h++) {
        const float* top = image + h * line;
        const float* bottom = top + line;
        float* row = quads + 4 * h * line;
        for (long i = 0; i < line - channels; i++) {
            row[4 * i] = top[i];
            row[4 * i + 1] = top[i + channels];
            row[4 * i + 2] = bottom[i];
            row[4 * i + 3] = bottom[i + channels];
        }
    }
}
#endif

// Copies less than a vector. Networks often have half a vector of outputs.
INLINE void copy(void* to, const void* from, long size, long count) {
    if (count == LANES / 2)
        memcpy(to, from, size * LANES / 2);
    else
        memcpy(to, from, size * count);
}

// Read and write a vector of which `count` values are in memory.
INLINE vector loaded(const float* from, const long count) {
    if (count == LANES) return *(const vector*)from;
    vector values = {0};
    copy(&values, from, sizeof(float), count);
    return values;
}
INLINE void store(float* to, vector values, const long count) {
    if (count == LANES)
        *(vector*)to = values;
    else
        copy(to, &values, sizeof(float), count);
}

INLINE vector either(integers mask, vector yes, vector no) {
    return (vector)((mask & (integers)yes) | (~mask & (integers)no));
}

// Calls CALL for every vector of outputs; the last may be cut short.
#define FOR_OUTPUTS(outputs, CALL) \
    for (long o = 0; o < outputs; o += LANES) { \
        if (outputs - o >= LANES) \
            CALL(LANES); \
        else \
            CALL(outputs - o); \
    }

// The activation; of minus infinity ReLU leaves zero, and NaN stays.
INLINE vector activated(vector value, float slope) {
    vector lowered = slope == 0 ? either(value != value, value, (vector){0}) : slope * value;
    return either(value > 0, value, lowered);
}

// Whether values take the place of the largest so far; NaN does, as in torch.
INLINE integers wins(vector value, vector largest) {
    return (value > largest) | (value != value);
}

// Chooses among 2 × 2 pixels of two rows; the first of equal ones wins.
INLINE void pool_outputs(const float* rows, long width, long outputs, long padded,
                         const float* bias, float slope, float* y, signed char* winner,
                         const long count) {
    vector biases = loaded(bias, count);
    for (long w = 0; w < width / 2; w++) {
        const float* top = rows + 2 * w * padded;
        const float* pixels[] = {top + padded, top + width * padded,
                                 top + width * padded + padded};
        vector largest = *(const vector*)top;
        integers chosen = {0};
#pragma GCC unroll 3
        for (int place = 0; place < 3; place++) {
            vector value = *(const vector*)pixels[place];
            integers won = wins(value, largest);
            largest = either(won, value, largest);
            chosen = (won & (place + 1)) | (~won & chosen);
        }
        store(y + w * outputs, activated(largest + biases, slope), count);
        shorts narrower = __builtin_convertvector(chosen, shorts);
        bytes places = __builtin_convertvector(narrower, bytes);
        copy(winner + w * outputs, &places, 1, count);
    }
}

static void pool_row(const float* rows, long width, long outputs, long padded,
                     const float* bias, float slope, float* y, signed char* winner) {
#define CALL(count) \
    pool_outputs(rows + o, width, outputs, padded, bias + o, slope, y + o, winner + o, count)
    FOR_OUTPUTS(outputs, CALL)
#undef CALL
}

INLINE void plain_outputs(const float* row, long width, long outputs, long padded,
                          const float* bias, float slope, float* y, const long count) {
    vector biases = loaded(bias, count);
    for (long w = 0; w < width; w++) {
        vector value = *(const vector*)(row + w * padded) + biases;
        store(y + w * outputs, activated(value, slope), count);
    }
}

static void plain_row(const float* row, long width, long outputs, long padded,
                      const float* bias, float slope, float* y) {
#define CALL(count) \
    plain_outputs(row + o, width, outputs, padded, bias + o, slope, y + o, count)
    FOR_OUTPUTS(outputs, CALL)
#undef CALL
}

// Returns a sample's image with zeros around it, in `memory` that is zero there. A copy of
// one image stays in the nearest caches, which one of all would not.
static const float* framed(const Layer* l, const float* x, long sample, float* memory) {
    long rows = l->height - 2 * l->padding, columns = l->width - 2 * l->padding;
    const float* image = x + sample * rows * columns * l->channels;
    if (!l->padding) return image;
    for (long h = 0; h < rows; h++) {
        long first = (h + l->padding) * l->width + l->padding;
        memcpy(memory + first * l->channels, image + h * columns * l->channels,
               sizeof(float) * columns * l->channels);
    }
    return memory;
}

// Images [clients, slots, …, channels] without padding, weights [clients, kernel, kernel,
// channels, padded outputs], results and winners [clients, slots, …, outputs]. Biases of a
// client begin `bias_stride` floats behind those of the one before.
int forward(const Layer* l, const float* x, const float* weights, const float* bias,
            long bias_stride, float* y, signed char* winner) {
    long length = l->kernel * l->channels, line = l->width * l->channels;
    long height = l->height - l->kernel + 1, width = l->width - l->kernel + 1;
    long step = l->pool + 1, results = (height / step) * (width / step) * l->outputs;
    int failed = 0;
#pragma omp parallel
    {
        long size = step * width * l->padded_outputs;
        float* rows = zeros(size + l->height * line);
        if (!rows) failed = 1;
#pragma omp for schedule(dynamic, 4)
        for (long sample = 0; sample < l->clients * l->slots; sample++) {
            if (!rows) continue;
            long client = sample / l->slots;
            const float* image = framed(l, x, sample, rows + size);
            const float* own = weights + client * l->kernel * length * l->padded_outputs;
            const float* own_bias = bias + client * bias_stride;
            for (long h = 0; h + step <= height; h += step) {
                for (long r = 0; r < step; r++)
                    row_of_results(image + (h + r) * line, l->channels, l->kernel, line, length,
                                   own, l->padded_outputs, rows + r * width * l->padded_outputs,
                                   width);
                long at = sample * results + (h / step) * (width / step) * l->outputs;
                if (l->pool)
                    pool_row(rows, width, l->outputs, l->padded_outputs, own_bias, l->slope,
                             y + at, winner + at);
                else
                    plain_row(rows, width, l->outputs, l->padded_outputs, own_bias, l->slope,
                              y + at);
            }
        }
        free(rows);
    }
    return failed;
}

// What the activation leaves of the gradient dy, where y is its output.
INLINE vector slanted(vector dy, vector y, float slope) {
    vector lowered = slope == 0 ? (vector){0} : slope * dy;
    return either(y <= 0, lowered, dy);
}

INLINE void expand_outputs(const float* dy, const float* y, long height, long width,
                           long outputs, long padded, float slope, float* dproduct,
                           long line, float* dbias, const long count) {
    vector sum = loaded(dbias, count);
    for (long h = 0; h < height; h++)
        for (long w = 0; w < width; w++) {
            vector value = slanted(loaded(dy, count), loaded(y, count), slope);
            *(vector*)(dproduct + h * line + w * padded) = value;
            sum += value;
            dy += outputs;
            y += outputs;
        }
    store(dbias, sum, count);
}

// Writes the gradient before the activation to `dproduct`, whose rows are `line` floats
// apart, and adds it up for the bias.
static void expand(const float* dy, const float* y, long height, long width, long outputs,
                   long padded, float slope, float* dproduct, long line, float* dbias) {
#define CALL(count) \
    expand_outputs(dy + o, y + o, height, width, outputs, padded, slope, dproduct + o, line, \
                   dbias + o, count)
    FOR_OUTPUTS(outputs, CALL)
#undef CALL
}

// What the gradient of pooled pixels is written to; null where it is not needed.
typedef struct {
    float* dproduct;  // all four pixels
    float* pooled;    // the one that has won
    float* orders;    // which that is: integers for `picked`
} Expanded;

INLINE void expand_pooled_outputs(const float* dy, const float* y, const signed char* winner,
                                  long height, long width, long outputs, long padded,
                                  float slope, Expanded to, long line, float* dbias,
                                  const long count) {
    vector sum = loaded(dbias, count);
    for (long h = 0; h < height / 2; h++)
        for (long w = 0; w < width / 2; w++) {
            vector value = slanted(loaded(dy, count), loaded(y, count), slope);
            sum += value;
            bytes places = {0};
            copy(&places, winner, 1, count);
            shorts wider = __builtin_convertvector(places, shorts);
            integers chosen = __builtin_convertvector(wider, integers);
#ifdef PICKS
            long at = (h * (width / 2) + w) * padded;
            *(vector*)(to.pooled + at) = value;
            *(vector*)(to.orders + at) = (vector)order_of(chosen);
#endif
            if (to.dproduct) {
                float* top = to.dproduct + 2 * h * line + 2 * w * padded;
                float* pixels[] = {top, top + padded, top + line, top + line + padded};
#pragma GCC unroll 4
                for (int place = 0; place < 4; place++)
                    *(vector*)pixels[place] = either(chosen == place, value, (vector){0});
            }
            dy += outputs;
            y += outputs;
            winner += outputs;
        }
    store(dbias, sum, count);
}

// Does so before pooling, too: all goes to the pixel that has won.
static void expand_pooled(const float* dy, const float* y, const signed char* winner,
                          long height, long width, long outputs, long padded, float slope,
                          Expanded to, long line, float* dbias) {
#define CALL(count) \
    expand_pooled_outputs( \
        dy + o, y + o, winner + o, height, width, outputs, padded, slope, \
        (Expanded){to.dproduct ? to.dproduct + o : 0, to.pooled + o, to.orders + o}, line, \
        dbias + o, count)
    FOR_OUTPUTS(outputs, CALL)
#undef CALL
}

// Gradients: dweights [splits, clients, kernel, kernel, channels, padded outputs] and
// dbias [splits, clients, outputs] are zero at first; dx, if not null, is [clients, slots,
// …, channels] without padding. `turned` are the weights as the gradient of images wants
// them: [clients, kernel, kernel, padded outputs, padded channels], rows and columns of
// kernels from last to first.
int backward(const Layer* l, const float* x, const float* turned, const float* y,
             const signed char* winner, const float* dy, float* dweights, float* dbias,
             float* dx) {
    long kernel = l->kernel, outputs = l->padded_outputs, channels = l->padded_channels;
    long length = kernel * l->channels, line = l->width * l->channels;
    long height = l->height - kernel + 1, width = l->width - kernel + 1;
    long step = l->pool + 1, results = (height / step) * (width / step) * l->outputs;
    // Zeros around the gradient, where kernels hang over the edge of the images.
    long edge = kernel - 1 - l->padding, dline = (width + 2 * edge) * outputs;
    long rows = l->height - 2 * l->padding, columns = l->width - 2 * l->padding;
    long size = (height + 2 * edge) * dline;
#ifdef PICKS
    const int picks = l->pool;
#else
    const int picks = 0;
#endif
    long rows_summed = picks ? height / 2 : height, columns_summed = picks ? width / 2 : width;
    long summed = rows_summed * columns_summed * outputs;
    long groups = tiles_of(summed, picks ? NEAR / 2 : NEAR);
    if (groups > rows_summed) groups = rows_summed;
    long more = picks ? 2 * summed + 4 * l->height * line : 0;
    int failed = 0;
#pragma omp parallel
    {
        float* memory = zeros(size + columns * channels + l->height * line + more);
        if (!memory) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < l->clients * l->splits; task++) {
            if (!memory) continue;
            float* inner = memory + edge * dline + edge * outputs;
            float* row = memory + size;
            float* frame = row + columns * channels;
            float* pooled = frame + l->height * line;
            float* orders = pooled + summed;
            float* quads = orders + summed;
            long client = task / l->splits, split = task % l->splits;
            float* dw = dweights + (split * l->clients + client) * kernel * length * outputs;
            float* db = dbias + (split * l->clients + client) * l->outputs;
            const float* own = turned + client * kernel * kernel * outputs * channels;
            long stop = begin_of(split + 1, l->slots, l->splits);
            for (long s = begin_of(split, l->slots, l->splits); s < stop; s++) {
                long sample = client * l->slots + s, at = sample * results;
                if (l->pool)
                    expand_pooled(dy + at, y + at, winner + at, height, width, l->outputs,
                                  outputs, l->slope,
                                  (Expanded){dx || !picks ? inner : 0, pooled, orders}, dline,
                                  db);
                else
                    expand(dy + at, y + at, height, width, l->outputs, outputs, l->slope, inner,
                           dline, db);
                const float* image = framed(l, x, sample, frame);
#ifdef PICKS
                if (picks) write_quads(l, image, quads);
#endif
                for (long g = 0; g < groups; g++) {
                    long h = begin_of(g, rows_summed, groups);
                    long count = begin_of(g + 1, rows_summed, groups) - h;
                    for (long i = 0; i < kernel; i++) {
#ifdef PICKS
                        if (picks) {
                            long at = h * columns_summed * outputs;
                            rows_of_picked_gradient(
                                quads + 4 * (2 * h + i) * line, 8 * l->channels, 8 * line,
                                length, pooled + at, orders + at, outputs, count,
                                columns_summed, dw + i * length * outputs);
                            continue;
                        }
#endif
                        rows_of_gradient(image + (h + i) * line, l->channels, line, length,
                                         inner + h * dline, dline, outputs, count, width,
                                         dw + i * length * outputs);
                    }
                }
                if (!dx) continue;
                for (long h = 0; h < rows; h++) {
                    // Only rows of the gradient that are not all zero.
                    long first = edge > h ? edge - h : 0;
                    long last = height + edge - h < kernel ? height + edge - h : kernel;
                    float* result = dx + (sample * rows + h) * columns * l->channels;
                    float* target = channels == l->channels ? result : row;
                    row_of_results(memory + (h + first) * dline, outputs, last - first, dline,
                                   kernel * outputs, own + first * kernel * outputs * channels,
                                   channels, target, columns);
                    if (target == result) continue;
                    for (long w = 0; w < columns; w++)
                        memcpy(result + w * l->channels, row + w * channels,
                               sizeof(float) * l->channels);
                }
            }
        }
        free(memory);
    }
    return failed;
}
