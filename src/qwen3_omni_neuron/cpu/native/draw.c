/* See draw.h. */

#include "draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "library.h"

/* Return an id's logit; minus infinity if the mask forbids it. */
static float allowed(const float *logits, const uint32_t *mask, int64_t id)
{
    return mask == NULL || mask[id / 32] >> id % 32 & 1 ? logits[id] : -INFINITY;
}

int64_t likeliest(const float *logits, const uint32_t *mask, int64_t vocab)
{
    int64_t best = 0;
    float most = allowed(logits, mask, 0);
    for (int64_t i = 1; isless(most, INFINITY); i++) { /* NaN is not less */
        i = kernels->first_above(logits, mask, i, vocab, most);
        if (i >= vocab)
            break;
        best = i;
        most = logits[i];
    }
    return isfinite(most) ? best : NOT_FINITE;
}

/* Sift heap[at] down, so that the subtree below is a heap whose root is its least element. */
static void sink(float *heap, int64_t at, int64_t count)
{
    float sinking = heap[at];
    for (int64_t below; (below = 2 * at + 1) < count; at = below) {
        if (below + 1 < count && heap[below + 1] < heap[below])
            below++;
        if (sinking <= heap[below])
            break;
        heap[at] = heap[below];
    }
    heap[at] = sinking;
}

/* Make an array a heap whose root is the least element. */
static void heapify(float *heap, int64_t count)
{
    for (int64_t i = count / 2; i-- > 0;)
        sink(heap, i, count);
}

/* Sort an array, largest first. */
static void sort(float *x, int64_t count)
{
    heapify(x, count);
    for (int64_t i = count; i-- > 1;) {
        float last = x[0];
        x[0] = x[i];
        x[i] = last;
        sink(x, 0, i);
    }
}

/* Return the k-th largest logit. heap: space for k. */
static float kth_largest(float *heap, const float *logits, const uint32_t *mask, int64_t vocab,
                         int64_t k)
{
    for (int64_t i = 0; i < k; i++)
        heap[i] = allowed(logits, mask, i);
    heapify(heap, k);
    for (int64_t i = k; (i = kernels->first_above(logits, mask, i, vocab, heap[0])) < vocab; i++) {
        heap[0] = logits[i];
        sink(heap, 0, k);
    }
    return heap[0];
}

/* Return the least score that top-p keeps. An id is dropped if likelier ids reach top_p. Rounds like
 * sample_top: torch computes a cumulative sum in float64 and rounds each element to float32. */
static float least_of_top_p(float *spare, const float *scores, int64_t count, float top_p)
{
    float *sorted = spare, *weights = spare + count, least = 0;
    double total = 0, cumulative = 0;
    memcpy(sorted, scores, (size_t)count * sizeof(float));
    sort(sorted, count);
    for (int64_t i = 0; i < count; i++)
        total += weights[i] = expf(sorted[i]);
    for (int64_t i = 0; i < count; i++) {
        float probability = weights[i] / (float)total;
        cumulative += probability;
        if ((float)cumulative - probability < top_p)
            least = sorted[i];
    }
    return least;
}

int64_t remaining(int64_t *ids, float *scores, float *spare, const float *logits,
                  const uint32_t *mask, int64_t vocab, float temperature, int64_t top_k, float top_p,
                  float min_p)
{
    int64_t count = 0, left = 0;
    float above = -INFINITY, most = -INFINITY, least = -INFINITY;
    if (top_k > 0 && top_k < vocab)
        above = nextafterf(kth_largest(spare, logits, mask, vocab, top_k), -INFINITY);
    for (int64_t i = 0; (i = kernels->first_above(logits, mask, i, vocab, above)) < vocab; i++) {
        if (!isless(logits[i], INFINITY)) /* NaN is not less, and is found whatever the bound */
            return 0;
        ids[count] = i;
        scores[count++] = logits[i];
        most = logits[i] > most ? logits[i] : most;
    }
    /* Subtract first: at a low temperature a large score would round the noise away. */
    for (int64_t i = 0; i < count; i++)
        scores[i] = (scores[i] - most) / temperature;
    if (top_p < 1)
        least = least_of_top_p(spare, scores, count, top_p);
    for (int64_t i = 0; i < count; i++)
        if (scores[i] >= least && (min_p <= 0 || expf(scores[i]) >= min_p)) {
            ids[left] = ids[i];
            scores[left++] = scores[i];
        }
    return left;
}

int64_t race(const int64_t *ids, const float *scores, int64_t count, const float *noise)
{
    int64_t best = NOT_FINITE;
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (scores[i] + noise[ids[i]] > most) {
            most = scores[i] + noise[ids[i]];
            best = ids[i];
        }
    return best;
}

/* Write the scores [count] of one sequence: its logits after suppression and penalties. */
static void score(float *scores, const Sampling *s, const float *logits)
{
    for (int64_t i = 0; i < s->count; i++)
        scores[i] = s->allowed == NULL ? logits[i] : logits[s->allowed[i]];
    if (s->penalties != NULL)
        for (int64_t i = 0; i < s->count; i++)
            scores[i] = scores[i] < 0 ? scores[i] * s->penalties[i] : scores[i] / s->penalties[i];
    if (s->counts != NULL)
        for (int64_t i = 0; i < s->count; i++)
            if (s->counts[i] > 0)
                scores[i] -= s->frequency * (float)s->counts[i] + s->presence;
}

int remaining_rows(int64_t rows, const float *const *logits, int64_t vocab,
                   const Sampling *const *sampling, const uint32_t *const *masks, int64_t *counts,
                   int64_t *indices, float *scores)
{
    float *spare = malloc((size_t)(3 * vocab) * sizeof(float)), *scored;
    if (spare == NULL)
        return NO_MEMORY;
    scored = spare + 2 * vocab;
    for (int64_t r = 0; r < rows; r++) {
        const Sampling *s = sampling[r];
        const uint32_t *mask = masks == NULL ? NULL : masks[r];
        const float *given = logits[r];
        if (s->allowed != NULL || s->penalties != NULL || s->counts != NULL) {
            score(scored, s, given);
            given = scored;
        }
        if (s->top_k == GREEDY) {
            indices[0] = likeliest(given, mask, s->count);
            scores[0] = 0;
            counts[r] = indices[0] != NOT_FINITE;
        } else
            counts[r] = remaining(indices, scores, spare, given, mask, s->count, s->temperature,
                                  s->top_k, s->top_p, s->min_p);
        indices += counts[r];
        scores += counts[r];
    }
    free(spare);
    return DONE;
}
