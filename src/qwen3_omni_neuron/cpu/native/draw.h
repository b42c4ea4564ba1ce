/* Choice of an id by its logits: model.code_predictor.sample_top, engines.sampling, and greedy. */

#ifndef DRAW_H
#define DRAW_H

#include <stdint.h>

/* What likeliest returns where an allowed logit is NaN or infinity, or all are minus infinity; race of no
 * ids, too. */
enum { NOT_FINITE = -1 };

/* Index of the largest logit; the first of equal ones. mask: NULL, or the ids that may be drawn, a bit
 * each; the others have the logit minus infinity. */
int64_t likeliest(const float *logits, const uint32_t *mask, int64_t vocab);

/* Find the ids that the top k, then top p, then min_p of the greatest probability leave, ascending.
 * mask: see likeliest. top_k: 0 for all. Writes ids and scores, (logit - largest) / temperature; each
 * has room for `vocab`, and `spare` for 2 vocab. Returns their number, 0 where there is NOT_FINITE. */
int64_t remaining(int64_t *ids, float *scores, float *spare, const float *logits,
                  const uint32_t *mask, int64_t vocab, float temperature, int64_t top_k, float top_p,
                  float min_p);

/* The remaining id with the largest score + noise[id]; the first of equal ones. */
int64_t race(const int64_t *ids, const float *scores, int64_t count, const float *noise);

#endif
