/* Sizes and offsets of the structs that Python fills, and constants that it shares. installed.py
 * compares these tables with its own ctypes structures when it loads the library. */

#ifndef LAYOUT_H
#define LAYOUT_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name; /* "Type" for a size, "Type.field" for an offset; NULL ends a table */
    int64_t number;
} LayoutEntry;

#define SIZE(type) {#type, (int64_t)sizeof(type)}
#define OFFSET(type, field) {#type "." #field, (int64_t)offsetof(type, field)}
#define CONSTANT(name) {#name, name}
#define END_OF_LAYOUT {NULL, 0}

#endif
