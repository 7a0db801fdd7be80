/* fipc_wait.c: the clock, and the lock of one process's threads.
 *
 * Pairs in this file
 *   L-drop  word: swap release in fipc_lock_drop -> L-take cas acquire, swap acquire in
 *           fipc_lock_try, fipc_lock_take. Travels: all that is done under the lock.
 *
 * Relaxed in this file
 *   next: different numbers are all that is wanted of it.
 *   owner: only its own thread compares it with itself.
 *   stop: see fipc_queue.c.
 */
#include "fipc_wait.h"

#include <time.h>

uint64_t fipc_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * FIPC_S + (uint64_t)t.tv_nsec;
}

uint64_t fipc_thread_id(void) {
    static fipc_a32 next;
    static _Thread_local uint64_t mine;
    if (mine == 0) {
        mine = (uint64_t)fipc_add32_relaxed(&next, 1) + 1; /* relaxed: different is enough */
    }
    return mine;
}

bool fipc_lock_mine(const struct fipc_lock *l) {
    /* relaxed: only this thread stores its own id, and takes it away again */
    return fipc_load64_relaxed(&l->owner) == fipc_thread_id();
}

bool fipc_lock_try(struct fipc_lock *l) {
    uint32_t seen = 0;
    if (!fipc_cas32_acquire(&l->word, &seen, 1)) { /* L-take */
        return false;
    }
    fipc_store64_relaxed(&l->owner, fipc_thread_id());
    return true;
}

int fipc_lock_take(struct fipc_lock *l, const struct fipc_waitops *ops, const fipc_a32 *stop,
                   uint64_t deadline) {
    if (fipc_lock_try(l)) {
        return FIPC_OK;
    }
    if (fipc_lock_mine(l)) {
        return FIPC_REENTRANT;
    }
    for (;;) {
        if (fipc_swap32_acquire(&l->word, 2) == 0) { /* L-take */
            fipc_store64_relaxed(&l->owner, fipc_thread_id());
            return FIPC_OK;
        }
        if (fipc_load32_relaxed(stop)) { /* relaxed: see fipc_queue_shutdown */
            return FIPC_SHUTDOWN;
        }
        uint64_t now = ops->now(ops->ctx);
        if (now >= deadline) {
            return FIPC_TIMEOUT;
        }
        uint64_t end = deadline - now > FIPC_SLICE_NS ? now + FIPC_SLICE_NS : deadline;
        if (ops->wait(ops->ctx, &l->word, 2, end) == FIPC_INTERRUPTED) {
            return FIPC_INTERRUPTED;
        }
    }
}

void fipc_lock_drop(struct fipc_lock *l, const struct fipc_waitops *ops) {
    fipc_store64_relaxed(&l->owner, 0);
    if (fipc_swap32_release(&l->word, 0) == 2) { /* L-drop */
        ops->wake(ops->ctx, &l->word);
    }
}
