/* See wave.h.
 *
 * A stream is computed a few inputs at a time, with a state between them, so that intermediate
 * results stay in the processor's cache. The released checkpoint has blocks of 768, 384, 192 and 96
 * output channels, and rates 8, 5, 4 and 3. Arrays are rows of channels, one a sample.
 *
 * Rows shorter than WIDEST make lines of WIDEST floats, the last one with rows too many. A unit multiplies
 * a line, with all rows that its taps reach back to, by a matrix of the taps and zeros between them.
 *
 * A unit's convolution of 7 taps computes two outputs by 8 products where 14 would be the plain way:
 * Winograd's F(2, 7), at the points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity. Outputs n and n + dilation
 * are a pair where n % (2 * dilation) < dilation, n counted from the stream's start; how a stream is cut
 * into calls changes no pair. The first of a pair depends on the first 7 of its 8 inputs alone, to the
 * bit, and the second on the last 7: half a pair can be computed with any row in place of the other.
 */

#include "wave.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "product.h"

enum { TAPS = 7, UP_TAPS = 2 };
/* Inputs that are computed together, before the first upsampling: enough to fill tiles of products, and
 * few enough for the results to stay in the processor's cache. Four frames of the released model. */
enum { INPUTS = 16 };
/* Pairs of outputs, and panels of them, that one task computes. */
enum { PAIRS = 72, PANELS = 6 };
enum { ROWS_A_TASK = 16 };
/* Multiplications that a Snake costs, about. */
enum { SNAKE_COST = 16 };

/* A state holds, of every block but the first, the last activated input; of every unit the activated
 * inputs that its taps reach back to, and those of the last convolution. */
