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
    Matrix to; /* the first of several adjacent ones */
    _Atomic int unsuited;
} Compacting;

/* Numbers of a block: [inputs, PANEL], in the order of a row. */
typedef const uint16_t (*Numbers)[PANEL];

static inline uint16_t exponent_of(uint16_t number)
{
    return number >> 7 & 0xff;
}

/* Whether a number's exponent can't be encoded in 4 bits. */
static inline uint16_t is_outside(uint16_t number, uint16_t lowest)
{
    return (uint16_t)(exponent_of(number) - lowest) >= EXPONENTS;
}

static int64_t count_outside(Numbers numbers, int64_t inputs, const uint16_t *lowest)
{
    uint16_t counts[PANEL] = {0};
    int64_t all = 0;
    for (int64_t k = 0; k < inputs; k++)
        for (int p = 0; p < PANEL; p++)
            counts[p] += is_outside(numbers[k][p], lowest[p]);
    for (int p = 0; p < PANEL; p++)
        all += counts[p];
    return all;
}

/* Find the lowest of the EXPONENTS that cover most numbers of an output; of equal ones, the highest. */
static uint16_t best_lowest(Numbers numbers, int64_t inputs, int place)
{
    int counts[256] = {0}, most = 0, inside = 0;
    uint16_t best = 0;
    for (int64_t k = 0; k < inputs; k++)
        counts[exponent_of(numbers[k][place])]++;
    for (int lowest = 1 - EXPONENTS; lowest <= 256 - EXPONENTS; lowest++) {
        inside += counts[lowest + EXPONENTS - 1];
        if (lowest > 0)
            inside -= counts[lowest - 1];
        if (lowest >= 0 && inside >= most) {
            most = inside;
            best = (uint16_t)lowest;
        }
    }
    return best;
}

_Static_assert(BLOCK_HEAD == PANEL + 4 * EXCEPTIONS && QUAD_BYTES == 3 * 2 * PANEL, "sizes agree");

/* Write a block's head, and replace its numbers' exponents by steps above the lowest. Returns 0 if too
 * many have another exponent. */
static int write_head(char *head, uint16_t (*numbers)[PANEL], int64_t inputs)
{
    uint16_t lowest[PANEL] = {0};
    uint32_t exceptions[EXCEPTIONS];
    int64_t listed = 0;
    for (int64_t k = 0; k < inputs; k++)
        for (int p = 0; p < PANEL; p++) {
            uint16_t exponent = exponent_of(numbers[k][p]);
            lowest[p] = exponent > lowest[p] ? exponent : lowest[p];
        }
    for (int p = 0; p < PANEL; p++)
        lowest[p] = lowest[p] < EXPONENTS ? 0 : lowest[p] - (EXPONENTS - 1);
    if (count_outside(numbers, inputs, lowest) > EXCEPTIONS) {
        for (int p = 0; p < PANEL; p++)
            lowest[p] = best_lowest(numbers, inputs, p);
        if (count_outside(numbers, inputs, lowest) > EXCEPTIONS)
            return 0;
    }
    memset(exceptions, 0xff, sizeof exceptions);
    for (int64_t k = 0; k < inputs; k++) {
        uint16_t any = 0;
        for (int p = 0; p < PANEL; p++)
            any |= is_outside(numbers[k][p], lowest[p]);
        for (int p = 0; any && p < PANEL; p++)
            if (is_outside(numbers[k][p], lowest[p])) {
                exceptions[listed++] = (uint32_t)(k * PANEL + p) << 16 | numbers[k][p];
                numbers[k][p] = (uint16_t)((numbers[k][p] & 0x807f) | lowest[p] << 7);
            }
        for (int p = 0; p < PANEL; p++)
            numbers[k][p] = (uint16_t)((numbers[k][p] & 0x807f) |
                                       (exponent_of(numbers[k][p]) - lowest[p]) << 7);
    }
    for (int p = 0; p < PANEL; p++)
        ((uint8_t *)head)[p] = (uint8_t)lowest[p];
    memcpy(head + PANEL, exceptions, sizeof exceptions);
    return 1;
}

/* Write quads of numbers as prepared by write_head. */
static void write_quads(uint16_t *to, Numbers numbers, int64_t inputs)
{
    for (int64_t k = 0; k < inputs; k += 4, to += 3 * PANEL)
        for (int p = 0; p < PANEL; p++) {
            uint16_t last = numbers[k + 3][p];
            to[p] = (uint16_t)(numbers[k][p] | (last >> 7 & 15) << 11);
            to[PANEL + p] = (uint16_t)(numbers[k + 1][p] | (last >> 3 & 15) << 11);
            to[2 * PANEL + p] =
                (uint16_t)(numbers[k + 2][p] | (last & 7) << 12 | last >> 15 << 11);
        }
}

/* Pack one panel. scratch: a block's numbers. */
static void compact_panel(void *work, int64_t task, float *scratch)
{
    Compacting *c = work;
    uint16_t(*numbers)[PANEL] = (uint16_t(*)[PANEL])scratch;
    int64_t panels = panels_of(c->out), matrix = task / panels, panel = task % panels;
    int64_t outs = smaller(PANEL, c->out - panel * PANEL), into = c->to.into;
    const uint16_t *from = c->from + (matrix * c->out + panel * PANEL) * into;
    char *head = (char *)c->to.panels + task * panel_bytes(&c->to);
    char *quads = head + blocks_of(into) * BLOCK_HEAD;
    for (int64_t start = 0; start < into; start += BLOCK_INPUTS, head += BLOCK_HEAD) {
        int64_t inputs = smaller(BLOCK_INPUTS, into - start);
        memset(numbers, 0, (size_t)inputs * sizeof *numbers);
        for (int64_t o = 0; o < outs; o++)
            for (int64_t k = 0, p = o / 16 * 16 + o % 8 * 2 + o / 8 % 2; k < inputs; k++)
                numbers[k][p] = from[o * into + start + k];
        if (c->unsuited || !write_head(head, numbers, inputs)) {
            c->unsuited = 1;
            return;
        }
        write_quads((uint16_t *)quads, numbers, inputs);
        quads += inputs / 4 * QUAD_BYTES;
    }
}

int pack_compact_matrices(void *to, const void *from, int64_t count, int64_t out, int64_t into)
{
    Compacting compacting = {from, out, {.panels = to, .into = into, .type = COMPACT}, 0};
    Team *team = open_team(INT64_MAX);
    int done = run_tasks(team, compact_panel, &compacting, count * panels_of(out),
                         count * out * into, BLOCK_INPUTS * PANEL / 2);
    close_team(team);
    return !done ? NO_MEMORY : compacting.unsuited ? UNSUITED : DONE;
}

typedef struct {
    const uint16_t *from;
    int64_t out;
    Matrix to; /* one of several adjacent ones */
} Rounding;

/* Round one panel. wide: a group's weights in float32, [group, PANEL], padded with zeros. */
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
