/* fipc_wait_poll.c: for systems without futexes. A sleeper looks at its word in intervals that
 * grow from 50 us to 1 ms: a wake-up takes at most 1 ms more, and an idle waiter makes a thousand
 * looks a second (about half a percent of a core). */
#include "fipc_wait.h"

#if !FIPC_HAVE_FUTEX

#include <errno.h>
#include <time.h>

#define FIRST_NS (50 * UINT64_C(1000))
#define LAST_NS FIPC_MS

static uint64_t poll_now(void *ctx) {
    (void)ctx;
    return fipc_now();
}

static int nap(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / FIPC_S), .tv_nsec = (long)(ns % FIPC_S)};
    return nanosleep(&t, NULL) == -1 && errno == EINTR ? FIPC_INTERRUPTED : FIPC_OK;
}

static int poll_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    const fipc_a32 *w = word;
    return fipc_wait_words(&(struct fipc_waitops){poll_now, poll_wait, NULL, ctx}, &w, &expected, 1,
                           deadline);
}

static void poll_wake(void *ctx, const void *word) {
    (void)ctx;
    (void)word; /* the sleeper sees the changed word by itself */
}

const struct fipc_waitops fipc_wait_platform = {poll_now, poll_wait, poll_wake, NULL};

int fipc_wait_words(const struct fipc_waitops *ops, const fipc_a32 *const *words,
                    const uint32_t *expected, uint32_t n, uint64_t deadline) {
    if (ops->wait != poll_wait) {
        return ops->wait(ops->ctx, words[0], expected[0], deadline);
    }
    uint64_t step = FIRST_NS;
    for (;;) {
        for (uint32_t i = 0; i < n; i++) {
            if (fipc_load32_relaxed(words[i]) != expected[i]) { /* relaxed: a hint */
                return FIPC_OK;
            }
        }
        uint64_t now = poll_now(NULL);
        if (now >= deadline) {
            return FIPC_OK;
        }
        if (nap(deadline - now < step ? deadline - now : step) == FIPC_INTERRUPTED) {
            return FIPC_INTERRUPTED;
        }
        step = step * 2 < LAST_NS ? step * 2 : LAST_NS;
    }
}

#endif
