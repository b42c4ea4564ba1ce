/* Products of rows with matrices, shared by the threads of a team. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include <stdint.h>

#include "matrix.h"
#include "parallel.h"

/* y = w x for rows, or y += w x if add. Returns 0 if allocation fails. */
int product(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
            const Matrix *w, int add);

/* product for rows with row_stride that are not read afterwards, and may be converted in place. */
int last_product(Team *team, float *y, int64_t y_stride, float *x, int64_t rows, const Matrix *w,
                 int add);

/* Write rows of inputs in the form that a matrix accepts, with row_stride. to: may be `from`.
 *
 * INT8 and INT4 accept integers: the largest of each GROUP_INPUTS inputs becomes INT8_LIMIT or
 * INT4_LIMIT, or its negative, and the others are rounded by the same scale to nearest even. A group is
 *   float: the scale;
 *   int32: -8 times the sum of the integers, since an INT4 number is stored as 8 more;
 *   int16 [GROUP_INPUTS]: the integers, zeros after the last input; for INT4 int8 [GROUP_INPUTS], of each
 *     8 inputs first the even, then the odd ones, like the lower and upper halves of a word's bytes.
 * A row with NaN or infinity has non-finite results. */
void take_inputs(float *to, const float *from, int64_t from_stride, int64_t rows, const Matrix *w);

/* Bytes of a row of inputs in the form that a matrix accepts. */
static inline int64_t input_row_bytes(const Matrix *w)
{
    return has_own_inputs(w) ? (w->into + GROUP_INPUTS - 1) / GROUP_INPUTS * input_bytes(w->type)
                             : w->into * (int64_t)sizeof(float);
}

/* Multiplications of rows with `weights` weights, as run_tasks counts: weights are read once, so
 * several rows cost less than as many single ones. */
static inline int64_t cost_of(int64_t rows, int64_t weights)
{
    return weights + rows * weights / 8;
}

/* Panels of a task: several are read side by side for a few rows; with more rows one has enough work,
 * and short tasks end together. */
int64_t group_for(int64_t rows);

/* Tasks of `group` panels each for a matrix of `out` outputs. */
static inline int64_t groups_of(int64_t out, int64_t group)
{
    return (panels_of(out) + group - 1) / group;
}

#endif
