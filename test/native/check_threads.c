/* Check of how many threads work while other processes keep cores busy: the pool's own functions, over
 * times that are given. Prints what differs, and exits with 1 if anything does. */

#include "parallel.c" /* the first: it asks the system's headers for more than is usual */

#include <stdio.h>

enum { MS = 1000000, THREADS = 16 };

static int failures;
static int64_t now;

static void expect(const char *what, int64_t got, int64_t expected)
{
    if (got != expected) {
        printf("%s: %lld, expected %lld\n", what, (long long)got, (long long)expected);
        failures++;
    }
}

/* Shared work of so many jobs, each with a wait at its end; all in ms. */
static void work(int64_t jobs, int64_t job, int64_t wait)
{
    for (int64_t i = 0; i < jobs; i++) {
        now += job * MS;
        count_wait(now, job * MS, wait * MS);
    }
}

/* Jobs that wait for half of their time, until fewer threads work. */
static void work_badly(void)
{
    int64_t before = pool.usable;
    for (int i = 0; i < 100 && pool.usable == before; i++)
        work(1, 6, 3);
}

static void later(int64_t ms)
{
    now += ms * MS;
    use_more(now);
}

int main(void)
{
    grow_pool(THREADS);
    work(100, 10, 1);
    expect("threads after waits as long as tasks are", pool.usable, THREADS);
    for (int i = 0; i < 20; i++) {
        work(9, 10, 0);
        work(1, 10, 4);
    }
    expect("threads where a wait of 4 ms comes every 100 ms", pool.usable, THREADS);

    for (int64_t times = 1, wait = 40; times <= 8; times++) {
        work_badly();
        expect("threads after waits for half of the time", pool.usable, THREADS / 2);
        expect("how long, in ms", (pool.fewer_until - now) / MS, wait);
        work(wait / 6, 6, 0);
        now = pool.fewer_until;
        later(-1);
        expect("threads before the time", pool.usable, THREADS / 2);
        later(1);
        expect("threads after it", pool.usable, THREADS);
        wait = wait < 1280 ? 2 * wait : wait;
    }
    work(20, 6, 0);
    expect("times that count after a window without waits", pool.stalls, 0);

    for (int64_t left = THREADS / 2; left >= 1; left /= 2) {
        work_badly();
        expect("threads after waits again and again", pool.usable, left);
    }
    work_badly();
    expect("threads, at the least", pool.usable, 1);
    now = pool.fewer_until;
    for (int64_t more = 2; more <= THREADS; more *= 2) {
        later(0);
        expect("threads that come back", pool.usable, more);
        later(19);
        expect("threads, a moment later", pool.usable, more);
        now += MS;
    }
    return failures != 0;
}
