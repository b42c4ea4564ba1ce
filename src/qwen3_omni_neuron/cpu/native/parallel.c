/* See parallel.h. */

#define _GNU_SOURCE /* sched_getcpu and sched_setaffinity, on Linux */
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "kernels.h"
#include "library.h"

/* Multiplications. Smaller jobs end before a helper wakes: run them alone. */
enum { SHARED_FROM = 1 << 17 };
enum { MOST_TEAMS = 64, MOST_PARTS = 16, CACHE_LINE = 64 };
/* Checks for tasks before an idle helper sleeps: tens of microseconds. */
enum { PATIENCE = 2000 };
/* If other processes keep the cores busy, a helper loses its core during a task, and its caller waits
 * longer than any task takes. That is cheap if rare; if such waits take a sixth of the time of shared
 * work, half of the threads work for a while, twice as long if it happens again. Times are of the last
 * WINDOW_NS of shared work or somewhat more. */
enum { STALL_NS = 2000000, FEWER_NS = 20000000, WINDOW_NS = 100000000, MOST_STALLS = 6 };

/* Consecutive tasks: end << 32 | next. In its own cache line, since one thread takes nearly all of
 * them. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
} Part;

/* Each thread begins with its own part of the tasks, then helps with the others'. Successive jobs have
 * their rows or samples in the same order, so that a thread mostly reads its own writes: reading from
 * another core's cache takes long. */
struct Team {
    Part part[MOST_PARTS];
    _Atomic int64_t open;
    _Atomic int64_t helpers; /* threads that look for tasks here, without the caller */
    int64_t most;            /* most such threads, including the caller */
    _Atomic int64_t parts;   /* of the last job */
    _Atomic int core;        /* on which the caller was last seen, or -1 */
    _Atomic int64_t done, failed;
    Task task;
    void *work;
    int64_t scratch_floats;
};

/* A team is not its caller's memory: a helper without a core may later look at a closed one. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int64_t helpers;        /* threads that were started */
    _Atomic int64_t size;   /* threads that may work at once */
    _Atomic int64_t usable; /* of these, while other processes keep cores busy */
    _Atomic int64_t asleep; /* helpers that wait for `wake` */
    _Atomic int64_t calls;  /* between open_team and close_team */
    _Atomic int64_t shared_ns, waited_ns; /* of shared work, and of long waits in it */
    _Atomic int64_t stalls;               /* successive halvings of `usable` */
    _Atomic int64_t fewer_until;          /* ns */
    Team teams[MOST_TEAMS];
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .size = 1, .usable = 1};

