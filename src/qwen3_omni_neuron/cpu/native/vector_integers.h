/* Products of INT8 and INT4 matrices with integer inputs: see take_inputs of product.h. Part of
 * vector_kernels.h.
 *
 * The products of a group's integers are summed exactly. The sum (below 2^24) is converted to a float,
 * multiplied by INT4's weight scale and then by the inputs' scale, and added to the total, group by
 * group; each operation rounds once. So a result has the same bits on every processor. */

/* Whether one instruction multiplies bytes and adds four products to a sum. */
#if defined(__ARM_FEATURE_DOTPROD) && LANES == 4
#define DOTS_OF(type) 1
#else
#define DOTS_OF(type) ((type) == INT4_VNNI)
#endif

/* ---- inputs ---- */

/* The largest magnitude of a group's inputs, whose bits are ordered like integers, NaN last. */
INLINE float KIND(largest_of)(const float *x)
{
    Bits most = {0};
    int32_t sizes[LANES], largest = 0;
    for (int i = 0; i < GROUP_INPUTS; i += LANES) {
        Bits size = *(const Bits *)(const void *)(x + i) & 0x7fffffff;
        most = (size & (size > most)) | (most & ~(size > most));
    }
    memcpy(sizes, &most, sizeof sizes);
    for (int i = 0; i < LANES; i++)
        largest = sizes[i] > largest ? sizes[i] : largest;
    float found;
    memcpy(&found, &largest, sizeof found);
    return found;
}

/* Reorder each 8 bytes, even ones first. */
INLINE uint64_t KIND(even_first)(uint64_t x)
{
    x = (x & 0xff0000ffff0000ff) | (x & 0x0000ff000000ff00) << 8 | (x >> 8 & 0x0000ff000000ff00);
    return (x & 0xffff00000000ffff) | (x & 0x00000000ffff0000) << 16 | (x >> 16 & 0x00000000ffff0000);
}

static void KIND(take)(void *to, const float *x, int64_t into, int64_t type)
{
    char *block = to;
    float limit = type == INT4 ? INT4_LIMIT : INT8_LIMIT;
    for (int64_t start = 0; start < into; start += GROUP_INPUTS, block += input_bytes(type)) {
        int64_t filled = smaller(GROUP_INPUTS, into - start);
        float some[GROUP_INPUTS] = {0};
        int32_t numbers[GROUP_INPUTS], sum = 0;
        memcpy(some, x + start, (size_t)filled * sizeof(float));
        float largest = KIND(largest_of)(some), scale = 0, inverse = 0;
        if (!(largest <= 0x1p-100f)) { /* nor NaN; smaller inputs are zeros */
            scale = largest / limit;
            inverse = limit / largest;
        }
        for (int i = 0; i < GROUP_INPUTS; i += LANES) {
            Vector number = READ(some + i) * inverse;
            ROUNDED(number);
            /* 1.5 * 2^23 + n is a float without fraction: its lowest bits are n. */
            *(Bits *)(numbers + i) = (Bits)(number + 12582912.0f) - 0x4b400000;
        }
        for (int i = 0; i < GROUP_INPUTS; i++)
            sum += (int16_t)numbers[i]; /* NaN's could overflow */
        sum *= -8;
        memcpy(block, &scale, sizeof scale);
        memcpy(block + 4, &sum, sizeof sum);
        if (type == INT4) {
            int8_t bytes[GROUP_INPUTS];
            uint64_t words[GROUP_INPUTS / 8];
            for (int i = 0; i < GROUP_INPUTS; i++)
                bytes[i] = (int8_t)numbers[i];
            memcpy(words, bytes, sizeof words);
            for (int i = 0; i < GROUP_INPUTS / 8; i++)
                words[i] = KIND(even_first)(words[i]);
            memcpy(block + INPUT_HEAD, words, sizeof words);
        } else {
            int16_t halves[GROUP_INPUTS];
            for (int i = 0; i < GROUP_INPUTS; i++)
                halves[i] = (int16_t)numbers[i];
            memcpy(block + INPUT_HEAD, halves, sizeof halves);
        }
    }
}

/* ---- sums ---- */