int64_t wave_state_size(const Wave *wave)
{
    int64_t total = 0, width = 0;
    for (int64_t b = 0; b < wave->blocks; b++) {
        const Block *block = wave->block + b;
        total += b > 0 ? block->into : 0;
        width = block->out;
        for (int u = 0; u < UNITS; u++)
            total += width * (TAPS - 1) * block->units[u].dilation;
    }
    return total + width * (TAPS - 1);
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
        total += inputs * UNITS * (POINTS / 2 + 1) * block->out * block->out;
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

/* ---- activations ---- */

typedef struct {
    float *to;
    const float *x;
    int64_t rows, width;
    const Snake *act;
} Activation;

static void activate_some(void *work, int64_t task, float *unused)
{
    const Activation *a = work;
    int64_t end = smaller(a->rows, (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        kernels->snake_row(a->to + r * a->width, a->x + r * a->width, a->act->frequency,
                           a->act->inverse_magnitude, a->width);
}

/* to = snake(x), line by line; `to` may be x. */
static int apply(const Buffers *b, const Snake *act, float *to, const float *x, int64_t rows,
                 int64_t width)
{
    int64_t line = larger(width, WIDEST), lines = (rows * width + line - 1) / line;
    Activation a = {to, x, lines, line, act};
    return run_tasks(b->team, activate_some, &a, (lines + ROWS_A_TASK - 1) / ROWS_A_TASK,
                     SNAKE_COST * rows * width, 1);
}

/* Write the `reach` rows of the state and snake(b->x) to b->joined, and zeros after them. Moves *state past
 * these rows, which become the last `reach` of b->joined. */
static int activate(const Buffers *b, const Snake *act, int64_t rows, int64_t width, int64_t reach,
                    float **state)
{
    size_t bytes = (size_t)(reach * width) * sizeof(float);
    memcpy(b->joined, *state, bytes);
    if (!apply(b, act, b->joined + reach * width, b->x, rows, width))
        return 0;
    memset(b->joined + (reach + rows) * width, 0, WIDEST * sizeof(float));
    memcpy(*state, b->joined + rows * width, bytes);
    *state += reach * width;
    return 1;
}

/* ---- convolutions of units ---- */

typedef struct {
    float *y;       /* [rows, width] */
    const float *x; /* [(TAPS - 1) * dilation + rows, width] */
    const Unit *unit;
    int64_t rows, width;
    int64_t skipped; /* rows before the first one in its block of 2 * dilation rows */
    int64_t first;   /* pair of that block with which the pairs begin */
    int64_t pairs, pairs_a_task;
} Convolution;

/* Describe the pairs of rows `before` to `before + rows` of a stream. */
static Convolution convolution_of(const Buffers *b, const Unit *unit, int64_t before, int64_t rows,
                                  int64_t width)
{
    int64_t d = unit->dilation, skipped = before % (2 * d), end = skipped + rows;
    int64_t first = larger(0, skipped - d);
    int64_t pairs = end / (2 * d) * d + smaller(d, end % (2 * d)) - first;
    int64_t tasks = (pairs + PAIRS - 1) / PAIRS;
    return (Convolution){b->other, b->joined, unit,  rows, width, skipped,
                         first,    pairs,     (pairs + tasks - 1) / tasks};
}

static void convolve_some(void *work, int64_t task, float *spread)
{
    const Convolution *c = work;
    const Snake *then = &c->unit->second;
    int64_t groups = groups_of(c->width, PANELS), d = c->unit->dilation, first[PAIRS];
    int64_t start = task / groups * c->pairs_a_task, stride = row_stride(c->width);
    int64_t pairs = smaller(c->pairs_a_task, c->pairs - start), place = (c->first + start) % d;
    int64_t panel = task % groups * PANELS, end = smaller(panel + PANELS, panels_of(c->width));
    int64_t row = (c->first + start - place) * 2 + place - c->skipped;
    float *products = spread + POINTS * PAIRS * stride;
    for (int64_t p = 0; p < pairs; p++) { /* the first rows of pairs; they may be before row 0 */
        first[p] = row;
        kernels->spread(spread + p * stride, pairs * stride, c->x + row * c->width, d * c->width,
                        c->width);
        row += ++place % d == 0 ? d + 1 : 1;
    }
    for (; panel < end; panel++) {
        int64_t at = panel * PANEL, outs = smaller(PANEL, c->width - at), size = pairs * outs;
        for (int64_t i = 0; i < POINTS; i++) {
            Matrix w = matrix_at(&c->unit->conv, i);
            if (i > 0 && i < POINTS - 1) /* each output has the bias once */
                w.bias = NULL;
            kernels->multiply(products + i * size, outs, spread + i * pairs * stride, stride, pairs,
                              &w, panel, 1, 0, NULL);
        }
        kernels->gather(products, size);
        for (int64_t half = 0; half < 2; half++)
            for (int64_t p = 0; p < pairs; p++) {
                row = first[p] + half * d;
                if (row >= 0 && row < c->rows)
                    kernels->snake_row(c->y + row * c->width + at,
                                       products + half * size + p * outs, then->frequency + at,
                                       then->inverse_magnitude + at, outs);
            }
    }
}

/* Run a residual unit on b->x [rows, width] in place. before: rows of the stream before these. Moves
 * *state past this part's. */
static int run_unit(const Unit *unit, const Buffers *b, int64_t before, int64_t rows,
                    int64_t width, float **state)
{
    Convolution c = convolution_of(b, unit, before, rows, width);
    int64_t tasks = (c.pairs + c.pairs_a_task - 1) / c.pairs_a_task * groups_of(width, PANELS);
    int64_t line = larger(width, WIDEST), lines = (rows * width + line - 1) / line;
    if (!activate(b, &unit->first, rows, width, (TAPS - 1) * unit->dilation, state))
        return 0;
    int done = width < WIDEST
                   ? product(b->team, b->other, line, b->joined, line, lines, &unit->conv, 0) &&
                         apply(b, &unit->second, b->other, b->other, rows, width)
                   : run_tasks(b->team, convolve_some, &c, tasks, c.pairs * POINTS * width * width,
                               POINTS * PAIRS * (row_stride(width) + PANEL));
    return done && product(b->team, b->x, line, b->other, line, lines, &unit->point, 1);
}

/* ---- blocks ---- */

/* Upsample b->x: [count, into] in, [the returned number of rows, out] out; 0 if allocation fails. Moves
 * *state past this part's. */
static int64_t upsample(const Block *block, const Buffers *b, int64_t count, int first,
                        float **state)
{
    int64_t skipped = first ? 1 : 0, pairs = count - skipped, into = block->into;
    /* A row that follows another lies beside it, so that both are one of twice the width. */
    if (!activate(b, &block->act, count, into, UP_TAPS - 1, state) ||
        !product(b->team, b->x, block->up.out, b->joined + skipped * into, into, pairs,
                 &block->up, 0))
        return 0;
    return pairs * block->rate;
}

/* Run a few inputs, x [inputs, channels]. before: inputs of the stream before these. */
static int run_inputs(const Wave *wave, const Buffers *b, const float *x, int64_t before,
                      int64_t inputs, float *state, float *samples)
{
    int64_t rows = inputs, width = wave->block[0].out;
    int first = before == 0;
    memcpy(b->x, x, (size_t)(rows * width) * sizeof(float));
    for (int64_t n = 0; n < wave->blocks; n++) {
        const Block *block = wave->block + n;
        if (n > 0) {
            rows = upsample(block, b, rows, first, &state);
            if (rows == 0)
                return 0;
            before = first ? 0 : block->rate * (before - 1), width = block->out;
        }
        for (int u = 0; u < UNITS; u++)
            if (!run_unit(block->units + u, b, before, rows, width, &state))
                return 0;
    }
    /* Each row times the weights of every tap. */
    if (!activate(b, &wave->act, rows, width, TAPS - 1, &state) ||
        !product(b->team, b->other, WIDEST, b->joined, width, TAPS - 1 + rows,
                 &wave->conv, 0))
        return 0;
    for (int64_t t = 0; t < rows; t++) { /* clip to [-1, 1]; NaN stays NaN */
        float sample = 0;
        for (int64_t k = 0; k < TAPS; k++)
            sample += b->other[(t + k) * WIDEST + k];
        samples[t] = sample > 1 ? 1 : sample < -1 ? -1 : sample;
    }
    return 1;
}

/* Allocate buffers for up to `inputs` inputs as one block, at b->x. Returns 0 if allocation fails. */
static int allocate(Buffers *b, const Wave *wave, int64_t inputs)
{
    int64_t x = 0, joined = 0, rows = inputs, width = wave->block[0].out;
    for (int64_t n = 0; n < wave->blocks; n++) {
        const Block *block = wave->block + n;
        if (n > 0) {
            joined = larger(joined, (rows + UP_TAPS - 1) * width);
            rows *= block->rate, width = block->out;
        }
        x = larger(x, rows * width);
        for (int u = 0; u < UNITS; u++) { /* `spread` reads up to a dilation before and after joined */
            int64_t dilation = block->units[u].dilation;
            x = larger(x, dilation * width);
            joined = larger(joined, (rows + TAPS * dilation) * width);
        }
    }
    x += WIDEST; /* of the last line */
    int64_t other = larger(x, (TAPS - 1 + rows) * WIDEST);
    joined = larger(joined, (TAPS - 1 + rows) * width) + WIDEST;
    b->x = calloc((size_t)(x + joined + other), sizeof(float));
    b->joined = b->x + x;
    b->other = b->joined + joined;
    return b->x != NULL;
}

int run_wave(Team *team, const Wave *wave, const float *x, int64_t before, int64_t inputs,
             float *state, float *samples)
{
    int64_t most = INPUTS * wave->block[0].rate, width = wave->block[0].out;
    Buffers b = {.team = team};
    if (!allocate(&b, wave, smaller(inputs, most)))
        return 0;
    int done = 1;
    for (int64_t at = 0; at < inputs && done; at += most) {
        int64_t now = smaller(inputs - at, most);
        done = run_inputs(wave, &b, x + at * width, before + at, now, state, samples);
        samples += wave_samples(wave, now, before + at == 0);
    }
    free(b.x);
    return done;
}
