/* The decoder layers of thinker, talker and code predictor (model.decoder.Decoder) and of code2wav. */

#ifndef DECODER_H
#define DECODER_H

#include <stdint.h>

#include "matrix.h"
#include "parallel.h"

/* Rows of a call: each row's slot, its position there, and the first position that it may see;
 * cosine and sine [rows, head_dim / 2] of its rope position. */
typedef struct {
    int64_t count;
    const int64_t *slots, *at, *from;
    const float *cosine, *sine;
} Rows;

/* Working memory of one call; see cut_memory. Strides are row_stride of the width. */
typedef struct {
    float *x;      /* [rows, hidden], dense */
    float *normed; /* [rows, hidden] */
    float *qkv;    /* [rows, (heads + 2 kv_heads) * head_dim], dense */
    float *mixed;  /* [rows, heads * head_dim] */
    float *router; /* [rows, experts]: the chosen ones' weights, 0 for the others */
    float *gathered, *gated; /* [rows * chosen or rows, hidden], [.., the larger ffn] */
    int64_t *order;          /* [rows * chosen]: rows by expert */
    int64_t *first;          /* [experts + 1]: where each expert's rows begin in order */
    int64_t *used;           /* [experts]: experts with rows, ascending */
    int64_t *tiles;          /* [rows + 1]: first row of each group of rows that attend together */
} Memory;

/* Return the bytes of the arrays of `rows` rows; cut the arrays from a block of that size. */
int64_t memory_size(const Decoder *d, int64_t rows);
void cut_memory(Memory *cut, char *block, const Decoder *d, int64_t rows);

/* Run the layers on m->x [rows, hidden], in place, without the final norm, and write keys and values
 * to the KV cache; a row attends to its slot's positions up to its own. accepted [rows, hidden]:
 * receives the output of the first accept_layer layers, before deepstack; may be NULL, and so may
 * deepstack. Returns 0 if allocation fails. */
int run_layers(Team *team, const Decoder *d, const Memory *m, const KvCache *kv, const Rows *rows,
               int64_t accept_layer, float *accepted, const Deepstack *deepstack);

/* y = norm(x) for rows. y has its own stride, x is dense. */
int norm_rows(Team *team, float *y, int64_t y_stride, const float *x, int64_t rows,
              const float *weight, int64_t width, float eps);

#endif
