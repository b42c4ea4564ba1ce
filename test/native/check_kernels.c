/* Check of the C against plain C in double precision, for a compiler and a processor on which the
 * tests in Python don't run: .ci/test-aarch64.
 *
 * Prints a line for each kind of processor that it ran as, and what differs. Exits with 1 if anything
 * does. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decoder.h"
#include "draw.h"
#include "kernels.h"
#include "parallel.h"
#include "product.h"

int use_kernels(const char *name);

enum { GUARDS = 16, MESSAGES = 40 };
static const float GUARD = 12345.5f; /* in memory that must not be written */

static int failures;
static const char *kind = "";
static char about[100]; /* what is being checked, for the messages */
static uint64_t digest; /* of the results of INT8 and INT4, which are the same for every kind */

static void fail(const char *what, int64_t index, double got, double expected)
{
    if (failures++ < MESSAGES)
        printf("%s: %s%s differs at %lld: %.9g, expected %.9g\n", kind, what, about,
               (long long)index, got, expected);
}

static void close_to(const char *what, int64_t index, double got, double expected, double allowed)
{
    if (!(fabs(got - expected) <= allowed))
        fail(what, index, got, expected);
}

/* ---- inputs: the same on every machine ---- */

static uint64_t state;

static float uniform(void) /* in [-1, 1) */
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static void *memory(int64_t bytes)
{
    void *block = calloc(1, (size_t)bytes + 64);
    if (block == NULL) {
        printf("no memory for %lld bytes\n", (long long)bytes);
        exit(2);
    }
    return block;
}

static float *numbers(int64_t count, float scale)
{
    float *made = memory((count + GUARDS) * 4);
    for (int64_t i = 0; i < count; i++)
        made[i] = uniform() * scale;
    for (int64_t i = count; i < count + GUARDS; i++)
        made[i] = GUARD;
    return made;
}

static void guarded(const char *what, const float *block, int64_t count)
{
    for (int64_t i = count; i < count + GUARDS; i++)
        if (block[i] != GUARD)
            fail(what, i, block[i], GUARD);
}

/* ---- products ---- */

typedef struct {
    Matrix matrix;
    double *dense; /* [out, into], without scale and bias */
} Weights;

/* A random INT4 matrix, packed here by library.h's description and not by the code under test. */
static Weights int4_weights(int64_t out, int64_t into, int64_t group, int64_t scale_type)
{
    Matrix m = {.into = into, .out = out, .type = INT4, .group = group, .scale_type = scale_type};
    int64_t groups = (into + group - 1) / group, scale_bytes = scale_type == FLOAT32 ? 4 : 2;
    int64_t block = group / 2 * PANEL + scale_bytes * PANEL;
    char *panels = memory(panels_of(out) * groups * block);
    double *dense = memory(out * into * 8);
    for (int64_t o = 0; o < out; o++)
        for (int64_t g = 0; g < groups; g++) {
            char *to = panels + (o / PANEL * groups + g) * block;
            char *scales = to + group / 2 * PANEL;
            float scale = uniform() < 0 ? -0.0078125f : 0.01171875f; /* -2^-7, 1.5 * 2^-7 */
            uint32_t bits, *words = (uint32_t *)(void *)to;
            uint16_t half;
            memcpy(&bits, &scale, 4);
            half = (uint16_t)(bits >> 16);
            if (scale_type == FLOAT16) /* sign, exponent 8 and the first bit of the fraction */
                half = scale < 0 ? 0xa000 : 0x2200;
            if (scale_type == FLOAT32)
                memcpy(scales + 4 * (o % PANEL), &scale, 4);
            else
                memcpy(scales + 2 * (o % PANEL), &half, 2);
            for (int64_t k = g * group; k < into && k < (g + 1) * group; k++) {
                int number = (int)floorf(uniform() * 8);
                int64_t at = k - g * group;
                words[at / 8 * PANEL + o % PANEL] |= (uint32_t)(number + 8) << (4 * (at % 8));
                dense[o * into + k] = (double)scale * number;
            }
        }
    m.panels = panels;
    return (Weights){m, dense};
}

