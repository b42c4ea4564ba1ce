/* Products of COMPACT matrices: see Matrix of library.h. Part of vector_kernels.h. */

typedef uint16_t KIND(Shorts) __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint8_t KIND(Exponents) __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
#define Shorts KIND(Shorts)
/* So a block's sums equal a chunk's of other types, to the bit. */
_Static_assert((int)BLOCK_INPUTS == CHUNK, "a block is a chunk");
/* Numbers of a row in one vector. */
#define SHORTS (2 * LANES)
/* Bytes from the numbers in use to those prefetched into the level-1 cache, of all panels of a tile
 * together. The fastest on Zen 4 of 200 to 12000 bytes and both caches. */
#define NEARBY 1536

/* Restore four inputs' bfloat16 numbers from 12 bits each: sign, exponent above `lowest`, mantissa. */
INLINE void KIND(restore)(Shorts numbers[4], const char *quad, Shorts lowest)
{
    Shorts words[3];
    for (int i = 0; i < 3; i++) {
        words[i] = *(const Shorts *)(const void *)(quad + i * 2 * PANEL);
        numbers[i] = (words[i] & 0x87ff) + lowest;
    }
#if LANES == 16 /* gcc 12 needs more operations */
#define AND_OR(a, b, mask)                                                                       \
    (Shorts) _mm512_ternarylogic_epi32((__m512i)(a), (__m512i)(b), _mm512_set1_epi16(mask), 0xf8)
    Shorts last = AND_OR((Shorts){0}, words[0] >> 4, 0x780);
    last = AND_OR(last, words[1] >> 8, 0x78);
    last = AND_OR(last, words[2] >> 12, 7);
    last = AND_OR(last, words[2] << 4, (short)0x8000);
#undef AND_OR
#else
    Shorts last = (words[0] >> 4 & 0x780) | (words[1] >> 8 & 0x78) | (words[2] >> 12 & 7) |
                  (words[2] << 4 & 0x8000);
#endif
    numbers[3] = last + lowest;
}

/* The lowest exponents from a place in a head on, shifted to bfloat16's exponent bits. */
INLINE Shorts KIND(lowest_of)(const char *exponents)
{
    return __builtin_convertvector(*(const KIND(Exponents) *)(const void *)exponents, Shorts) << 7;
}

/* The exceptions of a panel's block. next: the first unused one. quad: its quad. */
typedef struct {
    const uint32_t *next, *end;
    uint32_t quad;
} KIND(Exceptions);

/* Quad of the next exception; UINT32_MAX without one. */
INLINE uint32_t KIND(next_quad)(const KIND(Exceptions) *exceptions)
{
    return exceptions->next < exceptions->end ? *exceptions->next >> 23 : UINT32_MAX;
}

INLINE KIND(Exceptions) KIND(exceptions_of)(const char *head)
{
    KIND(Exceptions) exceptions = {(const uint32_t *)(const void *)(head + PANEL),
                                   (const uint32_t *)(const void *)(head + BLOCK_HEAD), 0};
    exceptions.quad = KIND(next_quad)(&exceptions);
    return exceptions;
}

/* Put a quad's exceptions in their places, skipping the panel's other vectors. first: place in the row
 * where the vectors begin. */
INLINE void KIND(put_exceptions)(Shorts numbers[4], KIND(Exceptions) *exceptions, uint32_t first)
{
    uint16_t places[4][SHORTS];
    memcpy(places, numbers, sizeof places);
    for (uint32_t quad = exceptions->quad; exceptions->quad == quad;
         exceptions->quad = KIND(next_quad)(exceptions)) {
        uint32_t number = *exceptions->next++, at = (number >> 16 & (PANEL - 1)) - first;
        if (at < SHORTS)
            places[number >> 21 & 3][at] = (uint16_t)number;
    }
    memcpy(numbers, places, sizeof places);
}

/* Add a block's sums to total. head, quads: of the block in the tile's first panel; left: bytes from quads
 * to the panel's end. lane, size, skip: see sum_compact. kept: 0, or gets the numbers as floats,
 * [inputs, vectors * LANES]. */
