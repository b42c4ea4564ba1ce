/* The kernels for each kind of processor, and the choice among them. */

#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

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

__attribute__((constructor)) static void choose_kernels(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        kernels = &kernels_avx512;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        kernels = &kernels_avx2;
#endif
}

/* For tests: take the kernels of this name. Returns 0 where this processor lacks them. */
int use_kernels(const char *name)
{
    const Kernels *all[] = {
#if defined(__x86_64__) && defined(__GNUC__)
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? &kernels_avx512
                                                                                : NULL,
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2 : NULL,
#endif
        &kernels_plain,
    };
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != NULL && strcmp(all[i]->name, name) == 0) {
            kernels = all[i];
            return 1;
        }
    return 0;
}
