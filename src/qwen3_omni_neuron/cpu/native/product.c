/* See product.h. */

#include "product.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { ROWS_A_TASK = 8 };

/* Make inputs those that an INT4 matrix takes, in place, and add the sums. */
static void take_int4_inputs(float *x, const Matrix *w)
{
    /* 16^-i, then that times 2^149 / RAW_SUMS. See take_inputs for the last ones. */
    static const float units[2][8] = {
        {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f},
        {0x1p89f, 0x1p85f, 0x1p81f, 0x1p77f, 0x1p73f, 0x1p69f, 0x1p73f, 0x1p69f}};
    float sum_unit = kernels->raw ? 1.0f / RAW_SUMS : 1.0f;
    int64_t into = filled_up(w->into);
    float *added = x + into;
    for (int64_t k = w->into; k < into; k++)
        x[k] = 0;
    for (int64_t start = 0; start < into; start += w->group) {
        int64_t end = smaller(into, start + w->group);
        float sums[8] = {0};
        for (int64_t k = start; k < end; k += 8)
            for (int i = 0; i < 8; i++) {
                sums[i] += x[k + i];
                x[k + i] *= units[kernels->raw][i];
            }
        *added++ = (((sums[0] + sums[4]) + (sums[2] + sums[6])) +
                    ((sums[1] + sums[5]) + (sums[3] + sums[7]))) * sum_unit;
    }
}

void take_inputs(float *to, const float *from, int64_t from_stride, int64_t rows, const Matrix *w)
{
    int64_t stride = row_stride(w->into);
    for (int64_t r = 0; r < rows; r++, to += stride, from += from_stride) {
        if (to != from)
            memcpy(to, from, (size_t)w->into * sizeof(float));
        if (w->type == INT4)
            take_int4_inputs(to, w);
    }
}

typedef struct {
    float *to;
    const float *from;
    int64_t from_stride, rows;
    const Matrix *w;
} Inputs;

static void take_some(void *work, int64_t task, float *unused)
{
    const Inputs *i = work;
    int64_t first = task * ROWS_A_TASK, rows = smaller(ROWS_A_TASK, i->rows - first);
    (void)unused;
    take_inputs(i->to + first * row_stride(i->w->into), i->from + first * i->from_stride,
                i->from_stride, rows, i->w);
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    int64_t group; /* panels of a task */
    const Matrix *w;
    int add;
} Product;

static void multiply_panels(void *work, int64_t task, float *unused)
{
    const Product *p = work;
    int64_t first = task * p->group;
    (void)unused;
    kernels->multiply(p->y + first * PANEL, p->y_stride, p->x, p->x_stride, p->rows, p->w, first,
                      smaller(p->group, panels_of(p->w->out) - first), p->add, NULL);
}

int64_t group_for(int64_t rows)
{
    return rows > FEW_ROWS ? 1 : PANELS_AT_ONCE;
}

/* product over inputs in the form that multiply takes. */
static int product_of(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                      int64_t rows, const Matrix *w, int add)
{
    Product p = {y, x, y_stride, x_stride, rows, group_for(rows), w, add};
    return run_tasks(team, multiply_panels, &p, groups_of(w->out, p.group),
                     cost_of(rows, w->into * w->out), 1);
}

/* Write rows of inputs in the form that a matrix takes. */
static int take_rows(Team *team, float *to, const float *from, int64_t from_stride, int64_t rows,
                     const Matrix *w)
{
    Inputs i = {to, from, from_stride, rows, w};
    return run_tasks(team, take_some, &i, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, rows * w->into,
                     1);
}

int product(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
            const Matrix *w, int add)
{
    if (!has_own_inputs(w))
        return product_of(team, y, y_stride, x, x_stride, rows, w, add);
    int64_t stride = row_stride(w->into);
    float *own = malloc((size_t)(rows * stride) * sizeof(float));
    if (own == NULL)
        return 0;
    int done = take_rows(team, own, x, x_stride, rows, w) &&
               product_of(team, y, y_stride, own, stride, rows, w, add);
    free(own);
    return done;
}

int last_product(Team *team, float *y, int64_t y_stride, float *x, int64_t rows, const Matrix *w,
                 int add)
{
    int64_t stride = row_stride(w->into);
    if (!has_own_inputs(w))
        return product(team, y, y_stride, x, stride, rows, w, add);
    return take_rows(team, x, x, stride, rows, w) &&
           product_of(team, y, y_stride, x, stride, rows, w, add);
}
