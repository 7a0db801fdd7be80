/* fipc_wait.h: sleeping and waking, the only place that blocks.
 *
 * fipc_wait_linux.c sleeps with futexes; fipc_wait_poll.c, for every other system (or with
 * FIPC_FORCE_POLL), looks at the word in growing intervals. Both keep the contract of
 * struct fipc_waitops: a wake-up is a hint, never the truth.
 */
#ifndef FIPC_WAIT_H
#define FIPC_WAIT_H

#include "fastipc.h"
#include "fipc_atomic.h"

#if defined(__linux__) && !defined(FIPC_FORCE_POLL)
#define FIPC_HAVE_FUTEX 1
#else
#define FIPC_HAVE_FUTEX 0
#endif

#define FIPC_MS UINT64_C(1000000)
#define FIPC_S UINT64_C(1000000000)

/* Longest sleep. One timed wake-up with a lock probe costs about 50 us of CPU: 0.02 % of a core
 * at this length; and it bounds what a lost wake-up can cost. */
#define FIPC_SLICE_NS (250 * FIPC_MS)

extern const struct fipc_waitops fipc_wait_platform;

/* Sleeps until one of n words differs from its expected value, or as wait() does. */
int fipc_wait_words(const struct fipc_waitops *ops, const fipc_a32 *const *words,
                    const uint32_t *expected, uint32_t n, uint64_t deadline);

/* ---- a mutex for the threads of one process ----
 * Taken with a deadline and interruptible, which pthread mutexes are not; it knows its owner, so
 * that a finalizer or a signal handler that comes back to the same object is refused instead of
 * waiting for itself. */
struct fipc_lock {
    fipc_a32 word;  /* 0 free, 1 held, 2 held and somebody may wait */
    fipc_a64 owner; /* fipc_thread_id() of the holder */
};

uint64_t fipc_thread_id(void);
bool fipc_lock_try(struct fipc_lock *l);
bool fipc_lock_mine(const struct fipc_lock *l);
/* FIPC_OK, FIPC_TIMEOUT, FIPC_INTERRUPTED, FIPC_REENTRANT, FIPC_SHUTDOWN (*stop became nonzero) */
int fipc_lock_take(struct fipc_lock *l, const struct fipc_waitops *ops, const fipc_a32 *stop,
                   uint64_t deadline);
void fipc_lock_drop(struct fipc_lock *l, const struct fipc_waitops *ops);

#endif /* FIPC_WAIT_H */
