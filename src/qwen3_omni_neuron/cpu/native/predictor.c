/* One frame of the code predictor in float32: model.code_predictor.CodePredictor.forward, and
 * model.sampler.sample_top, in one call. See predictor.py, which is the only caller.
 *
 * Arrays are dense, the last axis closest; matrices are [out, in] as torch has them. In the shapes
 * of the released checkpoint: hidden 1024, 16 heads and 8 kv heads of 128, so qkv is
 * [(16 + 8 + 8) * 128, 1024]; ffn 3072; vocab 2048; 15 steps, so 16 positions and 16 codes.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Four numbers at once, as gcc and clang write it for any machine; not aligned beyond a float. A
 * machine with vectors of 16 numbers gains little by them: adding their ends up takes most of it. */
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
#define FOUR(p) (*(const Four *)(p))

typedef struct {
    const float *attention_norm; /* [hidden] */
    const float *qkv;            /* [(heads + 2 kv_heads) * head_dim, hidden] */
    const float *qk_norm;        /* [heads + kv_heads, head_dim] */
    const float *out;            /* [hidden, heads * head_dim] */
    const float *ffn_norm;       /* [hidden] */
    const float *gate_up;        /* [2 ffn, hidden], gate first */
    const float *down;           /* [hidden, ffn] */
} Layer;

typedef struct {
    /* hidden, head_dim, ffn and vocab are multiples of 8 */
    int64_t steps, hidden, heads, kv_heads, head_dim, ffn, vocab, code0_vocab, layers;
    const Layer *layer;          /* [layers] */
    const float *norm;           /* [hidden] */
    const float *cos, *sin;      /* [steps + 1, head_dim]; sin's first half is negated */
    const float *code0_embedding; /* [code0_vocab, hidden] */
    const float *embedding;      /* [steps, vocab, hidden] */
    const float *head;           /* [steps, vocab, hidden] */
    float norm_eps;
} Predictor;

typedef struct {
    float logit;
    int32_t id;
} Candidate;

/* What a frame needs besides its weights. Rows are one a slot. */
typedef struct {
    float *x, *normed, *qkv, *mixed, *gate_up, *gated, *logits;
    float *keys, *values;   /* [layers, slots, kv_heads, steps + 1, head_dim] */
    float *probabilities;   /* [vocab], or of an attention's positions */
    Candidate *kept;        /* [vocab] */
} Scratch;

/* e^x within 2 units in the last place. libm's is a call a number; this becomes vectors. */
static inline float exponential(float x)
{
    union { float number; uint32_t bits; } shifted, power;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    /* e^x = 2^n e^rest. Adding 1.5 * 2^23 leaves no bits behind the point: the last ones are n. */
    shifted.number = x * 1.44269504f + 12582912.0f;
    float n = shifted.number - 12582912.0f;
    float rest = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts */
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    power.bits = (shifted.bits + 127) << 23;
    return sum * power.number;
}

static inline float sum(Four x)
{
    return (x[0] + x[1]) + (x[2] + x[3]);
}

/* width: a multiple of 4. */
static inline float dot(const float *a, const float *b, int64_t width)
{
    Four total = {0};
    for (int64_t i = 0; i < width; i += 4)
        total += FOUR(a + i) * FOUR(b + i);
    return sum(total);
}

/* y = x weight^T, or y += where add. x [rows, into], weight [out, into], y [rows, out]; into: a
 * multiple of 8, out: of 4. Each weight is read once for all rows, and what a row gets does not
 * depend on the others. */
