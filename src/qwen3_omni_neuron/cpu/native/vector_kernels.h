/* The kernels in vectors of LANES floats; kernels.c includes this file for each kind of processor,
 * defining LANES, REGISTERS (its vectors), TILE_ROWS (rows of the highest tile of a product) and
 * KIND(name). */

typedef float KIND(Vector) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t KIND(Bits) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t KIND(Words) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t KIND(Halves) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int16_t KIND(Pairs) __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int8_t KIND(Bytes) __attribute__((vector_size(LANES), aligned(1), may_alias));
#define Vector KIND(Vector)
#define Bits KIND(Bits)
#define Words KIND(Words)
#define AT(p) (*(Vector *)(p))
#define READ(p) (*(const Vector *)(p))
#define INLINE static inline __attribute__((always_inline))

/* Inputs whose products are summed before they join the total: more exact, and their weights stay in
 * the cache. */
#define CHUNK 256
/* Weights are prefetched into the level-2 cache: the level-1 cache waits for few lines at a time, which
 * limits a core to two thirds of its bandwidth. Wide numbers in narrow vectors are faster with the
 * level-1 cache, and less far ahead. */
#define NEAR(type) (LANES < 16 && (type) <= BFLOAT16)
/* Bytes from the weights in use to those prefetched. */
#define AHEAD(type) (NEAR(type) ? 4096 : 8192)
/* Sums of one dot product, the same on every processor. */
#define SUMS 16
/* Dot products that are computed together: their sums take half of the registers. */
#define DOTS (REGISTERS / 2)
/* Positions that all queries process before the next ones: their keys stay in the level-1 cache. */
#define POSITIONS 32

/* ---- products ---- */

INLINE void KIND(fetch)(const char *weights, int type)
{
    if (NEAR(type))
        __builtin_prefetch(weights, 0, 3);
    else
        __builtin_prefetch(weights, 0, 2);
}

/* Weights i to i + LANES - 1, widened. */
INLINE Vector KIND(widened)(const void *w, int64_t i, int type)
{
    const uint16_t *halves = (const uint16_t *)w + i;
    const int8_t *bytes = (const int8_t *)w + i;
    (void)halves, (void)bytes;
    if (type == FLOAT32)
        return READ((const float *)w + i);
#if LANES == 16 /* gcc 12 converts number by number below */
    if (type == BFLOAT16)
        return (Vector)_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves)), 16);
    return (Vector)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif LANES == 8
    if (type == BFLOAT16)
        return (Vector)_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves)), 16);
    return (Vector)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
    if (type == BFLOAT16)
        return (Vector)(__builtin_convertvector(*(const KIND(Halves) *)halves, Words) << 16);
    return __builtin_convertvector(
        __builtin_convertvector(*(const KIND(Bytes) *)bytes, Bits), Vector);
#endif
}

/* a * b + c. The compiler would round once or twice depending on the context, and a row's result on its
 * tile. */
INLINE Vector KIND(fused)(Vector a, Vector b, Vector c)
{
#if LANES == 16
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c; /* rounds twice without such an instruction */
#endif
}

/* x in every lane. Adding zeros would change -0, so the compiler would keep the addition. */
INLINE Vector KIND(filled)(float x)
{
    return x - (Vector){0};
}

/* Add the products of input k to sums. ahead: bytes to the prefetched weights. See sum_chunks. */
INLINE void KIND(add_input)(Vector (*sums)[8], const float *x, int64_t x_stride, int rows,
                            const void *w, int type, int64_t size, int64_t k, int vectors,
                            int64_t ahead)
{
    Vector some[8], inputs[12];
    for (int r = 0; r < rows && rows < vectors; r++)
        inputs[r] = KIND(filled)(x[r * x_stride + k]);
    for (int v = 0; v < vectors; v++) {
        int64_t i = v * LANES / PANEL * size + k * PANEL + v * LANES % PANEL;
        /* Each panel is a stream: prefetch it. Many rows find most of it in the cache. */
        if (v * LANES % PANEL * bytes_of(type) % 64 == 0 && (rows < TILE_ROWS || type != FLOAT32))
            KIND(fetch)((const char *)w + i * bytes_of(type) + ahead, type);
        some[v] = KIND(widened)(w, i, type);
        for (int r = 0; r < rows && rows < vectors; r++)
            sums[r][v] += inputs[r] * some[v];
    }
    for (int r = 0; r < rows && rows >= vectors; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] += x[r * x_stride + k] * some[v];
}

/* Add `rows` by `vectors` * LANES independent sums to total, which the processor overlaps. Counts and
 * type are constants after inlining: the sums are registers. w: the first weight; a panel has `size`
 * weights. skip: bytes from a panel's end to the next panel in use, which is prefetched. */
