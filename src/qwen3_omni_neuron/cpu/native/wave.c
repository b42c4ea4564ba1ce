/* The decoder blocks, last activation and last convolution of code2wav, where most of its time
 * goes: model.code2wav.Code2Wav.wave. Called by wave.py only.
 *
 * A stream is computed a few inputs at a time, with a state between them, so that intermediate
 * results stay in the processor's cache. The released checkpoint has blocks of 1536, 768, 384 and
 * 192 input channels, half as many output channels, and rates 8, 5, 4 and 3.
 */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "layout.h"
#include "status.h"

enum { UNITS = 3, UNIT_TAPS = 7, LAST_TAPS = 7, UP_TAPS = 2 };

typedef struct {
    const float *frequency, *inverse_magnitude; /* [width] */
} Snake;

typedef struct {
    int64_t dilation;
    Snake first, second;
    const float *conv, *conv_bias;   /* [width, width, 7], [width] */
    const float *point, *point_bias; /* [width, width], [width] */
} Unit;

typedef struct {
    int64_t into, out, rate;
    Snake act;
    const float *up, *up_bias; /* [out * rate, into, 2]: of the input before, of the input; [out *
                                  rate] */
    Unit units[UNITS];
} Block;

typedef struct {
    int64_t count, inputs; /* number of blocks; inputs computed at a time */
    const Block *block;    /* [count] */
    Snake act;
    const float *conv, *bias; /* [1, channels, 7], [1] */
} Wave;

const LayoutEntry wave_layout[] = {
    SIZE(Snake),
    OFFSET(Snake, frequency),
    OFFSET(Snake, inverse_magnitude),
    SIZE(Unit),
    OFFSET(Unit, dilation),
    OFFSET(Unit, first),
    OFFSET(Unit, second),
    OFFSET(Unit, conv),
    OFFSET(Unit, conv_bias),
    OFFSET(Unit, point),
    OFFSET(Unit, point_bias),
    SIZE(Block),
    OFFSET(Block, into),
    OFFSET(Block, out),
    OFFSET(Block, rate),
    OFFSET(Block, act),
    OFFSET(Block, up),
    OFFSET(Block, up_bias),
    OFFSET(Block, units),
    SIZE(Wave),
    OFFSET(Wave, count),
    OFFSET(Wave, inputs),
    OFFSET(Wave, block),
    OFFSET(Wave, act),
    OFFSET(Wave, conv),
    OFFSET(Wave, bias),
    END_OF_LAYOUT,
};

/* Floats of what a stream leaves: of every block the last activated input, then of every unit the
 * inputs that its taps reach back to, and those of the last convolution. */
int64_t wave_state_size(const Wave *wave)
{
    int64_t total = 0, channels = 0;
    for (int64_t b = 0; b < wave->count; b++) {
        const Block *block = wave->block + b;
        total += block->into;
        for (int u = 0; u < UNITS; u++)
            total += block->out * (UNIT_TAPS - 1) * block->units[u].dilation;
        channels = block->out;
    }
    return total + channels * (LAST_TAPS - 1);
}

/* Number of samples that so many inputs become. A stream's first inputs become fewer, by the
 * look-ahead of each block. */
static int64_t samples_of(const Wave *wave, int64_t inputs, int first)
{
    for (int64_t b = 0; b < wave->count; b++)
        inputs = wave->block[b].rate * (inputs - (first ? 1 : 0));
    return inputs;
}

/* Floats from the start of a channel of so many samples to the next channel. */
static int64_t stride_of(int64_t samples)
{
    return (samples + MORE_SAMPLES - 1) / MORE_SAMPLES * MORE_SAMPLES + MORE_SAMPLES;
}

/* Working memory, which the blocks use one after the other. */
typedef struct {
    float *x;      /* input and output of a block */
    float *joined; /* inputs that the state holds, then activated inputs */
    float *other;  /* result of a convolution */
} Buffers;

/* Upsample: an input and the one before it make `rate` samples. b->x: [into, inputs] in, [out,
 * samples] out. Returns the position in the state after this part's. */
static float *upsample(const Block *block, const Buffers *b, int64_t inputs, int64_t samples,
                       float *state)
{
    int64_t pairs = samples / block->rate, stride = stride_of(inputs + 1);
    int64_t held = pairs - inputs + 1; /* inputs from the state: 1, or 0 at a stream's start */
    for (int64_t c = 0; c < block->into; c++) {
        float *to = b->joined + c * stride;
        to[0] = state[c];
        kernels->snake(to + held, b->x + c * stride_of(inputs), block->act.frequency[c],
              block->act.inverse_magnitude[c], inputs);
        state[c] = to[pairs];
    }
    kernels->convolve(b->other, stride_of(pairs), b->joined, stride, block->up, block->up_bias,
                      block->into, 0, block->out * block->rate, UP_TAPS, 1, pairs, 0);
    for (int64_t o = 0; o < block->out; o++)
        for (int64_t phase = 0; phase < block->rate; phase++) {
            const float *from = b->other + (o * block->rate + phase) * stride_of(pairs);
            float *to = b->x + o * stride_of(samples) + phase;
            for (int64_t p = 0; p < pairs; p++)
                to[p * block->rate] = from[p];
        }
    return state + block->into;
}

