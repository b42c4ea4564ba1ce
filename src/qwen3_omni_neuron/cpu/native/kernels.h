/* The arithmetic of a decode step of a few rows, and of code2wav's decoder blocks, in float32.
 *
 * Arrays are dense and row-major; matrices are [out, in] as in torch. Widths are multiples of 8. A
 * row's result does not depend on the other rows.
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

/* y = x / rms(x) * weight for each row, [rows, width]; y may be x. */
void rms_norm(float *y, const float *x, const float *weight, int64_t rows, int64_t width,
              float eps);

/* Apply rotary embedding to one head [2 half] in place: elements i and half + i are a pair. */
void rotate(float *x, const float *cosine, const float *sine, int64_t half);

/* scale * silu(gate) * up. gate_up [2 width], gate first; gated [width]. */
void gate(float *gated, const float *gate_up, int64_t width, float scale);

/* Attention of a group of queries over the first `positions` keys and values. q, mixed [group,
 * width]; keys, values [positions, width]; weights [positions]: working memory. */
void attend(float *mixed, const float *q, const float *keys, const float *values, int64_t group,
            int64_t positions, int64_t width, float *weights);

/* A channel of audio begins `stride` floats after the channel before it. Up to MORE_SAMPLES floats
 * after a channel's last sample are read and written, too. */
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
