/* Decode steps (one row in each of several slots) and prompts of the thinker or the talker. Called by
 * steps.py only. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "kernels.h"
#include "product.h"

/* Rows of a prompt that pass all layers together: bounds a long prompt's memory. */
enum { BLOCK = 512 };

/* Buffers for the rows of a call. */
typedef struct {
    char *block;
    Memory memory;
    int64_t *slots, *at;  /* [rows] */
    float *cosine, *sine; /* [rows, head_dim / 2] */
} Call;

/* Allocate the memory of a call of `rows` rows. Returns 0 if allocation fails. */
static int begin(Call *call, const Stepper *p, int64_t rows)
{
    const Decoder *d = &p->decoder;
    int64_t half = d->head_dim / 2, size = memory_size(d, rows);
    int64_t floats = 2 * rows * half;
    call->block = malloc((size_t)size + (size_t)(2 * rows) * sizeof(int64_t) +
                         (size_t)floats * sizeof(float));
    if (call->block == NULL)
        return 0;
    cut_memory(&call->memory, call->block, d, rows);
    call->slots = (int64_t *)(call->block + size);
    call->at = call->slots + rows;
    call->cosine = (float *)(call->at + rows);
    call->sine = call->cosine + rows * half;
    return 1;
}

/* Fill a row of the rotary table for positions of time, height, width. */
static void rotary_row(const Call *call, const Stepper *p, int64_t row, const float *positions)
{
    int64_t half = p->decoder.head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float angle = positions[p->axis[i]] * p->frequencies[i];
        call->cosine[row * half + i] = cosf(angle);
        call->sine[row * half + i] = sinf(angle);
    }
}

int decode_step(const Stepper *p, int64_t rows, const int64_t *slots, const int64_t *lengths,
                const float *positions, const Table *table, const int64_t *ids, const float *added,
                float *logits, float *hidden)
{
    const Decoder *d = &p->decoder;
    int64_t width = d->hidden, stride = row_stride(width);
    Call call;
    for (int64_t r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= table->count)
            return NO_SUCH_ROW;
    if (!begin(&call, p, rows))
        return NO_MEMORY;
    float *x = call.memory.x, *normed = call.memory.normed;
    for (int64_t r = 0; r < rows; r++) {
        rotary_row(&call, p, r, (const float[3]){positions[r], positions[r], positions[r]});
        look_up(x + r * width, table, ids[r]);
        for (int64_t i = 0; i < width && added != NULL; i++)
            x[r * width + i] += added[slots[r] * width + i];
    }
    Rows all = {rows, slots, lengths, NULL, call.cosine, call.sine};
    Team *team = open_team(p->threads);
    int done = run_layers(team, d, &call.memory, &p->kv, &all, 0, NULL, NULL) &&
               norm_rows(team, normed, stride, x, rows, d->norm, width, d->norm_eps) &&
               product(team, logits, p->head.out, normed, stride, rows, &p->head, 0);
    close_team(team);
    for (int64_t r = 0; r < rows && done && hidden != NULL; r++)
        memcpy(hidden + slots[r] * width, normed + r * stride, (size_t)width * sizeof(float));
    free(call.block);
    return done ? DONE : NO_MEMORY;
}

int prefill(const Stepper *p, int64_t slot, int64_t start, int64_t rows, const float *positions,
            const Table *table, const int64_t *ids, int64_t named, const float *x,
            const Deepstack *deepstack, int64_t accept_layer, float *accepted, float *logits,
            float *hidden)
{
    const Decoder *d = &p->decoder;
    int64_t width = d->hidden, most = smaller(rows, BLOCK), seen = 0, failed = 0;
    for (int64_t r = 0; r < named; r++)
        if (ids[r] < 0 || ids[r] >= table->count)
            return NO_SUCH_ROW;
    int64_t *added = malloc((size_t)(deepstack->count + 1) * sizeof(int64_t));
    float *features = malloc((size_t)(deepstack->layers * smaller(deepstack->count, most) * width +
                                      1) * sizeof(float));
    Call call = {0};
    if (added == NULL || features == NULL || !begin(&call, p, most)) {
        free(added);
        free(features);
        return NO_MEMORY;
    }
    Team *team = open_team(p->threads);
    for (int64_t first = 0; first < rows && !failed; first += most) {
        int64_t count = smaller(most, rows - first), some = 0;
        for (int64_t r = 0; r < count; r++) {
            const float *at = positions + first + r;
            rotary_row(&call, p, r, (const float[3]){at[0], at[rows], at[2 * rows]});
            call.slots[r] = slot;
            call.at[r] = start + first + r;
        }
        int64_t looked_up = named <= first ? 0 : smaller(named - first, count);
        for (int64_t r = 0; r < looked_up; r++)
            look_up(call.memory.x + r * width, table, ids[first + r]);
        if (looked_up < count)
            memcpy(call.memory.x + looked_up * width, x + (first + looked_up - named) * width,
                   (size_t)((count - looked_up) * width) * sizeof(float));
        while (seen + some < deepstack->count && deepstack->rows[seen + some] < first + count)
            some++;
        for (int64_t i = 0; i < some; i++)
            added[i] = deepstack->rows[seen + i] - first;
        for (int64_t l = 0; some && l < deepstack->layers; l++)  // no features: a null pointer
            memcpy(features + l * some * width,
                   deepstack->features + (l * deepstack->count + seen) * width,
                   (size_t)(some * width) * sizeof(float));
        seen += some;
        Rows part = {count, call.slots, call.at, NULL, call.cosine, call.sine};
        Deepstack of_part = {deepstack->layers, some, added, features};
        failed = !run_layers(team, d, &call.memory, &p->kv, &part, accept_layer,
                             accepted == NULL ? NULL : accepted + first * width, &of_part);
        if (first + count == rows && logits != NULL)
            failed = failed ||
                     !norm_rows(team, hidden, width, call.memory.x + (count - 1) * width, 1,
                                d->norm, width, d->norm_eps) ||
                     !product(team, logits, p->head.out, hidden, width, 1, &p->head, 0);
    }
    close_team(team);
    free(call.block);
    free(features);
    free(added);
    return failed ? NO_MEMORY : DONE;
}

int multiply_rows(const Matrix *w, int64_t rows, const float *x, int64_t x_stride, float *y,
                  int64_t threads)
{
    Team *team = open_team(threads);
    int done = product(team, y, w->out, x, x_stride, rows, w, 0);
    close_team(team);
    return done ? DONE : NO_MEMORY;
}