INLINE void KIND(sum_chunks)(Vector (*total)[8], const float *x, int64_t x_stride, int rows,
                             const void *w, int type, int64_t size, int64_t into, int vectors,
                             int64_t skip)
{
    int64_t last = into - AHEAD(type) / (PANEL * bytes_of(type));
    for (int64_t start = 0; start < into; start += CHUNK) {
        int64_t k = start, end = into < start + CHUNK ? into : start + CHUNK;
        Vector sums[12][8];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = (Vector){0};
        while (k < end) {
            int64_t ahead = k < last ? AHEAD(type) : AHEAD(type) + skip;
            int64_t stop = k < last && last < end ? last : end;
            for (; k + 2 <= stop && rows == 1; k += 2)
                for (int i = 0; i < 2; i++)
                    KIND(add_input)(sums, x, x_stride, rows, w, type, size, k + i, vectors, ahead);
            for (; k < stop; k++)
                KIND(add_input)(sums, x, x_stride, rows, w, type, size, k, vectors, ahead);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                total[r][v] += sums[r][v];
    }
}

/* Scales i to i + LANES - 1, widened. */
INLINE Vector KIND(scales)(const char *scales, int64_t i, int64_t type)
{
    if (type == FLOAT32)
        return READ((const float *)(const void *)scales + i);
    if (type == BFLOAT16)
        return KIND(widened)(scales, i, BFLOAT16);
    /* The exponent moves to its place, and 2^112 adds the difference of the two types' biases. */
    Words bits = (Words)KIND(widened)(scales, i, BFLOAT16) >> 16;
    Vector size = (Vector)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Vector)((Words)size | (bits & 0x8000) << 16);
}

/* Round a vector here: the compiler must not fuse its product with an addition. */
#if defined(__x86_64__)
#define ROUNDED(x) __asm__("" : "+v"(x))
#elif defined(__aarch64__)
#define ROUNDED(x) __asm__("" : "+w"(x))
#else
#define ROUNDED(x) __asm__("" : "+m"(x))
#endif
#define IS_INT4(type) ((type) == INT4 || (type) == INT4_VNNI)
#define IS_INTEGER(type) (IS_INT4(type) || (type) == INT8 || (type) == INT8_VNNI)

#include "vector_integers.h"

/* Write LANES outputs of a row, from output `at` on. */
INLINE void KIND(put)(const Tiles *t, int64_t row, int64_t at, int type, Vector total)
{
    float *y = t->y + row * t->y_stride + at;
    Vector factor = KIND(filled)(1.0f), more = {0};
    if (t->scale != 0)
        factor *= READ(t->scale + at);
    if (t->bias != 0)
        more = READ(t->bias + at);
    if (IS_INTEGER(type)) {
        total *= factor;
        ROUNDED(total);
        factor = KIND(filled)(1.0f);
    }
    Vector result = KIND(fused)(total, factor, more);
    if (t->add)
        result += READ(y);
    AT(y) = result;
}

#include "vector_compact.h"

/* Whether a tile of INT4 fits the registers: sums, totals, and two vectors of weights per vector of
 * sums. */
INLINE int KIND(fits)(int type, int rows, int vectors)
{
    return !IS_INT4(type) || rows == 1 || 2 * (rows + 1) * vectors < REGISTERS;
}

/* Compute `rows` by `vectors` * LANES outputs of some panels, from output `at` on. */
INLINE void KIND(tile)(const Tiles *t, int64_t at, int rows, int type, int vectors)
{
    if (!KIND(fits)(type, rows, vectors)) /* never called: see shape_for */
        __builtin_unreachable();
    const Matrix *m = t->m;
    int64_t size = panel_bytes(m), end = at + vectors * LANES;
    const char *panels = t->panels + at / PANEL * size;
    int64_t skip = (end < t->outs ? t->panels + end / PANEL * size : t->next) - panels - size;
    Vector total[12][8];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] = (Vector){0};
    if (type == COMPACT)
        KIND(sum_compact)(total, t->x, t->x_stride, rows, panels, at % PANEL, size, m->into,
                          vectors, skip);
    else if (IS_INTEGER(type))
        KIND(sum_groups)(total, t->x, t->x_stride, rows, type, m, panels, at % PANEL, vectors,
                         skip);
    else
        KIND(sum_chunks)(total, t->x, t->x_stride, rows, panels + at % PANEL * bytes_of(type),
                         type, m->into * PANEL, m->into, vectors, skip);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            KIND(put)(t, r, at + v * LANES, type, total[r][v]);
}

/* Rows and vectors of tiles. Tiles of few rows are wider, so that enough sums overlap and each weight
 * is read and widened once. The highest tile's sums fill the registers. */
#if LANES == 16
#define SHAPES(SHAPE)                                                                            \
    SHAPE(12, 2) SHAPE(8, 2) SHAPE(7, 2) SHAPE(6, 2) SHAPE(5, 2) SHAPE(4, 2) SHAPE(3, 4)         \
    SHAPE(3, 2) SHAPE(2, 4) SHAPE(2, 2) SHAPE(1, 8) SHAPE(1, 4) SHAPE(1, 2)
#elif LANES == 8
#define SHAPES(SHAPE)                                                                            \
    SHAPE(6, 2) SHAPE(5, 2) SHAPE(4, 2) SHAPE(3, 4) SHAPE(3, 2) SHAPE(2, 4) SHAPE(2, 2)          \
    SHAPE(1, 8) SHAPE(1, 4)
#else
#define SHAPES(SHAPE) SHAPE(4, 4) SHAPE(3, 4) SHAPE(2, 4) SHAPE(1, 8) SHAPE(1, 4)
#endif

