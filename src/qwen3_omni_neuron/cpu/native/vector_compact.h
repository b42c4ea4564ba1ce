/* Products of COMPACT matrices: see Matrix of library.h. Part of vector_kernels.h. */

typedef uint16_t KIND(Shorts) __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint8_t KIND(Exponents) __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
#define Shorts KIND(Shorts)
/* Numbers of a row that one vector of them has. */
#define SHORTS (2 * LANES)
/* Bytes from the numbers that are used to those that are fetched into the level-1 cache, of all panels of
 * a tile together: about as much as a core waits for at once. */
#define NEARBY 1536

/* Four inputs' bfloat16 numbers from their 12 bits each: sign, exponent above `lowest`, mantissa. */
INLINE void KIND(restore)(Shorts numbers[4], const char *quad, Shorts lowest)
{
    Shorts words[3];
    for (int i = 0; i < 3; i++) {
        words[i] = *(const Shorts *)(const void *)(quad + i * 2 * PANEL);
        numbers[i] = (words[i] & 0x87ff) + lowest;
    }
#if LANES == 16 /* gcc 12 takes more operations */
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

/* Exceptions of a vector of numbers. next: the one that is not yet taken; quad: where it is. */
typedef struct {
    const uint32_t *next;
    uint32_t quad;
} KIND(Exceptions);

INLINE uint32_t KIND(quad_of)(uint32_t exception)
{
    return exception >> 23;
}

/* Put the exceptions of a quad in their places. first: number of the row that is the vectors' first. */
INLINE void KIND(put_exceptions)(Shorts numbers[4], KIND(Exceptions) *exceptions, uint32_t first)
{
    uint16_t places[4][SHORTS];
    memcpy(places, numbers, sizeof places);
    uint32_t quad = exceptions->quad;
    for (; KIND(quad_of)(*exceptions->next) == quad; exceptions->next++) {
        uint32_t number = *exceptions->next, at = (number >> 16 & (PANEL - 1)) - first;
        if (at < SHORTS)
            places[number >> 21 & 3][at] = (uint16_t)number;
    }
    exceptions->quad = KIND(quad_of)(*exceptions->next);
    memcpy(numbers, places, sizeof places);
}

/* sum_chunks for COMPACT weights. panels: the first one of the tile; lane: first output there. size: bytes
 * of a panel. skip: see sum_chunks. */
INLINE void KIND(sum_compact)(Vector (*total)[8], const float *x, int64_t x_stride, int rows,
                              const char *panels, int64_t lane, int64_t size, int64_t into,
                              int vectors, int64_t skip)
{
    int parts = vectors / 2, apart = LANES < 8 ? 2 : 1; /* vectors of a part: see PAIR below */
    int64_t nearby = NEARBY / larger(1, vectors * LANES / PANEL) / QUAD_BYTES * QUAD_BYTES;
    int64_t heads = blocks_of(into) * BLOCK_HEAD, last = size - nearby;
    int64_t at = heads; /* of the quad, in its panel */
    for (int64_t start = 0, block = 0; start < into; start += BLOCK_INPUTS, block += BLOCK_HEAD) {
        Vector sums[12][8];
        Shorts lowest[4];
        KIND(Exceptions) exceptions[4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = (Vector){0};
        for (int p = 0; p < parts; p++) {
            const char *head = panels + p * SHORTS / PANEL * size + block;
            const char *exponents = head + lane + p * SHORTS % PANEL;
            lowest[p] = __builtin_convertvector(
                            *(const KIND(Exponents) *)(const void *)exponents, Shorts) << 7;
            exceptions[p].next = (const uint32_t *)(const void *)(head + PANEL);
            exceptions[p].quad = KIND(quad_of)(*exceptions[p].next);
            for (int64_t b = 0; b < BLOCK_HEAD; b += 64) /* of the next block */
                __builtin_prefetch(head + BLOCK_HEAD + b, 0, 3);
        }
        uint32_t quads = (uint32_t)(smaller(BLOCK_INPUTS, into - start) / 4);
        for (uint32_t quad = 0; quad < quads; quad++, at += QUAD_BYTES, x += 4) {
            int64_t ahead = at < last ? nearby : nearby + skip;
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                const char *from = panels + p * SHORTS / PANEL * size + at;
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

/* Rows for which numbers are restored once. */
#define RESTORED_ROWS (8 * TILE_ROWS)
/* Vectors of a tile of TILE_ROWS: see SHAPES. */
#define TILE_VECTORS (16 / LANES)

/* Write a block's numbers as floats, [BLOCK_INPUTS, PANEL]. */
static void KIND(restore_block)(float *to, const char *head, const char *quads, int64_t inputs)
{
    for (int64_t lane = 0; lane < PANEL; lane += SHORTS) {
        Shorts lowest = __builtin_convertvector(
                            *(const KIND(Exponents) *)(const void *)(head + lane), Shorts) << 7;
        KIND(Exceptions) exceptions = {(const uint32_t *)(const void *)(head + PANEL), 0};
        exceptions.quad = KIND(quad_of)(*exceptions.next);
        int64_t apart = LANES < 8 ? 8 : LANES, output = lane / 16 * 16 + lane % 16 / 2;
        for (int64_t quad = 0; quad < inputs / 4; quad++) {
            Shorts numbers[4];
            KIND(restore)(numbers, quads + quad * QUAD_BYTES + 2 * lane, lowest);
            if (__builtin_expect(exceptions.quad == quad, 0))
                KIND(put_exceptions)(numbers, &exceptions, (uint32_t)lane);
            for (int i = 0; i < 4; i++) {
                float *row = to + (quad * 4 + i) * PANEL + output;
                AT(row) = (Vector)((Words)numbers[i] << 16);
                AT(row + apart) = (Vector)((Words)numbers[i] & 0xffff0000u);
            }
        }
    }
}

/* Add a restored block's sums to those of TILE_ROWS rows and TILE_VECTORS vectors. */
static __attribute__((noinline)) void KIND(add_restored)(Vector (*total)[PANEL / LANES],
                                                         const float *x, int64_t x_stride,
                                                         const float *numbers, int64_t inputs)
{
    Vector sums[12][8];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = total[r][v];
    KIND(sum_chunks)(sums, x, x_stride, TILE_ROWS, numbers, FLOAT32, 0, inputs, TILE_VECTORS, 0);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++)
            total[r][v] = sums[r][v];
}

/* Multiply most of many rows, all but the last few, by numbers that are restored once for many of them:
 * few registers hold low tiles, each of which would restore them. Returns the rows that are done. */
static int64_t KIND(multiply_restored)(const Tiles *t, int64_t rows)
{
    const Matrix *m = t->m;
    int64_t size = panel_bytes(m), done = rows < 2 * TILE_ROWS ? 0 : rows / TILE_ROWS * TILE_ROWS;
    for (int64_t at = 0; at < t->outs; at += PANEL)
        for (int64_t first = 0; first < done; first += RESTORED_ROWS) {
            int64_t now = smaller(done - first, RESTORED_ROWS);
            float numbers[BLOCK_INPUTS * PANEL];
            Vector total[RESTORED_ROWS][PANEL / LANES];
            const char *head = t->panels + at / PANEL * size;
            const char *quads = head + blocks_of(m->into) * BLOCK_HEAD;
            memset(total, 0, sizeof total);
            for (int64_t start = 0; start < m->into; start += BLOCK_INPUTS) {
                int64_t inputs = smaller(BLOCK_INPUTS, m->into - start);
                KIND(restore_block)(numbers, head, quads, inputs);
                head += BLOCK_HEAD;
                quads += inputs / 4 * QUAD_BYTES;
                for (int64_t r = 0; r < now; r += TILE_ROWS)
                    for (int v = 0; v < PANEL / LANES; v += TILE_VECTORS)
                        KIND(add_restored)((Vector(*)[PANEL / LANES])&total[r][v],
                                           t->x + (first + r) * t->x_stride + start, t->x_stride,
                                           numbers + v * LANES, inputs);
            }
            for (int64_t r = 0; r < now; r++)
                for (int v = 0; v < PANEL / LANES; v++)
                    KIND(put)(t, first + r, at + v * LANES, total[r][v]);
        }
    return done;
}

#undef RESTORED_ROWS
#undef TILE_VECTORS
#endif

#undef Shorts
#undef SHORTS
#undef NEARBY