static void product(float *y, const float *x, const float *weight, int64_t rows, int64_t into,
                    int64_t out, int add)
{
    for (int64_t o = 0; o < out; o += 4) { /* four by two sums that do not wait for each other */
        const float *wa = weight + o * into, *wb = wa + into, *wc = wb + into, *wd = wc + into;
        for (int64_t r = 0; r < rows; r++) {
            Four a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
            const float *row = x + r * into;
            float *to = y + r * out + o;
            for (int64_t i = 0; i < into; i += 8) {
                Four x0 = FOUR(row + i), x1 = FOUR(row + i + 4);
                a0 += x0 * FOUR(wa + i), a1 += x1 * FOUR(wa + i + 4);
                b0 += x0 * FOUR(wb + i), b1 += x1 * FOUR(wb + i + 4);
                c0 += x0 * FOUR(wc + i), c1 += x1 * FOUR(wc + i + 4);
                d0 += x0 * FOUR(wd + i), d1 += x1 * FOUR(wd + i + 4);
            }
            to[0] = sum(a0 + a1) + (add ? to[0] : 0);
            to[1] = sum(b0 + b1) + (add ? to[1] : 0);
            to[2] = sum(c0 + c1) + (add ? to[2] : 0);
            to[3] = sum(d0 + d1) + (add ? to[3] : 0);
        }
    }
}

/* y = x / rms(x) * weight, over `width` numbers; y may be x. */
static inline void rms_norm(float *y, const float *x, const float *weight, int64_t width,
                            float eps)
{
    float scale = 1.0f / sqrtf(dot(x, x, width) / (float)width + eps);
    for (int64_t i = 0; i < width; i++)
        y[i] = x[i] * scale * weight[i];
}

/* Turn a head in place: x * cos + swap_halves(x) * sin. */
static inline void rotate(float *x, const float *cosine, const float *sine, int64_t head_dim)
{
    int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cosine[i] + second * sine[i];
        x[half + i] = second * cosine[half + i] + first * sine[half + i];
    }
}

/* silu(gate) * up. gate_up [2 width], gate first; gated [width]. */
static inline void gate(float *restrict gated, const float *restrict gate_up, int64_t width)
{
    for (int64_t i = 0; i < width; i++)
        gated[i] = gate_up[i] / (1.0f + exponential(-gate_up[i])) * gate_up[width + i];
}

/* One slot's queries over the positions so far. q [heads, head_dim]; keys, values [kv_heads,
 * steps + 1, head_dim]; mixed [heads, head_dim]; weights: room for a number a position. */
static inline void attend(const Predictor *p, float *mixed, const float *q, const float *keys,
                          const float *values, int64_t position, float *weights)
{
    int64_t width = p->head_dim, group = p->heads / p->kv_heads;
    float scale = 1.0f / sqrtf((float)width);
    for (int64_t h = 0; h < p->heads; h++) { /* 16 heads, 8 kv heads: heads 2 and 3 read kv head 1 */
        int64_t line = h / group * (p->steps + 1) * width;
        float largest = -INFINITY, total = 0;
        for (int64_t t = 0; t <= position; t++) {
            weights[t] = scale * dot(q + h * width, keys + line + t * width, width);
            largest = weights[t] > largest ? weights[t] : largest;
        }
        for (int64_t t = 0; t <= position; t++)
            total += weights[t] = exponential(weights[t] - largest);
        memset(mixed + h * width, 0, width * sizeof(float));
        for (int64_t t = 0; t <= position; t++) {
            const float *value = values + line + t * width;
            float weight = weights[t] / total;
            for (int64_t i = 0; i < width; i++)
                mixed[h * width + i] += weight * value[i];
        }
    }
}

/* The decoder on one new row a slot, and the logits that follow it but at position 0, whose row is
 * only attended to. Reads and writes s->x [slots, hidden]; writes s->logits [slots, vocab]. */