/* A function for each tile shape and type: if several share one, the compiler keeps sums in memory. */
#define TILE(type, rows, vectors)                                                                \
    static __attribute__((noinline)) void KIND(tile_##type##_##rows##_##vectors)(const Tiles *t, \
                                                                                 int64_t at)     \
    {                                                                                            \
        KIND(tile)(t, at, rows, type, vectors);                                                  \
    }
#define SHAPE(rows, vectors)                                                                     \
    TILE(FLOAT32, rows, vectors)                                                                 \
    TILE(BFLOAT16, rows, vectors)                                                                \
    TILE(INT8, rows, vectors)                                                                    \
    TILE(INT4, rows, vectors)                                                                    \
    TILE(COMPACT, rows, vectors)                                                                 \
    VNNI_TILES(rows, vectors)
#if LANES == 16
#define VNNI_TILES(rows, vectors) TILE(INT8_VNNI, rows, vectors) TILE(INT4_VNNI, rows, vectors)
#else
#define VNNI_TILES(rows, vectors)
#endif
SHAPES(SHAPE)
#if LANES == 16 /* for outputs that end within a panel */
TILE(FLOAT32, 12, 1)
TILE(FLOAT32, 4, 1)
TILE(FLOAT32, 1, 1)
#elif LANES == 8
TILE(FLOAT32, 1, 2)
#endif
#undef SHAPE
#undef TILE

static const struct {
    int rows, vectors;
    void (*tile[TYPES])(const Tiles *, int64_t);
} KIND(shapes)[] = {
#define TILE(type, rows, vectors) [type] = KIND(tile_##type##_##rows##_##vectors)
#define SHAPE(rows, vectors)                                                                     \
    {rows, vectors,                                                                              \
     {TILE(FLOAT32, rows, vectors), TILE(BFLOAT16, rows, vectors), TILE(INT8, rows, vectors),    \
      TILE(INT4, rows, vectors), TILE(COMPACT, rows, vectors), VNNI_TILES(rows, vectors)}},
#undef VNNI_TILES
#if LANES == 16
#define VNNI_TILES(rows, vectors) TILE(INT8_VNNI, rows, vectors), TILE(INT4_VNNI, rows, vectors)
#else
#define VNNI_TILES(rows, vectors)
#endif
    SHAPES(SHAPE)
#undef VNNI_TILES
#undef SHAPE
#if LANES == 16
    {12, 1, {TILE(FLOAT32, 12, 1)}},
    {4, 1, {TILE(FLOAT32, 4, 1)}},
    {1, 1, {TILE(FLOAT32, 1, 1)}},
#elif LANES == 8
    {1, 2, {TILE(FLOAT32, 1, 2)}},
#endif
#undef TILE
};
#undef SHAPES

/* Return the index of the highest shape for these rows and outputs; of equal ones, the widest. */
static int KIND(shape_for)(int64_t rows, int type, int64_t outs)
{
    int s = 0;
    while (KIND(shapes)[s].rows > rows || outs % (KIND(shapes)[s].vectors * LANES) != 0 ||
           !KIND(fits)(type, KIND(shapes)[s].rows, KIND(shapes)[s].vectors))
        s++;
    return s;
}

/* multiply for the first `outs` outputs, which are whole panels, or of FLOAT32 whole vectors. */
static void KIND(multiply_whole)(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                                 int64_t rows, const Matrix *w, int64_t first, int64_t outs,
                                 int add, const char *next, int vnni)
{
    int type = (int)w->type;
    if (vnni && has_own_inputs(w))
        type = type == INT4 ? INT4_VNNI : INT8_VNNI;
    int64_t panels = panels_of(outs);
    Tiles t = {y,        x,
               y_stride, x_stride,
               outs,     add,
               w,        (const char *)w->panels + first * panel_bytes(w),
               next != 0 ? next : (const char *)w->panels + (first + panels) * panel_bytes(w),
               w->scale == 0 ? 0 : w->scale + first * PANEL,
               w->bias == 0 ? 0 : w->bias + first * PANEL};
#if LANES < 16
    if (type == COMPACT) {
        int64_t done = KIND(multiply_sharing)(&t, rows);
        rows -= done;
        t.x += done * x_stride;
        t.y += done * y_stride;
    }
#endif
    while (rows > 0) {
        int s = KIND(shape_for)(rows, type, outs);
        int64_t now = KIND(shapes)[s].rows;
        for (int64_t at = 0; at < outs; at += KIND(shapes)[s].vectors * LANES)
            KIND(shapes)[s].tile[type](&t, at);
        rows -= now;
        t.x += now * x_stride;
        t.y += now * y_stride;
    }
}

