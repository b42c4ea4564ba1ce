/* One frame of the code predictor: model.code_predictor.CodePredictor.forward in one call. Called
 * by predictor.py only. The released checkpoint has 5 layers, hidden size 1024, 16 heads and 8 KV
 * heads of 128, ffn 3072, vocab 2048, 15 steps. */

#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "draw.h"
#include "kernels.h"
#include "layout.h"
#include "status.h"

typedef struct {
    Decoder decoder;
    int64_t steps, vocab, code0_vocab;
    const float *cosine, *sine;   /* [steps + 1, head_dim / 2] */
    const float *code0_embedding; /* [code0_vocab, hidden] */
    const float *embedding;       /* [steps, vocab, hidden] */
    const float *head;            /* [steps, vocab, hidden] */
} Predictor;

const LayoutEntry predictor_layout[] = {
    SIZE(Predictor),
    OFFSET(Predictor, decoder),
    OFFSET(Predictor, steps),
    OFFSET(Predictor, vocab),
    OFFSET(Predictor, code0_vocab),
    OFFSET(Predictor, cosine),
    OFFSET(Predictor, sine),
    OFFSET(Predictor, code0_embedding),
    OFFSET(Predictor, embedding),
    OFFSET(Predictor, head),
    END_OF_LAYOUT,
};

/* What a frame needs; rows are one a slot, and two at its first step. */
typedef struct {
    Rows rows;
    KvCache kv;          /* [layers, slots, kv_heads, steps + 1, head_dim] */
    int64_t *slots, *at;  /* [2 slots] */
    float *cosine, *sine; /* [2 slots, head_dim / 2] */
    float *logits;        /* [slots, vocab] */
    Drawing drawing;
} Frame;

/* Allocate one block and cut all arrays from it. Returns 0 where there is no memory. */
static int allocate(Frame *f, char **block, const Predictor *p, int64_t slots)
{
    const Decoder *d = &p->decoder;
    int64_t half = d->head_dim / 2, positions = p->steps + 1;
    int64_t cache = d->layers * slots * d->kv_heads * positions * d->head_dim;
    size_t rows = (size_t)rows_size(d, 2 * slots, positions);
    size_t ids = (size_t)(4 * slots) * sizeof(int64_t);
    size_t kept = (size_t)(2 * p->vocab) * sizeof(Candidate);
    size_t floats = (size_t)(2 * cache + 4 * slots * half + (slots + 1) * p->vocab);
    *block = malloc(ids + kept + rows + floats * sizeof(float));
    if (*block == NULL)
        return 0;
    f->slots = (int64_t *)*block;
    f->at = f->slots + 2 * slots;
    f->drawing.kept = (Candidate *)(*block + ids);
    f->drawing.ordered = f->drawing.kept + p->vocab;
    cut_rows(&f->rows, *block + ids + kept, d, 2 * slots, positions);
    f->kv.keys = (float *)(*block + ids + kept + rows);
    f->kv.values = f->kv.keys + cache;
    f->kv.slots = slots;
    f->kv.positions = positions;
    f->cosine = f->kv.values + cache;
    f->sine = f->cosine + 2 * slots * half;
    f->logits = f->sine + 2 * slots * half;
    f->drawing.probabilities = f->logits + slots * p->vocab;
    return 1;
}

/* Run the layers on `each` rows a slot, the last of which is at `position`. */
static void advance(const Predictor *p, Frame *f, int64_t slots, int64_t each, int64_t position)
{
    int64_t half = p->decoder.head_dim / 2;
    for (int64_t r = 0; r < slots * each; r++) {
        f->slots[r] = r / each;
        f->at[r] = position - each + 1 + r % each;
        memcpy(f->cosine + r * half, p->cosine + f->at[r] * half, (size_t)half * sizeof(float));
        memcpy(f->sine + r * half, p->sine + f->at[r] * half, (size_t)half * sizeof(float));
    }
    decode_rows(&p->decoder, &f->rows, &f->kv, slots * each, f->slots, f->at, f->cosine,
                f->sine, 0, NULL);
}

/* Predict a frame. hidden [slots, hidden]; code0 [slots]; uniforms [slots, steps] and top_p
 * [slots], both NULL for greedy. Writes codes [slots, steps + 1], feedback [slots, hidden] and,
 * unless NULL, logits [steps, slots, vocab]. Keeps no state between calls: several threads may call
 * it. */
int predict_frame(const Predictor *p, int64_t slots, const float *hidden, const int64_t *code0,
                  const float *uniforms, const float *top_p, int64_t top_k, int64_t *codes,
                  float *feedback, float *logits)
{
    const Decoder *d = &p->decoder;
    int64_t width = d->hidden, groups = p->steps + 1;
    size_t row_bytes = (size_t)width * sizeof(float);
    char *block;
    Frame f;
    for (int64_t r = 0; r < slots; r++)
        if (code0[r] < 0 || code0[r] >= p->code0_vocab)
            return NO_SUCH_CODE;
    if (!allocate(&f, &block, p, slots))
        return NO_MEMORY;
    /* Position 0 is the talker's hidden state, position 1 the embedding of code 0, and so on: the
     * logits at position g are those of code g. The row of that code is position g + 1; the row of
     * the last code is only added to the feedback. */
    for (int64_t r = 0; r < slots; r++) {
        const float *row = p->code0_embedding + code0[r] * width;
        codes[r * groups] = code0[r];
        memcpy(feedback + r * width, row, row_bytes);
        memcpy(f.rows.x + 2 * r * width, hidden + r * width, row_bytes);
        memcpy(f.rows.x + (2 * r + 1) * width, row, row_bytes);
    }
    advance(p, &f, slots, 2, 1);
    for (int64_t r = 0; r < slots; r++)
        memcpy(f.rows.x + r * width, f.rows.x + (2 * r + 1) * width, row_bytes);
    for (int64_t step = 0; step < p->steps; step++) {
        if (step > 0)
            advance(p, &f, slots, 1, step + 1);
        rms_norm(f.rows.normed, f.rows.x, d->norm, slots, width, d->norm_eps);
        product(f.logits, f.rows.normed, p->head + step * p->vocab * width, slots, width, p->vocab,
                0);
        if (logits != NULL)
            memcpy(logits + step * slots * p->vocab, f.logits,
                   (size_t)(slots * p->vocab) * sizeof(float));
        for (int64_t r = 0; r < slots; r++) {
            const float *of_slot = f.logits + r * p->vocab;
            int64_t code;
            if (uniforms == NULL)
                code = likeliest(of_slot, p->vocab);
            else
                code = draw(&f.drawing, of_slot, p->vocab, top_k, uniforms[r * p->steps + step],
                            top_p[r]);
            float *row = f.rows.x + r * width;
            codes[r * groups + step + 1] = code;
            memcpy(row, p->embedding + (step * p->vocab + code) * width, row_bytes);
            for (int64_t i = 0; i < width; i++)
                feedback[r * width + i] += row[i];
        }
    }
    free(block);
    return DONE;
}
