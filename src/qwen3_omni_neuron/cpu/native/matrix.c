/* Packing of matrices in panels: see Matrix of library.h. */

#include "matrix.h"

#include "kernels.h"
#include "parallel.h"

typedef struct {
    char *to;
    const char *from;
    int64_t out, into, bytes;
    int widen;
} Packing;

/* Write one panel of numbers of a type, shifted to the left; zeros after the last output. */
#define PACK(type, stored, shift)                                                                \
    {                                                                                            \
        type *to = (type *)p->to + task * PANEL * p->into;                                       \
        const stored *from =                                                                     \
            (const stored *)p->from + (matrix * p->out + panel * PANEL) * p->into;               \
        for (int64_t k = 0; k < p->into; k++)                                                    \
            for (int64_t o = 0; o < PANEL; o++)                                                  \
                to[k * PANEL + o] = o < outs ? (type)((type)from[o * p->into + k] << (shift)) : 0; \
    }

static void pack_panel(void *work, int64_t task, float *unused)
{
    const Packing *p = work;
    int64_t panels = panels_of(p->out), matrix = task / panels, panel = task % panels;
    int64_t outs = p->out - panel * PANEL;
    (void)unused;
    if (p->widen)
        PACK(uint32_t, uint16_t, 16)
    else if (p->bytes == 4)
        PACK(uint32_t, uint32_t, 0)
    else if (p->bytes == 2)
        PACK(uint16_t, uint16_t, 0)
    else
        PACK(uint8_t, uint8_t, 0)
}

int pack_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into,
                  int64_t bytes, int widen)
{
    Packing packing = {to, from, out, into, bytes, widen};
    Team *team = open_team(INT64_MAX);
    int done = run_tasks(team, pack_panel, &packing, count * panels_of(out), count * out * into, 1);
    close_team(team);
    return done ? DONE : NO_MEMORY;
}

typedef struct {
    const uint16_t *from;
    int64_t out;
    Matrix to; /* one of those that follow each other */
} Rounding;

/* Round one panel. wide: a group's weights in float32, [group, PANEL], zeros where there are none. */
static void quantise_panel(void *work, int64_t task, float *wide)
{
    const Rounding *q = work;
    int64_t panels = panels_of(q->out), matrix = task / panels, panel = task % panels;
    int64_t outs = smaller(PANEL, q->out - panel * PANEL), into = q->to.into, group = q->to.group;
    const uint16_t *from = q->from + (matrix * q->out + panel * PANEL) * into;
    char *block = (char *)q->to.panels + task * panel_bytes(&q->to);
    for (int64_t start = 0; start < into; start += group, block += block_bytes(&q->to)) {
        int64_t filled = smaller(group, into - start);
        memset(wide, 0, (size_t)(group * PANEL) * sizeof(float));
        for (int64_t o = 0; o < outs; o++)
            for (int64_t k = 0; k < filled; k++) {
                uint32_t bits = (uint32_t)from[o * into + start + k] << 16;
                memcpy(wide + k * PANEL + o, &bits, sizeof bits);
            }
        kernels->quantise(block, wide, group);
    }
}

int quantise_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into,
                      int64_t group)
{
    Matrix one = {
        .panels = to, .into = into, .type = INT4, .group = group, .scale_type = BFLOAT16};
    Rounding rounding = {from, out, one};
    Team *team = open_team(INT64_MAX);
    int done = run_tasks(team, quantise_panel, &rounding, count * panels_of(out),
                         count * out * into * QUANTISED_STEPS, group * PANEL);
    close_team(team);
    return done ? DONE : NO_MEMORY;
}
