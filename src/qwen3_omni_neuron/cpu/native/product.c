/* See product.h. */

#include "product.h"

#include <stdlib.h>

#include "kernels.h"

enum { ROWS_A_TASK = 8 };

void order_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                const Matrix *w)
{
    for (int64_t r = 0; r < rows; r++, to += to_stride, from += from_stride)
        for (int64_t i = 0; i < w->into; i++)
            to[i] = from[w->order[i]];
}

typedef struct {
    float *to;
    const float *from;
    int64_t to_stride, from_stride, rows;
    const Matrix *w;
} Ordering;

static void order_some(void *work, int64_t task, float *unused)
{
    const Ordering *o = work;
    int64_t first = task * ROWS_A_TASK, rows = smaller(ROWS_A_TASK, o->rows - first);
    (void)unused;
    order_rows(o->to + first * o->to_stride, o->to_stride, o->from + first * o->from_stride,
               o->from_stride, rows, o->w);
}

typedef struct {
    float *y;
    const float *x;
    int64_t y_stride, x_stride, rows;
    int64_t group; /* panels of a task */
    const Matrix *w;
    int add;
} Product;

static void multiply_panels(void *work, int64_t task, float *scratch)
{
    const Product *p = work;
    int64_t first = task * p->group;
    kernels->multiply(p->y + first * PANEL, p->y_stride, p->x, p->x_stride, p->rows, p->w, first,
                      smaller(p->group, panels_of(p->w->out) - first), p->add, scratch);
}

int64_t group_for(int64_t rows)
{
    return rows > FEW_ROWS ? 1 : PANELS_AT_ONCE;
}

/* product over inputs that are in the matrix's order. */
static int ordered_product(Team *team, float *y, int64_t y_stride, const float *x,
                           int64_t x_stride, int64_t rows, const Matrix *w, int add)
{
    Product p = {y, x, y_stride, x_stride, rows, group_for(rows), w, add};
    return run_tasks(team, multiply_panels, &p, groups_of(w->out, p.group),
                     cost_of(rows, w->into * w->out), w->into * PANEL);
}

int product(Team *team, float *y, int64_t y_stride, const float *x, int64_t x_stride, int64_t rows,
            const Matrix *w, int add)
{
    if (w->order == NULL)
        return ordered_product(team, y, y_stride, x, x_stride, rows, w, add);
    int64_t stride = row_stride(w->into);
    float *ordered = malloc((size_t)(rows * stride) * sizeof(float));
    if (ordered == NULL)
        return 0;
    Ordering o = {ordered, x, stride, x_stride, rows, w};
    int done = run_tasks(team, order_some, &o, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK,
                         rows * w->into, 1) &&
               ordered_product(team, y, y_stride, ordered, stride, rows, w, add);
    free(ordered);
    return done;
}
