/* The decoder blocks of code2wav after the first upsampling: most of its work. */

#ifndef WAVE_H
#define WAVE_H

#include "library.h"
#include "parallel.h"

/* Floats of a stream's state. */
int64_t wave_state_size(const Wave *wave);

/* Number of samples of `inputs` inputs of the first block's units; fewer at a stream's start, by each
 * block's look-ahead. */
int64_t wave_samples(const Wave *wave, int64_t inputs, int first);

/* Approximate multiplications for `inputs` inputs. */
int64_t wave_cost(const Wave *wave, int64_t inputs);

/* Compute the samples of one stream. x [inputs, channels]; before: inputs of the stream before these.
 * state: changed in place; zeros at a stream's start. Returns 0 if allocation fails. */
int run_wave(Team *team, const Wave *wave, const float *x, int64_t before, int64_t inputs,
             float *state, float *samples);

#endif
