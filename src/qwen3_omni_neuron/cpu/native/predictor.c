/* One frame of the code predictor: model.code_predictor.CodePredictor.forward in one call. Called
 * by predictor.py only. The released checkpoint has 5 layers, hidden size 1024, 16 heads and 8 KV
 * heads of 128, ffn 3072, vocab 2048, 15 steps. */

#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "draw.h"
#include "kernels.h"
#include "product.h"

/* Buffers for a frame; one row per slot, and two at its first step. */
typedef struct {
    Memory memory;
    KvCache kv;                /* [layers, slots, kv_heads, steps + 1, head_dim] */
    int64_t *slots, *at, *ids; /* [2 slots] twice, [vocab] */
    float *cosine, *sine;      /* [2 slots, head_dim / 2] */
    float *logits;             /* [slots, vocab] */
    float *scores, *spare;     /* [vocab], [2 vocab] */
} Frame;

/* Allocate one block and cut all arrays from it. Returns 0 if allocation fails. */
static int allocate(Frame *f, char **block, const Predictor *p, int64_t slots)
{
    const Decoder *d = &p->decoder;
    int64_t half = d->head_dim / 2, positions = p->steps + 1, vocab = p->head.out;
    int64_t cache = d->layers * slots * d->kv_heads * positions * d->head_dim;
    size_t memory = (size_t)memory_size(d, 2 * slots);
    size_t ids = (size_t)(4 * slots + vocab) * sizeof(int64_t);
    size_t floats = (size_t)(2 * cache + 4 * slots * half + (slots + 3) * vocab);
    *block = malloc(memory + ids + floats * sizeof(float));
    if (*block == NULL)
        return 0;
    cut_memory(&f->memory, *block, d, 2 * slots);
    f->slots = (int64_t *)(*block + memory);
    f->at = f->slots + 2 * slots;
    f->ids = f->at + 2 * slots;
    float *keys = (float *)(*block + memory + ids), *values = keys + cache;
    f->kv = (KvCache){keys, values, slots, positions};
    f->cosine = values + cache;
    f->sine = f->cosine + 2 * slots * half;
    f->logits = f->sine + 2 * slots * half;
    f->scores = f->logits + slots * vocab;
    f->spare = f->scores + vocab;
    return 1;
}

/* Run the layers on `each` rows per slot, the last at `position`. Returns 0 if allocation fails.
 */
static int advance(Team *team, const Predictor *p, Frame *f, int64_t slots, int64_t each,
                   int64_t position)
{
    int64_t half = p->decoder.head_dim / 2;
    for (int64_t r = 0; r < slots * each; r++) {
        f->slots[r] = r / each;
        f->at[r] = position - each + 1 + r % each;
        memcpy(f->cosine + r * half, p->cosine + f->at[r] * half, (size_t)half * sizeof(float));
        memcpy(f->sine + r * half, p->sine + f->at[r] * half, (size_t)half * sizeof(float));
    }
    Rows rows = {slots * each, f->slots, f->at, NULL, f->cosine, f->sine};
    return run_layers(team, &p->decoder, &f->memory, &f->kv, &rows, 0, NULL, NULL);
}

/* Compute the logits f->logits of a step from the hidden states of f->memory [slots, hidden]. */
static int run_head(Team *team, const Predictor *p, Frame *f, int64_t slots, int64_t step)
{
    const Decoder *d = &p->decoder;
    Matrix head = matrix_at(&p->head, step);
    int64_t stride = row_stride(d->hidden);
    return norm_rows(team, f->memory.normed, stride, f->memory.x, slots, d->norm, d->hidden,
                     d->norm_eps) &&
           product(team, f->logits, head.out, f->memory.normed, stride, slots, &head, 0);
}

int predict_frame(const Predictor *p, int64_t slots, const int64_t *rows, const float *hidden,
                  const int64_t *code0, const float *noise, const float *top_p,
                  const int64_t *top_k, int64_t *codes, float *feedback, float *logits)
{
    int64_t width = p->decoder.hidden, groups = p->steps + 1, vocab = p->head.out;
    size_t row_bytes = (size_t)width * sizeof(float);
    char *block;
    Frame f;
    for (int64_t r = 0; r < slots; r++)
        if (code0[r] < 0 || code0[r] >= p->code0_embedding.count)
            return NO_SUCH_ROW;
    if (!allocate(&f, &block, p, slots))
        return NO_MEMORY;
    /* Position 0 is the talker's hidden state, position 1 the embedding of code 0, and so on: position
     * g has code g's logits, position g + 1 its row; the last code's row is only added to the feedback. */
    float *x = f.memory.x;
    for (int64_t r = 0; r < slots; r++) {
        codes[r * groups] = code0[r];
        float *sum = feedback + rows[r] * width;
        look_up(sum, &p->code0_embedding, code0[r]);
        memcpy(x + 2 * r * width, hidden + rows[r] * width, row_bytes);
        memcpy(x + (2 * r + 1) * width, sum, row_bytes);
    }
    Team *team = open_team(p->threads);
    int done = advance(team, p, &f, slots, 2, 1);
    for (int64_t r = 0; r < slots; r++)
        memcpy(x + r * width, x + (2 * r + 1) * width, row_bytes);
    for (int64_t step = 0; step < p->steps && done; step++) {
        done = (step == 0 || advance(team, p, &f, slots, 1, step + 1)) &&
               run_head(team, p, &f, slots, step);
        if (logits != NULL)
            memcpy(logits + step * slots * vocab, f.logits, (size_t)(slots * vocab) * sizeof(float));
        for (int64_t r = 0; r < slots && done; r++) {
            const float *of_slot = f.logits + r * vocab;
            int64_t code; /* NOT_FINITE does not affect other slots' frames */
            if (noise == NULL)
                code = likeliest(of_slot, NULL, vocab);
            else {
                int64_t count = remaining(f.ids, f.scores, f.spare, of_slot, NULL, vocab, 1,
                                          top_k[r], top_p[r], 0);
                code = race(f.ids, f.scores, count, noise + (r * p->steps + step) * vocab);
            }
            codes[r * groups + step + 1] = code;
            look_up(x + r * width, &p->embedding, step * vocab + larger(code, 0));
            for (int64_t i = 0; i < width; i++)
                feedback[rows[r] * width + i] += x[r * width + i];
        }
    }
    close_team(team);
    free(block);
    return done ? DONE : NO_MEMORY;
}
