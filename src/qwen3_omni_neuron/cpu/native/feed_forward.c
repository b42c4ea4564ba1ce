/* See feed_forward.h. */

#include "feed_forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "product.h"

enum { ROWS_A_TASK = 8 };

typedef struct {
    const Memory *m;
    int64_t hidden, ffn, experts, rows;
    int64_t group; /* panels per task */
    const Matrix *gate_up, *down;
    const float *scale; /* factor of each row of a dense one; NULL: 1 */
    int64_t used; /* experts with rows: m->used; 1 for a dense one */
    const float *x; /* inputs in the form that gate and up accept: [rows of all experts, hidden] */
    float *own;     /* where inputs are written in another form; may be m->normed */
} FeedForward;

/* Return the expert of this index among those with rows. */
static int64_t expert_at(const FeedForward *f, int64_t index)
{
    return f->experts ? f->m->used[index] : 0;
}

/* Count the rows of one expert, or all rows of a dense feed-forward (experts 0). */
static int64_t rows_of(const FeedForward *f, int64_t expert)
{
    return f->experts ? f->m->first[expert + 1] - f->m->first[expert] : f->rows;
}

static int64_t first_of(const FeedForward *f, int64_t expert)
{
    return f->experts ? f->m->first[expert] : 0;
}

/* Compute some columns of silu(gate) * up of one expert's rows. */
static void gate_panels(void *work, int64_t task, float *gates)
{
    const FeedForward *f = work;
    const Memory *m = f->m;
    int64_t groups = groups_of(f->ffn, f->group), expert = expert_at(f, task / groups);
    int64_t first = task % groups * f->group, column = first * PANEL;
    int64_t panels = smaller(f->group, panels_of(f->ffn) - first);
    int64_t columns = smaller(panels * PANEL, f->ffn - column);
    int64_t rows = rows_of(f, expert), start = first_of(f, expert), width = panels * PANEL;
    int64_t stride = row_stride(f->hidden);
    Matrix gate = matrix_at(f->gate_up, 2 * expert), up = matrix_at(f->gate_up, 2 * expert + 1);
    float *ups = gates + rows * width;
    kernels->multiply(gates, width, f->x + start * stride, stride, rows, &gate, first, panels,
                      0, NULL);
    kernels->multiply(ups, width, f->x + start * stride, stride, rows, &up, first, panels, 0,
                      NULL);
    for (int64_t r = 0; r < rows; r++) {
        float scale = f->scale == NULL ? 1.0f : f->scale[r];
        if (f->experts)
            scale = m->router[m->order[start + r] * f->experts + expert];
        kernels->gate(m->gated + (start + r) * row_stride(f->ffn) + column, gates + r * width,
                      ups + r * width, columns, scale);
    }
}

/* Add some columns of every expert's output to m->x, in the order of the experts. */
static void add_down_panels(void *work, int64_t task, float *outs)
{
    const FeedForward *f = work;
    const Memory *m = f->m;
    int64_t first = task * f->group, column = first * PANEL;
    int64_t panels = smaller(f->group, panels_of(f->hidden) - first), width = panels * PANEL;
    int64_t columns = smaller(width, f->hidden - column);
    for (int64_t i = 0; i < f->used; i++) {
        int64_t e = expert_at(f, i), rows = rows_of(f, e), start = first_of(f, e);
        Matrix down = matrix_at(f->down, e);
        int last = i + 1 == f->used; /* the next task begins with the first expert */
        Matrix later = matrix_at(f->down, expert_at(f, last ? 0 : i + 1));
        const char *next = (const char *)later.panels +
                           (last ? first + f->group : first) * panel_bytes(&later);
        kernels->multiply(outs, width, m->gated + start * row_stride(f->ffn), row_stride(f->ffn),
                          rows, &down, first, panels, 0, next);
        for (int64_t r = 0; r < rows; r++) {
            float *to = m->x + m->order[start + r] * f->hidden + column;
            for (int64_t c = 0; c < columns; c++)
                to[c] += outs[r * width + c];
        }
    }
}

/* Write rows of m->normed in the form that gate and up accept. */
static void take_gate_up(void *work, int64_t task, float *unused)
{
    const FeedForward *f = work;
    int64_t stride = row_stride(f->hidden), first = task * ROWS_A_TASK;
    (void)unused;
    take_inputs(f->own + first * stride, f->m->normed + first * stride, stride,
                smaller(ROWS_A_TASK, f->rows - first), f->gate_up);
}

static int take_rows(Team *team, FeedForward *f)
{
    return run_tasks(team, take_gate_up, f, (f->rows + ROWS_A_TASK - 1) / ROWS_A_TASK,
                     f->rows * f->hidden, 1);
}

/* Write one expert's inputs of down in the form that it accepts, in place. */
static void take_down(void *work, int64_t task, float *unused)
{
    const FeedForward *f = work;
    int64_t expert = expert_at(f, task), stride = row_stride(f->ffn);
    float *gated = f->m->gated + first_of(f, expert) * stride;
    (void)unused;
    take_inputs(gated, gated, stride, rows_of(f, expert), f->down);
}

/* m->gated = silu(gate) * up, for up to `most` rows of an expert. */
static int run_gates(Team *team, FeedForward *f, int64_t most, int64_t cost)
{
    return run_tasks(team, gate_panels, f, f->used * groups_of(f->ffn, f->group), cost,
                     2 * most * f->group * PANEL);
}