static void KIND(multiply_any)(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                               int64_t rows, const Matrix *w, int64_t first, int64_t panels,
                               int add, const char *next, int vnni)
{
    int64_t outs = smaller(panels * PANEL, w->out - first * PANEL), whole = outs / PANEL;
    if (w->type == FLOAT32 && outs % WIDEST == 0)
        whole = panels;
    if (whole > 0)
        KIND(multiply_whole)(y, y_stride, x, x_stride, rows, w, first, smaller(outs, whole * PANEL),
                             add, next, vnni);
    if (whole == panels)
        return;
    /* The last panel exceeds the rest of y, scale and bias. */
    Matrix last = *w;
    last.panels = (const char *)w->panels + (first + whole) * panel_bytes(w);
    last.out = PANEL;
    float some[TILE_ROWS * PANEL], scale[PANEL] = {0}, bias[PANEL] = {0};
    outs -= whole * PANEL;
    y += whole * PANEL;
    first = (first + whole) * PANEL;
    if (w->scale != 0)
        last.scale = memcpy(scale, w->scale + first, (size_t)outs * sizeof(float));
    if (w->bias != 0)
        last.bias = memcpy(bias, w->bias + first, (size_t)outs * sizeof(float));
    for (int64_t done = 0; done < rows; done += TILE_ROWS) {
        int64_t now = smaller(rows - done, TILE_ROWS);
        KIND(multiply_whole)(some, PANEL, x + done * x_stride, x_stride, now, &last, 0,
                             PANEL, 0, next, vnni);
        for (int64_t r = 0; r < now; r++)
            for (int64_t o = 0; o < outs; o++) {
                float result = some[r * PANEL + o], *to = y + (done + r) * y_stride + o;
                *to = add ? result + *to : result;
            }
    }
}

static void KIND(multiply)(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                           int64_t rows, const Matrix *w, int64_t first, int64_t panels, int add,
                           const char *next)
{
    KIND(multiply_any)(y, y_stride, x, x_stride, rows, w, first, panels, add, next, 0);
}

#if LANES == 16
/* multiply with the instructions of AVX512-VNNI. */
static void KIND(multiply_vnni)(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                                int64_t rows, const Matrix *w, int64_t first, int64_t panels,
                                int add, const char *next)
{
    KIND(multiply_any)(y, y_stride, x, x_stride, rows, w, first, panels, add, next, 1);
}
#endif

/* ---- rows ---- */

/* The first `count` floats at p, zeros after them. */
INLINE Vector KIND(some)(const float *p, int64_t count)
{
    Vector x = {0};
    if (count >= LANES)
        return READ(p);
    if (count > 0)
        memcpy(&x, p, (size_t)count * sizeof(float));
    return x;
}