/* Add to each sum the products of its word's two halves; x's have any sign. */
INLINE Words KIND(add_pairs)(Words sum, Words w, Words x, int type)
{
    (void)type;
#if LANES == 16
    if (type == INT8_VNNI) {
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
        return sum;
    }
    return sum + (Words)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif LANES == 8
    return sum + (Words)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    return sum + (Words)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    Bits a = (Bits)w, b = (Bits)x;
    return sum + (Words)((a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16));
#endif
}

/* Add to each sum the products of its word's four bytes: w's are 0 to 15, x's have any sign. Without
 * such an instruction a sum's halves are separate sums: at most 16 products each. */
INLINE Words KIND(add_bytes)(Words sum, Words w, Words x, int type)
{
    (void)type;
#if LANES == 16
    if (type == INT4_VNNI) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
        return sum;
    }
    return (Words)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#elif LANES == 8
    return (Words)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#else
    KIND(Pairs) a = (KIND(Pairs))w, b = (KIND(Pairs))x;
    return (Words)((KIND(Pairs))sum + (a & 255) * (b << 8 >> 8) + (a >> 8) * (b >> 8));
#endif
}

/* Return the sums of add_bytes. */
INLINE Words KIND(whole)(Words sum, int type)
{
    (void)type;
    if (DOTS_OF(type))
        return sum;
    return KIND(add_pairs)((Words){0}, sum, (Words){0} + 0x10001, INT8);
}

INLINE Vector KIND(float_of)(Words sum)
{
#if LANES == 16 /* gcc 12 converts number by number */
    return (Vector)_mm512_cvtepi32_ps((__m512i)sum);
#elif LANES == 8
    return (Vector)_mm256_cvtepi32_ps((__m256i)sum);
#else
    return __builtin_convertvector((Bits)sum, Vector);
#endif
}

/* The word at p in every lane. */
INLINE Words KIND(word)(const char *p)
{
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return (Words){0} + word;
}

/* Two inputs' weights of 2 * LANES outputs: a word has both of an output. second: 0 if the second input
 * is beyond the last, with weights of zero. */
INLINE void KIND(pairs_of)(Words pairs[2], const int8_t *w, int second)
{
#if LANES == 16
    __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)w));
    if (second)
        bytes = _mm512_or_si512(bytes, _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(
                                           (const __m256i *)(const void *)(w + PANEL))), 8));
    pairs[0] = (Words)_mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes));
    pairs[1] = (Words)_mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(bytes, 1));
#elif LANES == 8
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)w));
    if (second)
        bytes = _mm256_or_si256(bytes, _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(
                                           (const __m128i *)(const void *)(w + PANEL))), 8));
    pairs[0] = (Words)_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes));
    pairs[1] = (Words)_mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1));
#else
    for (int v = 0; v < 2; v++) {
        pairs[v] = (Words)__builtin_convertvector(*(const KIND(Bytes) *)(w + v * LANES), Bits) & 0xffff;
        if (second)
            pairs[v] |= (Words)__builtin_convertvector(*(const KIND(Bytes) *)(w + PANEL + v * LANES),
                                                       Bits) << 16;
    }
#endif
}

/* Add a group's sums to total. scale: INT4's weight scales, else NULL. */
INLINE void KIND(add_group)(Vector (*total)[8], Words (*sums)[8], const char *x, int64_t x_stride,
                            int rows, int type, const Vector *scale, int vectors)
{
    for (int r = 0; r < rows; r++) {
        Vector factor = (Vector)KIND(word)(x + r * x_stride);
        for (int v = 0; v < vectors; v++) {
            Words sum = sums[r][v];
            if (IS_INT4(type))
                sum = KIND(whole)(sum, type) + KIND(word)(x + r * x_stride + 4);
            Vector product = KIND(float_of)(sum);
            if (IS_INT4(type))
                product *= scale[v];
            product *= factor;
            ROUNDED(product);
            total[r][v] += product;
        }
    }
}

/* Compute a group's sums of INT8 weights, of `inputs` inputs. w: in the tile's first panel, of `size`
 * bytes each. ahead: see add_input. */
