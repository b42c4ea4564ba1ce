/* See decoder.h. */

#include "decoder.h"

#include <string.h>

#include "feed_forward.h"
#include "kernels.h"
#include "product.h"

/* ---- memory ---- */

/* Size in bytes of each array of `Memory`, in its order. */
enum { ARRAYS = 11 };
static void array_sizes(int64_t *sizes, const Decoder *d, int64_t rows)
{
    int64_t runs = d->experts ? rows * d->chosen : rows; /* pairs of expert and row */
    int64_t floats[7] = {
        rows * d->hidden,
        rows * row_stride(d->hidden),
        rows * (d->heads + 2 * d->kv_heads) * d->head_dim,
        rows * row_stride(d->heads * d->head_dim),
        rows * d->experts,
        d->experts ? runs * row_stride(d->hidden) : 0,
        larger(runs * row_stride(d->ffn), rows * row_stride(d->shared_ffn)),
    };
    int64_t ids[4] = {d->experts ? runs : 0, d->experts + 1, d->experts, rows + 1};
    for (int i = 0; i < 7; i++)
        sizes[i] = (floats[i] + 15) / 16 * 16 * (int64_t)sizeof(float);
    for (int i = 0; i < 4; i++)
        sizes[7 + i] = ids[i] * (int64_t)sizeof(int64_t);
}

int64_t memory_size(const Decoder *d, int64_t rows)
{
    int64_t sizes[ARRAYS], total = 0;
    array_sizes(sizes, d, rows);
    for (int i = 0; i < ARRAYS; i++)
        total += sizes[i];
    return total;
}

void cut_memory(Memory *cut, char *block, const Decoder *d, int64_t rows)
{
    float **floats[7] = {&cut->x,      &cut->normed,   &cut->qkv,  &cut->mixed,
                         &cut->router, &cut->gathered, &cut->gated};
    int64_t **ids[4] = {&cut->order, &cut->first, &cut->used, &cut->tiles}, sizes[ARRAYS];
    array_sizes(sizes, d, rows);
    for (int i = 0; i < 7; block += sizes[i++])
        *floats[i] = (float *)block;
    for (int i = 0; i < 4; block += sizes[7 + i++])
        *ids[i] = (int64_t *)block;
}

/* ---- norms ---- */

typedef struct {
    float *y;
    const float *x, *weight;
    int64_t y_stride, rows, width;
    float eps;
} Norm;

enum { ROWS_A_TASK = 8, ROWS_A_TILE = 4 };

