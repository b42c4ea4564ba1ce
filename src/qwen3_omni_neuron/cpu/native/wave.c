/* See wave.h.
 *
 * A stream is computed a few inputs at a time, with a state between them, so that intermediate
 * results stay in the processor's cache. Arrays are [channels, samples]. The released checkpoint has
 * blocks of 768, 384, 192 and 96 output channels, and rates 8, 5, 4 and 3.
 */

#include "wave.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { UNIT_TAPS = 7, LAST_TAPS = 7, UP_TAPS = 2 };
/* Inputs that are computed together, before the first upsampling: enough to fill whole vectors, and
 * few enough for the results to stay in the processor's cache. Four frames of the released model. */
enum { INPUTS = 16 };
/* What one task takes of an array: a multiple of MORE_SAMPLES, so that no task writes where another
 * one does. */
enum { SAMPLES_A_TASK = 256, CHANNELS_A_TASK = 32 };
/* Multiplications that a Snake costs, about. */
enum { SNAKE_COST = 16 };

/* A state holds, of every block but the first, the last activated input; of every unit the activated
 * inputs that its taps reach back to, and those of the last convolution. */
int64_t wave_state_size(const Wave *wave)
{
    int64_t total = 0, channels = 0;
    for (int64_t b = 0; b < wave->blocks; b++) {
        const Block *block = wave->block + b;
        total += b > 0 ? block->into : 0;
        for (int u = 0; u < UNITS; u++)
            total += block->out * (UNIT_TAPS - 1) * block->units[u].dilation;
        channels = block->out;
    }
    return total + channels * (LAST_TAPS - 1);
}

int64_t wave_samples(const Wave *wave, int64_t inputs, int first)
{
    for (int64_t b = 1; b < wave->blocks; b++)
        inputs = wave->block[b].rate * (inputs - (first ? 1 : 0));
    return inputs;
}

int64_t wave_cost(const Wave *wave, int64_t inputs)
{
    int64_t total = 0;
    for (int64_t b = 0; b < wave->blocks; b++) {
        const Block *block = wave->block + b;
        if (b > 0) {
            inputs *= block->rate;
            total += inputs * UP_TAPS * block->into * block->out;
        }
        total += inputs * UNITS * (UNIT_TAPS + 1) * block->out * block->out;
    }
    return total;
}

/* Floats from the start of a channel of so many samples to the next channel. */
static int64_t stride_of(int64_t samples)
{
    return (samples + MORE_SAMPLES - 1) / MORE_SAMPLES * MORE_SAMPLES + MORE_SAMPLES;
}

/* What run_inputs works in; the blocks use the arrays one after the other. */
typedef struct {
    Team *team;
    float *x;      /* input and output of a block */
    float *joined; /* inputs that the state holds, then activated inputs */
    float *other;  /* result of a convolution */
} Buffers;

/* ---- pieces ---- */

/* What a task takes of an array: channels `first` to `last` - 1, samples `start` to `end` - 1. Tasks
 * that follow each other take the same samples, so that a thread goes on with samples of its own in
 * the next job; see parallel.c. */
typedef struct {
    int64_t first, last, start, end;
} Piece;

static int64_t pieces_of(int64_t channels, int64_t channels_a_task, int64_t samples)
{
    return (channels + channels_a_task - 1) / channels_a_task *
           ((samples + SAMPLES_A_TASK - 1) / SAMPLES_A_TASK);
}

static Piece piece_at(int64_t task, int64_t channels, int64_t channels_a_task, int64_t samples)
{
    int64_t groups = (channels + channels_a_task - 1) / channels_a_task;
    int64_t first = task % groups * channels_a_task, start = task / groups * SAMPLES_A_TASK;
    return (Piece){first, smaller(first + channels_a_task, channels), start,
                   smaller(start + SAMPLES_A_TASK, samples)};
}

/* ---- activations ---- */

typedef struct {
    float *to, *state;
    const float *x;
    int64_t to_stride, x_stride, channels, samples, reach, held;
    const Snake *act;
} Activation;

/* to = the last `held` inputs of the state's `reach`, then snake(x). */
static void activate_some(void *work, int64_t task, float *unused)
{
    const Activation *a = work;
    Piece p = piece_at(task, a->channels, CHANNELS_A_TASK, a->samples);
    (void)unused;
    for (int64_t c = p.first; c < p.last; c++) {
        float *to = a->to + c * a->to_stride;
        if (p.start == 0)
            memcpy(to, a->state + (c + 1) * a->reach - a->held, (size_t)a->held * sizeof(float));
        kernels->snake(to + a->held + p.start, a->x + c * a->x_stride + p.start,
                       a->act->frequency[c], a->act->inverse_magnitude[c], p.end - p.start);
    }
}

