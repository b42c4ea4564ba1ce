/* A transformer layer of the audio encoder (model.audio_encoder.AudioEncoderLayer) or of the vision
 * encoder (model.vision_encoder.VisionLayer). Called by encoder_layers.py only.
 *
 * A frame's result does not depend on other frames or threads. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "kernels.h"
#include "product.h"

enum { ROWS_A_TASK = 8 };
/* Queries of one head per task: at most QUERIES. */
enum { QUERIES_A_TASK = 16 };

/* Buffers for a call. Heads are `width` floats wide, zeros after their head_dim: whole vectors. */
typedef struct {
    const EncoderLayer *layer;
    int64_t frames, rows, width;
    const int64_t *seen;        /* [frames] */
    const float *cosine, *sine; /* [rows, head_dim / 2], or NULL */
    float *x;                   /* [frames * rows, hidden] */
    float *normed;              /* [frames * rows, hidden], with row_stride */
    float *qkv;                 /* [frames * rows, 3 * hidden] */
    float *heads;               /* queries, keys, values: [3, frames, heads, rows, width] */
    float *wide;                /* [frames * rows, ffn], with row_stride */
} Call;

/* Run a task for every few rows. cost: multiplications of a row. */
static int run_rows(Team *team, Task task, Call *c, int64_t cost)
{
    int64_t rows = c->frames * c->rows;
    return run_tasks(team, task, c, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, rows * cost, 1);
}

static void norm_some(const Call *c, int64_t task, const float *weight, const float *bias)
{
    int64_t hidden = c->layer->hidden, stride = row_stride(hidden);
    int64_t end = smaller(c->frames * c->rows, (task + 1) * ROWS_A_TASK);
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        kernels->layer_norm(c->normed + r * stride, c->x + r * hidden, weight, bias, hidden,
                            c->layer->norm_eps);
}

static void norm_attention(void *work, int64_t task, float *unused)
{
    const Call *c = work;
    (void)unused;
    norm_some(c, task, c->layer->attention_norm, c->layer->attention_bias);
}

static void norm_ffn(void *work, int64_t task, float *unused)
{
    const Call *c = work;
    int64_t stride = row_stride(c->layer->hidden), first = task * ROWS_A_TASK;
    float *rows = c->normed + first * stride;
    (void)unused;
    norm_some(c, task, c->layer->ffn_norm, c->layer->ffn_bias);
    take_inputs(rows, rows, stride, smaller(ROWS_A_TASK, c->frames * c->rows - first),
                &c->layer->fc1);
}

/* A frame's queries (0), keys (1) or values (2) of one head. */
static float *head_at(const Call *c, int64_t which, int64_t frame, int64_t head)
{
    int64_t number = (which * c->frames + frame) * c->layer->heads + head;
    return c->heads + number * c->rows * c->width;
}

/* Copy rows of c->qkv to their heads; apply rotary embedding to queries and keys: elements i and half +
 * i are a pair. */
static void split_heads(void *work, int64_t task, float *unused)
{
    const Call *c = work;
    const EncoderLayer *l = c->layer;
    int64_t size = l->head_dim, half = size / 2;
    int64_t end = smaller(c->frames * c->rows, (task + 1) * ROWS_A_TASK);
    /* Attention divides by the root of its width: 80 for a head of 72. */
    float scale = c->width == size ? 1.0f : sqrtf((float)c->width / (float)size);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        for (int64_t n = 0; n < 3 * l->heads; n++) {
            int64_t which = n / l->heads, row = r % c->rows;
            const float *from = c->qkv + r * 3 * l->hidden + n * size;
            float *to = head_at(c, which, r / c->rows, n % l->heads) + row * c->width;
            memcpy(to, from, (size_t)size * sizeof(float));
            memset(to + size, 0, (size_t)(c->width - size) * sizeof(float));
            if (c->cosine != NULL && which < 2) {
                const float *cosine = c->cosine + row * half, *sine = c->sine + row * half;
                for (int64_t i = 0; i < half; i++) {
                    to[i] = from[i] * cosine[i] - from[half + i] * sine[i];
                    to[half + i] = from[half + i] * cosine[i] + from[i] * sine[i];
                }
            }
            for (int64_t i = 0; i < size && which == 0; i++)
                to[i] *= scale;
        }
}

static int64_t query_tasks(const Call *c)
{
    return (c->rows + QUERIES_A_TASK - 1) / QUERIES_A_TASK;
}

