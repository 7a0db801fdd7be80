/* The lock of a queue's end: for the threads of one process, with a deadline, interruptible, and
 * aware of its owner. */
#include "test.h"

#include <pthread.h>

#include "fipc_wait.h"

static const struct fipc_waitops *const platform = &fipc_wait_platform;
static const fipc_a32 never_stopped;

/* ---- many threads -------------------------------------------------------------------------- */

#define THREADS 4

struct crowd {
    struct fipc_lock lock;
    pthread_barrier_t start;
    const struct fipc_waitops *ops;
    uint64_t rounds;
    uint64_t counter; /* plain: only the lock keeps it whole */
    uint64_t inside;
};

static void *come_and_go(void *arg) {
    struct crowd *c = arg;
    pthread_barrier_wait(&c->start);
    for (uint64_t i = 0; i < c->rounds; i++) {
        while (i % 3 == 0 && !fipc_lock_try(&c->lock)) {
            sched_yield();
        }
        if (i % 3 != 0) {
            int rc;
            do { /* a signal of the machinery's own is no error */
                rc = fipc_lock_take(&c->lock, c->ops, &never_stopped, FIPC_FOREVER);
            } while (rc == FIPC_INTERRUPTED);
            CHECK_RC(rc, FIPC_OK);
        }
        CHECK(fipc_lock_mine(&c->lock));
        CHECK_EQ(c->inside, 0);
        c->inside = 1;
        c->counter++;
        if (i % 16 == 0) { /* so that others find it held */
            sched_yield();
        }
        c->inside = 0;
        fipc_lock_drop(&c->lock, c->ops);
        CHECK(!fipc_lock_mine(&c->lock));
    }
    return NULL;
}

static void run_crowd(const struct fipc_waitops *ops, uint64_t rounds) {
    struct crowd c = {.ops = ops, .rounds = rounds};
    pthread_t threads[THREADS];
    CHECK(pthread_barrier_init(&c.start, NULL, THREADS) == 0);
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, come_and_go, &c) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&c.start);
    CHECK_EQ(c.counter, THREADS * c.rounds);
    CHECK(fipc_lock_try(&c.lock));
}

static void one_thread_at_a_time_is_inside(void) { run_crowd(platform, TEST_SCALE(200000)); }

static int wait_without_end(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    (void)deadline; /* so that a wake-up that is owed and not given is a hang */
    return platform->wait(ctx, word, expected, FIPC_FOREVER);
}

static void whoever_waits_is_woken(void) {
    struct fipc_waitops ops = *platform;
    ops.wait = wait_without_end;
    run_crowd(&ops, FIPC_HAVE_FUTEX ? TEST_SCALE(200000) : TEST_SCALE(500));
}

/* ---- one holder ---------------------------------------------------------------------------- */

static void its_owner_is_refused_not_deadlocked(void) {
    struct fipc_lock l = {0};
    CHECK(!fipc_lock_mine(&l));
    CHECK_RC(fipc_lock_take(&l, platform, &never_stopped, 0), FIPC_OK);
    CHECK(fipc_lock_mine(&l));
    CHECK(!fipc_lock_try(&l));
    CHECK_RC(fipc_lock_take(&l, platform, &never_stopped, FIPC_FOREVER), FIPC_REENTRANT);
    CHECK_RC(fipc_lock_take(&l, platform, &never_stopped, 0), FIPC_REENTRANT);
    CHECK(fipc_lock_mine(&l));
    fipc_lock_drop(&l, platform);
    CHECK(!fipc_lock_mine(&l));
    CHECK_RC(fipc_lock_take(&l, platform, &never_stopped, 0), FIPC_OK);
    fipc_lock_drop(&l, platform);
}

static void *is_it_mine(void *arg) {
    struct fipc_lock *l = arg;
    CHECK(!fipc_lock_mine(l));
    CHECK(!fipc_lock_try(l));
    CHECK_RC(fipc_lock_take(l, platform, &never_stopped, 0), FIPC_TIMEOUT);
    return NULL;
}

static void in_another_thread(void *(*fn)(void *), void *arg) {
    pthread_t t;
    CHECK(pthread_create(&t, NULL, fn, arg) == 0);
    pthread_join(t, NULL);
}

static void another_thread_is_not_its_owner(void) {
    struct fipc_lock l = {0};
    CHECK(fipc_lock_try(&l));
    for (int i = 0; i < 3; i++) { /* three threads one after the other, with ids of their own */
        in_another_thread(is_it_mine, &l);
    }
    fipc_lock_drop(&l, platform);
    CHECK(fipc_lock_try(&l));
}

/* ---- a clock of our own -------------------------------------------------------------------- */

struct clock {
    uint64_t now;
    uint64_t waits, longest;
    uint64_t signal_at; /* a signal arrives then; 0: never */
    uint64_t stop_at;   /* *stop is set then, and the wake-up is lost */
    fipc_a32 *stop;
};

static uint64_t clock_now(void *ctx) { return ((struct clock *)ctx)->now; }

static int clock_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    struct clock *c = ctx;
    CHECK_EQ(fipc_load32_relaxed(word), expected);
    CHECK(deadline > c->now);
    c->waits++;
    c->longest = deadline - c->now > c->longest ? deadline - c->now : c->longest;
    if (c->stop_at > c->now && c->stop_at <= deadline) {
        fipc_store32_release(c->stop, 1);
    }
    if (c->signal_at > c->now && c->signal_at <= deadline) {
        c->now = c->signal_at;
        return FIPC_INTERRUPTED;
    }
    c->now = deadline;
    return FIPC_OK;
}

static void clock_wake(void *ctx, const void *word) {
    (void)ctx;
    (void)word;
}