/* Activate, then move the state to the last `reach` inputs. */
static int activate(const Buffers *b, Activation a)
{
    if (!run_tasks(b->team, activate_some, &a, pieces_of(a.channels, CHANNELS_A_TASK, a.samples),
                   SNAKE_COST * a.channels * a.samples, 1))
        return 0;
    for (int64_t c = 0; c < a.channels; c++)
        memcpy(a.state + c * a.reach, a.to + c * a.to_stride + a.held + a.samples - a.reach,
               (size_t)a.reach * sizeof(float));
    return 1;
}

/* ---- convolutions ---- */

typedef struct {
    float *y;
    const float *x;
    const Filter *filter;
    int64_t y_stride, x_stride, into, out, taps, dilation, samples;
    int add;
    const Snake *then; /* applied to the result; NULL for none */
} Convolution;

/* Some samples of CHANNELS output channels. */
static void convolve_some(void *work, int64_t task, float *scratch)
{
    const Convolution *c = work;
    const float *weight = c->filter->weight;
    Piece p = piece_at(task, c->out, CHANNELS, c->samples);
    int64_t samples = p.end - p.start, from = 0; /* the output that `weight` begins with */
    float *y = c->y + p.start;
    if (c->filter->type == BFLOAT16) {
        int64_t size = c->into * c->taps;
        const uint16_t *weights = c->filter->weight;
        kernels->widen(scratch, weights + p.first * size, size * CHANNELS);
        weight = scratch, from = p.first;
    }
    kernels->convolve(y + from * c->y_stride, c->y_stride, c->x + p.start, c->x_stride, weight,
                      c->filter->bias + from, c->into, p.first - from, p.last - from, c->taps,
                      c->dilation, samples, c->add);
    if (c->then != NULL)
        for (int64_t o = p.first; o < p.last; o++)
            kernels->snake(y + o * c->y_stride, y + o * c->y_stride, c->then->frequency[o],
                           c->then->inverse_magnitude[o], samples);
}

static int convolve(const Buffers *b, Convolution c)
{
    int64_t widened = c.filter->type == BFLOAT16 ? c.into * c.taps * CHANNELS : 1;
    return run_tasks(b->team, convolve_some, &c, pieces_of(c.out, CHANNELS, c.samples),
                     c.samples * c.into * c.out * c.taps, widened);
}

/* ---- blocks ---- */

typedef struct {
    float *to;         /* [out, pairs * rate] */
    const float *from; /* [out * rate, pairs] */
    int64_t out, rate, pairs;
} Phases;

/* Order samples by time: one of every phase after the other. */
static void join_phases(void *work, int64_t task, float *unused)
{
    const Phases *f = work;
    Piece part = piece_at(task, f->out, CHANNELS_A_TASK, f->pairs);
    (void)unused;
    for (int64_t o = part.first; o < part.last; o++)
        for (int64_t phase = 0; phase < f->rate; phase++) {
            const float *from = f->from + (o * f->rate + phase) * stride_of(f->pairs);
            float *to = f->to + o * stride_of(f->pairs * f->rate) + phase;
            for (int64_t p = part.start; p < part.end; p++)
                to[p * f->rate] = from[p];
        }
}

/* Upsample: an input and the one before it make `rate` samples. b->x: [into, inputs] in, [out,
 * samples] out. Moves *state past this part's. */
static int upsample(const Block *block, const Buffers *b, int64_t inputs, int64_t samples,
                    float **state)
{
    int64_t pairs = samples / block->rate, stride = stride_of(inputs + 1);
    int64_t held = pairs - inputs + 1; /* inputs from the state: 1, or 0 at a stream's start */
    Activation act = {b->joined, *state, b->x, stride, stride_of(inputs), block->into, inputs,
                      1, held, &block->act};
    Convolution up = {b->other, b->joined, &block->up, stride_of(pairs), stride, block->into,
                      block->out * block->rate, UP_TAPS, 1, pairs, 0, NULL};
    Phases phases = {b->x, b->other, block->out, block->rate, pairs};
    *state += block->into;
    return activate(b, act) && convolve(b, up) &&
           run_tasks(b->team, join_phases, &phases,
                     pieces_of(block->out, CHANNELS_A_TASK, pairs), block->out * samples, 1);
}