/* m->x += a dense feed-forward of m->normed. scale [rows]: factor of each row; NULL: 1. */
static int add_dense(Team *team, const Memory *m, int64_t rows, int64_t hidden, int64_t ffn,
                     const Matrix *gate_up, const Matrix *down, const float *scale)
{
    FeedForward f = {.m = m, .hidden = hidden, .ffn = ffn, .rows = rows, .group = group_for(rows),
                     .gate_up = gate_up, .down = down, .scale = scale, .used = 1, .x = m->normed};
    if (has_own_inputs(gate_up)) { /* others read m->normed afterwards */
        f.x = f.own = malloc((size_t)(rows * row_stride(hidden)) * sizeof(float));
        if (f.own == NULL || !take_rows(team, &f)) {
            free(f.own);
            return 0;
        }
    }
    int done = run_gates(team, &f, rows, cost_of(rows, 2 * hidden * ffn)) &&
               last_product(team, m->x, hidden, m->gated, rows, down, 1);
    free(f.own);
    return done;
}

/* Replace one row's router logits by weights, 0 for all but the `chosen` largest. */
static void choose(const Decoder *d, float *router)
{
    int64_t experts = d->experts;
    float largest = -INFINITY, all = 0, sum = 0;
    for (int64_t e = 0; e < experts; e++)
        largest = router[e] > largest ? router[e] : largest;
    for (int64_t e = 0; e < experts; e++)
        router[e] -= largest;
    kernels->exponentials(router, router, experts);
    for (int64_t e = 0; e < experts; e++)
        all += router[e];
    for (int64_t n = 0; n < d->chosen; n++) { /* the sign marks a chosen one */
        int64_t best = 0;
        for (int64_t e = 1; e < experts; e++)
            if (router[e] > router[best])
                best = e;
        sum += router[best];
        router[best] = -router[best];
    }
    float total = d->normalized ? sum : all;
    for (int64_t e = 0; e < experts; e++)
        router[e] = router[e] < 0 ? -router[e] / total : 0;
}

/* List the rows by expert: m->order and m->first. Returns their number. */
static int64_t sort_rows(const Decoder *d, const Memory *m, int64_t rows)
{
    int64_t count = 0;
    for (int64_t e = 0; e < d->experts; e++) {
        m->first[e] = count;
        for (int64_t r = 0; r < rows; r++)
            if (m->router[r * d->experts + e] > 0)
                m->order[count++] = r;
    }
    return m->first[d->experts] = count;
}

/* Copy the rows of each expert. */
static void gather_rows(void *work, int64_t task, float *unused)
{
    const FeedForward *f = work;
    const Memory *m = f->m;
    int64_t stride = row_stride(f->hidden);
    int64_t end = smaller(m->first[f->experts], (task + 1) * ROWS_A_TASK);
    (void)unused;
    for (int64_t i = task * ROWS_A_TASK; i < end; i++)
        memcpy(m->gathered + i * stride, m->normed + m->order[i] * stride,
               (size_t)input_row_bytes(f->gate_up));
}

/* m->x += the routed experts' output for m->normed: an expert runs on the rows that chose it. */
static int add_experts(Team *team, const Decoder *d, const Layer *layer, const Memory *m,
                       int64_t rows)
{
    int64_t hidden = d->hidden, ffn = d->ffn;
    FeedForward f = {.m = m, .hidden = hidden, .ffn = ffn, .experts = d->experts, .rows = rows,
                     .gate_up = &layer->gate_up, .down = &layer->down, .x = m->gathered,
                     .own = m->normed};
    if (!product(team, m->router, d->experts, m->normed, row_stride(hidden), rows, &layer->router,
                 0))
        return 0;
    for (int64_t r = 0; r < rows; r++)
        choose(d, m->router + r * d->experts);
    int64_t runs = sort_rows(d, m, rows), most = 0;
    for (int64_t e = 0; e < d->experts; e++) {
        most = larger(most, rows_of(&f, e));
        if (rows_of(&f, e) > 0)
            m->used[f.used++] = e;
    }
    f.group = group_for(most);
    int64_t cost = cost_of(1, runs * hidden * ffn);
    return (!has_own_inputs(f.gate_up) || take_rows(team, &f)) &&
           run_tasks(team, gather_rows, &f, (runs + ROWS_A_TASK - 1) / ROWS_A_TASK, runs * hidden,
                     1) &&
           run_gates(team, &f, most, 2 * cost) &&
           (!has_own_inputs(f.down) || run_tasks(team, take_down, &f, f.used, runs * ffn, 1)) &&
           run_tasks(team, add_down_panels, &f, groups_of(hidden, f.group), cost,
                     most * f.group * PANEL);
}

/* m->x += the shared expert's output, scaled by its sigmoid gate. */
static int add_shared(Team *team, const Decoder *d, const Layer *layer, const Memory *m,
                      int64_t rows)
{
    float *scale = m->gathered; /* free until the routed experts */
    if (!product(team, scale, 1, m->normed, row_stride(d->hidden), rows, &layer->shared_gate, 0))
        return 0;
    for (int64_t r = 0; r < rows; r++)
        scale[r] = -scale[r];
    kernels->exponentials(scale, scale, rows);
    for (int64_t r = 0; r < rows; r++)
        scale[r] = 1.0f / (1.0f + scale[r]);
    return add_dense(team, m, rows, d->hidden, d->shared_ffn, &layer->shared_gate_up,
                     &layer->shared_down, scale);
}

int add_feed_forward(Team *team, const Decoder *d, const Layer *layer, const Memory *m,
                     int64_t rows)
{
    if (d->experts == 0)
        return add_dense(team, m, rows, d->hidden, d->ffn, &layer->gate_up, &layer->down, NULL);
    return (layer->shared_gate.panels == NULL || add_shared(team, d, layer, m, rows)) &&
           add_experts(team, d, layer, m, rows);
}