/* Memory of a thread for its tasks, freed when the thread ends. */
typedef struct {
    float *floats;
    int64_t count;
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void free_scratch(void *scratch)
{
    free(((Scratch *)scratch)->floats);
    free(scratch);
}

/* A child process inherits neither its parent's threads nor their calls. */
static void forget_threads(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.helpers = 0;
    pool.asleep = pool.calls = 0;
    for (int i = 0; i < MOST_TEAMS; i++)
        pool.teams[i].open = pool.teams[i].helpers = 0;
}

static void prepare(void)
{
    pthread_key_create(&scratch_key, free_scratch);
    pthread_atfork(NULL, NULL, forget_threads);
}

/* Return this thread's memory of at least `count` floats, or NULL. */
static float *scratch_of(int64_t count)
{
    Scratch *mine = pthread_getspecific(scratch_key);
    if (mine == NULL) {
        mine = calloc(1, sizeof(Scratch));
        if (mine == NULL || pthread_setspecific(scratch_key, mine) != 0) {
            free(mine);
            return NULL;
        }
    }
    if (mine->count < count || mine->floats == NULL) {
        free(mine->floats);
        mine->count = count;
        mine->floats = aligned_alloc(CACHE_LINE, ((size_t)count + 31) / 16 * CACHE_LINE);
    }
    return mine->floats;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Return this thread's core, or -1 if unknown. */
static int this_core(void)
{
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Move this thread to another of its cores, if any. A kernel that wakes a helper on its caller's core
 * often leaves it there for a whole call, in which both take turns. */
static void leave_core(int core)
{
#ifdef __linux__
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return;
    others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed); /* the scheduler may still move it back */
#else
    (void)core;
#endif
}

/* Take the next task of a part. Returns -1 if none remains. */
static int64_t take_task(Part *part)
{
    uint64_t ticket = atomic_load_explicit(&part->ticket, memory_order_acquire);
    do {
        if ((uint32_t)ticket >= ticket >> 32)
            return -1;
    } while (!atomic_compare_exchange_weak_explicit(
        &part->ticket, &ticket, ticket + 1, memory_order_acq_rel, memory_order_acquire));
    return (uint32_t)ticket;
}

/* Take a task of a team, first of the thread's own part, and run it. own: the thread's number in the
 * team. Returns 0 if none remains. */
static int run_one(Team *team, int64_t own)
{
    int64_t index = -1, parts = team->parts;
    for (int64_t i = 0; i < parts && index < 0; i++)
        index = take_task(team->part + (own + i) % parts);
    if (index < 0)
        return 0;
    /* The caller waits for this task: its data remain until then. */
    float *scratch = scratch_of(team->scratch_floats);
    if (scratch != NULL)
        team->task(team->work, index, scratch);
    else
        atomic_store(&team->failed, 1);
    atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
    return 1;
}

/* Upper bound of a team's helpers while calls share the pool. */
static int64_t fair_share(const Team *team)
{
    int64_t calls = pool.calls, usable = pool.usable;
    int64_t share = calls > 0 && usable > calls ? (usable - 1) / calls : 0;
    return share < team->most - 1 ? share : team->most - 1;
}

/* Work for a team until it closes, has no tasks for a while, or has more than its share. */
static void serve(Team *team, int64_t own)
{
    int idle = 0;
    while (team->open && idle < PATIENCE && team->helpers <= fair_share(team)) {
        int core = this_core();
        if (core >= 0 && core == team->core)
            leave_core(core);
        if (run_one(team, own)) {
            idle = 0;
        } else {
            idle++;
            pause_briefly();
        }
    }
    atomic_fetch_sub_explicit(&team->helpers, 1, memory_order_release);
}

/* Join the open team with the fewest helpers that lacks one; NULL if none does. own: becomes the
 * thread's number in the team. Under the lock. */
static Team *join_team(int64_t *own)
{
    Team *chosen = NULL;
    for (int i = 0; i < MOST_TEAMS; i++) {
        Team *team = pool.teams + i;
        if (team->open && team->helpers < fair_share(team))
            if (chosen == NULL || team->helpers < chosen->helpers)
                chosen = team;
    }
    if (chosen != NULL)
        *own = ++chosen->helpers;
    return chosen;
}

static void *help(void *unused)
{
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        pool.asleep++;
        pthread_cond_wait(&pool.wake, &pool.lock);
        pool.asleep--;
        int64_t own = 0;
        Team *team = join_team(&own);
        pthread_mutex_unlock(&pool.lock);
        if (team != NULL)
            serve(team, own);
    }
    return NULL;
}

void grow_pool(int64_t threads)
{
    pthread_mutex_lock(&pool.lock);
    if (threads > pool.size)
        pool.size = pool.usable = threads;
    pthread_mutex_unlock(&pool.lock);
}

/* Start missing helpers. Under the lock. */
static void start_helpers(void)
{
    while (pool.helpers < pool.size - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL) != 0)
            return; /* callers work alone */
        pthread_detach(thread);
        pool.helpers++;
    }
}

