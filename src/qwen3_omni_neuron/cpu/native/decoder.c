/* See decoder.h. */

#include "decoder.h"

#include <math.h>
#include <string.h>

#include "kernels.h"
#include "layout.h"

const LayoutEntry decoder_layout[] = {
    SIZE(Layer),
    OFFSET(Layer, attention_norm),
    OFFSET(Layer, qkv),
    OFFSET(Layer, qk_norm),
    OFFSET(Layer, out),
    OFFSET(Layer, ffn_norm),
    OFFSET(Layer, gate_up),
    OFFSET(Layer, down),
    OFFSET(Layer, router),
    OFFSET(Layer, shared_gate_up),
    OFFSET(Layer, shared_down),
    OFFSET(Layer, shared_gate),
    SIZE(Decoder),
    OFFSET(Decoder, layers),
    OFFSET(Decoder, hidden),
    OFFSET(Decoder, heads),
    OFFSET(Decoder, kv_heads),
    OFFSET(Decoder, head_dim),
    OFFSET(Decoder, ffn),
    OFFSET(Decoder, experts),
    OFFSET(Decoder, chosen),
    OFFSET(Decoder, shared_ffn),
    OFFSET(Decoder, normalized),
    OFFSET(Decoder, norm_eps),
    OFFSET(Decoder, layer),
    OFFSET(Decoder, norm),
    SIZE(KvCache),
    OFFSET(KvCache, keys),
    OFFSET(KvCache, values),
    OFFSET(KvCache, slots),
    OFFSET(KvCache, positions),
    END_OF_LAYOUT,
};

/* Floats of each array of `Rows`, in its order. */
enum { ARRAYS = 9 };
static void array_sizes(int64_t *sizes, const Decoder *d, int64_t rows, int64_t positions)
{
    int64_t ffn = larger(d->ffn, d->shared_ffn);
    sizes[0] = rows * d->hidden;
    sizes[1] = rows * d->hidden;
    sizes[2] = rows * (d->heads + 2 * d->kv_heads) * d->head_dim;
    sizes[3] = rows * d->heads * d->head_dim;
    sizes[4] = rows * 2 * ffn;
    sizes[5] = rows * ffn;
    sizes[6] = rows * d->experts;
    sizes[7] = rows * d->hidden;
    sizes[8] = positions;
}

int64_t rows_size(const Decoder *d, int64_t rows, int64_t positions)
{
    int64_t sizes[ARRAYS], total = 0;
    array_sizes(sizes, d, rows, positions);
    for (int i = 0; i < ARRAYS; i++)
        total += sizes[i];
    return rows * (int64_t)sizeof(float *) + total * (int64_t)sizeof(float);
}

void cut_rows(Rows *cut, char *block, const Decoder *d, int64_t rows, int64_t positions)
{
    float **arrays[ARRAYS] = {&cut->x,     &cut->normed, &cut->qkv,      &cut->mixed, &cut->gate_up,
                              &cut->gated, &cut->router, &cut->gathered, &cut->scratch};
    int64_t sizes[ARRAYS];
    array_sizes(sizes, d, rows, positions);
    cut->to = (float **)block;
    float *next = (float *)(block + rows * (int64_t)sizeof(float *));
    for (int i = 0; i < ARRAYS; next += sizes[i++])
        *arrays[i] = next;
}

/* Norm one row's queries and keys, apply rotary embedding to them, and write its keys and values to
 * the KV cache, at position `at` of its slot. first_head: index of the slot's first KV head. */
static void write_kv_row(const Decoder *d, const Layer *layer, const Rows *s, const KvCache *kv,
                         int64_t first_head, int64_t row, int64_t at, const float *cosine,
                         const float *sine)
{
    int64_t width = d->head_dim, qk_heads = d->heads + d->kv_heads;
    float *q = s->qkv + row * (qk_heads + d->kv_heads) * width;
    const float *k = q + d->heads * width, *v = q + qk_heads * width;
    for (int64_t h = 0; h < qk_heads; h++) {
        rms_norm(q + h * width, q + h * width, layer->qk_norm + h * width, 1, width, d->norm_eps);
        rotate(q + h * width, cosine, sine, width / 2);
    }
    for (int64_t h = 0; h < d->kv_heads; h++) {
        int64_t to = ((first_head + h) * kv->positions + at) * width;
        memcpy(kv->keys + to, k + h * width, (size_t)width * sizeof(float));
        memcpy(kv->values + to, v + h * width, (size_t)width * sizeof(float));
    }
}

/* Write the attention output of one row to s->mixed: over its slot, up to its own position. */
static void attend_slot(const Decoder *d, const Rows *s, const KvCache *kv, int64_t first_head,
                        int64_t row, int64_t at)
{
    int64_t width = d->head_dim, group = d->heads / d->kv_heads;
    const float *q = s->qkv + row * (d->heads + 2 * d->kv_heads) * width;
    float *mixed = s->mixed + row * d->heads * width;
    for (int64_t h = 0; h < d->kv_heads; h++) { /* 16 heads, 8 kv heads: 2 and 3 read kv head 1 */
        int64_t start = (first_head + h) * kv->positions * width;
        attend(mixed + h * group * width, q + h * group * width, kv->keys + start,
               kv->values + start, group, at + 1, width, s->scratch);
    }
}