INLINE void KIND(sum_int8)(Words (*sums)[8], const char *x, int64_t x_stride, int rows,
                           const int8_t *w, int64_t size, int64_t inputs, int type, int vectors,
                           int64_t ahead)
{
    for (int64_t k = 0; k < inputs; k += 2) {
        int second = k + 1 < inputs;
        Words pairs[8];
        for (int v = 0; v < vectors; v += 2) {
            const int8_t *from = w + v * LANES / PANEL * size + k * PANEL + v * LANES % PANEL;
            if (v * LANES % PANEL == 0) /* two inputs of a panel are a cache line */
                KIND(fetch)((const char *)from + ahead, type);
            KIND(pairs_of)(pairs + v, from, second);
        }
        for (int r = 0; r < rows; r++) {
            Words input = KIND(word)(x + r * x_stride + INPUT_HEAD + 2 * k);
            for (int v = 0; v < vectors; v++)
                sums[r][v] = KIND(add_pairs)(sums[r][v], pairs[v], input, type);
        }
    }
}

/* Compute a group's sums of INT4 weights. numbers: in the first panel. Others: see sum_int8. */
INLINE void KIND(sum_int4)(Words (*sums)[8], const char *x, int64_t x_stride, int rows,
                           const char *numbers, int64_t size, int type, int vectors, int64_t ahead)
{
#pragma GCC unroll 4
    for (int k = 0; k < GROUP_INPUTS; k += 8) {
        Words words[8];
        for (int v = 0; v < vectors; v++) {
            const char *some = numbers + v * LANES / PANEL * size + k / 8 * PANEL * 4 +
                               v * LANES % PANEL * 4;
            words[v] = *(const Words *)(const void *)some;
            if (v * LANES * 4 % 64 == 0) /* as in sum_chunks */
                KIND(fetch)(some + ahead, type);
        }
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < rows; r++) {
                Words input = KIND(word)(x + r * x_stride + INPUT_HEAD + k + 4 * half);
                for (int v = 0; v < vectors; v++)
                    sums[r][v] = KIND(add_bytes)(sums[r][v], words[v] >> 4 * half & 0x0f0f0f0f,
                                                 input, type);
            }
    }
}

/* sum_chunks for INT8 and INT4 weights, group by group, over inputs as take_inputs writes them. panels:
 * the first of the tile; lane: first output there. skip: see sum_chunks. */
INLINE void KIND(sum_groups)(Vector (*total)[8], const float *inputs, int64_t inputs_stride,
                             int rows, int type, const Matrix *m, const char *panels, int64_t lane,
                             int vectors, int64_t skip)
{
    int64_t size = panel_bytes(m), x_stride = inputs_stride * (int64_t)sizeof(float);
    const char *x = (const char *)inputs, *block = panels;
    for (int64_t start = 0; start < m->into; start += GROUP_INPUTS, x += input_bytes(m->type)) {
        const char *w = IS_INT4(type) ? block + start % m->group / 8 * PANEL * 4 + lane * 4
                                      : panels + start * PANEL + lane;
        int64_t ahead = AHEAD(type);
        if (w + ahead >= panels + size)
            ahead += skip;
        Words sums[12][8];
        Vector scale[8];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] = (Words){0};
        if (!IS_INT4(type)) {
            if (start + GROUP_INPUTS <= m->into)
                KIND(sum_int8)(sums, x, x_stride, rows, (const int8_t *)w, size, GROUP_INPUTS, type,
                               vectors, ahead);
            else
                KIND(sum_int8)(sums, x, x_stride, rows, (const int8_t *)w, size, m->into - start,
                               type, vectors, ahead);
            KIND(add_group)(total, sums, x, x_stride, rows, type, 0, vectors);
            continue;
        }
        KIND(sum_int4)(sums, x, x_stride, rows, w, size, type, vectors, ahead);
        for (int v = 0; v < vectors; v++) {
            const char *scales = block + number_bytes(m->group) + v * LANES / PANEL * size;
            if (v * LANES % PANEL == 0 && rows < TILE_ROWS)
                KIND(fetch)(scales + ahead, type);
            scale[v] = KIND(scales)(scales, lane + v * LANES % PANEL, m->scale_type);
        }
        KIND(add_group)(total, sums, x, x_stride, rows, type, scale, vectors);
        if ((start + GROUP_INPUTS) % m->group == 0)
            block += block_bytes(m);
    }
}

#undef DOTS_OF