Team *open_team(int64_t most)
{
    Team *team = NULL;
    pthread_once(&once, prepare);
    pool.calls++;
    if (most < 2 || pool.size < 2)
        return NULL;
    pthread_mutex_lock(&pool.lock);
    start_helpers();
    for (int i = 0; i < MOST_TEAMS && team == NULL; i++)
        if (!pool.teams[i].open && pool.teams[i].helpers == 0)
            team = pool.teams + i;
    if (team != NULL) {
        team->most = most;
        team->parts = 0;
        team->failed = 0;
        team->open = 1;
    }
    pthread_mutex_unlock(&pool.lock);
    return team;
}

/* Wake helpers up to the team's share. */
static void wake_helpers(const Team *team)
{
    int64_t lacking = fair_share(team) - team->helpers;
    if (pool.asleep == 0 || lacking <= 0)
        return;
    pthread_mutex_lock(&pool.lock);
    while (lacking-- > 0)
        pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

/* Return when all tasks are done. */
static void wait_for_helpers(const Team *team, int64_t tasks)
{
    for (int spins = 0; atomic_load_explicit(&team->done, memory_order_acquire) < tasks; spins++) {
        if (spins < PATIENCE)
            pause_briefly();
        else
            sched_yield();
    }
}

/* Count the time of shared work and of the wait at its end, and choose how many threads may work. */
static void count_wait(int64_t now, int64_t shared_ns, int64_t waited_ns)
{
    int64_t shared = atomic_fetch_add(&pool.shared_ns, shared_ns) + shared_ns, waited = 0;
    if (waited_ns >= STALL_NS)
        waited = atomic_fetch_add(&pool.waited_ns, waited_ns) + waited_ns;
    if (waited > shared / 6) {
        pool.stalls = smaller(pool.stalls + 1, MOST_STALLS);
        pool.fewer_until = now + (FEWER_NS << pool.stalls);
        pool.usable = larger(pool.usable / 2, 1);
        pool.shared_ns = pool.waited_ns = 0;
    } else if (shared > WINDOW_NS) {
        pool.shared_ns = shared / 2;
        pool.waited_ns = pool.waited_ns / 2;
        if (pool.usable == pool.size)
            pool.stalls = 0;
    }
}

/* When it is time, let twice as many threads work again. */
static void use_more(int64_t now)
{
    int64_t until = pool.fewer_until;
    if (pool.usable == pool.size || now < until ||
        !atomic_compare_exchange_strong(&pool.fewer_until, &until, now + FEWER_NS))
        return;
    pool.usable = smaller(2 * pool.usable, pool.size);
    pool.shared_ns = pool.waited_ns = 0;
}

int run_tasks(Team *team, Task task, void *work, int64_t tasks, int64_t cost,
              int64_t scratch_floats)
{
    float *scratch = scratch_of(scratch_floats);
    if (scratch == NULL)
        return 0;
    int alone = team == NULL || tasks < 2 || cost < SHARED_FROM;
    int64_t start = alone ? 0 : now_ns();
    if (!alone)
        use_more(start);
    if (alone || pool.usable < 2) {
        for (int64_t i = 0; i < tasks; i++)
            task(work, i, scratch);
        return 1;
    }
    team->task = task;
    team->work = work;
    team->scratch_floats = scratch_floats;
    team->core = this_core();
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    int64_t parts = smaller(smaller(fair_share(team) + 1, MOST_PARTS), tasks);
    for (int64_t i = 0; i < parts; i++)
        atomic_store_explicit(&team->part[i].ticket,
                              (uint64_t)(tasks * (i + 1) / parts) << 32 | tasks * i / parts,
                              memory_order_release);
    atomic_store_explicit(&team->parts, parts, memory_order_release);
    wake_helpers(team);
    while (run_one(team, 0))
        ;
    int64_t end = now_ns();
    wait_for_helpers(team, tasks);
    int64_t now = now_ns();
    if (parts > 1)
        count_wait(now, now - start, now - end);
    return !team->failed;
}

void close_team(Team *team)
{
    pool.calls--;
    if (team != NULL)
        team->open = 0;
}
