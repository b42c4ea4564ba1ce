/* Code2wav (model.code2wav.Code2Wav): frames of codes to samples. Called by code2wav.py only.
 *
 * The parts before the first block's units process rows [time, channels] of all streams together, a
 * part of the frames at a time; wave.h has the rest, stream by stream. A stream's result does not
 * depend on other streams, threads, or the split of its frames into calls.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "kernels.h"
#include "product.h"
#include "wave.h"

enum { TAPS = 7, UP_TAPS = 2 };
/* Frames of a stream computed together: bounds a long call's memory. */
enum { FRAMES = 32 };
enum { ROWS_A_TASK = 4 };
/* Split a stream above LONG_WAVE multiplications (1 ms); wake no helper below SHORT_CALL. */
enum { LONG_WAVE = 1 << 26, SHORT_CALL = 1 << 25 };

/* ---- a stream's state ---- */

/* Keys or values of all layers in a state: [layers, kv_heads, window - 1, head_dim]. */
static int64_t held_floats(const Decoder *d)
{
    return d->layers * d->kv_heads * (d->window - 1) * d->head_dim;
}

int64_t code2wav_state_size(const Code2Wav *c)
{
    return 2 * held_floats(&c->decoder) + (c->stages + 1) * (TAPS - 1) * c->decoder.hidden +
           c->conv_in.out + wave_state_size(&c->wave);
}

/* ---- memory ---- */

/* Buffers for the rows of a call. */
typedef struct {
    char *all;
    Memory memory; /* its x: the transformer's rows */
    KvCache kv;    /* a slot per stream; positions window - 1 + frames */
    int64_t *slots, *at, *from;
    float *cosine, *sine;
    float *rows, *normed; /* [rows, hidden], later [rows, channels], with strides */
    float *wide;          /* a feed-forward's rows, or gathered ones */
    float *inputs;        /* of the wave: [samples, channels] of each stream */
} Front;

/* Widest row of `wide`. */
static int64_t wide_width(const Code2Wav *c)
{
    int64_t width = larger(TAPS * c->decoder.hidden, UP_TAPS * c->conv_in.out);
    for (int64_t i = 0; i < c->stages; i++)
        width = larger(width, c->stage[i].fc1.out);
    return width;
}

/* Allocate the memory of `streams` times `frames`. Returns 0 if allocation fails. */
static int allocate(Front *f, const Code2Wav *c, int64_t streams, int64_t frames)
{
    const Decoder *d = &c->decoder;
    int64_t rows = streams * frames, half = d->head_dim / 2, inputs = rows;
    for (int64_t i = 0; i < c->stages; i++)
        inputs *= c->stage[i].ratio;
    f->kv = (KvCache){.slots = streams, .positions = d->window - 1 + frames};
    int64_t kv = d->layers * streams * d->kv_heads * f->kv.positions * d->head_dim;
    int64_t row = row_stride(larger(d->hidden, c->conv_in.out));
    int64_t floats[] = {kv, kv, rows * half, rows * half, inputs * row, inputs * row,
                        inputs * row_stride(wide_width(c)), inputs * c->up.out};
    float *keys, *values;
    float **to[] = {&keys,       &values,       &f->cosine, &f->sine,
                    &f->rows,    &f->normed,    &f->wide,   &f->inputs};
    enum { ARRAYS = sizeof floats / sizeof *floats };
    int64_t block = (memory_size(d, rows) + 63) / 64 * 64, bytes = block;
    for (int i = 0; i < ARRAYS; i++)
        bytes += (floats[i] + 15) / 16 * 16 * (int64_t)sizeof(float);
    f->all = malloc((size_t)bytes + (size_t)(3 * rows) * sizeof(int64_t));
    if (f->all == NULL)
        return 0;
    cut_memory(&f->memory, f->all, d, rows);
    float *next = (float *)(f->all + block);
    for (int i = 0; i < ARRAYS; next += (floats[i++] + 15) / 16 * 16)
        *to[i] = next;
    f->kv.keys = keys, f->kv.values = values;
    f->slots = (int64_t *)(f->all + bytes);
    f->at = f->slots + rows;
    f->from = f->at + rows;
    return 1;
}

