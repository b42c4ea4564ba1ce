/* The arithmetic of a decode step, on a few rows, and of a wave, in float32.
 *
 * Arrays are dense, the last axis closest; matrices are [out, in] as torch has them. Widths are
 * multiples of 8. What a row gets does not depend on the rows beside it.
 */

#ifndef KERNELS_H
#define KERNELS_H

#include <stdint.h>

static inline int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* y = x weight^T, or y += where add. x [rows, into], weight [out, into], y [rows, out]. Any `out`.
 */
void product(float *y, const float *x, const float *weight, int64_t rows, int64_t into,
             int64_t out, int add);

/* to[r] += x[r] weight for each row. x [rows, into], weight [into, out], to[r] [out]. */
void spread(float *const *to, const float *x, const float *weight, int64_t rows, int64_t into,
            int64_t out);

/* y = x / rms(x) * weight for each row, [rows, width]; y may be x. */
void rms_norm(float *y, const float *x, const float *weight, int64_t rows, int64_t width,
              float eps);

/* Turn a head in place, [2 half]: each number with the one half a head further. */
void rotate(float *x, const float *cosine, const float *sine, int64_t half);

/* scale * silu(gate) * up. gate_up [2 width], gate first; gated [width]. */
void gate(float *gated, const float *gate_up, int64_t width, float scale);

/* A group of queries over the first `positions` keys and values. q, mixed [group, width]; keys,
 * values [positions, width]; weights: room for a number a position. */
void attend(float *mixed, const float *q, const float *keys, const float *values, int64_t group,
            int64_t positions, int64_t width, float *weights);

/* A channel of a wave is a line of samples, `stride` floats from the next channel's, of which up to
 * MORE_SAMPLES behind the last one are read and written, too. */
#define MORE_SAMPLES 32

/* y[o][t] = bias[o] + the sum over i and k of weight[o][i][k] * x[i][t + k * dilation], or y +=
 * where add. x [into channels, samples + (taps - 1) * dilation], y [out channels, samples]. */
void convolve(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
              const float *bias, int64_t into, int64_t out, int64_t taps, int64_t dilation,
              int64_t samples, int add);

/* y = x + inverse_magnitude * sin(frequency * x)^2 in one channel; y may be x. */
void snake(float *y, const float *x, float frequency, float inverse_magnitude, int64_t samples);

/* e^x within 2 units in the last place. */
float exponential(float x);

#endif
