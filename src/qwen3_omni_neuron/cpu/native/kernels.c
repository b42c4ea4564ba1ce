/* The kernels for each kind of processor, and the choice among them. */

#include "kernels.h"

#include <math.h>
#include <string.h>

/* A type of a tile beside those of weights: see number. FLOAT16 is a type of scales alone. */
enum { INT4_RAW = FLOAT16, TYPES = COMPACT + 1 };
/* A bit of MXCSR that the headers name only where SSE3 is compiled for. */
enum { DENORMALS_ARE_ZEROS = 0x40 };

/* A product of rows and panels of one type, of `outs` outputs. unit: what the sums are multiplied by, see
 * take_inputs. panels: the first one, with whose outputs y, scale and bias begin; next: see multiply. */
typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, outs;
    int add;
    float unit;
    const Matrix *m;
    const char *panels, *next;
    const float *scale, *bias;
} Tiles;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

/* Take denormal floats as they are, even where the thread's caller takes them for zeros. Returns what
 * restore_denormals restores. */
static uint64_t keep_denormals(void)
{
    uint64_t usual = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    usual = _mm_getcsr();
    _mm_setcsr((unsigned)usual & ~(_MM_FLUSH_ZERO_ON | DENORMALS_ARE_ZEROS));
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(usual));
    __asm__ volatile("msr fpcr, %0" : : "r"(usual & ~(UINT64_C(1) << 24)));
#endif
    return usual;
}

static void restore_denormals(uint64_t usual)
{
#if defined(__x86_64__) && defined(__GNUC__)
    _mm_setcsr((unsigned)usual);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(usual));
#else
    (void)usual;
#endif
}

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
#define REGISTERS 32 /* of ARM; an x86-64 with 16 keeps some sums in memory */
#define TILE_ROWS 4
#include "vector_kernels.h"

const Kernels *kernels = &kernels_plain;

/* The kernels of each kind that this processor can run, the best first, and the raw ones after each. */
static const Kernels *kinds[6];

__attribute__((constructor)) static void choose_kernels(void)
{
    int count = 0, raw = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    /* AMD's multiply denormal floats as fast as others, Intel's a hundred times slower. */
    raw = __builtin_cpu_is("amd");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        kinds[count++] = &kernels_avx512, kinds[count++] = &raw_kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        kinds[count++] = &kernels_avx2, kinds[count++] = &raw_kernels_avx2;
#endif
    kinds[count++] = &kernels_plain, kinds[count++] = &raw_kernels_plain;
    kernels = kinds[raw];
}

/* For tests: take the kernels of this name. Returns 0 where this processor lacks them. */
int use_kernels(const char *name)
{
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (kinds[i] != NULL && strcmp(kinds[i]->name, name) == 0) {
            kernels = kinds[i];
            return 1;
        }
    return 0;
}