/* ---- transformer ---- */

/* Copy keys or values between a stream's state and the cache. held: in the state; NULL: zeros. start:
 * the first one's position in the cache. */
static void copy_held(const Decoder *d, const KvCache *kv, float *cache, int64_t stream,
                      int64_t start, float *to_state, const float *held)
{
    int64_t size = (d->window - 1) * d->head_dim;
    for (int64_t l = 0; l < d->layers; l++)
        for (int64_t h = 0; h < d->kv_heads; h++) {
            int64_t head = (l * kv->slots + stream) * d->kv_heads + h;
            float *at = cache + (head * kv->positions + start) * d->head_dim;
            int64_t own = (l * d->kv_heads + h) * size;
            if (to_state != NULL)
                memcpy(to_state + own, at, (size_t)size * sizeof(float));
            else if (held != NULL)
                memcpy(at, held + own, (size_t)size * sizeof(float));
            else
                memset(at, 0, (size_t)size * sizeof(float));
        }
}

typedef struct {
    const Code2Wav *c;
    const Front *f;
    const int64_t *codes; /* [streams, groups, all_frames], at the first frame of this part */
    int64_t frames, all_frames;
} Embedding;

/* Compute a row of the hidden states in f->memory: the mean of its codes' rows. */
static void embed_row(void *work, int64_t row, float *scratch)
{
    const Embedding *e = work;
    int64_t width = e->c->decoder.hidden, stream = row / e->frames, t = row % e->frames;
    float *to = e->f->memory.x + row * width;
    memset(to, 0, (size_t)width * sizeof(float));
    for (int64_t g = 0; g < e->c->groups; g++) {
        int64_t code = e->codes[(stream * e->c->groups + g) * e->all_frames + t];
        look_up(scratch, &e->c->embedding, g * e->c->codes + code);
        for (int64_t i = 0; i < width; i++)
            to[i] += scratch[i];
    }
    for (int64_t i = 0; i < width; i++)
        to[i] /= (float)e->c->groups;
}

/* Run embedding and transformer: f->normed [rows, hidden]. positions [streams]: frames before these.
 * held: [streams, state], NULL at the start of streams; states receive the keys and values. */
static int transform(Team *team, const Front *f, const Embedding *e, int64_t streams,
                     const int64_t *positions, int64_t more, const float *held, float *states)
{
    const Code2Wav *c = e->c;
    const Decoder *d = &c->decoder;
    int64_t half = d->head_dim / 2, reach = d->window - 1, rows = streams * e->frames;
    int64_t size = code2wav_state_size(c), floats = held_floats(d);
    for (int64_t s = 0; s < streams; s++) {
        const float *own = held == NULL ? NULL : held + s * size;
        copy_held(d, &f->kv, f->kv.keys, s, 0, NULL, own);
        copy_held(d, &f->kv, f->kv.values, s, 0, NULL, own == NULL ? NULL : own + floats);
        for (int64_t t = 0; t < e->frames; t++) {
            int64_t r = s * e->frames + t, position = more + (positions ? positions[s] : 0);
            f->slots[r] = s;
            f->at[r] = reach + t;
            f->from[r] = larger(t, reach - position); /* at position 2 the last 2 of 71 are filled */
            for (int64_t i = 0; i < half; i++) {
                float angle = (float)(position + t) * c->frequencies[i];
                f->cosine[r * half + i] = cosf(angle);
                f->sine[r * half + i] = sinf(angle);
            }
        }
    }
    Rows all = {rows, f->slots, f->at, f->from, f->cosine, f->sine};
    int64_t width = d->hidden;
    if (!run_tasks(team, embed_row, (void *)e, rows, rows * c->groups * width, width) ||
        !run_layers(team, d, &f->memory, &f->kv, &all, 0, NULL, NULL) ||
        !norm_rows(team, f->normed, row_stride(width), f->memory.x, rows, d->norm, width,
                   d->norm_eps))
        return 0;
    for (int64_t s = 0; s < streams; s++) {
        copy_held(d, &f->kv, f->kv.keys, s, e->frames, states + s * size, NULL);
        copy_held(d, &f->kv, f->kv.values, s, e->frames, states + s * size + floats, NULL);
    }
    return 1;
}

