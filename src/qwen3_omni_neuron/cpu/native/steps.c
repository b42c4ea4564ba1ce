/* Decode steps (one row in each of several slots) and short prompts of the thinker or the talker.
 * Called by steps.py only. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "kernels.h"
#include "layout.h"
#include "status.h"

typedef struct {
    Decoder decoder;
    KvCache kv;
    int64_t vocab;
    const float *head;        /* [vocab, hidden] */
    const float *frequencies; /* [head_dim / 2] */
    const int64_t *axis;      /* [head_dim / 2]: 0 time, 1 height, 2 width: its position */
} Stepper;

const LayoutEntry steps_layout[] = {
    SIZE(Stepper),
    OFFSET(Stepper, decoder),
    OFFSET(Stepper, kv),
    OFFSET(Stepper, vocab),
    OFFSET(Stepper, head),
    OFFSET(Stepper, frequencies),
    OFFSET(Stepper, axis),
    END_OF_LAYOUT,
};

/* What the rows of a call work in. */
typedef struct {
    char *block;
    Rows rows;
    float *cosine, *sine; /* [rows, head_dim / 2] */
} Call;

/* Allocate a call's memory, and fill in its rows and rotary tables. positions: [3, rows] if axes,
 * else [rows], the same for all axes. Returns 0 where there is no memory. */
static int begin(Call *call, const Stepper *p, int64_t rows, const float *x, const float *positions,
                 int axes)
{
    const Decoder *d = &p->decoder;
    int64_t half = d->head_dim / 2, size = rows_size(d, rows, p->kv.positions);
    call->block = malloc((size_t)size + (size_t)(2 * rows * half) * sizeof(float));
    if (call->block == NULL)
        return 0;
    cut_rows(&call->rows, call->block, d, rows, p->kv.positions);
    call->cosine = (float *)(call->block + size);
    call->sine = call->cosine + rows * half;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < half; i++) {
            float angle = positions[axes ? p->axis[i] * rows + r : r] * p->frequencies[i];
            call->cosine[r * half + i] = cosf(angle);
            call->sine[r * half + i] = sinf(angle);
        }
    memcpy(call->rows.x, x, (size_t)(rows * d->hidden) * sizeof(float));
    return 1;
}

/* Compute the rows' normed hidden states and logits. */
static void finish(const Stepper *p, int64_t rows, const float *x, float *hidden, float *logits)
{
    const Decoder *d = &p->decoder;
    rms_norm(hidden, x, d->norm, rows, d->hidden, d->norm_eps);
    product(logits, hidden, p->head, rows, d->hidden, p->vocab, 0);
}

/* Run a decode step. slots, lengths [rows]: each row's slot, and how many of its positions are
 * filled. positions [rows]: each row's rope position. x [rows, hidden]. Writes logits [rows, vocab]
 * and hidden [rows, hidden], which is normed. Several threads may call it for different slots. */
int decode_step(const Stepper *p, int64_t rows, const int64_t *slots, const int64_t *lengths,
                const float *positions, const float *x, float *logits, float *hidden)
{
    Call call;
    if (!begin(&call, p, rows, x, positions, 0))
        return NO_MEMORY;
    decode_rows(&p->decoder, &call.rows, &p->kv, rows, slots, lengths, call.cosine, call.sine, 0,
                NULL);
    finish(p, rows, call.rows.x, hidden, logits);
    free(call.block);
    return DONE;
}

/* Run a prompt from position 0 of a slot. slots [rows]: that slot, for every row; places [rows]: 0,
 * 1, 2 ...; positions [3, rows]. x [rows, hidden]. Writes the last row's logits [vocab] and hidden
 * [hidden], and accepted [rows, hidden]: see decode_rows. */
int prefill(const Stepper *p, int64_t rows, const int64_t *slots, const int64_t *places,
            const float *positions, const float *x, int64_t accept_layer, float *accepted,
            float *logits, float *hidden)
{
    Call call;
    if (!begin(&call, p, rows, x, positions, 1))
        return NO_MEMORY;
    decode_rows(&p->decoder, &call.rows, &p->kv, rows, slots, places, call.cosine, call.sine,
                accept_layer, accepted);
    finish(p, 1, call.rows.x + (rows - 1) * p->decoder.hidden, hidden, logits);
    free(call.block);
    return DONE;
}