/* Add the SUMS sums of a dot product, in one order on every processor. */
INLINE float KIND(added)(const Vector *sums)
{
    float all[SUMS];
    for (int v = 0; v < SUMS / LANES; v++)
        AT(all + v * LANES) = sums[v];
    for (int width = SUMS / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            all[i] += all[i + width];
    return all[0];
}

/* Split the lanes of a, then of b, into groups of 2 * half. Return each group's lower or upper half. */
INLINE Vector KIND(half_groups)(Vector a, Vector b, int half, int upper)
{
#ifdef __clang__
    Vector found;
    for (int p = 0; p < LANES; p++) {
        int lane = p / half * 2 * half + p % half + upper * half;
        found[p] = lane < LANES ? a[lane] : b[lane - LANES];
    }
    return found;
#else
    Bits lanes;
    for (int p = 0; p < LANES; p++)
        lanes[p] = p / half * 2 * half + p % half + upper * half;
    return __builtin_shuffle(a, b, lanes);
#endif
}

/* Add the halves of each group of 2 * half lanes: 2 * half vectors become `half` vectors. */
INLINE void KIND(fold)(Vector *x, int half)
{
    for (int d = 0; d < half; d++)
        x[d] = KIND(half_groups)(x[2 * d], x[2 * d + 1], half, 0) +
               KIND(half_groups)(x[2 * d], x[2 * d + 1], half, 1);
}

/* Add the sums of LANES dot products, each in the order of `added`. Returns a lane for each. */
INLINE Vector KIND(all_added)(Vector (*sums)[SUMS / LANES])
{
    Vector x[LANES];
    for (int d = 0; d < LANES; d++) {
        for (int v = SUMS / LANES / 2; v > 0; v /= 2)
            for (int i = 0; i < v; i++)
                sums[d][i] += sums[d][i + v];
        x[d] = sums[d][0];
    }
    /* Not a loop: the compiler must know `half`, or it recomputes the lanes to shuffle. */
    if (LANES > 8)
        KIND(fold)(x, LANES / 2);
    if (LANES > 4)
        KIND(fold)(x, 4);
    KIND(fold)(x, 2);
    KIND(fold)(x, 1);
    return x[0];
}

/* Write `scale` times the dot products of `count` queries with the keys [at, at + key_count) to
 * to[query] + at; counts are constants after inlining. */
INLINE void KIND(dots)(float *const *to, int64_t at, const float *const *queries, int count,
                       const float *keys, int key_count, int64_t width, float scale)
{
    Vector sums[DOTS][SUMS / LANES]; /* query by query */
    int64_t whole = width / SUMS * SUMS;
    for (int d = 0; d < count * key_count; d++)
        for (int v = 0; v < SUMS / LANES; v++)
            sums[d][v] = (Vector){0};
    for (int v = 0; v < SUMS / LANES; v++)
        for (int64_t i = v * LANES; i < whole; i += SUMS)
            for (int k = 0; k < key_count; k++) {
                Vector key = READ(keys + (at + k) * width + i);
                for (int q = 0; q < count; q++)
                    sums[q * key_count + k][v] += READ(queries[q] + i) * key;
            }
    if (whole < width)
        for (int v = 0; v < SUMS / LANES; v++)
            for (int k = 0; k < key_count; k++) {
                int64_t i = whole + v * LANES;
                Vector key = KIND(some)(keys + (at + k) * width + i, width - i);
                for (int q = 0; q < count; q++)
                    sums[q * key_count + k][v] = KIND(fused)(KIND(some)(queries[q] + i, width - i),
                                                             key, sums[q * key_count + k][v]);
            }
    float found[DOTS];
    if (count * key_count == DOTS)
        for (int d = 0; d < DOTS; d += LANES)
            AT(found + d) = KIND(all_added)(sums + d) * scale;
    else
        for (int d = 0; d < count * key_count; d++)
            found[d] = KIND(added)(sums[d]) * scale;
    for (int q = 0; q < count; q++)
        memcpy(to[q] + at, found + q * key_count, (size_t)key_count * sizeof(float));
}

INLINE float KIND(dot)(const float *a, const float *b, int64_t width)
{
    float result, *to[1] = {&result};
    const float *one[1] = {a};
    KIND(dots)(to, 0, one, 1, b, 1, width, 1.0f);
    return result;
}

static void KIND(rms_norm)(float *y, const float *x, const float *weight, int64_t width, float eps)
{
    float scale = 1.0f / sqrtf(KIND(dot)(x, x, width) / (float)width + eps);
    for (int64_t i = 0; i < width; i++)
        y[i] = x[i] * scale * weight[i];
}

static void KIND(layer_norm)(float *y, const float *x, const float *weight, const float *bias,
                             int64_t width, float eps)
{
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < width; i++)
        mean += x[i];
    mean /= (double)width;
    for (int64_t i = 0; i < width; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    float scale = (float)(1.0 / sqrt(squares / (double)width + eps)), middle = (float)mean;
    for (int64_t i = 0; i < width; i++)
        y[i] = (x[i] - middle) * scale * weight[i] + bias[i];
}

/* Select a where `mask` is all ones and b where it is zero. */
INLINE Vector KIND(pick)(Bits mask, Vector a, Vector b)
{
    return (Vector)(((Bits)a & mask) | ((Bits)b & ~mask));
}

INLINE Vector KIND(exp)(Vector x)
{
    const Vector low = (Vector){0} - 87.0f, high = (Vector){0} + 88.0f;
    x = KIND(pick)(x < low, low, KIND(pick)(x > high, high, x));
    /* e^x = 2^n e^rest. 1.5 * 2^23 + n is a float without fraction: its lowest bits are n. */
    Vector shifted = x * 1.44269504f + 12582912.0f;
    Vector n = shifted - 12582912.0f;
    Vector rest = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts */
    Vector total = rest * (1.0f / 5040) + 1.0f / 720;
    total = total * rest + 1.0f / 120;
    total = total * rest + 1.0f / 24;
    total = total * rest + 1.0f / 6;
    total = total * rest + 0.5f;
    total = total * rest + 1.0f;
    total = total * rest + 1.0f;
    return total * (Vector)(((Bits)shifted + 127) << 23);
}

/* Apply an expression of the vectors `x` and `z`, read at a and b, to `width` floats. */
#define FOR_EACH(y, a, b, width, expression)                                                     \
    for (int64_t i = 0; i < (width); i += LANES) {                                               \
        int64_t left = (width) - i;                                                              \
        Vector x = left < LANES ? KIND(some)((a) + i, left) : READ((a) + i);                     \
        Vector z = left < LANES ? KIND(some)((b) + i, left) : READ((b) + i);                     \
        Vector result = expression;                                                              \
        (void)z;                                                                                 \
        if (left < LANES)                                                                        \
            memcpy((y) + i, &result, (size_t)left * sizeof(float));                              \
        else                                                                                     \
            AT((y) + i) = result;                                                                \
    }

static void KIND(exponentials)(float *y, const float *a, int64_t width)
{
    FOR_EACH(y, a, a, width, KIND(exp)(x))
}

static void KIND(gate)(float *y, const float *gate, const float *up, int64_t width, float scale)
{
    FOR_EACH(y, gate, up, width, x / (1.0f + KIND(exp)(-x)) * z * scale)
}

/* erf(x) as x p(x^2) / q(x^2), within 4e-7; beyond 4 it is 1 in float32. */
INLINE Vector KIND(erf)(Vector x)
{
    const Vector high = (Vector){0} + 4.0f, low = -high;
    x = KIND(pick)(x < low, low, KIND(pick)(x > high, high, x));
    Vector square = x * x;
    Vector above = square * -2.72614225801306e-10f + 2.77068142495902e-08f;
    above = above * square - 2.10102402082508e-06f;
    above = above * square - 5.69250639462346e-05f;
    above = above * square - 7.34990630326855e-04f;
    above = above * square - 2.95459980854025e-03f;
    above = above * square - 1.60960333262415e-02f;
    Vector below = square * -1.45660718464996e-05f - 2.13374055278905e-04f;
    below = below * square - 1.68282697438203e-03f;
    below = below * square - 7.37332916720468e-03f;
    below = below * square - 1.42647390514189e-02f;
    return x * above / below;
}

static void KIND(gelu)(float *y, const float *a, int64_t width)
{
    FOR_EACH(y, a, a, width, x * 0.5f * (1.0f + KIND(erf)(x * 0.707106781f)))
}

static void KIND(gelu_tanh)(float *y, const float *a, int64_t width)
{
    /* (1 + tanh(u)) / 2 is 1 / (1 + e^-2u) */
    FOR_EACH(y, a, a, width,
             x / (1.0f + KIND(exp)((x + x * x * x * 0.044715f) * -1.59576912f)))
}

/* ---- attention ---- */

/* Softmax of one query's scores, in place. The sum has the order of a dot product. */
INLINE void KIND(softmax)(float *w, int64_t count)
{
    Vector most = (Vector){0} - INFINITY, sums[SUMS / LANES] = {{0}};
    float largest = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        most = KIND(pick)(READ(w + i) > most, READ(w + i), most);
    for (; i < count; i++)
        largest = w[i] > largest ? w[i] : largest;
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    for (i = 0; i < count; i++)
        w[i] -= largest;
    KIND(exponentials)(w, w, count);
    for (i = 0; i < count; i += SUMS)
        for (int v = 0; v < SUMS / LANES; v++)
            sums[v] += KIND(some)(w + i + v * LANES, count - i - v * LANES);
    float total = KIND(added)(sums);
    for (i = 0; i < count; i++)
        w[i] /= total;
}

/* Add the values of rows [start, stop) to the queries that see them. all: every query does. Unseen
 * values may be NaN, which a weight of 0 would not exclude. */
INLINE void KIND(mix_rows)(Vector (*sums)[4], float *const *weights, const int64_t *from,
                           const int64_t *to, int count, const float *values, int64_t start,
                           int64_t stop, int64_t width, int64_t at, int vectors, int64_t left,
                           int all)
{
    for (int64_t t = start; t < stop; t++)
        for (int v = 0; v < vectors; v++) {
            Vector value = KIND(some)(values + t * width + at + v * LANES, left - v * LANES);
            for (int q = 0; q < count; q++)
                if (all || (from[q] <= t && t < to[q]))
                    sums[q][v] = KIND(fused)(KIND(filled)(weights[q][t]), value, sums[q][v]);
        }
}

/* Add the values of positions [start, stop) to `count` queries' mixed values, [vectors * LANES] of
 * them, or only `left`; counts are constants after inlining. Query q sees rows [from[q], to[q]). */
INLINE void KIND(mix)(float *const *mixed, float *const *weights, const int64_t *from,
                      const int64_t *to, int count, const float *values, int64_t start, int64_t stop, int64_t width, int64_t at, int vectors, int64_t left)
{
    Vector sums[4][4];
    int64_t shared = start, shared_end = stop;
    for (int q = 0; q < count; q++) {
        shared = larger(shared, from[q]);
        shared_end = smaller(shared_end, to[q]);
    }
    shared = smaller(shared, stop);
    shared_end = larger(shared, shared_end);
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++)
            sums[q][v] = KIND(some)(mixed[q] + at + v * LANES, left - v * LANES);
    KIND(mix_rows)(sums, weights, from, to, count, values, start, shared, width, at, vectors, left,
                   0);
    KIND(mix_rows)(sums, weights, from, to, count, values, shared, shared_end, width, at, vectors,
                   left, 1);
    KIND(mix_rows)(sums, weights, from, to, count, values, shared_end, stop, width, at, vectors,
                   left, 0);
    for (int q = 0; q < count; q++)
        memcpy(mixed[q] + at, sums[q],
               (size_t)smaller(left, vectors * LANES) * sizeof(float));
}

