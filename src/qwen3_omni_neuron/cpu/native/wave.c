/* See wave.h.
 *
 * A stream is computed a few inputs at a time, with a state between them, so that intermediate
 * results stay in the processor's cache. The released checkpoint has blocks of 768, 384, 192 and 96
 * output channels, and rates 8, 5, 4 and 3.
 *
 * Arrays are in pieces: [pieces, channels, samples of a piece]. Channels with all their samples would be
 * pages apart, and a convolution, which reads a few samples of every channel, would wait for each.
 */

#include "wave.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { UNIT_TAPS = 7, LAST_TAPS = 7, UP_TAPS = 2 };
/* Inputs that are computed together, before the first upsampling: enough to fill whole vectors, and
 * few enough for the results to stay in the processor's cache. Four frames of the released model. */
enum { INPUTS = 16 };
/* Samples of a piece, at least as many as the taps of a convolution reach back to. */
enum { PIECE = 256 };
/* Channels of a piece that one task activates; and input channels that a convolution takes at a time, so
 * that their samples and weights stay in the level-2 cache. */
enum { CHANNELS_A_TASK = 32, INPUT_CHANNELS = 192 };
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

/* Buffers of run_inputs; the blocks use the arrays one after the other. */
typedef struct {
    Team *team;
    float *x;      /* input and output of a block */
    float *joined; /* inputs that the state holds, then activated inputs */
    float *other;  /* result of a convolution */
} Buffers;

/* ---- pieces ---- */

/* One at least: a stream's first inputs may be too few for a result, and are kept all the same. */
static int64_t pieces_of(int64_t samples)
{
    return larger(1, (samples + PIECE - 1) / PIECE);
}

/* Floats from the start of a channel to the next channel in the pieces of so many samples, each piece
 * with `reach` samples more. */
static int64_t stride_of(int64_t samples, int64_t reach)
{
    return (smaller(samples, PIECE) + reach + MORE_SAMPLES - 1) / MORE_SAMPLES * MORE_SAMPLES +
           MORE_SAMPLES;
}

/* Floats of an array. */
static int64_t floats_of(int64_t channels, int64_t samples, int64_t reach)
{
    return pieces_of(samples) * channels * stride_of(samples, reach);
}

/* A task's part of an array: channels `first` to `last` - 1 of a piece, which has `samples`. Tasks
 * that follow each other take the same piece, so that a thread goes on with samples of its own in the
 * next job; see parallel.c. */
typedef struct {
    int64_t number, first, last, samples;
} Piece;

static int64_t tasks_of(int64_t channels, int64_t channels_a_task, int64_t samples)
{
    return (channels + channels_a_task - 1) / channels_a_task * pieces_of(samples);
}

static Piece piece_at(int64_t task, int64_t channels, int64_t channels_a_task, int64_t samples)
{
    int64_t groups = (channels + channels_a_task - 1) / channels_a_task, number = task / groups;
    int64_t first = task % groups * channels_a_task;
    return (Piece){number, first, smaller(first + channels_a_task, channels),
                   smaller(PIECE, samples - number * PIECE)};
}

/* ---- activations ---- */

/* Input of a convolution: the last `held` samples of the state, [channels, reach], then snake(x). Each
 * piece of `to` ends with the first `reach` samples of the piece after it. */
typedef struct {
    float *to, *state;
    const float *x;
    int64_t channels, samples; /* of x */
    int64_t reach, held;
    const Snake *act;
} Activation;

/* Samples of the convolution's result. */
static int64_t results_of(const Activation *a)
{
    return a->held + a->samples - a->reach;
}

static void activate_some(void *work, int64_t task, float *unused)
{
    const Activation *a = work;
    int64_t results = results_of(a), stride = stride_of(results, a->reach);
    int64_t x_stride = stride_of(a->samples, 0);
    Piece p = piece_at(task, a->channels, CHANNELS_A_TASK, results);
    int64_t start = p.number * PIECE, end = start + p.samples + a->reach;
    (void)unused;
    for (int64_t c = p.first; c < p.last; c++) {
        float *to = a->to + (p.number * a->channels + c) * stride;
        int64_t t = start;
        if (t < a->held) {
            t = a->held;
            memcpy(to, a->state + (c + 1) * a->reach - a->held, (size_t)a->held * sizeof(float));
        }
        while (t < end) {
            int64_t from = t - a->held, number = from / PIECE;
            int64_t count = smaller(end - t, (number + 1) * PIECE - from);
            kernels->snake(to + t - start,
                           a->x + (number * a->channels + c) * x_stride + from % PIECE,
                           a->act->frequency[c], a->act->inverse_magnitude[c], count);
            t += count;
        }
    }
}

/* Activate, then move the state to the last `reach` inputs. */
static int activate(const Buffers *b, Activation a)
{
    int64_t results = results_of(&a), stride = stride_of(results, a.reach);
    if (!run_tasks(b->team, activate_some, &a, tasks_of(a.channels, CHANNELS_A_TASK, results),
                   SNAKE_COST * a.channels * a.samples, 1))
        return 0;
    int64_t last = pieces_of(results) - 1;
    const float *from = a.to + last * a.channels * stride + results - last * PIECE;
    for (int64_t c = 0; c < a.channels; c++)
        memcpy(a.state + c * a.reach, from + c * stride, (size_t)a.reach * sizeof(float));
    return 1;
}

/* ---- convolutions ---- */

typedef struct {
    float *y;
    const float *x; /* [into, samples], its pieces with what the taps reach back to */
    const Filter *filter;
    int64_t into, out, taps, dilation, samples;
    int add;
    const Snake *then; /* applied to the result; NULL for none */
} Convolution;

