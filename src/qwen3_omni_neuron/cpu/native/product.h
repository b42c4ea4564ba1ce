/* Products of rows with matrices, shared by the threads of a team. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include <stdint.h>

#include "matrix.h"
#include "parallel.h"

/* y = w x for rows, or y += w x where add. Returns 0 without memory. */
int product(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
            const Matrix *w, int add);

/* product for rows with row_stride that nobody reads afterwards, and that may be taken in place. */
int last_product(Team *team, float *y, int64_t y_stride, float *x, int64_t rows, const Matrix *w,
                 int add);

/* Whether a matrix takes its inputs in a form of its own. */
static inline int has_own_inputs(const Matrix *w)
{
    return w->type == INT4;
}

/* Write rows of inputs in the form that a matrix takes, with row_stride; also in place, where `to` is
 * `from`.
 *
 * INT4 multiplies numbers where they lie in a word: number i of 8 as 0 to 15 times 16^i, the last one
 * shifted to where the first lies. So its inputs are divided by these powers of two. Each number is then
 * too large by 8, which the sum of a group's inputs makes up for: the sums follow filled_up(into)
 * inputs.
 *
 * Where kernels->raw, the word's bits are taken for a float, which spares the conversion: a denormal one,
 * 2^-149 times the integer; the last two numbers are shifted to where numbers 4 and 5 lie. The inputs are
 * multiplied by 2^149 / RAW_SUMS, the sums by 1 / RAW_SUMS, and results by RAW_SUMS: an input may have any
 * size up to 2^38, and the result has the same bits. */
void take_inputs(float *to, const float *from, int64_t from_stride, int64_t rows, const Matrix *w);

/* Multiplications of rows with so many weights, as run_tasks counts: weights are read once, so that
 * several rows cost less than as many times one. */
static inline int64_t cost_of(int64_t rows, int64_t weights)
{
    return weights + rows * weights / 8;
}

/* Panels of a task: several are read side by side for a few rows; more rows have work enough in one,
 * and a short task keeps nobody waiting at the end. */
int64_t group_for(int64_t rows);

/* Tasks of so many panels each for a matrix of `out` outputs. */
static inline int64_t groups_of(int64_t out, int64_t group)
{
    return (panels_of(out) + group - 1) / group;
}

#endif