/* A random matrix, packed here by matrix.h's description and not by the code under test. */
static Weights weights(int64_t out, int64_t into, int64_t type, int with_scale, int with_bias)
{
    int64_t packed = panels_of(out) * into * PANEL;
    char *panels = memory(packed * bytes_of(type));
    double *dense = memory(out * into * 8);
    for (int64_t o = 0; o < out; o++)
        for (int64_t k = 0; k < into; k++) {
            int64_t at = (o / PANEL * into + k) * PANEL + o % PANEL;
            float value = uniform();
            uint32_t bits;
            if (type == FLOAT32) {
                memcpy(panels + 4 * at, &value, 4);
            } else if (type == BFLOAT16) {
                memcpy(&bits, &value, 4);
                bits &= 0xffff0000u;
                memcpy(&value, &bits, 4);
                uint16_t half = (uint16_t)(bits >> 16);
                memcpy(panels + 2 * at, &half, 2);
            } else {
                int8_t byte = (int8_t)(value * 127);
                panels[at] = (char)byte;
                value = byte;
            }
            dense[o * into + k] = value;
        }
    Weights made = {{.panels = panels, .into = into, .out = out, .type = type}, dense};
    if (with_scale)
        made.matrix.scale = numbers(out, 0.01f);
    if (with_bias)
        made.matrix.bias = numbers(out, 1.0f);
    return made;
}

static void free_weights(Weights *w)
{
    free((void *)w->matrix.panels);
    free((void *)w->matrix.scale);
    free((void *)w->matrix.bias);
    free(w->dense);
}

static void check_product(const Weights *w, const float *y, const float *before, int64_t y_stride,
                          const float *x, int64_t x_stride, int64_t rows, int add)
{
    const Matrix *m = &w->matrix;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < m->out; o++) {
            double total = 0, size = 0, scale = m->scale ? m->scale[o] : 1;
            for (int64_t k = 0; k < m->into; k++) {
                double product = x[r * x_stride + k] * w->dense[o * m->into + k] * scale;
                total += product;
                size += fabs(product);
            }
            if (m->bias)
                total += m->bias[o];
            if (add)
                total += before[r * y_stride + o];
            close_to("multiply", r * y_stride + o, y[r * y_stride + o], total, 2e-6 * (size + 2));
        }
}

/* Read inputs in the form that a matrix takes by product.h's description: they are within half a step. */
static float *read_inputs(const float *x, const float *given, int64_t rows, const Matrix *m)
{
    float *read = memory(rows * m->into * 4);
    memcpy(read, given, (size_t)(rows * m->into) * 4);
    for (int64_t r = 0; has_own_inputs(m) && r < rows; r++)
        for (int64_t k = 0; k < m->into; k++) {
            const char *group = (const char *)(x + r * row_stride(m->into)) +
                                k / GROUP_INPUTS * (m->type == INT4 ? 40 : 72);
            int64_t i = k % GROUP_INPUTS, at = r * m->into + k;
            float scale;
            int16_t half;
            memcpy(&scale, group, 4);
            memcpy(&half, group + 8 + 2 * i, 2);
            if (m->type == INT4)
                half = (int8_t)group[8 + i / 8 * 8 + i % 2 * 4 + i % 8 / 2];
            read[at] = scale * (float)half;
            close_to("input", at, read[at], given[at], 0.501 * scale);
        }
    return read;
}