/* ---- rows before the blocks ---- */

/* Rows of several streams, [streams, count, width], which follow the rows in the streams' states. */
typedef struct {
    const float *x;
    int64_t stride, streams, count, width, reach;
    float *state; /* of the first stream: [reach, width] */
    int64_t state_size;
} Streamed;

/* Return row t of a stream, from -`reach` on. */
static const float *row_at(const Streamed *r, int64_t stream, int64_t t)
{
    if (t >= 0)
        return r->x + (stream * r->count + t) * r->stride;
    return r->state + stream * r->state_size + (r->reach + t) * r->width;
}

/* Keep each stream's last `reach` rows in its state. */
static void keep(const Streamed *r)
{
    size_t bytes = (size_t)r->width * sizeof(float);
    for (int64_t s = 0; s < r->streams; s++)
        for (int64_t i = 0; i < r->reach; i++) /* reads a row of the state before replacing it */
            memcpy(r->state + s * r->state_size + i * r->width,
                   row_at(r, s, r->count - r->reach + i), bytes);
}

typedef struct {
    Streamed rows;
    int64_t first; /* first row of each stream with a result */
    float *y;
    int64_t y_stride;
    const Stage *stage; /* for depthwise and layer norm */
    const Snake *act;   /* for gathered rows; NULL for none */
} Window;

