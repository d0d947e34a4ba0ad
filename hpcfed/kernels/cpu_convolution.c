// Convolution, activation and pooling of many clients on a CPU, forward and backward.
//
// Images are channels-last. So for one row of a kernel the values that a pixel needs lie
// side by side in the image, kernel · channels of them, and the convolution is a matrix
// product without any patches in memory. A tile of the product stays in registers: up to
// PIXELS rows and VECTORS vectors of outputs. Outputs are padded to whole vectors.
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
#define PIXELS 6
// Tiles fill the registers: AVX has 16, the others 32.
#if defined(__AVX__) && !defined(__AVX512F__)
#define VECTORS 2
#else
#define VECTORS 4
#endif

typedef float vector __attribute__((vector_size(BYTES), aligned(4)));
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

// Adds to `tile` the product of `count` rows, `row` floats apart, with weights. Each row
// is a sum over `lines` pieces of `length` values, `line` floats apart.
INLINE void multiply(const float* x, long row, long lines, long line, long length,
                     const float* weights, long stride, vector tile[PIXELS][VECTORS],
                     const int count, const int vectors) {
    for (long i = 0; i < lines; i++) {
        const float* values = x + i * line;
        for (long q = 0; q < length; q++) {
            vector w[VECTORS];
            for (int v = 0; v < vectors; v++) w[v] = *(const vector*)(weights + v * LANES);
            for (int p = 0; p < count; p++)
                for (int v = 0; v < vectors; v++) tile[p][v] += values[p * row + q] * w[v];
            weights += stride;
        }
    }
}

// Computes `count` neighbouring pixels of a row of results, for some vectors of outputs.
INLINE void pixels(const float* x, long step, long lines, long line, long length,
                   const float* weights, long outputs, float* y, const int count,
                   const int vectors) {
    vector tile[PIXELS][VECTORS];
    for (int p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) tile[p][v] = (vector){0};
    multiply(x, step, lines, line, length, weights, outputs, tile, count, vectors);
    for (int p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) *(vector*)(y + p * outputs + v * LANES) = tile[p][v];
}

// Adds the products of `count` neighbouring values of x with dy, over a row of pixels.
INLINE void outer(const float* x, long step, const float* dy, long outputs, long width,
                  float* dw, const int count, const int vectors) {
    vector tile[PIXELS][VECTORS];
    for (int p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) tile[p][v] = *(vector*)(dw + p * outputs + v * LANES);
    // Pixels are what is summed over here, so they are the pieces of length 1.
    multiply(x, 1, width, step, 1, dy, outputs, tile, count, vectors);
    for (int p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) *(vector*)(dw + p * outputs + v * LANES) = tile[p][v];
}

// Calls CALL with constants for the size of a tile, so that it can stay in registers.
#define WITH_VECTORS(count, CALL) \
    switch (vectors) { \
        case 1: CALL(count, 1); break; \
        case 2: CALL(count, 2); break; \
        case 3: CALL(count, VECTORS < 3 ? VECTORS : 3); break; \
        default: CALL(count, VECTORS); \
    }
#define WITH_TILE(CALL) \
    switch (count) { \
        case 1: WITH_VECTORS(1, CALL) break; \
        case 2: WITH_VECTORS(2, CALL) break; \
        case 3: WITH_VECTORS(3, CALL) break; \
        case 4: WITH_VECTORS(4, CALL) break; \
        case 5: WITH_VECTORS(5, CALL) break; \
        default: WITH_VECTORS(6, CALL) \
    }

// Number of tiles, and where the i-th begins, when `total` is cut into about equal tiles.
INLINE long tiles_of(long total, long most) { return (total + most - 1) / most; }
INLINE long begin_of(long i, long total, long tiles) { return i * total / tiles; }

// Computes a row of results: `width` pixels of `outputs`, from `lines` rows of an image.
static void row_of_results(const float* x, long step, long lines, long line, long length,
                           const float* weights, long outputs, float* y, long width) {
    long tiles = tiles_of(width, PIXELS);
    for (long o = 0; o < outputs; o += VECTORS * LANES) {
        int vectors = (outputs - o) / LANES < VECTORS ? (int)((outputs - o) / LANES) : VECTORS;
        for (long t = 0; t < tiles; t++) {
            long first = begin_of(t, width, tiles);
            int count = (int)(begin_of(t + 1, width, tiles) - first);
#define CALL(c, v) \
    pixels(x + first * step, step, lines, line, length, weights + o, outputs, \
           y + first * outputs + o, c, v)
            WITH_TILE(CALL)
#undef CALL
        }
    }
}

// Adds what a row of pixels contributes to the gradient of one row of a kernel.
static void row_of_gradient(const float* x, long step, long length, const float* dy,
                            long outputs, long width, float* dw) {
    long tiles = tiles_of(length, PIXELS);
    for (long o = 0; o < outputs; o += VECTORS * LANES) {
        int vectors = (outputs - o) / LANES < VECTORS ? (int)((outputs - o) / LANES) : VECTORS;
        for (long t = 0; t < tiles; t++) {
            long first = begin_of(t, length, tiles);
            int count = (int)(begin_of(t + 1, length, tiles) - first);
#define CALL(c, v) \
    outer(x + first, step, dy + o, outputs, width, dw + first * outputs + o, c, v)
            WITH_TILE(CALL)
#undef CALL
        }
    }
}