/* Multiply `rows` rows by a matrix, in calls of several panels and each row alone. */
static void check_rows(const Weights *w, int64_t rows, int add)
{
    const Matrix *m = &w->matrix;
    int64_t out = m->out, into = m->into, panels = panels_of(out);
    int64_t x_stride = row_stride(into), y_stride = out + 3;
    float *given = numbers(rows * into, 1.0f), *x = numbers(rows * x_stride, 1.0f);
    float *y = numbers(rows * y_stride, 1.0f), *before = memory(rows * y_stride * 4);
    for (int64_t i = 0; i < rows * x_stride; i++)
        x[i] = NAN; /* what is read must have been written */
    take_inputs(x, given, into, rows, m);
    guarded("memory after inputs", x, rows * x_stride);
    memcpy(before, y, (size_t)(rows * y_stride) * 4);
    for (int64_t p = 0; p < panels; p += PANELS_AT_ONCE)
        kernels->multiply(y + p * PANEL, y_stride, x, x_stride, rows, m, p,
                          smaller(PANELS_AT_ONCE, panels - p), add, NULL);
    float *read = read_inputs(x, given, rows, m);
    check_product(w, y, before, y_stride, read, into, rows, add);
    free(read);
    for (int64_t i = 0; has_own_inputs(m) && i < rows * y_stride; i++) {
        uint32_t bits;
        memcpy(&bits, y + i, 4);
        digest = (digest ^ bits) * 1099511628211u;
    }
    guarded("memory after y of multiply", y, rows * y_stride);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = out; o < y_stride; o++)
            if (y[r * y_stride + o] != before[r * y_stride + o])
                fail("memory between rows of multiply", r, y[r * y_stride + o], 0);
        /* A row alone, a panel at a time, has the same bits. */
        float *alone = numbers(out, 1.0f);
        memcpy(alone, before + r * y_stride, (size_t)out * 4);
        for (int64_t p = 0; p < panels; p++)
            kernels->multiply(alone + p * PANEL, out, x + r * x_stride, x_stride, 1, m, p, 1, add,
                              NULL);
        for (int64_t o = 0; o < out; o++)
            if (memcmp(alone + o, y + r * y_stride + o, 4) != 0) {
                fail("a row alone", r * y_stride + o, y[r * y_stride + o], alone[o]);
                break;
            }
        free(alone);
    }
    free(given), free(x), free(y), free(before);
}

static void check_multiply(void)
{
    static const int64_t shapes[][2] = {{32, 1},    {5, 7},   {33, 256},
                                        {128, 300}, {48, 20}, {161, 515}};
    static const int64_t row_counts[] = {1, 2, 3, 4, 5, 7, 12, 13, 29};
    for (int64_t n = 0; n < 6 * 9 * 3; n++) {
        int64_t out = shapes[n % 6][0], into = shapes[n % 6][1], rows = row_counts[n / 6 % 9];
        int add = (int)(n % 2);
        Weights w = weights(out, into, n / 54, n / 54 == INT8, n % 4 == 1);
        snprintf(about, sizeof about, " [%d x %d of type %d, %d rows%s%s%s]", (int)out, (int)into,
                 (int)w.matrix.type, (int)rows, w.matrix.scale ? ", scale" : "",
                 w.matrix.bias ? ", bias" : "", add ? ", add" : "");
        check_rows(&w, rows, add);
        free_weights(&w);
    }
    static const int64_t scale_types[] = {FLOAT32, BFLOAT16, FLOAT16};
    for (int64_t n = 0; n < 6 * 9 * 3; n++) {
        int64_t out = shapes[n % 6][0], into = shapes[n % 6][1], rows = row_counts[n / 6 % 9];
        int64_t group = 32 << n % 3, scale_type = scale_types[n / 54];
        Weights w = int4_weights(out, into, group, scale_type);
        snprintf(about, sizeof about, " [%d x %d in groups of %d, scales of type %d, %d rows]",
                 (int)out, (int)into, (int)group, (int)scale_type, (int)rows);
        check_rows(&w, rows, (int)(n % 2));
        free_weights(&w);
    }
    about[0] = 0;
}

/* ---- rows ---- */

