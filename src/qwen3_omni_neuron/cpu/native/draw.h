/* Choice of an id by its logits: model.code_predictor.sample_top, engines.sampling, and greedy. */

#ifndef DRAW_H
#define DRAW_H

#include <stdint.h>

typedef struct {
    float logit;
    int32_t id;
} Candidate;

/* Working memory of a draw: `vocab` elements of each. */
typedef struct {
    Candidate *kept, *ordered;
    float *probabilities;
} Drawing;

/* What likeliest and draw return where an allowed logit is NaN or infinity, or all are minus infinity. */
enum { NOT_FINITE = -1 };

/* Index of the largest logit; the first of equal ones. mask: NULL, or the ids that may be drawn, a bit
 * each; the others have the logit minus infinity. */
int64_t likeliest(const float *logits, const uint32_t *mask, int64_t vocab);

/* Draw an index from softmax(logits / temperature), restricted to the top k, then to top p, then to
 * those of at least min_p times the greatest probability. mask: see likeliest. uniform: a random
 * number in [0, 1). top_k: 0 for all. Rounds like sample_top: torch computes a cumulative sum in
 * float64 and rounds each element to float32. */
int64_t draw(const Drawing *d, const float *logits, const uint32_t *mask, int64_t vocab,
             float temperature, int64_t top_k, float uniform, float top_p, float min_p);

#endif
