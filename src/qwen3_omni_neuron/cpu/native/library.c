/* Digest of the compiled sources: see sources.py, which counts SOURCE_DIGEST. */

#include "library.h"

const int64_t source_digest = SOURCE_DIGEST;
