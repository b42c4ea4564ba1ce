/* The arithmetic of a few rows, of prompts, and of code2wav's decoder blocks, in float32.
 *
 * Arrays are row-major; a stride is the number of floats from one row to the next. A row's result does
 * not depend on other rows or threads. Compiled once per kind of processor.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

#include "matrix.h"

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Floats from one row to the next in arrays that `multiply` reads: rows a power of two apart would
 * share few cache lines. */
static inline int64_t row_stride(int64_t width)
{
    return (width + 15) / 16 * 16 + 16;
}

/* Most rows for which a task has several panels. */
enum { FEW_ROWS = 12 };
/* Steps that `quantise` tries for a group. */
enum { QUANTISED_STEPS = 22 };
/* Most panels of one call of multiply. */
enum { PANELS_AT_ONCE = 4 };
/* Most queries of one call of attend, which share keys. */
enum { QUERIES = 32 };

/* Points of a convolution of code2wav's units, and inputs of a pair of outputs. */
enum { POINTS = 8 };

typedef struct {
    const char *name;
    /* Multiply rows by `panels` panels from `first` on: y = w x, or y += w x if add. x [rows, into], or
     * as written by take_inputs of product.h; y [rows, up to panels * PANEL], these panels' outputs.
     * next: the thread's next panels, of this number and shape, prefetched at the end; NULL: the
     * following ones in w. */
    void (*multiply)(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
                     const Matrix *w, int64_t first, int64_t panels, int add, const char *next);
    /* Write `into` inputs of a row as integers for INT8 or INT4 weights: see take_inputs of product.h.
     * to: may be x. */
    void (*take)(void *to, const float *x, int64_t into, int64_t type);
    /* Round a group of a panel, w [group, PANEL], to an INT4 block with bfloat16 scales. The weights
     * are bfloat16 numbers. */
    void (*quantise)(void *block, const float *w, int64_t group);
    /* y = x / rms(x) * weight for one row; y may be x. */
    void (*rms_norm)(float *y, const float *x, const float *weight, int64_t width, float eps);
    /* y = (x - mean) / deviation * weight + bias for one row; y may be x. */
    void (*layer_norm)(float *y, const float *x, const float *weight, const float *bias,
                       int64_t width, float eps);
    /* y = scale * silu(gate) * up. */
    void (*gate)(float *y, const float *gate, const float *up, int64_t width, float scale);
    /* y = x / 2 * (1 + erf(x / sqrt 2)); y may be x. */
    void (*gelu)(float *y, const float *x, int64_t width);
    /* y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); y may be x. */
    void (*gelu_tanh)(float *y, const float *x, int64_t width);
    /* y = e^x within 2 units in the last place; y may be x. */
    void (*exponentials)(float *y, const float *x, int64_t width);
    /* Attention of up to QUERIES queries over keys and values [positions, width]: query i sees
     * positions [from[i], to[i]). scratch: queries * (largest `to` + 16) floats. */
    void (*attend)(float *const *mixed, const float *const *queries, const int64_t *from,
                   const int64_t *to, int64_t count, const float *keys, const float *values,
                   int64_t width, float *scratch);
    /* Convert the inputs of a pair of outputs, x [POINTS, width], to each point's inputs, y [POINTS,
     * width]: see wave.c. Up to WIDEST floats after each row are read and written, too. */
    void (*spread)(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t width);
    /* Add up products of the points [POINTS, count]: the first outputs of pairs replace the first
     * [count], the second ones the second. count: a multiple of WIDEST. */
    void (*gather)(float *products, int64_t count);
    /* y = x + inverse_magnitude * sin(frequency * x)^2 for one sample of every channel; y may be x. */
    void (*snake_row)(float *y, const float *x, const float *frequency,
                      const float *inverse_magnitude, int64_t width);
    /* Return the first element from `from` on that is above a bound or NaN, and whose bit is in the
     * mask, unless NULL; else count. */
    int64_t (*first_above)(const float *x, const uint32_t *mask, int64_t from, int64_t count,
                           float bound);
} Kernels;

/* Kernels of this processor. */
extern const Kernels *kernels;

#endif