/* CHANNELS output channels of a piece. */
static void convolve_some(void *work, int64_t task, float *scratch)
{
    static const float zeros[CHANNELS];
    const Convolution *c = work;
    int64_t y_stride = stride_of(c->samples, 0);
    int64_t x_stride = stride_of(c->samples, (c->taps - 1) * c->dilation);
    Piece p = piece_at(task, c->out, CHANNELS, c->samples);
    float *y = c->y + (p.number * c->out + p.first) * y_stride;
    const float *x = c->x + p.number * c->into * x_stride;
    for (int64_t i = 0; i < c->into; i += INPUT_CHANNELS) {
        int64_t into = smaller(INPUT_CHANNELS, c->into - i);
        int64_t at = (p.first * c->into + i * CHANNELS) * c->taps;
        const float *weight = (const float *)c->filter->weight + at;
        if (c->filter->type == BFLOAT16) {
            kernels->widen(scratch, (const uint16_t *)c->filter->weight + at,
                           into * c->taps * CHANNELS);
            weight = scratch;
        }
        kernels->convolve(y, y_stride, x + i * x_stride, x_stride, weight,
                          i == 0 ? c->filter->bias + p.first : zeros, into, p.last - p.first,
                          c->taps, c->dilation, p.samples, i > 0 || c->add);
    }
    if (c->then != NULL)
        for (int64_t o = p.first; o < p.last; o++, y += y_stride)
            kernels->snake(y, y, c->then->frequency[o], c->then->inverse_magnitude[o], p.samples);
}

static int convolve(const Buffers *b, Convolution c)
{
    return run_tasks(b->team, convolve_some, &c, tasks_of(c.out, CHANNELS, c.samples),
                     c.samples * c.into * c.out * c.taps, INPUT_CHANNELS * c.taps * CHANNELS);
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
    int64_t from_stride = stride_of(f->pairs, 0), to_stride = stride_of(f->pairs * f->rate, 0);
    Piece p = piece_at(task, f->out, CHANNELS_A_TASK, f->pairs);
    (void)unused;
    for (int64_t o = p.first; o < p.last; o++)
        for (int64_t phase = 0; phase < f->rate; phase++) {
            const float *from =
                f->from + ((p.number * f->out + o) * f->rate + phase) * from_stride;
            int64_t t = p.number * PIECE * f->rate + phase;
            for (int64_t i = 0; i < p.samples; i++, t += f->rate)
                f->to[(t / PIECE * f->out + o) * to_stride + t % PIECE] = from[i];
        }
}

/* Upsample: an input and the one before it make `rate` samples. b->x: [into, inputs] in, [out,
 * samples] out. Moves *state past this part's. */
static int upsample(const Block *block, const Buffers *b, int64_t inputs, int64_t samples,
                    float **state)
{
    int64_t pairs = samples / block->rate;
    int64_t held = pairs - inputs + 1; /* inputs from the state: 1, or 0 at a stream's start */
    Activation act = {b->joined, *state, b->x, block->into, inputs, UP_TAPS - 1, held, &block->act};
    Convolution up = {b->other, b->joined, &block->up, block->into, block->out * block->rate,
                      UP_TAPS, 1, pairs, 0, NULL};
    Phases phases = {b->x, b->other, block->out, block->rate, pairs};
    *state += block->into;
    return activate(b, act) && convolve(b, up) &&
           run_tasks(b->team, join_phases, &phases, tasks_of(block->out, CHANNELS_A_TASK, pairs),
                     block->out * samples, 1);
}

/* Activate samples and apply a causal convolution, and `then` unless it is NULL: b->x [channels,
 * samples] to b->other [out, samples]. Moves *state past this part's. */
static int convolve_stream(const Buffers *b, const Snake *act, const Filter *filter,
                           int64_t channels, int64_t out, int64_t taps, int64_t dilation,
                           int64_t samples, const Snake *then, float **state)
{
    int64_t reach = (taps - 1) * dilation;
    Activation activation = {b->joined, *state, b->x, channels, samples, reach, reach, act};
    Convolution conv = {b->other, b->joined, filter, channels, out, taps, dilation, samples, 0, then};
    *state += channels * reach;
    return activate(b, activation) && convolve(b, conv);
}

/* Run a residual unit on b->x [channels, samples] in place. Moves *state past this part's. */
static int run_unit(const Unit *unit, const Buffers *b, int64_t channels, int64_t samples,
                    float **state)
{
    Convolution point = {b->x, b->other, &unit->point, channels, channels, 1, 1, samples, 1, NULL};
    return convolve_stream(b, &unit->first, &unit->conv, channels, channels, UNIT_TAPS,
                           unit->dilation, samples, &unit->second, state) &&
           convolve(b, point);
}

/* Run a few inputs, x [inputs, channels]. */
static int run_inputs(const Wave *wave, const Buffers *b, const float *x, int64_t inputs, int first,
                      float *state, float *samples)
{
    int64_t count = inputs, channels = wave->block[0].out;
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < channels; c++)
            b->x[(t / PIECE * channels + c) * stride_of(count, 0) + t % PIECE] =
                x[t * channels + c];
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
    for (int64_t t = 0; t < count; t++) { /* clip to [-1, 1]; NaN stays NaN */
        float sample = b->other[t / PIECE * stride_of(count, 0) + t % PIECE];
        samples[t] = sample > 1 ? 1 : sample < -1 ? -1 : sample;
    }
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
            joined = larger(joined, floats_of(block->into, count, UP_TAPS - 1));
            other = larger(other, floats_of(block->out * block->rate, count, 0));
        }
        x = larger(x, floats_of(block->out, longer, 0));
        joined = larger(joined, floats_of(block->out, longer, reach));
        other = larger(other, floats_of(block->out, longer, 0));
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
