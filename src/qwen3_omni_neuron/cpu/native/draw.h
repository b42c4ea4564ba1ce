/* Choice of an id by its logits: model.code_predictor.sample_top, engines.sampling, and greedy. */

#ifndef DRAW_H
#define DRAW_H

#include <stdint.h>

/* Result of likeliest if an allowed logit is NaN or infinity, or all are minus infinity; also of race
 * without ids. */
enum { NOT_FINITE = -1 };

/* Return the first index of the largest logit. mask: NULL, or a bit per id that may be drawn; the
 * others have the logit minus infinity. */
int64_t likeliest(const float *logits, const uint32_t *mask, int64_t vocab);

/* Find the ids that remain after top-k, then top-p, then min-p, ascending. mask: see likeliest. top_k:
 * 0: all. Writes ids and scores, (logit - largest) / temperature; each has space for `vocab`, `spare`
 * for 2 vocab. Returns their number, 0 for NOT_FINITE. */
int64_t remaining(int64_t *ids, float *scores, float *spare, const float *logits,
                  const uint32_t *mask, int64_t vocab, float temperature, int64_t top_k, float top_p,
                  float min_p);

/* Return the first remaining id with the largest score + noise[id]. */
int64_t race(const int64_t *ids, const float *scores, int64_t count, const float *noise);

#endif
