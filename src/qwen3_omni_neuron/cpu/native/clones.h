/* CLONED(feature): compile a function for any x86-64 and once more for one that has the feature;
 * the one to run is chosen when the library is loaded. On other machines the function is compiled
 * once, for the compiler's default target. */

#ifndef CLONES_H
#define CLONES_H

#include <stdint.h> /* __GLIBC__ */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED(feature) __attribute__((target_clones(feature, "default")))
#else
#define CLONED(feature)
#endif

#endif
