/* Products of rows with matrices, shared by the threads of a team. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include <stdint.h>

#include "matrix.h"
#include "parallel.h"

/* y = w x for rows, or y += w x where add. Returns 0 without memory. */
int product(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
            const Matrix *w, int add);

/* Copy rows of inputs in a matrix's order, which it must have. */
void order_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                const Matrix *w);

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