/* Attend with some queries of a head: c->normed becomes the weighted values. */
static void attend_some(void *work, int64_t task, float *scratch)
{
    const Call *c = work;
    const EncoderLayer *l = c->layer;
    int64_t tasks = query_tasks(c), frame = task / tasks / l->heads, head = task / tasks % l->heads;
    int64_t start = task % tasks * QUERIES_A_TASK, end = smaller(c->rows, start + QUERIES_A_TASK);
    const float *q = head_at(c, 0, frame, head), *k = head_at(c, 1, frame, head);
    const float *v = head_at(c, 2, frame, head);
    float *results = scratch + QUERIES_A_TASK * (c->rows + WIDEST);
    const float *queries[QUERIES_A_TASK] = {NULL};
    float *mixed[QUERIES_A_TASK] = {NULL};
    int64_t from[QUERIES_A_TASK] = {0}, to[QUERIES_A_TASK] = {0};
    for (int64_t r = start; r < end; r++) {
        queries[r - start] = q + r * c->width;
        mixed[r - start] = results + (r - start) * c->width;
        to[r - start] = c->seen[frame];
    }
    kernels->attend(mixed, queries, from, to, end - start, k, v, c->width, scratch);
    for (int64_t r = start; r < end; r++)
        memcpy(c->normed + (frame * c->rows + r) * row_stride(l->hidden) + head * l->head_dim,
               mixed[r - start], (size_t)l->head_dim * sizeof(float));
}

/* Compute a panel of the feed-forward's first half, activated. */
static void widen_panel(void *work, int64_t task, float *unused)
{
    const Call *c = work;
    const Matrix *w = &c->layer->fc1;
    int64_t stride = row_stride(w->out), columns = smaller(PANEL, w->out - task * PANEL);
    float *y = c->wide + task * PANEL;
    (void)unused;
    kernels->multiply(y, stride, c->normed, row_stride(w->into), c->frames * c->rows, w, task, 1,
                      0, NULL);
    for (int64_t r = 0; r < c->frames * c->rows; r++, y += stride)
        if (c->layer->tanh_gelu)
            kernels->gelu_tanh(y, y, columns);
        else
            kernels->gelu(y, y, columns);
}

/* Cut the arrays of a call from one block. Returns it, or NULL if allocation fails. */
static float *allocate(Call *c)
{
    const EncoderLayer *l = c->layer;
    int64_t rows = c->frames * c->rows;
    int64_t floats[] = {rows * row_stride(l->hidden), rows * 3 * l->hidden,
                        3 * rows * l->heads * c->width, rows * row_stride(l->fc1.out)};
    float **arrays[] = {&c->normed, &c->qkv, &c->heads, &c->wide};
    enum { ARRAYS = sizeof floats / sizeof *floats };
    int64_t total = 0;
    for (int i = 0; i < ARRAYS; i++)
        total += floats[i];
    float *block = malloc((size_t)total * sizeof(float)), *next = block;
    for (int i = 0; i < ARRAYS; next += floats[i++])
        *arrays[i] = next;
    return block;
}

int encoder_layer(const EncoderLayer *l, int64_t frames, int64_t rows, const int64_t *seen,
                  const float *cosine, const float *sine, float *x)
{
    int64_t all = frames * rows;
    int64_t width = (l->head_dim + WIDEST - 1) / WIDEST * WIDEST;
    Call c = {l, frames, rows, width, seen, cosine, sine, x, NULL, NULL, NULL, NULL};
    float *block = allocate(&c);
    if (block == NULL)
        return NO_MEMORY;
    Team *team = open_team(l->threads);
    int done = run_rows(team, norm_attention, &c, 4 * l->hidden) &&
               last_product(team, c.qkv, 3 * l->hidden, c.normed, all, &l->qkv, 0) &&
               run_rows(team, split_heads, &c, 3 * l->hidden) &&
               run_tasks(team, attend_some, &c, frames * l->heads * query_tasks(&c),
                         2 * all * rows * l->heads * width,
                         QUERIES_A_TASK * (rows + WIDEST + width)) &&
               last_product(team, x, l->hidden, c.normed, all, &l->out, 1) &&
               run_rows(team, norm_ffn, &c, 4 * l->hidden) &&
               run_tasks(team, widen_panel, &c, panels_of(l->fc1.out), all * l->hidden * l->fc1.out,
                         1) &&
               last_product(team, x, l->hidden, c.wide, all, &l->fc2, 1);
    close_team(team);
    free(block);
    return done ? DONE : NO_MEMORY;
}