static void check_norms(void)
{
    static const int64_t widths[] = {1, 15, 16, 17, 64, 100, 515};
    for (int n = 0; n < 7; n++) {
        int64_t width = widths[n];
        float *x = numbers(width, 3.0f), *weight = numbers(width, 1.0f), *y = numbers(width, 1.0f);
        float *bias = numbers(width, 1.0f);
        double squares = 0, mean = 0, spread = 0;
        for (int64_t i = 0; i < width; i++) {
            squares += (double)x[i] * x[i] / (double)width;
            mean += x[i] / (double)width;
        }
        for (int64_t i = 0; i < width; i++)
            spread += (x[i] - mean) * (x[i] - mean) / (double)width;
        kernels->rms_norm(y, x, weight, width, 1e-6f);
        for (int64_t i = 0; i < width; i++)
            close_to("rms_norm", i, y[i], x[i] / sqrt(squares + 1e-6) * weight[i], 3e-6);
        kernels->layer_norm(y, x, weight, bias, width, 1e-5f);
        for (int64_t i = 0; i < width; i++)
            close_to("layer_norm", i, y[i],
                     (x[i] - mean) / sqrt(spread + 1e-5) * weight[i] + bias[i], 4e-6);
        guarded("memory after y of a norm", y, width);
        free(x), free(weight), free(y), free(bias);
    }
}

static void check_functions(void)
{
    for (int64_t width = 1; width < 70; width += width < 36 ? 1 : 11) {
        float *x = numbers(width, 12.0f), *up = numbers(width, 2.0f), *y = numbers(width, 1.0f);
        x[0] = width % 2 ? 60.0f : -60.0f;
        kernels->exponentials(y, x, width);
        for (int64_t i = 0; i < width; i++)
            close_to("exponentials", i, y[i], exp(x[i]), 4e-7 * exp(x[i]));
        kernels->gelu(y, x, width);
        for (int64_t i = 0; i < width; i++)
            close_to("gelu", i, y[i], x[i] / 2.0 * (1 + erf(x[i] / sqrt(2))),
                     4e-7 * fabs(x[i]) + 1e-7);
        kernels->gelu_tanh(y, x, width);
        for (int64_t i = 0; i < width; i++) {
            double inner = sqrt(2 / acos(-1)) * (x[i] + 0.044715 * x[i] * x[i] * x[i]);
            close_to("gelu_tanh", i, y[i], x[i] / 2.0 * (1 + tanh(inner)),
                     1e-6 * fabs(x[i]) + 1e-7);
        }
        kernels->gate(y, x, up, width, 0.5f);
        for (int64_t i = 0; i < width; i++) {
            double expected = x[i] / (1 + exp(-(double)x[i])) * up[i] * 0.5;
            close_to("gate", i, y[i], expected, 1e-6 * fabs(expected) + 1e-9);
        }
        guarded("memory after y of a function", y, width);
        free(x), free(up), free(y);
    }
}

/* ---- attention ---- */

static void check_attend(void)
{
    static const int64_t widths[] = {8, 16, 17, 64, 80, 128}, counts[] = {1, 3, 4, 23};
    enum { POSITIONS = 70 };
    for (int n = 0; n < 24; n++) {
        int64_t width = widths[n % 6], count = counts[n / 6], positions = POSITIONS;
        float *keys = numbers(positions * width, 1.0f), *values = numbers(positions * width, 1.0f);
        float *scratch = numbers(count * (positions + 16), 1.0f);
        float *query[QUERIES], *mixed[QUERIES];
        int64_t from[QUERIES], to[QUERIES];
        for (int64_t q = 0; q < count; q++) {
            query[q] = numbers(width, 3.0f), mixed[q] = numbers(width, 1.0f);
            from[q] = q, to[q] = positions - count + q + 1;
        }
        kernels->attend(mixed, (const float *const *)query, from, to, count, keys, values, width,
                        scratch);
        guarded("scratch of attend", scratch, count * (positions + 16));
        for (int64_t q = 0; q < count; q++) {
            double weight[POSITIONS], total = 0;
            for (int64_t t = from[q]; t < to[q]; t++) {
                weight[t] = 0;
                for (int64_t i = 0; i < width; i++)
                    weight[t] += (double)query[q][i] * keys[t * width + i];
                total += weight[t] = exp(weight[t] / sqrt((double)width));
            }
            for (int64_t i = 0; i < width; i++) {
                double expected = 0;
                for (int64_t t = from[q]; t < to[q]; t++)
                    expected += weight[t] / total * values[t * width + i];
                close_to("attend", q * width + i, mixed[q][i], expected, 4e-6);
            }
            guarded("memory after mixed of attend", mixed[q], width);
            free(query[q]), free(mixed[q]);
        }
        free(keys), free(values), free(scratch);
    }
}