/* A part of attend: the scores of `count` queries for the keys of positions [start, stop), or their
 * values' contribution to `mixed`, NULL for scores. `count` is a constant after inlining. */
INLINE void KIND(attend_part)(float *const *mixed, float *const *weights,
                              const float *const *queries, const int64_t *from, const int64_t *to,
                              int count, const float *rows, int64_t start, int64_t stop, int64_t width)
{
    int64_t first = from[0], last = to[0], together = DOTS / count;
    float scale = 1.0f / sqrtf((float)width);
    for (int q = 1; q < count; q++) {
        first = smaller(first, from[q]);
        last = larger(last, to[q]);
    }
    start = larger(start, first), stop = smaller(stop, last);
    if (mixed == 0) {
        for (; start + together <= stop; start += together)
            KIND(dots)(weights, start, queries, count, rows, DOTS / count, width, scale);
        for (; start < stop; start++)
            KIND(dots)(weights, start, queries, count, rows, 1, width, scale);
        return;
    }
    int64_t at = 0;
    int vectors = count == 4 ? REGISTERS / 8 : 4; /* whose sums are registers */
    for (; at + vectors * LANES <= width; at += vectors * LANES)
        KIND(mix)(mixed, weights, from, to, count, rows, start, stop, width, at, vectors,
                  vectors * LANES);
    for (; at + LANES <= width; at += LANES)
        KIND(mix)(mixed, weights, from, to, count, rows, start, stop, width, at, 1, LANES);
    if (at < width)
        KIND(mix)(mixed, weights, from, to, count, rows, start, stop, width, at, 1, width - at);
}