/* Activate samples and apply a causal convolution, and `then` unless it is NULL: b->x [channels,
 * samples] to b->other [out, samples]. Moves *state past this part's. */
static int convolve_stream(const Buffers *b, const Snake *act, const Filter *filter,
                           int64_t channels, int64_t out, int64_t taps, int64_t dilation,
                           int64_t samples, const Snake *then, float **state)
{
    int64_t reach = (taps - 1) * dilation, stride = stride_of(reach + samples);
    Activation activation = {b->joined, *state, b->x, stride, stride_of(samples), channels, samples,
                             reach, reach, act};
    Convolution conv = {b->other, b->joined, filter, stride_of(samples), stride, channels, out,
                        taps, dilation, samples, 0, then};
    *state += channels * reach;
    return activate(b, activation) && convolve(b, conv);
}

/* Run a residual unit on b->x [channels, samples] in place. Moves *state past this part's. */
static int run_unit(const Unit *unit, const Buffers *b, int64_t channels, int64_t samples,
                    float **state)
{
    int64_t stride = stride_of(samples);
    Convolution point = {b->x, b->other, &unit->point, stride, stride, channels, channels, 1, 1,
                         samples, 1, NULL};
    return convolve_stream(b, &unit->first, &unit->conv, channels, channels, UNIT_TAPS,
                           unit->dilation, samples, &unit->second, state) &&
           convolve(b, point);
}

/* Run a few inputs, x [inputs, channels]. */
static int run_inputs(const Wave *wave, const Buffers *b, const float *x, int64_t inputs, int first,
                      float *state, float *samples)
{
    int64_t count = inputs, channels = wave->block[0].out;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t t = 0; t < count; t++)
            b->x[c * stride_of(count) + t] = x[t * channels + c];
    for (int64_t n = 0; n < wave->blocks; n++) {
        const Block *block = wave->block + n;
        if (n > 0) {
            int64_t longer = block->rate * (count - (first ? 1 : 0));
            if (!upsample(block, b, count, longer, &state))
                return 0;
            count = longer, channels = block->out;
        }
        for (int u = 0; u < UNITS; u++)
            if (!run_unit(block->units + u, b, channels, count, &state))
                return 0;
    }
    if (!convolve_stream(b, &wave->act, &wave->conv, channels, 1, LAST_TAPS, 1, count, NULL, &state))
        return 0;
    for (int64_t t = 0; t < count; t++) /* clip to [-1, 1]; NaN stays NaN */
        samples[t] = b->other[t] > 1 ? 1 : b->other[t] < -1 ? -1 : b->other[t];
    return 1;
}

/* Allocate buffers for up to so many inputs as one block, at b->x. Returns 0 without memory. */
static int allocate(Buffers *b, const Wave *wave, int64_t inputs)
{
    int64_t x = 0, joined = 0, other = 0, count = inputs;
    for (int64_t n = 0; n < wave->blocks; n++) {
        const Block *block = wave->block + n;
        int64_t longer = n > 0 ? count * block->rate : count, reach = LAST_TAPS - 1;
        for (int u = 0; u < UNITS; u++)
            reach = larger(reach, (UNIT_TAPS - 1) * block->units[u].dilation);
        if (n > 0) {
            joined = larger(joined, block->into * stride_of(count + 1));
            other = larger(other, block->out * block->rate * stride_of(count));
        }
        x = larger(x, block->out * stride_of(longer));
        joined = larger(joined, block->out * stride_of(longer + reach));
        other = larger(other, block->out * stride_of(longer));
        count = longer;
    }
    b->x = calloc((size_t)(x + joined + other), sizeof(float));
    b->joined = b->x + x;
    b->other = b->joined + joined;
    return b->x != NULL;
}

int run_wave(Team *team, const Wave *wave, const float *x, int64_t inputs, int first, float *state,
             float *samples)
{
    int64_t most = INPUTS * wave->block[0].rate, channels = wave->block[0].out;
    Buffers b = {.team = team};
    if (!allocate(&b, wave, smaller(inputs, most)))
        return 0;
    int done = 1;
    for (int64_t at = 0; at < inputs && done; at += most) {
        int64_t now = smaller(inputs - at, most);
        int begins = first && at == 0;
        done = run_inputs(wave, &b, x + at * channels, now, begins, state, samples);
        samples += wave_samples(wave, now, begins);
    }
    free(b.x);
    return done;
}
