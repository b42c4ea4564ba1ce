/* Return values of the functions that Python calls: see binding.py. */

#ifndef STATUS_H
#define STATUS_H

enum { DONE = 0, NO_MEMORY = 1, NO_SUCH_ROW = 2 };

#endif
