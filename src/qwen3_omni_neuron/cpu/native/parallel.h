/* A pool of helper threads that share the work of calls.
 *
 * A call opens a team, runs tasks through it, and closes it. Helpers join open teams while no more
 * threads work than the pool allows, and sleep otherwise, so that one stage's helpers take no core from
 * another. Which thread runs a task never changes a result. */

#ifndef PARALLEL_H
#define PARALLEL_H

#include <stdatomic.h>
#include <stdint.h>

/* One part of some work. scratch: the thread's memory, see run_tasks. */
typedef void (*Task)(void *work, int64_t task, float *scratch);

typedef struct Team Team;

/* Begin a call, with a team of up to `most` threads, this one included. NULL: a team without helpers,
 * which the functions below also accept. */
Team *open_team(int64_t most);

/* Run tasks 0 to tasks - 1 in any order, and return when all are done. cost: all multiplications;
 * little work stays on this thread. scratch_floats: of each thread's memory. Returns 0 if a thread
 * could not allocate them. */
int run_tasks(Team *team, Task task, void *work, int64_t tasks, int64_t cost,
              int64_t scratch_floats);

/* End a call. team: may be NULL. */
void close_team(Team *team);

#endif
