/* fipc_wait_linux.c: futexes. Not PRIVATE ones: the words are shared between processes.
 * Sources: futex(2), and futex_waitv in Linux 5.16 for several words. */
#include "fipc_wait.h"

#if FIPC_HAVE_FUTEX

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct timespec to_timespec(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / FIPC_S), .tv_nsec = (long)(ns % FIPC_S)};
    return t;
}

static uint64_t linux_now(void *ctx) {
    (void)ctx;
    return fipc_now();
}

static int linux_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    (void)ctx;
    struct timespec t = to_timespec(deadline);
    /* BITSET, because its time is absolute and monotonic */
    long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected,
                      deadline == FIPC_FOREVER ? NULL : &t, NULL, FUTEX_BITSET_MATCH_ANY);
    return rc == -1 && errno == EINTR ? FIPC_INTERRUPTED : FIPC_OK;
}

static void linux_wake(void *ctx, const void *word) {
    (void)ctx;
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

const struct fipc_waitops fipc_wait_platform = {linux_now, linux_wait, linux_wake, NULL};

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449 /* the same number on every architecture */
#endif
#define WAITV_MAX 128 /* the kernel's limit */

struct waitv { /* struct futex_waitv, which older headers lack */
    uint64_t val;
    uint64_t uaddr;
    uint32_t flags; /* 2: a 32-bit word, shared */
    uint32_t reserved;
};

int fipc_wait_words(const struct fipc_waitops *ops, const fipc_a32 *const *words,
                    const uint32_t *expected, uint32_t n, uint64_t deadline) {
    if (n == 1) {
        return ops->wait(ops->ctx, words[0], expected[0], deadline);
    }
    if (n <= WAITV_MAX && ops->wait == linux_wait) {
        struct waitv v[WAITV_MAX];
        for (uint32_t i = 0; i < n; i++) {
            v[i] = (struct waitv){expected[i], (uint64_t)(uintptr_t)words[i], 2, 0};
        }
        struct timespec t = to_timespec(deadline);
        long rc = syscall(SYS_futex_waitv, v, n, 0, deadline == FIPC_FOREVER ? NULL : &t,
                          CLOCK_MONOTONIC);
        if (rc >= 0 || errno == EAGAIN || errno == ETIMEDOUT) {
            return FIPC_OK;
        }
        if (errno == EINTR) {
            return FIPC_INTERRUPTED;
        }
        /* ENOSYS, or a filter that refuses the call: fall through */
    }
    /* Without it: sleep on the first word, briefly. 1 ms is 1,000 looks a second, about 1 % of a
     * core for a dozen queues. */
    uint64_t now = ops->now(ops->ctx);
    uint64_t end = deadline - now > FIPC_MS ? now + FIPC_MS : deadline;
    return ops->wait(ops->ctx, words[0], expected[0], end);
}

#endif
