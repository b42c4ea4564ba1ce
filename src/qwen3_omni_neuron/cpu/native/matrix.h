/* Access to weights in the layouts of library.h. */

#ifndef MATRIX_H
#define MATRIX_H

#include <string.h>

#include "library.h"

static inline int64_t panels_of(int64_t out)
{
    return (out + PANEL - 1) / PANEL;
}

static inline int64_t bytes_of(int64_t type)
{
    return type == FLOAT32 ? 4 : type == BFLOAT16 || type == FLOAT16 ? 2 : 1;
}

/* Bytes of an INT4 block's numbers, which precede its scales. */
static inline int64_t number_bytes(int64_t group)
{
    return group / 2 * PANEL;
}

/* Inputs rounded with one scale: see take_inputs of product.h. */
enum { GROUP_INPUTS = 32 };
/* The largest integer of such a group: 32 products with INT8 weights sum to less than 2^24. */
enum { INT4_LIMIT = 127, INT8_LIMIT = 4095 };
/* Bytes before a group's integers, and with them. */
enum { INPUT_HEAD = 8 };
static inline int64_t input_bytes(int64_t type)
{
    return INPUT_HEAD + GROUP_INPUTS * (type == INT4 ? 1 : 2);
}

/* Whether a matrix needs its inputs in another form. */
static inline int has_own_inputs(const Matrix *w)
{
    return w->type == INT4 || w->type == INT8;
}

/* Bytes of an INT4 block. */
static inline int64_t block_bytes(const Matrix *w)
{
    return number_bytes(w->group) + bytes_of(w->scale_type) * PANEL;
}

/* Blocks of a COMPACT panel. */
static inline int64_t blocks_of(int64_t into)
{
    return (into + BLOCK_INPUTS - 1) / BLOCK_INPUTS;
}

static inline int64_t panel_bytes(const Matrix *w)
{
    if (w->type == COMPACT)
        return blocks_of(w->into) * BLOCK_HEAD + w->into / 4 * QUAD_BYTES;
    if (w->type == INT4)
        return (w->into + w->group - 1) / w->group * block_bytes(w);
    return PANEL * w->into * bytes_of(w->type);
}

/* Matrix number `index` of several adjacent ones of this shape, with their own scales and one bias. */
static inline Matrix matrix_at(const Matrix *stack, int64_t index)
{
    Matrix one = *stack;
    one.panels =
        (const char *)stack->panels + index * panels_of(stack->out) * panel_bytes(stack);
    if (stack->scale != 0)
        one.scale = stack->scale + index * stack->out;
    return one;
}

/* Write row `index` of a table, widened. */
static inline void look_up(float *to, const Table *table, int64_t index)
{
    if (table->type == FLOAT32) {
        memcpy(to, (const float *)table->rows + index * table->width,
               (size_t)table->width * sizeof(float));
        return;
    }
    const uint16_t *row = (const uint16_t *)table->rows + index * table->width;
    for (int64_t i = 0; i < table->width; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

#endif
