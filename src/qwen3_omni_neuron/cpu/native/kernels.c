/* See kernels.h. */

#include "kernels.h"

#include <math.h>
#include <string.h>

#include "clones.h"

/* Vectors of eight and of four floats, for any machine with gcc or clang; aligned as one float. */
typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(32)));
typedef int32_t FourBits __attribute__((vector_size(16)));
#define WIDE 8
#define LANES(p) (*(Lanes *)(p))
#define READ(p) (*(const Lanes *)(p))

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (FourBits){__VA_ARGS__})
#endif

/* Add the two halves of a vector. */
INLINE Four fold(Lanes x)
{
    return (Four){x[0], x[1], x[2], x[3]} + (Four){x[4], x[5], x[6], x[7]};
}

INLINE float sum(Lanes x)
{
    Four half = fold(x);
    return (half[0] + half[2]) + (half[1] + half[3]);
}

/* {sum(a), sum(b), sum(c), sum(d)} */
INLINE Four sums_of_four(Lanes a, Lanes b, Lanes c, Lanes d)
{
    Four fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
    /* a0 + a2, b0 + b2, a1 + a3, b1 + b3; then the same for c and d; then the pairs are added */
    Four ab = SHUFFLE(fa, fb, 0, 4, 1, 5) + SHUFFLE(fa, fb, 2, 6, 3, 7);
    Four cd = SHUFFLE(fc, fd, 0, 4, 1, 5) + SHUFFLE(fc, fd, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

INLINE float dot(const float *a, const float *b, int64_t width)
{
    Lanes total = {0};
    for (int64_t i = 0; i < width; i += WIDE)
        total += READ(a + i) * READ(b + i);
    return sum(total);
}

/* Select a where `mask` is all ones and b where it is zero. */
INLINE Lanes pick(Bits mask, Lanes a, Lanes b)
{
    return (Lanes)(((Bits)a & mask) | ((Bits)b & ~mask));
}

/* e^x of eight numbers at once; libm's takes one call for each. */
INLINE Lanes exponentials(Lanes x)
{
    const Lanes low = (Lanes){0} - 87.0f, high = (Lanes){0} + 88.0f;
    x = pick(x < low, low, pick(x > high, high, x));
    /* e^x = 2^n e^rest. 1.5 * 2^23 + n is a float without fraction: its lowest bits are n. */
    Lanes shifted = x * 1.44269504f + 12582912.0f;
    Lanes n = shifted - 12582912.0f;
    Lanes rest = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts */
    Lanes total = rest * (1.0f / 5040) + 1.0f / 720;
    total = total * rest + 1.0f / 120;
    total = total * rest + 1.0f / 24;
    total = total * rest + 1.0f / 6;
    total = total * rest + 0.5f;
    total = total * rest + 1.0f;
    total = total * rest + 1.0f;
    return total * (Lanes)(((Bits)shifted + 127) << 23);
}

CLONED("fma")
float exponential(float x)
{
    return exponentials((Lanes){x})[0];
}

/* Compute `rows` by `outs` sums side by side: they don't depend on each other, so the processor
 * overlaps them. Both counts are constants after inlining, so that the sums are registers. */
INLINE void tile(float *y, const float *x, const float *weight, int rows, int outs, int64_t into,
                 int64_t out, int add)
{
    Lanes sums[2][8] = {{{0}}};
    for (int64_t i = 0; i < into; i += WIDE)
        for (int o = 0; o < outs; o++) {
            Lanes w = READ(weight + o * into + i);
            for (int r = 0; r < rows; r++)
                sums[r][o] += READ(x + r * into + i) * w;
        }
    for (int r = 0; r < rows; r++) {
        float *to = y + r * out;
        for (int o = 0; o + 4 <= outs; o += 4) {
            Lanes *s = sums[r] + o;
            Four four = sums_of_four(s[0], s[1], s[2], s[3]);
            if (add)
                four += *(Four *)(to + o);
            *(Four *)(to + o) = four;
        }
        if (outs == 1)
            *to = sum(sums[r][0]) + (add ? *to : 0);
    }
}

CLONED("fma")
void product(float *y, const float *x, const float *weight, int64_t rows, int64_t into,
             int64_t out, int add)
{
    int64_t o = 0;
    for (; o + 8 <= out && rows == 1; o += 8)
        tile(y + o, x, weight + o * into, 1, 8, into, out, add);
    for (; o + 4 <= out; o += 4) { /* each weight is read once for all rows */
        int64_t r = 0;
        for (; r + 2 <= rows; r += 2)
            tile(y + r * out + o, x + r * into, weight + o * into, 2, 4, into, out, add);
        if (r < rows)
            tile(y + r * out + o, x + r * into, weight + o * into, 1, 4, into, out, add);
    }
    for (; o < out; o++)
        for (int64_t r = 0; r < rows; r++)
            tile(y + r * out + o, x + r * into, weight + o * into, 1, 1, into, out, add);
}

CLONED("fma")
void rms_norm(float *y, const float *x, const float *weight, int64_t rows, int64_t width, float eps)
{
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        float scale = 1.0f / sqrtf(dot(x, x, width) / (float)width + eps);
        for (int64_t i = 0; i < width; i += WIDE)
            LANES(y + i) = READ(x + i) * scale * READ(weight + i);
    }
}

CLONED("fma")
void rotate(float *x, const float *cosine, const float *sine, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cosine[i] - second * sine[i];
        x[half + i] = second * cosine[i] + first * sine[i];
    }
}