/* ---- audio ---- */

/* A pair of outputs of 7 taps by the products of its points, against the sums over its taps. */
static void check_points(int64_t width)
{
    static const double points[] = {0, 1, -1, 2, -2, 0.5, -0.5};
    int64_t stride = width + WIDEST, padded = panels_of(width) * PANEL;
    float *x = numbers(POINTS * width + WIDEST, 1.0f), *taps = numbers(7 * width, 1.0f);
    float *spread = numbers(POINTS * stride, 1.0f), *products = numbers(POINTS * padded, 1.0f);
    kernels->spread(spread, stride, x, width, width);
    guarded("memory after y of spread", spread, POINTS * stride);
    for (int64_t i = 0; i < POINTS; i++)
        for (int64_t c = 0; c < width; c++) {
            double at = taps[6 * width + c]; /* of infinity */
            for (int64_t k = 6; i < 7 && k-- > 0;)
                at = at * points[i] + taps[k * width + c];
            for (int64_t j = 0; i < 7 && j < 7; j++)
                at /= j == i ? 1 : points[i] - points[j];
            products[i * padded + c] = (float)at * spread[i * stride + c] * (i == 0 ? -1 : 1);
        }
    kernels->gather(products, padded);
    guarded("memory after products of gather", products, POINTS * padded);
    for (int64_t half = 0; half < 2; half++)
        for (int64_t c = 0; c < width; c++) {
            double total = 0;
            for (int64_t k = 0; k < 7; k++)
                total += (double)taps[k * width + c] * x[(k + half) * width + c];
            close_to("gather", half * padded + c, products[half * padded + c], total, 2e-5);
        }
    free(x), free(taps), free(spread), free(products);
}

static void check_snake(int64_t width)
{
    float *x = numbers(width, 5.0f), *y = numbers(width, 1.0f);
    float *frequency = numbers(width, 9.0f), *inverse = numbers(width, 1.0f);
    kernels->snake_row(y, x, frequency, inverse, width);
    for (int64_t t = 0; t < width; t++) {
        double angle = (double)frequency[t] * x[t];
        close_to("snake_row", t, y[t], x[t] + inverse[t] * sin(angle) * sin(angle),
                 1e-6 + 1.5e-7 * fabs(angle));
    }
    guarded("memory after y of snake_row", y, width);
    free(x), free(y), free(frequency), free(inverse);
}

static void check_audio(void)
{
    static const int64_t widths[] = {1, 12, 33, 48, 100};
    for (int n = 0; n < 5; n++) {
        check_points(widths[n]);
        check_snake(widths[n]);
    }
}

/* ---- threads ---- */