struct attempt {
    struct fipc_lock *lock;
    struct clock clock;
    const fipc_a32 *stop;
    uint64_t deadline;
    int rc;
};

static void *attempt(void *arg) {
    struct attempt *a = arg;
    struct fipc_waitops ops = {clock_now, clock_wait, clock_wake, &a->clock};
    a->rc = fipc_lock_take(a->lock, &ops, a->stop, a->deadline);
    return NULL;
}

static void a_deadline_is_kept(void) {
    struct fipc_lock l = {0};
    CHECK(fipc_lock_try(&l));
    static const uint64_t lengths[] = {1, FIPC_MS, FIPC_SLICE_NS, FIPC_SLICE_NS + 1, 7 * FIPC_S};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct attempt a = {.lock = &l,
                            .clock = {.now = 5 * FIPC_S},
                            .stop = &never_stopped,
                            .deadline = 5 * FIPC_S + lengths[i]};
        in_another_thread(attempt, &a);
        CHECK_RC(a.rc, FIPC_TIMEOUT);
        CHECK_EQ(a.clock.now, a.deadline);
        CHECK(a.clock.longest <= FIPC_SLICE_NS);
    }
    static const uint64_t past[] = {0, 1, 5 * FIPC_S};
    for (size_t i = 0; i < 3; i++) { /* a poll doesn't sleep */
        struct attempt a = {
            .lock = &l, .clock = {.now = 5 * FIPC_S}, .stop = &never_stopped, .deadline = past[i]};
        in_another_thread(attempt, &a);
        CHECK_RC(a.rc, FIPC_TIMEOUT);
        CHECK_EQ(a.clock.waits, 0);
    }
    fipc_lock_drop(&l, platform);
    CHECK_RC(fipc_lock_take(&l, platform, &never_stopped, 0),
             FIPC_OK); /* a free one: a poll does */
}

static void a_signal_comes_up(void) {
    struct fipc_lock l = {0};
    CHECK(fipc_lock_try(&l));
    struct attempt a = {.lock = &l,
                        .clock = {.now = FIPC_S, .signal_at = 3 * FIPC_S},
                        .stop = &never_stopped,
                        .deadline = FIPC_FOREVER};
    in_another_thread(attempt, &a);
    CHECK_RC(a.rc, FIPC_INTERRUPTED);
    CHECK_EQ(a.clock.now, 3 * FIPC_S);
    CHECK(fipc_lock_mine(&l));
}

static void a_shutdown_is_seen_even_when_its_wake_up_is_lost(void) {
    struct fipc_lock l = {0};
    fipc_a32 stop = 0;
    CHECK(fipc_lock_try(&l));
    struct attempt a = {
        .lock = &l,
        .clock = {.now = FIPC_S, .stop_at = 3 * FIPC_S + 1, .stop = &stop},
        .stop = &stop,
        .deadline = FIPC_FOREVER,
    };
    in_another_thread(attempt, &a);
    CHECK_RC(a.rc, FIPC_SHUTDOWN);
    CHECK(a.clock.now >= a.clock.stop_at && a.clock.now <= a.clock.stop_at + FIPC_SLICE_NS);
}

/* ---- the real thing ------------------------------------------------------------------------ */

static void on_signal(int signal) { (void)signal; }

struct blocked {
    struct fipc_lock *lock;
    fipc_a32 stop;
    fipc_a32 done;
    int rc;
};

static void *block(void *arg) {
    struct blocked *b = arg;
    b->rc = fipc_lock_take(b->lock, platform, &b->stop, FIPC_FOREVER);
    fipc_store32_release(&b->done, 1);
    return NULL;
}

static void a_real_signal_ends_a_real_wait(void) {
    struct sigaction act = {.sa_handler = on_signal}; /* no SA_RESTART: neither has Python */
    struct sigaction old;
    sigaction(SIGUSR1, &act, &old);
    struct fipc_lock l = {0};
    struct blocked b = {.lock = &l};
    CHECK(fipc_lock_try(&l));
    pthread_t t;
    CHECK(pthread_create(&t, NULL, block, &b) == 0);
    while (!fipc_load32_acquire(&b.done)) { /* it may not have fallen asleep yet */
        pthread_kill(t, SIGUSR1);
        test_nap();
    }
    pthread_join(t, NULL);
    CHECK_RC(b.rc, FIPC_INTERRUPTED);
    sigaction(SIGUSR1, &old, NULL);
}

static void a_shutdown_ends_a_real_wait(void) {
    struct fipc_lock l = {0};
    struct blocked b = {.lock = &l};
    CHECK(fipc_lock_try(&l));
    pthread_t t;
    CHECK(pthread_create(&t, NULL, block, &b) == 0);
    UNTIL(fipc_load32_relaxed(&l.word) == 2);
    fipc_store32_release(&b.stop, 1);
    platform->wake(platform->ctx, &l.word);
    pthread_join(t, NULL);
    CHECK_RC(b.rc, FIPC_SHUTDOWN);
    CHECK(fipc_lock_mine(&l));
}

static const struct test_case cases[] = {
    {"one thread at a time is inside", one_thread_at_a_time_is_inside},
    {"whoever waits is woken", whoever_waits_is_woken},
    {"its owner is refused, not deadlocked", its_owner_is_refused_not_deadlocked},
    {"another thread is not its owner", another_thread_is_not_its_owner},
    {"a deadline is kept", a_deadline_is_kept},
    {"a signal comes up", a_signal_comes_up},
    {"a shutdown is seen even when its wake-up is lost",
     a_shutdown_is_seen_even_when_its_wake_up_is_lost},
    {"a real signal ends a real wait", a_real_signal_ends_a_real_wait},
    {"a shutdown ends a real wait", a_shutdown_ends_a_real_wait},
};

TEST_MAIN(cases)