/* attend_part for all queries, some at a time. A separate function: see TILE. */
static __attribute__((noinline)) void KIND(attend_parts)(
    float *const *mixed, float *const *weights, const float *const *queries, const int64_t *from,
    const int64_t *to, int64_t count, const float *rows, int64_t start, int64_t stop, int64_t width)
{
    int64_t q = 0;
    for (; q + 4 <= count; q += 4)
        KIND(attend_part)(mixed == 0 ? 0 : mixed + q, weights + q, queries + q, from + q, to + q, 4,
                          rows, start, stop, width);
    for (; q + 2 <= count; q += 2)
        KIND(attend_part)(mixed == 0 ? 0 : mixed + q, weights + q, queries + q, from + q, to + q, 2,
                          rows, start, stop, width);
    for (; q < count; q++)
        KIND(attend_part)(mixed == 0 ? 0 : mixed + q, weights + q, queries + q, from + q, to + q, 1,
                          rows, start, stop, width);
}

static void KIND(attend)(float *const *mixed, const float *const *queries, const int64_t *from,
                         const int64_t *to, int64_t count, const float *keys, const float *values,
                         int64_t width, float *scratch)
{
    int64_t first = from[0], last = to[0];
    float *weights[QUERIES];
    for (int64_t q = 1; q < count; q++) {
        first = smaller(first, from[q]);
        last = larger(last, to[q]);
    }
    for (int64_t q = 0; q < count; q++) {
        weights[q] = scratch + q * (last + LANES);
        memset(mixed[q], 0, (size_t)width * sizeof(float));
    }
    for (int64_t t = first; t < last; t += POSITIONS)
        KIND(attend_parts)(0, weights, queries, from, to, count, keys, t,
                           smaller(last, t + POSITIONS), width);
    for (int64_t q = 0; q < count; q++)
        KIND(softmax)(weights[q] + from[q], to[q] - from[q]);
    for (int64_t t = first; t < last; t += POSITIONS)
        KIND(attend_parts)(mixed, weights, queries, from, to, count, values, t,
                           smaller(last, t + POSITIONS), width);
}

/* ---- audio ---- */

/* A point's polynomial is the product of (x - point) over all other points; even and odd terms of a
 * point and its negative differ only in sign. */
static void KIND(spread)(float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t width)
{
    for (int64_t i = 0; i < width; i += LANES, x += LANES, y += LANES) {
        Vector in[POINTS], even[3], odd[3];
        for (int k = 0; k < POINTS; k++)
            in[k] = READ(x + k * x_stride);
        even[0] = in[2] + in[6] - in[4] * 4.25f;
        odd[0] = in[1] + in[5] - in[3] * 4.25f;
        even[1] = in[6] + in[2] * 0.25f - in[4] * 1.25f;
        odd[1] = in[1] * 0.5f - in[3] * 2.5f + in[5] * 2.0f;
        even[2] = in[6] + in[2] * 4.0f - in[4] * 5.0f;
        odd[2] = in[1] * 2.0f - in[3] * 2.5f + in[5] * 0.5f;
        AT(y) = in[0] - in[6] + (in[4] - in[2]) * 5.25f;
        for (int k = 0; k < 3; k++) {
            AT(y + (2 * k + 1) * y_stride) = even[k] + odd[k];
            AT(y + (2 * k + 2) * y_stride) = even[k] - odd[k];
        }
        AT(y + 7 * y_stride) = in[7] - in[1] + (in[3] - in[5]) * 5.25f;
    }
}

static void KIND(gather)(float *products, int64_t count)
{
    for (float *p = products, *end = p + count; p < end; p += LANES) {
        Vector of[POINTS];
        for (int i = 0; i < POINTS; i++)
            of[i] = READ(p + i * count);
        AT(p) = of[0] + (of[1] + of[2]) + (of[3] + of[4]) + (of[5] + of[6]);
        AT(p + count) = of[7] + (of[1] - of[2]) + (of[3] - of[4]) * 2.0f + (of[5] - of[6]) * 0.5f;
    }
}

/* sin(x)^2, whose period is pi, within 4e-7 up to |x| of some thousands. */
INLINE Vector KIND(squared_sines)(Vector x)
{
    Vector n = (x * 0.318309886f + 12582912.0f) - 12582912.0f; /* rounded: see exp */
    Vector r = x - n * 3.140625f - n * 9.67502594e-4f - n * 1.50995799e-7f; /* pi in three parts */
    Vector square = r * r;
    Vector total = square * (-1.0f / 39916800) + 1.0f / 362880;
    total = total * square - 1.0f / 5040;
    total = total * square + 1.0f / 120;
    total = total * square - 1.0f / 6;
    total = total * square * r + r;
    return total * total;
}

static void KIND(snake_row)(float *y, const float *a, const float *frequency,
                            const float *inverse_magnitude, int64_t width)
{
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        AT(y + i) = READ(a + i) + KIND(squared_sines)(READ(a + i) * READ(frequency + i)) *
                                      READ(inverse_magnitude + i);
    if (i < width) {
        Vector x = KIND(some)(a + i, width - i), f = KIND(some)(frequency + i, width - i);
        x += KIND(squared_sines)(x * f) * KIND(some)(inverse_magnitude + i, width - i);
        memcpy(y + i, &x, (size_t)(width - i) * sizeof(float));
    }
}

/* ---- order ---- */

