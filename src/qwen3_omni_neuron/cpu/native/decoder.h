/* The decoder layers of thinker, talker and code predictor: model.decoder.Decoder. */

#ifndef DECODER_H
#define DECODER_H

#include <stdint.h>

/* NULL where a layer has none: router and shared_* of dense layers, shared_* of the thinker. */
typedef struct {
    const float *attention_norm;  /* [hidden] */
    const float *qkv;             /* [(heads + 2 kv_heads) * head_dim, hidden] */
    const float *qk_norm;         /* [heads + kv_heads, head_dim] */
    const float *out;             /* [hidden, heads * head_dim] */
    const float *ffn_norm;        /* [hidden] */
    const float *gate_up;         /* [experts, 2 ffn, hidden], gate first; dense: one of it */
    const float *down;            /* [experts, hidden, ffn]; dense: one of it */
    const float *router;          /* [experts, hidden] */
    const float *shared_gate_up;  /* [2 shared_ffn, hidden], gate first */
    const float *shared_down;     /* [hidden, shared_ffn] */
    const float *shared_gate;     /* [1, hidden] */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn;
    int64_t experts, chosen, shared_ffn; /* experts: 0 where layers are dense */
    int32_t normalized;                  /* the chosen experts' weights add up to 1 */
    float norm_eps;
    const Layer *layer; /* [layers] */
    const float *norm;  /* [hidden] */
} Decoder;

/* A KV cache. keys and values: [layers, slots, kv_heads, positions, head_dim]. */
typedef struct {
    float *keys, *values;
    int64_t slots, positions;
} KvCache;

/* Working memory of one call, for all its rows. */
typedef struct {
    float *x, *normed, *qkv, *mixed, *gate_up, *gated;
    float *router;   /* [rows, experts]: the chosen ones' weights, 0 for the others */
    float *gathered; /* [rows, hidden]: the rows that chose one expert, then its output */
    float *scratch;  /* [positions] */
    float **to;      /* [rows] */
} Rows;

/* Size in bytes of the arrays of `Rows`, for a cache with so many positions a slot; and the arrays,
 * cut from a block of that size. */
int64_t rows_size(const Decoder *d, int64_t rows, int64_t positions);
void cut_rows(Rows *cut, char *block, const Decoder *d, int64_t rows, int64_t positions);

/* Run the layers on rows, and write their keys and values to the KV cache. s->x: [rows, hidden],
 * in and out, without the final norm. slots, at [rows]: each row's slot in the cache and its
 * position there; a row attends to the positions of its slot up to its own. cosine, sine [rows,
 * head_dim / 2]. accepted [rows, hidden]: receives the output of the first accept_layer layers;
 * or NULL. */
void decode_rows(const Decoder *d, const Rows *s, const KvCache *kv, int64_t rows,
                 const int64_t *slots, const int64_t *at, const float *cosine, const float *sine,
                 int64_t accept_layer, float *accepted);

#endif