static void check_threads(void)
{
    int64_t rows = 37, stride, y_stride = 700;
    Weights w = weights(700, 515, BFLOAT16, 0, 1);
    stride = row_stride(515);
    float *x = numbers(rows * stride, 1.0f), *first = numbers(rows * y_stride, 1.0f);
    Team *alone = open_team(1);
    if (alone != NULL || !product(alone, first, y_stride, x, stride, rows, &w.matrix, 0))
        fail("product of one thread, without memory", 0, 0, 1);
    close_team(alone);
    grow_pool(4);
    check_product(&w, first, first, y_stride, x, stride, rows, 0);
    for (int64_t threads = 2; threads <= 4; threads++)
        for (int again = 0; again < 20; again++) {
            float *y = numbers(rows * y_stride, 1.0f);
            Team *team = open_team(threads);
            if (!product(team, y, y_stride, x, stride, rows, &w.matrix, 0))
                fail("product of a team, without memory", threads, 0, 1);
            close_team(team);
            if (memcmp(y, first, (size_t)(rows * y_stride) * 4) != 0)
                fail("product of so many threads", threads, 0, 1);
            free(y);
        }
    free(x), free(first);
    free_weights(&w);
}

/* With bounds that few and many elements exceed, and words of a mask that allow all, few and none. */
static void check_above(const float *x, int64_t count)
{
    static const uint32_t words[] = {UINT32_MAX, 0x80010001u, 0};
    uint32_t mask[10];
    for (int64_t i = 0; i < 10; i++)
        mask[i] = words[i % 3];
    for (int masked = 0; masked < 2; masked++)
        for (float bound = -2; bound < 5; bound++)
            for (int64_t from = 0; from <= count; from++) {
                int64_t first = from, found;
                while (first < count &&
                       !(x[first] > bound && (!masked || mask[first / 32] >> first % 32 & 1)))
                    first++;
                found = kernels->first_above(x, masked ? mask : NULL, from, count, bound);
                if (found != first)
                    fail("first_above", from, (double)found, (double)first);
            }
}

static void check_draw(int64_t vocab)
{
    enum { MOST = 300 };
    int64_t ids[MOST], best = 0;
    float scores[MOST], spare[2 * MOST], noise[MOST] = {0}, *logits = numbers(vocab, 4.0f);
    double total = 0;
    for (int64_t i = 0; i < vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    for (int64_t i = 0; i < vocab; i++)
        total += exp((logits[i] - logits[best]) / 2);
    if (likeliest(logits, NULL, vocab) != best ||
        remaining(ids, scores, spare, logits, NULL, vocab, 1, 1, 1, 0) != 1 ||
        race(ids, scores, 1, noise) != best)
        fail("the likeliest", vocab, (double)likeliest(logits, NULL, vocab), (double)best);
    int64_t every = remaining(ids, scores, spare, logits, NULL, vocab, 2, 0, 1, 0);
    noise[vocab / 2] = 99;
    if (every != vocab || race(ids, scores, every, noise) != vocab / 2)
        fail("race", vocab, (double)every, (double)vocab);
    int64_t half = remaining(ids, scores, spare, logits, NULL, vocab, 2, 0, 0.5f, 0);
    double kept = 0, least = 0;
    for (int64_t i = 0; i < half; i++) {
        close_to("score", ids[i], scores[i], (logits[ids[i]] - logits[best]) / 2, 1e-5);
        kept += exp(scores[i]) / total;
        least = scores[i] < least ? scores[i] : least;
    }
    if (kept < 0.5 || kept - exp(least) / total >= 0.5)
        fail("top p", vocab, kept, 0.5);
    check_above(logits, vocab);
    free(logits);
}

int main(void)
{
    static const char *const kinds[] = {"_vnni_avx512", "_avx512", "_avx2", "_plain"};
    uint64_t first = 0;
    for (int i = 0; i < 4; i++) {
        if (!use_kernels(kinds[i]))
            continue;
        kind = kernels->name + 1;
        state = 1;
        int before = failures;
        digest = 0;
        check_multiply();
        first = first == 0 ? digest : first;
        if (digest != first)
            fail("bits of integer products", i, 0, 0);
        check_norms();
        check_functions();
        check_attend();
        check_audio();
        check_threads();
        check_draw(300);
        check_draw(75);
        printf("  as %s: %s\n", kind, failures == before ? "passed" : "FAILED");
    }
    return failures != 0;
}