/* Whether any of a mask word's 32 elements is above a bound or NaN. */
INLINE int KIND(any_above)(const float *x, Vector bound)
{
    Bits any = {0};
    for (int i = 0; i < 32; i += LANES)
        any |= ~(READ(x + i) <= bound);
#if LANES == 8
    return !_mm256_testz_si256((__m256i)any, (__m256i)any);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++)
        found |= any[i];
    return found;
#endif
}

static int64_t KIND(first_above)(const float *x, const uint32_t *mask, int64_t from, int64_t count,
                                 float bound)
{
    const Vector bounds = KIND(filled)(bound);
    for (int64_t i = from; i < count;) {
        int64_t end = smaller((i | 31) + 1, count);
        uint32_t bits = (mask == NULL ? UINT32_MAX : mask[i / 32]) >> i % 32;
        if (bits != 0 && (end - i < 32 || KIND(any_above)(x + i, bounds)))
            for (int64_t j = i; j < end; j++, bits >>= 1)
                if (bits & 1 && !(x[j] <= bound))
                    return j;
        i = end;
    }
    return count;
}

/* ---- rounding ---- */

/* The nearest of the numbers -8 to 7; halves to even. */
INLINE Vector KIND(nearest)(Vector x)
{
    const Vector low = (Vector){0} - 8.0f, high = (Vector){0} + 7.0f;
#if LANES == 16
    x = (Vector)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vector)_mm512_max_ps(_mm512_min_ps((__m512)x, (__m512)high), (__m512)low);
#elif LANES == 8
    x = (Vector)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vector)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)high), (__m256)low);
#else
    for (int i = 0; i < LANES; i++)
        x[i] = rintf(x[i]);
    return KIND(pick)(x < low, low, KIND(pick)(x > high, high, x));
#endif
}

/* Gives the bits of cpu.packing.quantise_groups: sums are exact, because a weight with a non-zero
 * number is at least a 32nd of the largest. */
static void KIND(quantise)(void *block, const float *w, int64_t group)
{
    uint32_t *numbers = block;
    uint16_t *scales = (uint16_t *)((char *)block + number_bytes(group));
    for (int64_t o = 0; o < PANEL; o += LANES) {
        Vector most = READ(w + o), least = most, best = {0}, scale = {0};
        for (int64_t k = 1; k < group; k++) {
            Vector x = READ(w + k * PANEL + o);
            most = KIND(pick)(x > most, x, most);
            least = KIND(pick)(x < least, x, least);
        }
        most = KIND(pick)(most > -least, most, least);
        for (int step = 0; step < QUANTISED_STEPS; step++) {
            Vector per_step = ((Vector){0} - (7.0f + (float)step * 0.125f)) / most;
            Vector products = {0}, squares = {0};
            for (int64_t k = 0; k < group; k++) {
                Vector x = READ(w + k * PANEL + o), number = KIND(nearest)(x * per_step);
                products += x * number;
                squares += number * number;
            }
            Vector gain = products * products / squares;
            scale = KIND(pick)(gain > best, products / squares, scale);
            best = KIND(pick)(gain > best, gain, best);
        }
        Words bits = (Words)scale;
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000; /* to bfloat16 */
        scale = (Vector)bits;
        for (int lane = 0; lane < LANES; lane++)
            scales[o + lane] = (uint16_t)(bits[lane] >> 16);
        for (int64_t k = 0; k < group; k += 8) {
            Words packed = {0};
            for (int64_t i = 0; i < 8; i++) {
                Vector number = KIND(nearest)(READ(w + (k + i) * PANEL + o) / scale);
                number = KIND(pick)(scale == 0, (Vector){0}, number);
                packed |= (Words)__builtin_convertvector(number + 8.0f, Bits) << (uint32_t)(4 * i);
            }
            *(Words *)(numbers + k / 8 * PANEL + o) = packed;
        }
    }
}

#define NAME_OF(kind) #kind
#define NAME(kind) NAME_OF(kind)
#define OTHERS                                                                                   \
    .take = KIND(take),                                                                          \
    .quantise = KIND(quantise),                                                                  \
    .rms_norm = KIND(rms_norm),                                                                  \
    .layer_norm = KIND(layer_norm),                                                              \
    .gate = KIND(gate),                                                                          \
    .gelu = KIND(gelu),                                                                          \
    .gelu_tanh = KIND(gelu_tanh),                                                                \
    .exponentials = KIND(exponentials),                                                          \
    .attend = KIND(attend),                                                                      \
    .spread = KIND(spread),                                                                      \
    .gather = KIND(gather),                                                                      \
    .snake_row = KIND(snake_row),                                                                \
    .first_above = KIND(first_above),
static const Kernels KIND(kernels) = {.name = NAME(KIND()), .multiply = KIND(multiply), OTHERS};
#if LANES == 16
static const Kernels KIND(vnni_kernels) = {
    .name = NAME(KIND(_vnni)), .multiply = KIND(multiply_vnni), OTHERS};
#endif
#undef OTHERS

#undef NAME
#undef NAME_OF
#undef FOR_EACH
#undef CHUNK
#undef AHEAD
#undef NEAR
#undef SUMS
#undef DOTS
#undef POSITIONS
#undef ROUNDED
#undef IS_INT4
#undef IS_INTEGER
#undef INLINE
#undef READ
#undef AT
#undef Bits
#undef Words
#undef Vector
#undef TILE_ROWS
#undef REGISTERS
#undef LANES
#undef KIND