static void norm_some(void *work, int64_t task, float *unused)
{
    const Norm *n = work;
    int64_t end = smaller(n->rows, (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        kernels->rms_norm(n->y + r * n->y_stride, n->x + r * n->width, n->weight, n->width, n->eps);
}

int norm_rows(Team *team, float *y, int64_t y_stride, const float *x, int64_t rows,
              const float *weight, int64_t width, float eps)
{
    Norm n = {y, x, weight, y_stride, rows, width, eps};
    return run_tasks(team, norm_some, &n, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, rows * width, 1);
}

/* ---- attention ---- */

typedef struct {
    const Decoder *d;
    const Layer *layer;
    const Memory *m;
    const KvCache *kv;
    const Rows *rows;
    int64_t number; /* of the layer */
} Attention;

/* Return where the keys and values of a row's KV head begin. */
static int64_t head_start(const Attention *a, int64_t row, int64_t head)
{
    int64_t slot = a->number * a->kv->slots + a->rows->slots[row];
    return (slot * a->d->kv_heads + head) * a->kv->positions * a->d->head_dim;
}

/* Apply rotary embedding to one head [2 half] in place: elements i and half + i are a pair. */
static void rotate(float *x, const float *cosine, const float *sine, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cosine[i] - second * sine[i];
        x[half + i] = second * cosine[i] + first * sine[i];
    }
}

/* Norm one row's queries and keys, apply rotary embedding to them, and write its keys and values to
 * the KV cache, at its position of its slot. */
static void write_kv_row(const Attention *a, int64_t row)
{
    const Decoder *d = a->d;
    int64_t width = d->head_dim, half = width / 2, qk_heads = d->heads + d->kv_heads;
    float *q = a->m->qkv + row * (qk_heads + d->kv_heads) * width;
    const float *k = q + d->heads * width, *v = q + qk_heads * width;
    for (int64_t h = 0; h < qk_heads; h++) {
        float *head = q + h * width;
        if (a->layer->qk_norm != NULL)
            kernels->rms_norm(head, head, a->layer->qk_norm + h * width, width, d->norm_eps);
        rotate(head, a->rows->cosine + row * half, a->rows->sine + row * half, half);
    }
    for (int64_t h = 0; h < d->kv_heads; h++) {
        int64_t to = head_start(a, row, h) + a->rows->at[row] * width;
        memcpy(a->kv->keys + to, k + h * width, (size_t)width * sizeof(float));
        memcpy(a->kv->values + to, v + h * width, (size_t)width * sizeof(float));
    }
}

static void write_kv_rows(void *work, int64_t task, float *unused)
{
    const Attention *a = work;
    int64_t end = smaller(a->rows->count, (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t r = task * ROWS_A_TASK; r < end; r++)
        write_kv_row(a, r);
}

/* Attend with up to QUERIES queries over one KV head. heads: the queries'. */
static void attend_together(const Attention *a, int64_t kv_head, const int64_t *row,
                            const int64_t *head, int64_t count, float *scratch)
{
    const Decoder *d = a->d;
    int64_t width = d->head_dim, start = head_start(a, row[0], kv_head);
    int64_t qkv_width = (d->heads + 2 * d->kv_heads) * width;
    const float *queries[QUERIES];
    float *mixed[QUERIES];
    int64_t from[QUERIES], to[QUERIES];
    for (int64_t i = 0; i < count; i++) {
        queries[i] = a->m->qkv + row[i] * qkv_width + head[i] * width;
        mixed[i] = a->m->mixed + row[i] * row_stride(d->heads * width) + head[i] * width;
        from[i] = a->rows->from == NULL ? 0 : a->rows->from[row[i]];
        to[i] = a->rows->at[row[i]] + 1;
    }
    kernels->attend(mixed, queries, from, to, count, a->kv->keys + start, a->kv->values + start,
                    width, scratch);
}

/* Attend with a tile's rows over one KV head: with all heads that share it, so that a key is read once. */
static void attend_tile(void *work, int64_t task, float *scratch)
{
    const Attention *a = work;
    int64_t tile = task / a->d->kv_heads, kv_head = task % a->d->kv_heads;
    int64_t group = a->d->heads / a->d->kv_heads, first_head = kv_head * group;
    int64_t first = a->m->tiles[tile], rows = a->m->tiles[tile + 1] - first, count = 0;
    int64_t row[QUERIES], head[QUERIES];
    for (int64_t h = 0; h < group; h++) {
        for (int64_t i = 0; i < rows; i++)
            row[count] = first + i, head[count++] = first_head + h;
        if (count + rows > QUERIES || h + 1 == group) {
            attend_together(a, kv_head, row, head, count, scratch);
            count = 0;
        }
    }
}

/* Group consecutive rows of one slot. Returns the number of groups; *longest becomes the most positions
 * that a row sees, *pairs the number of pairs of rows and positions. */
static int64_t make_tiles(int64_t *tiles, const Rows *rows, int64_t *longest, int64_t *pairs)
{
    int64_t count = 0;
    *longest = *pairs = 0;
    for (int64_t r = 0; r < rows->count; r++) {
        if (r == 0 || rows->slots[r] != rows->slots[r - 1] || r - tiles[count - 1] == ROWS_A_TILE)
            tiles[count++] = r;
        *longest = larger(*longest, rows->at[r] + 1);
        *pairs += rows->at[r] + 1;
    }
    tiles[count] = rows->count;
    return count;
}

/* m->x += attention of m->x. */
static int add_attention(Team *team, const Attention *a)
{
    const Decoder *d = a->d;
    const Memory *m = a->m;
    int64_t rows = a->rows->count, width = d->heads * d->head_dim, longest, pairs;
    int64_t qkv_width = width + 2 * d->kv_heads * d->head_dim;
    int64_t tiles = make_tiles(m->tiles, a->rows, &longest, &pairs);
    return norm_rows(team, m->normed, row_stride(d->hidden), m->x, rows, a->layer->attention_norm,
                     d->hidden, d->norm_eps) &&
           last_product(team, m->qkv, qkv_width, m->normed, rows, &a->layer->qkv, 0) &&
           run_tasks(team, write_kv_rows, (void *)a, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK,
                     4 * rows * qkv_width, 1) &&
           run_tasks(team, attend_tile, (void *)a, tiles * d->kv_heads,
                     2 * pairs * d->heads * d->head_dim, QUERIES * (longest + 16)) &&
           last_product(team, m->x, d->hidden, m->mixed, rows, &a->layer->out, 1);
}

/* ---- layers ---- */

static void add_deepstack(const Deepstack *deepstack, int64_t layer, float *x, int64_t hidden)
{
    const float *features = deepstack->features + layer * deepstack->count * hidden;
    for (int64_t i = 0; i < deepstack->count; i++)
        for (int64_t h = 0; h < hidden; h++)
            x[deepstack->rows[i] * hidden + h] += features[i * hidden + h];
}

int run_layers(Team *team, const Decoder *d, const Memory *m, const KvCache *kv, const Rows *rows,
               int64_t accept_layer, float *accepted, const Deepstack *deepstack)
{
    size_t bytes = (size_t)(rows->count * d->hidden) * sizeof(float);
    if (accepted != NULL && accept_layer == 0)
        memcpy(accepted, m->x, bytes);
    for (int64_t l = 0; l < d->layers; l++) {
        const Layer *layer = d->layer + l;
        Attention attention = {d, layer, m, kv, rows, l};
        if (!add_attention(team, &attention) ||
            !norm_rows(team, m->normed, row_stride(d->hidden), m->x, rows->count, layer->ffn_norm,
                       d->hidden, d->norm_eps) ||
            !add_feed_forward(team, d, layer, m, rows->count))
            return 0;
        if (accepted != NULL && l + 1 == accept_layer)
            memcpy(accepted, m->x, bytes);
        if (deepstack != NULL && l < deepstack->layers)
            add_deepstack(deepstack, l, m->x, d->hidden);
    }
    return 1;
}