// All of a value below zero that the activation leaves; of minus infinity ReLU leaves
// zero, and NaN stays.
INLINE float lowered(float value, float slope) {
    return slope == 0 ? (value != value ? value : 0) : slope * value;
}

// Whether a value takes the place of the largest so far; NaN does, as in torch.
INLINE int wins(float value, float largest) { return (value > largest) | (value != value); }

// Chooses among 2 × 2 pixels of two rows, for each output; the first of equal ones wins.
static void pool_row(const float* restrict rows, long width, long outputs, long padded,
                     const float* restrict bias, float slope, float* restrict y,
                     signed char* restrict winner) {
    for (long w = 0; w < width / 2; w++) {
        const float* top = rows + 2 * w * padded;
        const float* bottom = top + width * padded;
        for (long o = 0; o < outputs; o++) {
            float largest = top[o], second = top[padded + o];
            float third = bottom[o], fourth = bottom[padded + o];
            signed char chosen = 0;
            chosen = wins(second, largest) ? 1 : chosen;
            largest = wins(second, largest) ? second : largest;
            chosen = wins(third, largest) ? 2 : chosen;
            largest = wins(third, largest) ? third : largest;
            chosen = wins(fourth, largest) ? 3 : chosen;
            largest = wins(fourth, largest) ? fourth : largest;
            winner[o] = chosen;
            float value = largest + bias[o];
            y[o] = value > 0 ? value : lowered(value, slope);
        }
        y += outputs;
        winner += outputs;
    }
}

static void plain_row(const float* restrict row, long width, long outputs, long padded,
                      const float* restrict bias, float slope, float* restrict y) {
    for (long w = 0; w < width; w++)
        for (long o = 0; o < outputs; o++) {
            float value = row[w * padded + o] + bias[o];
            y[w * outputs + o] = value > 0 ? value : lowered(value, slope);
        }
}

// Images [clients, slots, height, width, channels], weights [clients, kernel, kernel,
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
        float* rows = malloc(sizeof(float) * step * width * l->padded_outputs);
        if (!rows) failed = 1;
#pragma omp for schedule(dynamic, 4)
        for (long sample = 0; sample < l->clients * l->slots; sample++) {
            if (!rows) continue;
            long client = sample / l->slots;
            const float* image = x + sample * l->height * line;
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

// Writes the gradient before the activation to `dproduct`, whose rows are `line` floats
// apart, and adds it up for the bias.
static void expand(const float* restrict dy, const float* restrict y, long height, long width,
                   long outputs, long padded, float slope, float* restrict dproduct, long line,
                   float* restrict dbias) {
    for (long h = 0; h < height; h++)
        for (long w = 0; w < width; w++) {
            float* pixel = dproduct + h * line + w * padded;
            for (long o = 0; o < outputs; o++) {
                float below = slope == 0 ? 0 : slope * dy[o];
                pixel[o] = y[o] <= 0 ? below : dy[o];
                dbias[o] += pixel[o];
            }
            dy += outputs;
            y += outputs;
        }
}

// Does so before pooling, too: all goes to the pixel that has won.
static void expand_pooled(const float* restrict dy, const float* restrict y,
                          const signed char* restrict winner, long height, long width,
                          long outputs, long padded, float slope, float* restrict dproduct,
                          long line, float* restrict dbias) {
    for (long h = 0; h < height / 2; h++)
        for (long w = 0; w < width / 2; w++) {
            float* top = dproduct + 2 * h * line + 2 * w * padded;
            float* bottom = top + line;
            for (long o = 0; o < outputs; o++) {
                float below = slope == 0 ? 0 : slope * dy[o];
                float value = y[o] <= 0 ? below : dy[o];
                int chosen = winner[o];
                dbias[o] += value;
                top[o] = chosen == 0 ? value : 0;
                top[padded + o] = chosen == 1 ? value : 0;
                bottom[o] = chosen == 2 ? value : 0;
                bottom[padded + o] = chosen == 3 ? value : 0;
            }
            dy += outputs;
            y += outputs;
            winner += outputs;
        }
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
    int failed = 0;
#pragma omp parallel
    {
        float* memory = calloc(size + columns * channels, sizeof(float));
        if (!memory) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < l->clients * l->splits; task++) {
            if (!memory) continue;
            float* inner = memory + edge * dline + edge * outputs;
            float* row = memory + size;
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
                const float* image = x + sample * l->height * line;
                for (long h = 0; h < height; h++)
                    for (long i = 0; i < kernel; i++)
                        row_of_gradient(image + (h + i) * line, l->channels, length,
                                        inner + h * dline, outputs, width,
                                        dw + i * length * outputs);
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
