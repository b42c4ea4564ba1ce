/* See draw.h. */

#include "draw.h"

#include <math.h>
#include <stdlib.h>

#include "kernels.h"
#include "library.h"

enum { FEW = 256 }; /* a multiple of WIDEST */

/* The logit of an id, which the mask may forbid. */
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

/* Order of candidates: the largest logit first; of equal ones the smaller id first. */
static int before(Candidate a, Candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* Sift heap[at] down, so that the subtree below is a heap whose root is its last candidate in
 * order. */
static void sink(Candidate *heap, int64_t at, int64_t count)
{
    Candidate sinking = heap[at];
    for (int64_t below; (below = 2 * at + 1) < count; at = below) {
        if (below + 1 < count && before(heap[below], heap[below + 1]))
            below++;
        if (!before(sinking, heap[below]))
            break;
        heap[at] = heap[below];
    }
    heap[at] = sinking;
}

/* Make an array a heap whose root is the last candidate in order. */
static void heapify(Candidate *heap, int64_t count)
{
    for (int64_t i = count / 2; i-- > 0;)
        sink(heap, i, count);
}

static void sort_heap(Candidate *heap, int64_t count)
{
    for (int64_t i = count; i-- > 1;) {
        Candidate last = heap[0];
        heap[0] = heap[i];
        heap[i] = last;
        sink(heap, 0, i);
    }
}

/* Write the first k of up to FEW candidates in order. Each one's place is the number of those before
 * it: no branch depends on the logits. */
static void sort_few(Candidate *ordered, const Candidate *kept, int64_t count, int64_t k)
{
    float logits[FEW];
    int32_t ids[FEW], places[FEW];
    int64_t whole = (count + WIDEST - 1) / WIDEST * WIDEST;
    for (int64_t i = 0; i < whole; i++) {
        logits[i] = i < count ? kept[i].logit : 0;
        ids[i] = i < count ? kept[i].id : 0;
    }
    kernels->places(places, logits, ids, count);
    for (int64_t i = 0; i < count; i++)
        if (places[i] < k)
            ordered[places[i]] = kept[i];
}

/* Return the k largest logits in order; NULL for NaN or infinity among them. */
static const Candidate *largest(const Drawing *d, int64_t k, const float *logits,
                                const uint32_t *mask, int64_t vocab)
{
    Candidate *kept = d->kept;
    int64_t held = vocab <= FEW ? vocab : k;
    for (int64_t i = 0; i < held; i++) {
        kept[i] = (Candidate){allowed(logits, mask, i), (int32_t)i};
        if (!isless(kept[i].logit, INFINITY)) /* NaN is not less */
            return NULL;
    }
    if (held > FEW || held < vocab)
        heapify(kept, held);
    for (int64_t i = held;
         (i = kernels->first_above(logits, mask, i, vocab, kept[0].logit)) < vocab; i++) {
        if (!isless(logits[i], INFINITY))
            return NULL;
        kept[0] = (Candidate){logits[i], (int32_t)i};
        sink(kept, 0, held);
    }
    if (held > FEW) {
        sort_heap(kept, held);
        return kept;
    }
    sort_few(d->ordered, kept, held, k);
    return d->ordered;
}

int64_t draw(const Drawing *d, const float *logits, const uint32_t *mask, int64_t vocab,
             float temperature, int64_t top_k, float uniform, float top_p, float min_p)
{
    int64_t k = top_k > 0 && top_k < vocab ? top_k : vocab, rank = 0;
    const Candidate *kept = largest(d, k, logits, mask, vocab);
    if (kept == NULL || !isfinite(kept[0].logit))
        return NOT_FINITE;
    float most = kept[0].logit / temperature;
    float *probabilities = d->probabilities;
    double total = 0, cumulative = 0, kept_sum = 0;
    float least;
    for (int64_t i = 0; i < k; i++)
        total += probabilities[i] = expf(kept[i].logit / temperature - most);
    least = min_p * (probabilities[0] / (float)total);
    for (int64_t i = 0; i < k; i++) {
        float probability = probabilities[i] / (float)total;
        cumulative += probability;
        if ((float)cumulative - probability < top_p && probability >= least)
            kept_sum += probability;
        probabilities[i] = (float)kept_sum;
    }
    float threshold = uniform * (float)kept_sum;
    while (rank < k - 1 && probabilities[rank] <= threshold)
        rank++;
    return kept[rank].id;
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

int draw_rows(int64_t rows, const float *const *logits, int64_t vocab,
              const Sampling *const *sampling, const float *uniforms,
              const uint32_t *const *masks, int64_t *ids)
{
    size_t kept = (size_t)(2 * vocab) * sizeof(Candidate);
    char *block = malloc(kept + (size_t)(2 * vocab) * sizeof(float));
    if (block == NULL)
        return NO_MEMORY;
    Drawing drawing = {(Candidate *)block, (Candidate *)block + vocab, (float *)(block + kept)};
    float *scores = drawing.probabilities + vocab;
    for (int64_t r = 0; r < rows; r++) {
        const Sampling *s = sampling[r];
        const uint32_t *mask = masks == NULL ? NULL : masks[r];
        const float *given = logits[r];
        int64_t index;
        if (s->allowed != NULL || s->penalties != NULL || s->counts != NULL) {
            score(scores, s, given);
            given = scores;
        }
        /* Where top_p is 1, what its rounding drops is less than a step of uniforms. */
        index = s->top_k == GREEDY ? likeliest(given, mask, s->count)
                                   : draw(&drawing, given, mask, s->count, s->temperature,
                                          s->top_k, uniforms[r], s->top_p, s->min_p);
        ids[r] = index;
        if (index == NOT_FINITE)
            continue;
        if (s->penalties != NULL)
            s->penalties[index] = s->penalty;
        if (s->counts != NULL)
            s->counts[index]++;
        if (s->allowed != NULL)
            ids[r] = s->allowed[index];
    }
    free(block);
    return DONE;
}