static void advance(const Predictor *p, const Scratch *s, int64_t slots, int64_t position)
{
    int64_t hidden = p->hidden, width = p->head_dim, positions = p->steps + 1;
    int64_t qk_heads = p->heads + p->kv_heads, qkv_width = (qk_heads + p->kv_heads) * width;
    const float *cosine = p->cos + position * width, *sine = p->sin + position * width;
    for (int64_t l = 0; l < p->layers; l++) {
        const Layer *layer = p->layer + l;
        for (int64_t r = 0; r < slots; r++)
            rms_norm(s->normed + r * hidden, s->x + r * hidden, layer->attention_norm, hidden,
                     p->norm_eps);
        product(s->qkv, s->normed, layer->qkv, slots, hidden, qkv_width, 0);
        for (int64_t r = 0; r < slots; r++) {
            float *q = s->qkv + r * qkv_width, *k = q + p->heads * width, *v = q + qk_heads * width;
            int64_t line = (l * slots + r) * p->kv_heads * positions * width;
            for (int64_t h = 0; h < qk_heads; h++) {
                rms_norm(q + h * width, q + h * width, layer->qk_norm + h * width, width,
                         p->norm_eps);
                rotate(q + h * width, cosine, sine, width);
            }
            for (int64_t h = 0; h < p->kv_heads; h++) {
                int64_t at = line + (h * positions + position) * width;
                memcpy(s->keys + at, k + h * width, width * sizeof(float));
                memcpy(s->values + at, v + h * width, width * sizeof(float));
            }
            attend(p, s->mixed + r * p->heads * width, q, s->keys + line, s->values + line,
                   position, s->probabilities);
        }
        if (position == 0 && l == p->layers - 1)
            return; /* nothing reads the rest */
        product(s->x, s->mixed, layer->out, slots, p->heads * width, hidden, 1);
        for (int64_t r = 0; r < slots; r++)
            rms_norm(s->normed + r * hidden, s->x + r * hidden, layer->ffn_norm, hidden,
                     p->norm_eps);
        product(s->gate_up, s->normed, layer->gate_up, slots, hidden, 2 * p->ffn, 0);
        for (int64_t r = 0; r < slots; r++)
            gate(s->gated + r * p->ffn, s->gate_up + r * 2 * p->ffn, p->ffn);
        product(s->x, s->gated, layer->down, slots, p->ffn, hidden, 1);
    }
    if (position == 0)
        return; /* a predictor without layers */
    for (int64_t r = 0; r < slots; r++)
        rms_norm(s->normed + r * hidden, s->x + r * hidden, p->norm, hidden, p->norm_eps);
    product(s->logits, s->normed, p->head + (position - 1) * p->vocab * hidden, slots, hidden,
            p->vocab, 0);
}

