/* One code from its logits: model.sampler.sample_top, and the greedy choice. */

#ifndef DRAW_H
#define DRAW_H

#include <stdint.h>

typedef struct {
    float logit;
    int32_t id;
} Candidate;

/* Room for a draw: `vocab` of each. */
typedef struct {
    Candidate *kept, *ordered;
    float *probabilities;
} Drawing;

/* Of equal logits the first. */
int64_t likeliest(const float *logits, int64_t vocab);

/* One draw of the top-k, then top-p, part of softmax(logits), uniform in [0, 1). top_k: 0 for all.
 * Rounds as sample_top does: torch adds a cumulative sum up in float64 and rounds each entry to
 * float32. */
int64_t draw(const Drawing *d, const float *logits, int64_t vocab, int64_t top_k, float uniform,
             float top_p);

#endif
