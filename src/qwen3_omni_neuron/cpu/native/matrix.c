/* Matrices in panels: see matrix.h. Called by matrix.py only. */

#include "matrix.h"

#include "layout.h"
#include "parallel.h"
#include "status.h"

typedef struct {
    char *to;
    const char *from;
    int64_t out, into, bytes;
} Packing;

/* Write one panel of numbers of a type; zeros after the last output. */
#define PACK(type)                                                                               \
    {                                                                                            \
        type *to = (type *)p->to + task * PANEL * p->into;                                       \
        const type *from = (const type *)p->from + (matrix * p->out + panel * PANEL) * p->into;  \
        for (int64_t k = 0; k < p->into; k++)                                                    \
            for (int64_t o = 0; o < PANEL; o++)                                                  \
                to[k * PANEL + o] = o < outs ? from[o * p->into + k] : 0;                        \
    }

static void pack_panel(void *work, int64_t task, float *unused)
{
    const Packing *p = work;
    int64_t panels = panels_of(p->out), matrix = task / panels, panel = task % panels;
    int64_t outs = p->out - panel * PANEL;
    (void)unused;
    if (p->bytes == 4)
        PACK(uint32_t)
    else if (p->bytes == 2)
        PACK(uint16_t)
    else
        PACK(uint8_t)
}

/* Pack `count` dense matrices [out, into] of numbers of 1, 2 or 4 bytes, with all threads of the pool. */
int pack_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into,
                  int64_t bytes)
{
    Packing packing = {to, from, out, into, bytes};
    Team *team = open_team(INT64_MAX);
    int done = run_tasks(team, pack_panel, &packing, count * panels_of(out), count * out * into, 1);
    close_team(team);
    return done ? DONE : NO_MEMORY;
}
