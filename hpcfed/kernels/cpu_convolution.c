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
// Rows of tiles of 1, 2 … vectors. Tiles fill the registers: AVX has 16, the others 32.
// With fewer sums, each would wait for the one before.
#if defined(__AVX__) && !defined(__AVX512F__)
#define VECTORS 2
static const int most_rows[] = {10, 6};
#else
#define VECTORS 4
static const int most_rows[] = {10, 12, 8, 6};
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
#define WITH_ROWS_TO_6(v, CALL) \
    case 1: CALL(1, v); break; \
    case 2: CALL(2, v); break; \
    case 3: CALL(3, v); break; \
    case 4: CALL(4, v); break; \
    case 5: CALL(5, v); break; \
    case 6: CALL(6, v); break;
#define WITH_ROWS_TO_8(v, CALL) \
    WITH_ROWS_TO_6(v, CALL) \
    case 7: CALL(7, v); break; \
    case 8: CALL(8, v); break;
#define WITH_ROWS_TO_10(v, CALL) \
    WITH_ROWS_TO_8(v, CALL) \
    case 9: CALL(9, v); break; \
    case 10: CALL(10, v); break;
#define WITH_ROWS_TO_12(v, CALL) \
    WITH_ROWS_TO_10(v, CALL) \
    case 11: CALL(11, v); break; \
    case 12: CALL(12, v); break;
#if VECTORS == 2
#define WITH_TILE(CALL) \
    switch (vectors) { \
        case 1: switch (rows) { WITH_ROWS_TO_10(1, CALL) } break; \
        default: switch (rows) { WITH_ROWS_TO_6(2, CALL) } \
    }
#else
#define WITH_TILE(CALL) \
    switch (vectors) { \
        case 1: switch (rows) { WITH_ROWS_TO_10(1, CALL) } break; \
        case 2: switch (rows) { WITH_ROWS_TO_12(2, CALL) } break; \
        case 3: switch (rows) { WITH_ROWS_TO_8(3, CALL) } break; \
        default: switch (rows) { WITH_ROWS_TO_6(4, CALL) } \
    }
#endif

// Number of tiles, and where the i-th begins, when `total` is cut into about equal tiles.
INLINE long tiles_of(long total, long most) { return (total + most - 1) / most; }
INLINE long begin_of(long i, long total, long tiles) { return i * total / tiles; }

// Computes a row of results: `width` pixels of `outputs`, from `lines` rows of an image.
static void row_of_results(const float* x, long step, long lines, long line, long length,
                           const float* weights, long outputs, float* y, long width) {
    for (long o = 0; o < outputs; o += VECTORS * LANES) {
        int vectors = (outputs - o) / LANES < VECTORS ? (int)((outputs - o) / LANES) : VECTORS;
        long tiles = tiles_of(width, most_rows[vectors - 1]);
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
    for (long o = 0; o < outputs; o += VECTORS * LANES) {
        int vectors = (outputs - o) / LANES < VECTORS ? (int)((outputs - o) / LANES) : VECTORS;
        long tiles = tiles_of(length, most_rows[vectors - 1]);
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

INLINE void expand_pooled_outputs(const float* dy, const float* y, const signed char* winner,
                                  long height, long width, long outputs, long padded,
                                  float slope, float* dproduct, long line, float* dbias,
                                  const long count) {
    vector sum = loaded(dbias, count);
    for (long h = 0; h < height / 2; h++)
        for (long w = 0; w < width / 2; w++) {
            vector value = slanted(loaded(dy, count), loaded(y, count), slope);
            bytes places = {0};
            copy(&places, winner, 1, count);
            shorts wider = __builtin_convertvector(places, shorts);
            integers chosen = __builtin_convertvector(wider, integers);
            float* top = dproduct + 2 * h * line + 2 * w * padded;
            float* pixels[] = {top, top + padded, top + line, top + line + padded};
#pragma GCC unroll 4
            for (int place = 0; place < 4; place++)
                *(vector*)pixels[place] = either(chosen == place, value, (vector){0});
            sum += value;
            dy += outputs;
            y += outputs;
            winner += outputs;
        }
    store(dbias, sum, count);
}

// Does so before pooling, too: all goes to the pixel that has won.
static void expand_pooled(const float* dy, const float* y, const signed char* winner,
                          long height, long width, long outputs, long padded, float slope,
                          float* dproduct, long line, float* dbias) {
#define CALL(count) \
    expand_pooled_outputs(dy + o, y + o, winner + o, height, width, outputs, padded, slope, \
                          dproduct + o, line, dbias + o, count)
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
    long groups = tiles_of(height * width * outputs, NEAR);
    if (groups > height) groups = height;
    int failed = 0;
#pragma omp parallel
    {
        float* memory = zeros(size + columns * channels + l->height * line);
        if (!memory) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < l->clients * l->splits; task++) {
            if (!memory) continue;
            float* inner = memory + edge * dline + edge * outputs;
            float* row = memory + size;
            float* frame = row + columns * channels;
            long client = task / l->splits, split = task % l->splits;
            float* dw = dweights + (split * l->clients + client) * kernel * length * outputs;
            float* db = dbias + (split * l->clients + client) * l->outputs;
            const float* own = turned + client * kernel * kernel * outputs * channels;
            long stop = begin_of(split + 1, l->slots, l->splits);
            for (long s = begin_of(split, l->slots, l->splits); s < stop; s++) {
                long sample = client * l->slots + s, at = sample * results;
                if (l->pool)
                    expand_pooled(dy + at, y + at, winner + at, height, width, l->outputs,
                                  outputs, l->slope, inner, dline, db);
                else
                    expand(dy + at, y + at, height, width, l->outputs, outputs, l->slope, inner,
                           dline, db);
                const float* image = framed(l, x, sample, frame);
                for (long g = 0; g < groups; g++) {
                    long h = begin_of(g, height, groups);
                    long count = begin_of(g + 1, height, groups) - h;
                    for (long i = 0; i < kernel; i++)
                        rows_of_gradient(image + (h + i) * line, l->channels, line, length,
                                         inner + h * dline, dline, outputs, count, width,
                                         dw + i * length * outputs);
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