/* y = norm of the depthwise convolution. */
static void depthwise_some(void *work, int64_t task, float *unused)
{
    const Window *w = work;
    const Streamed *rows = &w->rows;
    int64_t end = smaller(rows->streams * rows->count, (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++) {
        float *y = w->y + r * w->y_stride;
        memcpy(y, w->stage->depthwise_bias, (size_t)rows->width * sizeof(float));
        for (int64_t k = 0; k < TAPS; k++) {
            const float *x = row_at(rows, r / rows->count, r % rows->count + k - (TAPS - 1));
            const float *weight = w->stage->depthwise + k * rows->width;
            for (int64_t i = 0; i < rows->width; i++)
                y[i] += weight[i] * x[i];
        }
        kernels->layer_norm(y, y, w->stage->norm, w->stage->norm_bias, rows->width,
                            w->stage->norm_eps);
    }
}

/* y = a row and the earlier rows that it needs, side by side. */
static void gather_some(void *work, int64_t task, float *unused)
{
    const Window *w = work;
    const Streamed *rows = &w->rows;
    int64_t count = rows->count - w->first;
    int64_t end = smaller(rows->streams * count, (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        for (int64_t k = 0; k <= rows->reach; k++) {
            const float *x = row_at(rows, r / count, w->first + r % count + k - rows->reach);
            float *y = w->y + r * w->y_stride + k * rows->width;
            if (w->act == NULL)
                memcpy(y, x, (size_t)rows->width * sizeof(float));
            else
                kernels->snake_row(y, x, w->act->frequency, w->act->inverse_magnitude, rows->width);
        }
}

/* Run a window's task on all rows. cost: of a row. */
static int slide(Team *team, Task task, const Window *w, int64_t cost)
{
    int64_t rows = w->rows.streams * (w->rows.count - w->first);
    return run_tasks(team, task, (void *)w, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, rows * cost, 1);
}

typedef struct {
    float *x;
    int64_t stride, width;
} Gelu;

static void gelu_row(void *work, int64_t row, float *unused)
{
    const Gelu *g = work;
    (void)unused;
    kernels->gelu(g->x + row * g->stride, g->x + row * g->stride, g->width);
}

/* Upsample f->normed [streams, count, hidden]: f->rows becomes [streams, count * ratio, hidden], and
 * f->normed is used. */
static int run_stage(Team *team, const Front *f, const Stage *stage, int64_t streams, int64_t count,
                     int64_t hidden, float *state, int64_t state_size)
{
    int64_t stride = row_stride(hidden), rows = streams * count * stage->ratio;
    int64_t wide = row_stride(stage->fc1.out);
    for (int64_t phase = 0; phase < stage->ratio; phase++) {
        Matrix up = matrix_at(&stage->up, phase);
        if (!product(team, f->rows + phase * stride, stage->ratio * stride, f->normed, stride,
                     streams * count, &up, 0))
            return 0;
    }
    Window w = {{f->rows, stride, streams, count * stage->ratio, hidden, TAPS - 1, state,
                 state_size}, 0, f->normed, stride, stage, NULL};
    Gelu gelu = {f->wide, wide, stage->fc1.out};
    if (!slide(team, depthwise_some, &w, 2 * TAPS * hidden))
        return 0;
    keep(&w.rows);
    return product(team, f->wide, wide, f->normed, stride, rows, &stage->fc1, 0) &&
           run_tasks(team, gelu_row, &gelu, rows, 16 * rows * stage->fc1.out, 1) &&
           product(team, f->rows, stride, f->wide, wide, rows, &stage->fc2, 1);
}

/* Run the parts between transformer and wave: f->inputs from f->normed. Advances *state, of the first
 * stream, past these parts. Returns the number of the wave's inputs per stream, 0 if allocation fails. */
static int64_t run_front(Team *team, Front *f, const Code2Wav *c, int64_t streams, int64_t frames,
                         int first, float **state)
{
    int64_t hidden = c->decoder.hidden, stride = row_stride(hidden), count = frames;
    int64_t channels = c->conv_in.out, wide = row_stride(TAPS * hidden);
    int64_t size = code2wav_state_size(c);
    for (int64_t i = 0; i < c->stages; i++) {
        if (!run_stage(team, f, c->stage + i, streams, count, hidden, *state, size))
            return 0;
        *state += (TAPS - 1) * hidden;
        count *= c->stage[i].ratio;
        float *result = f->rows;
        f->rows = f->normed;
        f->normed = result;
    }
    Window w = {{f->normed, stride, streams, count, hidden, TAPS - 1, *state, size}, 0, f->wide,
                wide, NULL, NULL};
    if (!slide(team, gather_some, &w, TAPS * hidden / 4))
        return 0;
    keep(&w.rows);
    *state += (TAPS - 1) * hidden;
    stride = row_stride(channels);
    if (!product(team, f->rows, stride, f->wide, wide, streams * count, &c->conv_in, 0))
        return 0;
    wide = row_stride(UP_TAPS * channels);
    int64_t pairs = count - (first ? 1 : 0);
    Window pair = {{f->rows, stride, streams, count, channels, UP_TAPS - 1, *state, size},
                   first ? 1 : 0, f->wide, wide, NULL, &c->wave.block->act};
    if (!slide(team, gather_some, &pair, 16 * UP_TAPS * channels))
        return 0;
    keep(&pair.rows);
    *state += channels;
    if (!product(team, f->inputs, c->up.out, f->wide, wide, streams * pairs, &c->up, 0))
        return 0;
    return pairs * c->wave.block->rate;
}

/* ---- calls ---- */

/* The waves of several streams. */
typedef struct {
    const Code2Wav *c;
    const Front *f;
    int64_t inputs;
    const int64_t *positions; /* [streams]: frames before these, without `more`; NULL for none */
    int64_t more;
    float *states, *samples; /* at the first stream's */
    int64_t stride;          /* from one stream's samples to the next one's */
    _Atomic int failed;
} Waves;

/* Inputs of the wave of `frames` frames. */
static int64_t inputs_of(const Code2Wav *c, int64_t frames, int first)
{
    for (int64_t i = 0; i < c->stages; i++)
        frames *= c->stage[i].ratio;
    return (frames - (first ? 1 : 0)) * c->wave.block->rate;
}

static void run_one_wave(Waves *w, Team *team, int64_t stream)
{
    const Wave *wave = &w->c->wave;
    int64_t position = w->more + (w->positions == NULL ? 0 : w->positions[stream]);
    int64_t before = position == 0 ? 0 : inputs_of(w->c, position, 1);
    if (!run_wave(team, wave, w->f->inputs + stream * w->inputs * wave->block->out, before,
                  w->inputs, w->states + stream * code2wav_state_size(w->c),
                  w->samples + stream * w->stride))
        w->failed = 1;
}

static void wave_task(void *work, int64_t stream, float *unused)
{
    (void)unused;
    run_one_wave(work, NULL, stream);
}

/* If there are enough short streams, each gets a thread. Otherwise the threads share the work of one
 * stream after the other: helpers can be reclaimed early. */
static int run_waves(Team *team, Waves *w, int64_t streams)
{
    int64_t cost = wave_cost(&w->c->wave, w->inputs);
    if (streams >= w->c->threads && cost < LONG_WAVE)
        return run_tasks(team, wave_task, w, streams, streams * cost, 1) && !w->failed;
    for (int64_t s = 0; s < streams && !w->failed; s++)
        run_one_wave(w, team, s);
    return !w->failed;
}

/* Samples of `frames` frames. */
static int64_t samples_of(const Code2Wav *c, int64_t frames, int first)
{
    return wave_samples(&c->wave, inputs_of(c, frames, first), first);
}

int run_code2wav(const Code2Wav *c, int64_t streams, const int64_t *codes, int64_t frames,
                 const int64_t *positions, const float *state, float *new_state, float *samples)
{
    int64_t size = code2wav_state_size(c), kv = 2 * held_floats(&c->decoder);
    int64_t most = smaller(frames, FRAMES), total = samples_of(c, frames, state == NULL), wrote = 0;
    for (int64_t i = 0; i < streams * c->groups * frames; i++)
        if (codes[i] < 0 || codes[i] >= c->codes)
            return NO_SUCH_ROW;
    Front front;
    if (!allocate(&front, c, streams, most))
        return NO_MEMORY;
    for (int64_t s = 0; s < streams; s++) { /* keys and values are written before they are read */
        size_t bytes = (size_t)(size - kv) * sizeof(float);
        if (state == NULL)
            memset(new_state + s * size + kv, 0, bytes);
        else
            memcpy(new_state + s * size + kv, state + s * size + kv, bytes);
    }
    int64_t cost = streams * wave_cost(&c->wave, inputs_of(c, frames, 0));
    Team *team = open_team(cost < SHORT_CALL ? 1 : c->threads);
    int done = 1;
    for (int64_t at = 0; at < frames && done; at += most) {
        Embedding e = {c, &front, codes + at, smaller(most, frames - at), frames};
        int first = state == NULL && at == 0;
        float *states = new_state + kv;
        int64_t inputs = 0;
        done = transform(team, &front, &e, streams, positions, at, at == 0 ? state : new_state,
                         new_state);
        if (done)
            inputs = run_front(team, &front, c, streams, e.frames, first, &states);
        Waves waves = {c, &front, inputs, positions, at, states, samples + wrote, total, 0};
        done = inputs > 0 && run_waves(team, &waves, streams);
        wrote += samples_of(c, e.frames, first);
    }
    close_team(team);
    free(front.all);
    return done ? DONE : NO_MEMORY;
}