CLONED("fma")
void gate(float *gated, const float *gate_up, int64_t width, float scale)
{
    for (int64_t i = 0; i < width; i += WIDE) {
        Lanes x = READ(gate_up + i);
        LANES(gated + i) = x / (1.0f + exponentials(-x)) * READ(gate_up + width + i) * scale;
    }
}

CLONED("fma")
void attend(float *mixed, const float *q, const float *keys, const float *values, int64_t group,
            int64_t positions, int64_t width, float *weights)
{
    float scale = 1.0f / sqrtf((float)width);
    for (int64_t h = 0; h < group; h++, q += width, mixed += width) {
        float largest = -INFINITY, total = 0;
        for (int64_t t = 0; t < positions; t++) {
            weights[t] = scale * dot(q, keys + t * width, width);
            largest = weights[t] > largest ? weights[t] : largest;
        }
        int64_t t = 0;
        for (; t + WIDE <= positions; t += WIDE) {
            LANES(weights + t) = exponentials(READ(weights + t) - largest);
            total += sum(READ(weights + t));
        }
        for (; t < positions; t++)
            total += weights[t] = exponentials((Lanes){weights[t] - largest})[0];
        memset(mixed, 0, (size_t)width * sizeof(float));
        for (t = 0; t < positions; t++) {
            float weight = weights[t] / total;
            for (int64_t i = 0; i < width; i += WIDE)
                LANES(mixed + i) += weight * READ(values + t * width + i);
        }
    }
}

/* Compute `outs` channels by `lanes` times eight samples; both are constants, see tile. */
INLINE void convolve_tile(float *y, int64_t y_stride, const float *x, int64_t x_stride,
                          const float *weight, const float *bias, int outs, int lanes,
                          int64_t into, int64_t taps, int64_t dilation, int add)
{
    Lanes sums[4][4];
    for (int o = 0; o < outs; o++)
        for (int l = 0; l < lanes; l++)
            sums[o][l] = (Lanes){0} + bias[o];
    for (int64_t i = 0; i < into; i++)
        for (int64_t k = 0; k < taps; k++)
            for (int l = 0; l < lanes; l++) {
                Lanes from = READ(x + i * x_stride + k * dilation + l * WIDE);
                for (int o = 0; o < outs; o++)
                    sums[o][l] += from * weight[(o * into + i) * taps + k];
            }
    for (int o = 0; o < outs; o++)
        for (int l = 0; l < lanes; l++) {
            float *to = y + o * y_stride + l * WIDE;
            if (add)
                sums[o][l] += READ(to);
            LANES(to) = sums[o][l];
        }
}

CLONED("fma")
void convolve(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
              const float *bias, int64_t into, int64_t out, int64_t taps, int64_t dilation,
              int64_t samples, int add)
{
    int64_t o = 0, size = into * taps;
    for (; o + 4 <= out; o += 4) /* eight sums at a time: enough to overlap */
        for (int64_t t = 0; t < samples; t += 2 * WIDE)
            convolve_tile(y + o * y_stride + t, y_stride, x + t, x_stride, weight + o * size,
                          bias + o, 4, 2, into, taps, dilation, add);
    for (; o + 2 <= out; o += 2)
        for (int64_t t = 0; t < samples; t += 4 * WIDE)
            convolve_tile(y + o * y_stride + t, y_stride, x + t, x_stride, weight + o * size,
                          bias + o, 2, 4, into, taps, dilation, add);
    for (; o < out; o++)
        for (int64_t t = 0; t < samples; t += 4 * WIDE)
            convolve_tile(y + o * y_stride + t, y_stride, x + t, x_stride, weight + o * size,
                          bias + o, 1, 4, into, taps, dilation, add);
}

/* sin(x)^2, whose period is pi, within 4e-7 up to |x| of some thousands. */
INLINE Lanes squared_sines(Lanes x)
{
    Lanes n = (x * 0.318309886f + 12582912.0f) - 12582912.0f; /* rounded: see exponentials */
    Lanes r = x - n * 3.140625f - n * 9.67502594e-4f - n * 1.50995799e-7f; /* pi in three parts */
    Lanes square = r * r;
    Lanes total = square * (-1.0f / 39916800) + 1.0f / 362880;
    total = total * square - 1.0f / 5040;
    total = total * square + 1.0f / 120;
    total = total * square - 1.0f / 6;
    total = total * square * r + r;
    return total * total;
}

CLONED("fma")
void snake(float *y, const float *x, float frequency, float inverse_magnitude, int64_t samples)
{
    for (int64_t t = 0; t < samples; t += WIDE) {
        Lanes from = READ(x + t);
        LANES(y + t) = from + squared_sines(from * frequency) * inverse_magnitude;
    }
}
