/* What the library was compiled from. See layout.h. */

#include "layout.h"

#include "status.h"

/* setup.py defines SOURCE_HASH: see sources.py. */
const char source_hash[] = SOURCE_HASH;

const LayoutEntry status_layout[] = {CONSTANT(NO_MEMORY), CONSTANT(NO_SUCH_ROW), END_OF_LAYOUT};
