/* Weights as the C takes them. */

#ifndef MATRIX_H
#define MATRIX_H

#include <stdint.h>
#include <string.h>

/* Outputs of a matrix that lie side by side: see Matrix. */
enum { PANEL = 32 };

/* Types of weights. They are widened to float32 when they are used. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

/* A matrix [out, into] in panels: [ceil(out / PANEL), into, PANEL], zeros after the last output. The
 * products of a panel are sums side by side, each over `into` in order: whatever the processor, the
 * number of rows and of threads, a row's result is the same. */
typedef struct {
    const void *panels;
    const float *scale; /* [out], what each output is multiplied by; NULL for 1 */
    const float *bias;  /* [out], added to each output; NULL for none */
    int64_t into, out;
    int64_t type;
} Matrix;

/* A table of rows [count, width], for lookups. */
typedef struct {
    const void *rows;
    int64_t count, width;
    int64_t type; /* FLOAT32 or BFLOAT16 */
} Table;

static inline int64_t panels_of(int64_t out)
{
    return (out + PANEL - 1) / PANEL;
}

static inline int64_t bytes_of(int64_t type)
{
    return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1;
}

/* Matrix number `index` of several that follow each other, each of this shape; all have one bias. */
static inline Matrix matrix_at(const Matrix *stack, int64_t index)
{
    Matrix one = *stack;
    one.panels = (const char *)stack->panels +
                 index * panels_of(stack->out) * PANEL * stack->into * bytes_of(stack->type);
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
