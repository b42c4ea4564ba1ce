/* The decoder blocks of code2wav after the first upsampling: most of its work. */

#ifndef WAVE_H
#define WAVE_H

#include <stdint.h>

#include "parallel.h"

enum { UNITS = 3 };

typedef struct {
    const float *frequency, *inverse_magnitude; /* [width] */
} Snake;

/* Weights of convolutions lie as `convolve` takes them. */
typedef struct {
    int64_t dilation;
    Snake first, second;
    const float *conv, *conv_bias;   /* of 7 taps, [width] */
    const float *point, *point_bias; /* of 1 tap, [width] */
} Unit;

typedef struct {
    int64_t into, out, rate;
    Snake act;
    const float *up, *up_bias; /* outputs out * rate, 2 taps: of the input before, of the input; NULL
                                  in the first block, whose upsampling is code2wav.c's */
    Unit units[UNITS];
} Block;

typedef struct {
    int64_t blocks;
    const Block *block; /* [blocks] */
    Snake act;
    const float *conv, *bias; /* 1 output, 7 taps; [1] */
} Wave;

/* Floats of a stream's state. */
int64_t wave_state_size(const Wave *wave);

/* Number of samples that so many inputs become: of a stream's first inputs fewer, by each block's
 * look-ahead. inputs: what the first block's units take. */
int64_t wave_samples(const Wave *wave, int64_t inputs, int first);

/* Compute the samples of one stream. x [inputs, channels]. state: changed in place; zeros at a
 * stream's start. Returns 0 without memory. */
int run_wave(Team *team, const Wave *wave, const float *x, int64_t inputs, int first, float *state,
             float *samples);

#endif