static int64_t likeliest(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static int before(Candidate a, Candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* Let heap[at] sink until no candidate stands above one that comes before it in order: the last of
 * all is on top. */
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

/* The k largest logits in order, largest first; of equal ones the smaller id first. */
static void largest(Candidate *kept, int64_t k, const float *logits, int64_t vocab)
{
    for (int64_t i = 0; i < k; i++)
        kept[i] = (Candidate){logits[i], (int32_t)i};
    for (int64_t i = k / 2; i-- > 0;)
        sink(kept, i, k);
    for (int64_t i = k; i < vocab; i++) {
        if (logits[i] > kept[0].logit) {
            kept[0] = (Candidate){logits[i], (int32_t)i};
            sink(kept, 0, k);
        }
    }
    for (int64_t i = k; i-- > 1;) {
        Candidate last = kept[0];
        kept[0] = kept[i];
        kept[i] = last;
        sink(kept, 0, i);
    }
}

/* One draw of the top-k, then top-p, part of softmax(logits), in the roundings of sample_top: torch
 * adds a cumulative sum up in float64 and rounds each entry to float32. */
static int64_t draw(const float *logits, int64_t vocab, int64_t top_k, float uniform, float top_p,
                    Candidate *kept, float *probabilities)
{
    int64_t k = top_k > 0 && top_k < vocab ? top_k : vocab, rank = 0;
    double total = 0, cumulative = 0, kept_sum = 0;
    largest(kept, k, logits, vocab);
    for (int64_t i = 0; i < k; i++)
        total += probabilities[i] = expf(kept[i].logit - kept[0].logit);
    for (int64_t i = 0; i < k; i++) {
        float probability = probabilities[i] / (float)total;
        cumulative += probability;
        if ((float)cumulative - probability < top_p)
            kept_sum += probability;
        probabilities[i] = (float)kept_sum;
    }
    float threshold = uniform * (float)kept_sum;
    while (rank < k - 1 && probabilities[rank] <= threshold)
        rank++;
    return kept[rank].id;
}

/* Cut the scratch of `slots` slots from one new block, which begins at s->x. 0 without memory. */
static int allocate(Scratch *s, const Predictor *p, int64_t slots)
{
    int64_t heads = p->heads * p->head_dim, kv_heads = p->kv_heads * p->head_dim;
    int64_t cache = p->layers * kv_heads * (p->steps + 1), total = 0, position = 0;
    float *kept;
    float **arrays[] = {&s->x,     &s->normed, &s->qkv,  &s->mixed,  &s->gate_up,
                        &s->gated, &s->logits, &s->keys, &s->values, &s->probabilities,
                        &kept};
    int64_t sizes[] = {slots * p->hidden,
                       slots * p->hidden,
                       slots * (heads + 2 * kv_heads),
                       slots * heads,
                       slots * 2 * p->ffn,
                       slots * p->ffn,
                       slots * p->vocab,
                       slots * cache,
                       slots * cache,
                       p->vocab + p->steps + 1, /* of ids, or of positions */
                       p->vocab * (int64_t)(sizeof(Candidate) / sizeof(float))};
    int count = sizeof(sizes) / sizeof(sizes[0]);
    for (int i = 0; i < count; i++)
        total += sizes[i];
    float *block = malloc((size_t)total * sizeof(float));
    if (block == NULL)
        return 0;
    for (int i = 0; i < count; position += sizes[i++])
        *arrays[i] = block + position;
    s->kept = (Candidate *)kept;
    return 1;
}

enum { DONE = 0, NO_MEMORY = 1, NO_SUCH_CODE = 2 };

/* hidden [slots, hidden]; code0 [slots]; uniforms [slots, steps] and top_p [slots], or NULL for
 * greedy. Writes codes [slots, steps + 1], feedback [slots, hidden] and, but for NULL, logits
 * [steps, slots, vocab]. Holds no state between calls: several threads may be in it. */
int predict_frame(const Predictor *p, int64_t slots, const float *hidden, const int64_t *code0,
                  const float *uniforms, const float *top_p, int64_t top_k, int64_t *codes,
                  float *feedback, float *logits)
{
    int64_t width = p->hidden, groups = p->steps + 1;
    size_t logits_of_step = (size_t)(slots * p->vocab);
    Scratch s;
    for (int64_t r = 0; r < slots; r++)
        if (code0[r] < 0 || code0[r] >= p->code0_vocab)
            return NO_SUCH_CODE;
    if (!allocate(&s, p, slots))
        return NO_MEMORY;
    memcpy(s.x, hidden, (size_t)(slots * width) * sizeof(float));
    memset(feedback, 0, (size_t)(slots * width) * sizeof(float));
    for (int64_t r = 0; r < slots; r++)
        codes[r * groups] = code0[r];
    /* Position 0 is the talker's hidden state, position 1 the embedding of code 0, and so on: the
     * logits at position g are those of code g. That code's own row is position g + 1, but for the
     * last one's, which goes into the feedback alone. */
    advance(p, &s, slots, 0);
    for (int64_t group = 0; group < groups; group++) {
        const float *table = group == 0 ? p->code0_embedding
                                        : p->embedding + (group - 1) * p->vocab * width;
        for (int64_t r = 0; r < slots; r++) {
            float *row = s.x + r * width;
            memcpy(row, table + codes[r * groups + group] * width, (size_t)width * sizeof(float));
            for (int64_t i = 0; i < width; i++)
                feedback[r * width + i] += row[i];
        }
        if (group == p->steps)
            break;
        advance(p, &s, slots, group + 1);
        for (int64_t r = 0; r < slots; r++) {
            const float *of_slot = s.logits + r * p->vocab;
            codes[r * groups + group + 1] =
                uniforms == NULL
                    ? likeliest(of_slot, p->vocab)
                    : draw(of_slot, p->vocab, top_k, uniforms[r * p->steps + group], top_p[r],
                           s.kept, s.probabilities);
        }
        if (logits != NULL)
            memcpy(logits + group * logits_of_step, s.logits, logits_of_step * sizeof(float));
    }
    free(s.x);
    return DONE;
}

/* An extension module must have this on some systems; nothing imports it: see predictor.py. */
void *PyInit__predictor(void) { return NULL; }