INLINE void KIND(sum_block)(Vector (*total)[8], const float *x, int64_t x_stride, int rows,
                            const char *head, const char *quads, int64_t left, int64_t lane,
                            int64_t size, int64_t inputs, int vectors, int64_t skip, float *kept)
{
    /* A part is one vector of numbers, which gives two of sums, `apart` vectors apart. */
    int parts = vectors / 2, apart = LANES < 8 ? 2 : 1;
    int64_t nearby = NEARBY / larger(1, vectors * LANES / PANEL) / QUAD_BYTES * QUAD_BYTES;
    Vector sums[12][8];
    Shorts lowest[4];
    KIND(Exceptions) exceptions[4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = (Vector){0};
    for (int p = 0; p < parts; p++) {
        const char *panel = head + p * SHORTS / PANEL * size;
        lowest[p] = KIND(lowest_of)(panel + lane + p * SHORTS % PANEL);
        exceptions[p] = KIND(exceptions_of)(panel);
        for (int64_t b = 0; b < BLOCK_HEAD; b += 64) /* of the next block */
            __builtin_prefetch(panel + BLOCK_HEAD + b, 0, 3);
    }
    uint32_t count = (uint32_t)(inputs / 4);
    for (uint32_t quad = 0; quad < count; quad++, quads += QUAD_BYTES, x += 4) {
        int64_t ahead = nearby < left ? nearby : nearby + skip;
        left -= QUAD_BYTES;
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            const char *from = quads + p * SHORTS / PANEL * size;
            if (p * SHORTS % PANEL == 0)
                for (int b = 0; b < QUAD_BYTES; b += 64)
                    __builtin_prefetch(from + ahead + b, 0, 3);
            Shorts numbers[4];
            KIND(restore)(numbers, from + 2 * (lane + p * SHORTS % PANEL), lowest[p]);
            if (__builtin_expect(exceptions[p].quad == quad, 0))
                KIND(put_exceptions)(numbers, exceptions + p,
                                     (uint32_t)(lane + p * SHORTS % PANEL));
            int v = p / apart * apart * 2 + p % apart;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                Vector even = (Vector)((Words)numbers[i] << 16);
                Vector odd = (Vector)((Words)numbers[i] & 0xffff0000u);
                if (kept != 0) {
                    float *to = kept + ((quad * 4 + i) * vectors + v) * LANES;
                    AT(to) = even;
                    AT(to + apart * LANES) = odd;
                }
                for (int r = 0; r < rows; r++) {
                    Vector input = KIND(filled)(x[r * x_stride + i]);
                    sums[r][v] += input * even;
                    sums[r][v + apart] += input * odd;
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] += sums[r][v];
}

/* sum_chunks for COMPACT weights. panels: the first one of the tile; lane: first output there. size: bytes
 * of a panel. skip: see sum_chunks. */
INLINE void KIND(sum_compact)(Vector (*total)[8], const float *x, int64_t x_stride, int rows,
                              const char *panels, int64_t lane, int64_t size, int64_t into,
                              int vectors, int64_t skip)
{
    const char *head = panels, *quads = panels + blocks_of(into) * BLOCK_HEAD;
    for (int64_t start = 0; start < into; start += BLOCK_INPUTS) {
        int64_t inputs = smaller(BLOCK_INPUTS, into - start);
        KIND(sum_block)(total, x + start, x_stride, rows, head, quads, panels + size - quads, lane,
                        size, inputs, vectors, skip, 0);
        head += BLOCK_HEAD;
        quads += inputs / 4 * QUAD_BYTES;
    }
#if LANES == 16 /* a vector has 8 outputs of either half of a panel */
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v += 2) {
            __m512 even = (__m512)total[r][v], odd = (__m512)total[r][v + 1];
            total[r][v] = (Vector)_mm512_shuffle_f32x4(even, odd, 0x44);
            total[r][v + 1] = (Vector)_mm512_shuffle_f32x4(even, odd, 0xee);
        }
#endif
}

#if LANES < 16

/* Fewest and most rows whose tiles share numbers restored once. */
#define LEAST_SHARING (3 * TILE_ROWS)
#define MOST_SHARING (16 * TILE_ROWS)
/* Vectors of a tile of TILE_ROWS, see SHAPES, and its outputs. */
#define TILE_VECTORS (16 / LANES)
#define TILE_OUTS (TILE_VECTORS * LANES)

/* Add a block's sums to the totals of TILE_ROWS rows. kept: gets the numbers as floats, [inputs,
 * TILE_OUTS]. The others: see sum_block. */
static __attribute__((noinline)) void KIND(sum_first)(Vector (*total)[TILE_VECTORS],
                                                      const float *x, int64_t x_stride,
                                                      const char *head, const char *quads,
                                                      int64_t left, int64_t lane, int64_t inputs,
                                                      int64_t skip, float *kept)
{
    Vector sums[TILE_ROWS][8];
    for (int r = 0; r < TILE_ROWS; r++)
        memcpy(sums[r], total[r], sizeof total[r]);
    if (kept == 0) /* a constant for sum_block */
        __builtin_unreachable();
    KIND(sum_block)(sums, x, x_stride, TILE_ROWS, head, quads, left, lane, 0, inputs,
                    TILE_VECTORS, skip, kept);
    for (int r = 0; r < TILE_ROWS; r++)
        memcpy(total[r], sums[r], sizeof total[r]);
}

/* sum_first with its stored numbers. */
static __attribute__((noinline)) void KIND(sum_kept)(Vector (*total)[TILE_VECTORS],
                                                     const float *x, int64_t x_stride,
                                                     const float *kept, int64_t inputs)
{
    Vector sums[TILE_ROWS][TILE_VECTORS];
    memset(sums, 0, sizeof sums);
    for (int64_t k = 0; k < inputs; k++, x++, kept += TILE_OUTS)
        for (int r = 0; r < TILE_ROWS; r++)
            for (int v = 0; v < TILE_VECTORS; v++)
                sums[r][v] += x[r * x_stride] * READ(kept + v * LANES);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            total[r][v] += sums[r][v];
}

/* Multiply many rows, except the last few: a block's first tile restores its numbers for the others.
 * Returns the number of rows done. */
static int64_t KIND(multiply_sharing)(const Tiles *t, int64_t rows)
{
    const Matrix *m = t->m;
    int64_t size = panel_bytes(m), done = rows < LEAST_SHARING ? 0 : rows / TILE_ROWS * TILE_ROWS;
    for (int64_t first = 0; first < done; first += MOST_SHARING)
        for (int64_t at = 0; at < t->outs; at += TILE_OUTS) {
            int64_t now = smaller(done - first, MOST_SHARING), end = at + TILE_OUTS;
            float kept[BLOCK_INPUTS * TILE_OUTS];
            Vector total[MOST_SHARING][TILE_VECTORS];
            const char *head = t->panels + at / PANEL * size, *stop = head + size;
            const char *quads = head + blocks_of(m->into) * BLOCK_HEAD;
            int64_t skip = (end < t->outs ? t->panels + end / PANEL * size : t->next) - stop;
            memset(total, 0, sizeof total);
            for (int64_t start = 0; start < m->into; start += BLOCK_INPUTS) {
                int64_t inputs = smaller(BLOCK_INPUTS, m->into - start);
                const char *next = quads + inputs / 4 * QUAD_BYTES;
                const float *x = t->x + first * t->x_stride + start;
                KIND(sum_first)(total, x, t->x_stride, head, quads, stop - quads, at % PANEL,
                                inputs, skip, kept);
                const char *fetched = next; /* of the next block; each other tile fetches a share */
                for (int64_t r = TILE_ROWS; r < now; r += TILE_ROWS) {
                    const char *share = next + (next - quads) * r / (now - TILE_ROWS);
                    for (; fetched < share; fetched += 64)
                        __builtin_prefetch(fetched, 0, 2);
                    KIND(sum_kept)(total + r, x + r * t->x_stride, t->x_stride, kept, inputs);
                }
                head += BLOCK_HEAD;
                quads = next;
            }
            for (int64_t r = 0; r < now; r++)
                for (int v = 0; v < TILE_VECTORS; v++)
                    KIND(put)(t, first + r, at + v * LANES, COMPACT, total[r][v]);
        }
    return done;
}

#undef LEAST_SHARING
#undef MOST_SHARING
#undef TILE_VECTORS
#undef TILE_OUTS
#endif

#undef Shorts
#undef SHORTS
#undef NEARBY
