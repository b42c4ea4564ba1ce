/* The kernels of each kind of processor, and their selection. */

#include "kernels.h"

#include <math.h>
#include <string.h>

/* Types of a tile beside those of weights: with AVX512-VNNI. FLOAT16 is only a type of scales. */
enum { INT4_VNNI = FLOAT16, INT8_VNNI = COMPACT + 1, TYPES };

/* Product of rows and panels of one type, of `outs` outputs. panels: the first one, where y, scale and
 * bias begin. next: see multiply. */
typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, outs;
    int add;
    const Matrix *m;
    const char *panels, *next;
    const float *scale, *bias;
} Tiles;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)

#define KIND(name) name##_avx512
#define LANES 16
#define REGISTERS 32
#define TILE_ROWS 12
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#include "vector_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define KIND(name) name##_avx2
#define LANES 8
#define REGISTERS 16
#define TILE_ROWS 6
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "vector_kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

/* Four floats: any x86-64, and ARM. */
#define KIND(name) name##_plain
#define LANES 4
#define REGISTERS 32 /* ARM's; an x86-64 with 16 keeps some sums in memory */
#define TILE_ROWS 4
#include "vector_kernels.h"

const Kernels *kernels = &kernels_plain;

/* The kernels of the kinds that this processor can run, the best first. */
static const Kernels *kinds[4];

__attribute__((constructor)) static void choose_kernels(void)
{
    int count = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512vnni"))
            kinds[count++] = &vnni_kernels_avx512;
        kinds[count++] = &kernels_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        kinds[count++] = &kernels_avx2;
#endif
    kinds[count] = &kernels_plain;
    kernels = kinds[0];
}

/* For tests: use the kernels of this name. Returns 0 if this processor lacks them. */
int use_kernels(const char *name)
{
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i] != NULL && strcmp(kinds[i]->name, name) == 0) {
            kernels = kinds[i];
            return 1;
        }
    return 0;
}