/* Activate samples and apply a causal convolution. b->x [channels, samples] in, y [out, samples]
 * out. Returns the position in the state after this part's. */
static float *convolve_stream(float *y, const Buffers *b, const Snake *act, const float *weight,
                              const float *bias, int64_t channels, int64_t out, int64_t taps,
                              int64_t dilation, int64_t samples, float *state)
{
    int64_t reach = (taps - 1) * dilation, stride = stride_of(reach + samples);
    for (int64_t c = 0; c < channels; c++, state += reach) {
        float *to = b->joined + c * stride;
        memcpy(to, state, (size_t)reach * sizeof(float));
        kernels->snake(to + reach, b->x + c * stride_of(samples), act->frequency[c],
              act->inverse_magnitude[c], samples);
        memcpy(state, to + samples, (size_t)reach * sizeof(float));
    }
    kernels->convolve(y, stride_of(samples), b->joined, stride, weight, bias, channels, 0, out, taps,
                      dilation, samples, 0);
    return state;
}

/* Run a residual unit on b->x [channels, samples] in place. Returns the position in the state after
 * this part's. */
static float *run_unit(const Unit *unit, const Buffers *b, int64_t channels, int64_t samples,
                       float *state)
{
    int64_t stride = stride_of(samples);
    state = convolve_stream(b->other, b, &unit->first, unit->conv, unit->conv_bias, channels,
                            channels, UNIT_TAPS, unit->dilation, samples, state);
    for (int64_t c = 0; c < channels; c++)
        kernels->snake(b->other + c * stride, b->other + c * stride, unit->second.frequency[c],
              unit->second.inverse_magnitude[c], samples);
    kernels->convolve(b->x, stride, b->other, stride, unit->point, unit->point_bias, channels, 0,
                      channels, 1, 1, samples, 1);
    return state;
}

/* Run a few inputs of one stream. x: [channels, inputs], the channels x_stride floats apart. */
static void run_inputs(const Wave *wave, const Buffers *b, const float *x, int64_t x_stride,
                       int64_t inputs, int first, float *state, float *samples)
{
    int64_t count = inputs, channels = wave->block[0].into;
    for (int64_t c = 0; c < channels; c++)
        memcpy(b->x + c * stride_of(count), x + c * x_stride, (size_t)count * sizeof(float));
    for (int64_t n = 0; n < wave->count; n++) {
        const Block *block = wave->block + n;
        int64_t longer = block->rate * (count - (first ? 1 : 0));
        state = upsample(block, b, count, longer, state);
        count = longer, channels = block->out;
        for (int u = 0; u < UNITS; u++)
            state = run_unit(block->units + u, b, channels, count, state);
    }
    convolve_stream(b->other, b, &wave->act, wave->conv, wave->bias, channels, 1, LAST_TAPS, 1,
                    count, state);
    for (int64_t t = 0; t < count; t++) /* clip to [-1, 1]; NaN stays NaN */
        samples[t] = b->other[t] > 1 ? 1 : b->other[t] < -1 ? -1 : b->other[t];
}

/* Allocate buffers for up to so many inputs as one block, at b->x. Returns 0 without memory. */
static int allocate(Buffers *b, const Wave *wave, int64_t inputs)
{
    int64_t x = 0, joined = 0, other = 0, count = inputs;
    for (int64_t n = 0; n < wave->count; n++) {
        const Block *block = wave->block + n;
        int64_t longer = count * block->rate, reach = 0;
        for (int u = 0; u < UNITS; u++)
            reach = larger(reach, (UNIT_TAPS - 1) * block->units[u].dilation);
        x = larger(x, larger(block->into * stride_of(count), block->out * stride_of(longer)));
        joined = larger(joined, larger(block->into * stride_of(count + 1),
                                       block->out * stride_of(longer + reach)));
        other = larger(other, larger(block->out * block->rate * stride_of(count),
                                     block->out * stride_of(longer)));
        count = longer;
    }
    b->x = calloc((size_t)(x + joined + other), sizeof(float));
    b->joined = b->x + x;
    b->other = b->joined + joined;
    return b->x != NULL;
}

/* Compute samples of several streams. x [streams, channels, inputs]. state [streams,
 * wave_state_size]: of the inputs before, changed in place; zeros at a stream's start. samples
 * [streams, ...]: see samples_of. Several threads may call it. */
int run_wave(const Wave *wave, int64_t streams, const float *x, int64_t inputs, int first,
             float *state, float *samples)
{
    int64_t channels = wave->block[0].into, size = wave_state_size(wave), most = wave->inputs;
    Buffers b;
    if (!allocate(&b, wave, inputs < most ? inputs : most))
        return NO_MEMORY;
    for (int64_t s = 0; s < streams; s++, x += channels * inputs, state += size)
        for (int64_t done = 0; done < inputs; done += most) {
            int64_t left = inputs - done, now = left < most ? left : most;
            int begins = first && done == 0;
            run_inputs(wave, &b, x + done, inputs, now, begins, state, samples);
            samples += samples_of(wave, now, begins);
        }
    free(b.x);
    return DONE;
}