/* Replace one row's router logits by weights, 0 for all but the `chosen` largest. */
static void choose(const Decoder *d, float *router)
{
    int64_t experts = d->experts;
    float largest = -INFINITY, all = 0, sum = 0;
    for (int64_t e = 0; e < experts; e++)
        largest = router[e] > largest ? router[e] : largest;
    for (int64_t e = 0; e < experts; e++)
        all += router[e] = exponential(router[e] - largest);
    for (int64_t n = 0; n < d->chosen; n++) { /* the sign marks a chosen one */
        int64_t best = 0;
        for (int64_t e = 1; e < experts; e++)
            if (router[e] > router[best])
                best = e;
        sum += router[best];
        router[best] = -router[best];
    }
    float total = d->normalized ? sum : all;
    for (int64_t e = 0; e < experts; e++)
        router[e] = router[e] < 0 ? -router[e] / total : 0;
}

/* Add the shared expert's output, scaled by its sigmoid gate, to s->x. */
static void add_shared(const Decoder *d, const Layer *layer, const Rows *s, int64_t rows)
{
    int64_t ffn = d->shared_ffn;
    product(s->gate_up, s->normed, layer->shared_gate_up, rows, d->hidden, 2 * ffn, 0);
    for (int64_t r = 0; r < rows; r++) {
        float gate_logit;
        product(&gate_logit, s->normed + r * d->hidden, layer->shared_gate, 1, d->hidden, 1, 0);
        gate(s->gated + r * ffn, s->gate_up + r * 2 * ffn, ffn,
             1.0f / (1.0f + exponential(-gate_logit)));
    }
    product(s->x, s->gated, layer->shared_down, rows, ffn, d->hidden, 1);
}

/* Add the routed experts' output to s->x: each expert runs once, on the rows that chose it. */
static void add_experts(const Decoder *d, const Layer *layer, const Rows *s, int64_t rows)
{
    int64_t hidden = d->hidden, ffn = d->ffn;
    product(s->router, s->normed, layer->router, rows, hidden, d->experts, 0);
    for (int64_t r = 0; r < rows; r++)
        choose(d, s->router + r * d->experts);
    for (int64_t e = 0; e < d->experts; e++) {
        int64_t count = 0;
        for (int64_t r = 0; r < rows; r++)
            if (s->router[r * d->experts + e] > 0) {
                memcpy(s->gathered + count * hidden, s->normed + r * hidden,
                       (size_t)hidden * sizeof(float));
                s->to[count++] = s->x + r * hidden;
            }
        if (count == 0)
            continue;
        product(s->gate_up, s->gathered, layer->gate_up + e * 2 * ffn * hidden, count, hidden,
                2 * ffn, 0);
        for (int64_t i = 0; i < count; i++) {
            int64_t row = (s->to[i] - s->x) / hidden;
            gate(s->gated + i * ffn, s->gate_up + i * 2 * ffn, ffn,
                 s->router[row * d->experts + e]);
        }
        product(s->gathered, s->gated, layer->down + e * hidden * ffn, count, ffn, hidden, 0);
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < hidden; h++)
                s->to[i][h] += s->gathered[i * hidden + h];
    }
}

/* Add the output of a dense layer's feed-forward to s->x. */
static void add_dense(const Decoder *d, const Layer *layer, const Rows *s, int64_t rows)
{
    product(s->gate_up, s->normed, layer->gate_up, rows, d->hidden, 2 * d->ffn, 0);
    for (int64_t r = 0; r < rows; r++)
        gate(s->gated + r * d->ffn, s->gate_up + r * 2 * d->ffn, d->ffn, 1.0f);
    product(s->x, s->gated, layer->down, rows, d->ffn, d->hidden, 1);
}

void decode_rows(const Decoder *d, const Rows *s, const KvCache *kv, int64_t rows,
                 const int64_t *slots, const int64_t *at, const float *cosine, const float *sine,
                 int64_t accept_layer, float *accepted)
{
    int64_t hidden = d->hidden, heads_width = d->heads * d->head_dim, half = d->head_dim / 2;
    int64_t qkv_width = heads_width + 2 * d->kv_heads * d->head_dim;
    for (int64_t l = 0; l < d->layers; l++) {
        const Layer *layer = d->layer + l;
        if (accepted != NULL && l == accept_layer)
            memcpy(accepted, s->x, (size_t)(rows * hidden) * sizeof(float));
        rms_norm(s->normed, s->x, layer->attention_norm, rows, hidden, d->norm_eps);
        product(s->qkv, s->normed, layer->qkv, rows, hidden, qkv_width, 0);
        for (int64_t r = 0; r < rows; r++) {
            int64_t first_head = (l * kv->slots + slots[r]) * d->kv_heads;
            write_kv_row(d, layer, s, kv, first_head, r, at[r], cosine + r * half,
                         sine + r * half);
            attend_slot(d, s, kv, first_head, r, at[r]);
        }
        product(s->x, s->mixed, layer->out, rows, heads_width, hidden, 1);
        rms_norm(s->normed, s->x, layer->ffn_norm, rows, hidden, d->norm_eps);
        if (layer->router == 0)
            add_dense(d, layer, s, rows);
        else {
            if (layer->shared_gate != 0)
                add_shared(d, layer, s, rows);
            add_experts(d, layer, s, rows);
        }
    }
    if (accepted != NULL && accept_layer == d->layers)
        memcpy(accepted, s->x, (size_t)(rows * hidden) * sizeof(float));
}
