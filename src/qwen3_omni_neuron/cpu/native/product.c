/* See product.h. */

#include "product.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { ROWS_A_TASK = 8 };
/* Most rows of a task: enough to read its panels seldom, few enough to share matrices of few panels. */
enum { MOST_ROWS = 960 };

void take_inputs(float *to, const float *from, int64_t from_stride, int64_t rows, const Matrix *w)
{
    int64_t stride = row_stride(w->into);
    for (int64_t r = 0; r < rows; r++, to += stride, from += from_stride)
        if (has_own_inputs(w))
            kernels->take(to, from, w->into, w->type);
        else if (to != from)
            memcpy(to, from, (size_t)w->into * sizeof(float));
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
    int64_t groups = groups_of(p->w->out, p->group), first = task % groups * p->group;
    int64_t row = task / groups * MOST_ROWS;
    (void)unused;
    kernels->multiply(p->y + row * p->y_stride + first * PANEL, p->y_stride,
                      p->x + row * p->x_stride, p->x_stride, smaller(MOST_ROWS, p->rows - row), p->w,
                      first, smaller(p->group, panels_of(p->w->out) - first), p->add, NULL);
}

int64_t group_for(int64_t rows)
{
    return rows > FEW_ROWS ? 1 : PANELS_AT_ONCE;
}

/* product over inputs in the form that multiply accepts. */
static int product_of(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                      int64_t rows, const Matrix *w, int add)
{
    Product p = {y, x, y_stride, x_stride, rows, group_for(rows), w, add};
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return run_tasks(team, multiply_panels, &p, blocks * groups_of(w->out, p.group),
                     cost_of(rows, w->into * w->out), 1);
}

/* Write rows of inputs in the form that a matrix accepts. */
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
