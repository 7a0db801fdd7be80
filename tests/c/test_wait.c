/* Waiting, with a clock, a kernel and a fate of our own: how long a wait sleeps, what it costs,
 * what a lost wake-up costs, when it spins. Then the platform's own operations.
 *
 * Both ends live in this thread. What the peer does is an event at a point of virtual time, that
 * is run when the waiting end looks at the clock or sleeps past it.
 */
#include "test.h"

#include <pthread.h>

#include "fipc_queue.h"
#include "peers.h"

#define US UINT64_C(1000)
#define LATE (300 * FIPC_MS) /* what a lost wake-up may cost */

/* ---- virtual time -------------------------------------------------------------------------- */

struct event {
    uint64_t at; /* 0: none */
    void (*run)(void *);
    void *arg; /* run NULL: a signal arrives */
};

#define MAX_EVENTS 64

struct fate {
    uint64_t now;
    uint64_t step; /* what a look at the clock takes */
    struct event events[MAX_EVENTS];
    bool lose_wakes;
    bool busy; /* in an event */
    const void *sleeper;
    bool woken, signalled;
    uint64_t looks, sleeps, wakes, longest, first_sleep;
    struct fipc_waitops ops;
};

/* The earliest event until then. */
static struct event *next_event(struct fate *f, uint64_t until) {
    struct event *e = NULL;
    for (int i = 0; i < MAX_EVENTS; i++) {
        struct event *other = &f->events[i];
        if (other->at != 0 && other->at <= until && (e == NULL || other->at < e->at)) {
            e = other;
        }
    }
    return e;
}

static void run_event(struct fate *f, struct event *e) {
    struct event copy = *e;
    e->at = 0;
    f->now = copy.at > f->now ? copy.at : f->now;
    if (copy.run == NULL) {
        f->signalled = true;
        return;
    }
    f->busy = true;
    copy.run(copy.arg);
    f->busy = false;
}

static uint64_t fate_now(void *ctx) {
    struct fate *f = ctx;
    if (!f->busy) {
        f->looks++;
        f->now += f->step;
        struct event *e;
        while ((e = next_event(f, f->now)) != NULL && e->run != NULL) {
            run_event(f, e);
        }
    }
    return f->now;
}

/* As a futex: the word is compared once, on the way in. */
static int fate_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    struct fate *f = ctx;
    CHECK(!f->busy);
    f->sleeps++;
    f->first_sleep = f->first_sleep ? f->first_sleep : f->now;
    if (deadline > f->now && deadline - f->now > f->longest) {
        f->longest = deadline - f->now;
    }
    if (fipc_load32_relaxed(word) != expected) {
        return FIPC_OK;
    }
    f->sleeper = word;
    f->woken = f->signalled = false;
    struct event *e;
    while (!f->woken && !f->signalled && (e = next_event(f, deadline)) != NULL) {
        run_event(f, e);
    }
    f->sleeper = NULL;
    if (!f->woken && !f->signalled && deadline > f->now) {
        CHECK(deadline != FIPC_FOREVER); /* else this would be a sleep for ever */
        f->now = deadline;
    }
    return f->signalled ? FIPC_INTERRUPTED : FIPC_OK;
}

static void fate_wake(void *ctx, const void *word) {
    struct fate *f = ctx;
    f->wakes++;
    /* each end has a mapping of its own: what the addresses have in common is the place in a page */
    uintptr_t apart = (uintptr_t)f->sleeper - (uintptr_t)word;
    if (!f->lose_wakes && f->sleeper != NULL && apart % FIPC_PAGE == 0) {
        f->woken = true;
    }
}

static void fate_init(struct fate *f) {
    memset(f, 0, sizeof *f);
    f->now = 1000 * FIPC_S;
    f->step = 500;
    f->ops = (struct fipc_waitops){fate_now, fate_wait, fate_wake, f};
}

/* Forgets what was counted. */
static void fate_count(struct fate *f) {
    f->looks = f->sleeps = f->wakes = f->longest = f->first_sleep = 0;
}

static void at(struct fate *f, uint64_t when, void (*run)(void *), void *arg) {
    for (int i = 0; i < MAX_EVENTS; i++) {
        if (f->events[i].at == 0) {
            f->events[i] = (struct event){when, run, arg};
            return;
        }
    }
    FAIL("too many events");
}

/* Then, but for some looks at the clock. */
#define CHECK_AT(fate, when)                                                                       \
    CHECK((fate)->now >= (when) && (fate)->now <= (when) + 100 * (fate)->step)

/* ---- a writer and its readers -------------------------------------------------------------- */

#define MOST 4

struct pair {
    struct fate f;
    struct fipc_config c;
    fipc_queue *w;
    fipc_queue *r[MOST];
    uint64_t sent, taken[MOST];
};

static void pair_open(struct pair *p, uint32_t readers, uint32_t slots, uint32_t chunks) {
    memset(p, 0, sizeof *p);
    fate_init(&p->f);
    p->c = peers_config(readers);
    p->c.n_slots = slots;
    p->c.n_chunks = chunks;
    p->c.ops = &p->f.ops;
    p->c.n_cpus = 16;
    p->w = peers_create(&p->c);
}

static void pair_attach(struct pair *p) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    for (uint32_t i = 0; i < p->c.n_readers; i++) {
        p->r[i] = peers_attach(p->w, i, &p->c);
    }
    CHECK_RC(fipc_queue_wait_ready(p->w, &call, &err), FIPC_OK);
}

static void pair_close(struct pair *p) {
    for (uint32_t i = 0; i < p->c.n_readers; i++) {
        fipc_queue_free(p->r[i]);
    }
    fipc_queue_free(p->w);
}

#define SMALL 40
#define BIG 2000 /* in a chunk */

static void put_small(void *arg) {
    struct pair *p = arg;
    peers_put(p->w, p->sent + 1, SMALL);
    p->sent++;
}

static void put_big(void *arg) {
    struct pair *p = arg;
    peers_put(p->w, p->sent + 1, BIG);
    p->sent++;
}

/* Takes one message of either kind. */
static void take(struct pair *p, uint32_t i) {
    struct fipc_message m;
    struct fipc_error err;
    struct fipc_call call = {0};
    CHECK_RC(fipc_queue_recv(p->r[i], &call, &m, &err), FIPC_OK);
    peers_check(&m, ++p->taken[i], m.blocks[0].len);
    fipc_message_clear(&m);
}

static void take_from_first(void *arg) { take(arg, 0); }

static void take_everything(void *arg) {
    struct pair *p = arg;
    for (uint32_t i = 0; i < p->c.n_readers; i++) {
        while (p->taken[i] < p->sent) {
            take(p, i);
        }
    }
}

/* Waits until readable, through whatever comes up; returns how often something did. */
static uint64_t wait_readable(struct pair *p, struct fipc_call *call) {
    struct fipc_error err;
    uint64_t n = 0;
    for (;; n++) {
        int rc = fipc_queue_wait_readable(p->r[0], call, &err);
        if (rc == FIPC_OK) {
            return n;
        }
        CHECK_RC(rc, FIPC_INTERRUPTED);
    }
}

static uint64_t budget(fipc_queue *q) {
    struct fipc_stats s;
    fipc_queue_stats(q, &s);
    return s.spin_ns;
}

/* Until nobody is to spin: so that a case sees sleeps from the start. */
static void without_spin(struct pair *p) { p->c.spin_ns = 0; }

/* ---- sleeping ------------------------------------------------------------------------------ */

static void an_idle_reader_wakes_45_times_in_10_s(void) {
    for (int signals = 0; signals < 2; signals++) {
        struct pair p;
        pair_open(&p, 1, 8, 2);
        pair_attach(&p);
        struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = signals};
        fate_count(&p.f);
        uint64_t when = p.f.now + 10 * FIPC_S;
        at(&p.f, when, put_small, &p);
        uint64_t came_up = wait_readable(&p, &call);
        CHECK_AT(&p.f, when); /* the wake-up worked */
        CHECK(p.f.longest <= FIPC_SLICE_NS);
        CHECK(p.f.sleeps >= 40 && p.f.sleeps <= 45);
        CHECK(signals ? came_up >= 9 && came_up <= 45 : came_up == 0);
        CHECK(p.f.looks < 1000 + 10 * p.f.sleeps); /* it spun once, at most */
        struct fipc_stats s;
        fipc_queue_stats(p.r[0], &s);
        CHECK_EQ(s.sleeps, p.f.sleeps);
        take(&p, 0);
        pair_close(&p);
    }
}

static void a_blocked_writer_sleeps_in_slices_too(void) {
    struct pair p;
    pair_open(&p, 1, 2, 2);
    pair_attach(&p);
    put_small(&p);
    put_small(&p);
    fate_count(&p.f);
    uint64_t when = p.f.now + 10 * FIPC_S;
    at(&p.f, when, take_from_first, &p);
    put_small(&p);
    CHECK_AT(&p.f, when);
    CHECK(p.f.longest <= FIPC_SLICE_NS);
    CHECK(p.f.sleeps >= 40 && p.f.sleeps <= 45);
    take_everything(&p);
    pair_close(&p);
}

static void a_message_arrives_soon_though_its_wake_up_is_lost(void) {
    for (int i = 0; i < TEST_SCALE(300); i++) {
        struct pair p;
        pair_open(&p, 1, 8, 2);
        pair_attach(&p);
        p.f.lose_wakes = true;
        uint64_t when = p.f.now + 1 + test_log_uniform(test_random(), 3 * FIPC_S);
        at(&p.f, when, test_chance(2) ? put_small : put_big, &p);
        struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = test_chance(2)};
        wait_readable(&p, &call);
        CHECK(p.f.now >= when && p.f.now <= when + LATE);
        take(&p, 0);
        pair_close(&p);
    }
}

static void room_is_found_soon_though_its_wake_up_is_lost(void) {
    for (int i = 0; i < TEST_SCALE(300); i++) {
        bool chunks = test_chance(2); /* which of the two the writer waits for */
        struct pair p;
        pair_open(&p, (uint32_t)(1 + test_below(MOST)), chunks ? 8 : 2, chunks ? 2 : 4);
        pair_attach(&p);
        (chunks ? put_big : put_small)(&p);
        (chunks ? put_big : put_small)(&p);
        p.f.lose_wakes = test_chance(4) ? false : true;
        uint64_t when = p.f.now + 1 + test_log_uniform(test_random(), 3 * FIPC_S);
        at(&p.f, when, take_everything, &p);
        (chunks ? put_big : put_small)(&p);
        CHECK(p.f.now >= when && p.f.now <= when + (p.f.lose_wakes ? LATE : 100 * p.f.step));
        take_everything(&p);
        pair_close(&p);
    }
}

/* A wake-up is a system call: it is made for who sleeps, and for nobody else. */
static void only_a_sleeper_is_woken(void) {
    struct pair p;
    pair_open(&p, 1, 4, 2);
    without_spin(&p);
    pair_attach(&p);
    put_small(&p); /* rings off what wait_ready may have parked */
    take_everything(&p);
    fate_count(&p.f);
    for (int i = 0; i < 100; i++) {
        put_small(&p);
        put_big(&p);
        take_everything(&p);
    }
    CHECK_EQ(p.f.wakes, 0);
    CHECK_EQ(p.f.sleeps, 0);

    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint64_t when = p.f.now + FIPC_MS;
    at(&p.f, when, put_small, &p);
    wait_readable(&p, &call);
    CHECK_EQ(p.f.wakes, 1);
    CHECK_AT(&p.f, when);
    put_small(&p);
    CHECK_EQ(p.f.wakes, 1); /* nobody sleeps any more */
    put_small(&p);
    put_small(&p);

    fate_count(&p.f); /* full: now the writer sleeps */
    when = p.f.now + FIPC_MS;
    at(&p.f, when, take_from_first, &p);
    put_small(&p);
    CHECK_EQ(p.f.wakes, 1);
    CHECK_AT(&p.f, when);
    take_everything(&p);
    CHECK_EQ(p.f.wakes, 1);
    pair_close(&p);
}

/* With a ring of many slots the writer isn't woken for each one that becomes free. */
static void a_writer_is_woken_for_a_batch(void) {
    struct pair p;
    pair_open(&p, 1, 64, 2);
    without_spin(&p);
    pair_attach(&p);
    for (int i = 0; i < 64; i++) {
        put_small(&p);
    }
    fate_count(&p.f);
    uint64_t begin = p.f.now;
    for (uint64_t i = 1; i <= 30; i++) {
        at(&p.f, begin + i * FIPC_MS, take_from_first, &p);
    }
    put_small(&p);
    CHECK_EQ(p.f.wakes, 1);
    CHECK(p.f.sleeps == 1);
    CHECK(p.taken[0] > 1 && p.taken[0] <= 30);
    while (next_event(&p.f, begin + FIPC_S) != NULL) { /* the rest */
        run_event(&p.f, next_event(&p.f, begin + FIPC_S));
    }
    take_everything(&p);
    pair_close(&p);
}

/* ---- looking for the dead ------------------------------------------------------------------ */

static uint64_t lock_looks;
static int64_t presumed_dead = -1; /* a lock's index: the kernel says that it is free */

bool __real_fipc_lock_byte_held(int fd, uint32_t index);
bool __wrap_fipc_lock_byte_held(int fd, uint32_t index);

bool __wrap_fipc_lock_byte_held(int fd, uint32_t index) {
    lock_looks++;
    return index == presumed_dead ? false : __real_fipc_lock_byte_held(fd, index);
}

/* Each end asks in every slice while it waits, and a busy writer twice a second: not more, since
 * that is a system call, and not less, since somebody may wait for the answer. */
static void the_kernel_is_asked_about_peers_often_enough_and_not_too_often(void) {
    struct pair p;
    pair_open(&p, 1, 4, 2);
    pair_attach(&p);
    struct fipc_error err;
    struct fipc_call call = {.deadline = p.f.now + 10 * FIPC_S};
    lock_looks = 0;
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_TIMEOUT);
    CHECK(lock_looks >= 35 && lock_looks <= 45);
    for (int i = 0; i < 4; i++) {
        put_small(&p);
    }
    lock_looks = 0;
    CHECK_RC(peers_put_until(p.w, 5, SMALL, p.f.now + 10 * FIPC_S), FIPC_TIMEOUT);
    CHECK(lock_looks >= 35 && lock_looks <= 45);
    take_everything(&p);
    lock_looks = 0;
    uint64_t stood_aside = 0;
    for (int i = 0; i < 1000; i++) {
        p.f.now += 10 * FIPC_MS;
        char bytes[SMALL];
        struct fipc_piece piece = {.ptr = bytes, .len = SMALL};
        pattern_fill(bytes, p.sent + 1, 0, SMALL);
        int rc = fipc_queue_send_inline(p.w, &piece, 1, (uint32_t)p.sent + 1, &err);
        if (rc == FIPC_WOULD_BLOCK) { /* that asks, which this may not */
            stood_aside++;
            put_small(&p);
        } else {
            CHECK_RC(rc, FIPC_OK);
            p.sent++;
        }
        take(&p, 0);
    }
    CHECK(lock_looks >= 15 && lock_looks <= 25);
    CHECK(stood_aside >= 15 && stood_aside <= 25);
    pair_close(&p);
}

/* Those that live ring for the writer, though one that is dead has not read. */
static void an_evicted_reader_is_not_waited_for_by_the_others_bell(void) {
    struct pair p;
    pair_open(&p, 2, 4, 2);
    pair_attach(&p);
    struct fipc_error err;
    presumed_dead = FIPC_READER_LOCK(1);
    CHECK_RC(fipc_queue_evict(p.w, 1, &err), FIPC_OK);
    presumed_dead = -1;
    for (int i = 0; i < 4; i++) {
        put_small(&p);
    }
    uint64_t when = p.f.now + 10 * FIPC_MS;
    at(&p.f, when, take_from_first, &p);
    put_small(&p);
    CHECK_AT(&p.f, when);
    pair_close(&p);
}

/* ---- deadlines ----------------------------------------------------------------------------- */

static void a_deadline_is_kept_on_both_sides(void) {
    static const uint64_t lengths[] = {1, US, 100 * US, FIPC_MS, FIPC_SLICE_NS, 3 * FIPC_S + 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct pair p;
        pair_open(&p, 1, 2, 1);
        pair_attach(&p);
        struct fipc_error err;
        struct fipc_message m;
        uint64_t begin = p.f.now;
        CHECK_RC(peers_recv(p.r[0], begin + lengths[i], &m, &err), FIPC_TIMEOUT);
        CHECK_AT(&p.f, begin + lengths[i]);
        put_big(&p);
        begin = p.f.now; /* no chunk */
        CHECK_RC(peers_put_until(p.w, 2, BIG, begin + lengths[i]), FIPC_TIMEOUT);
        CHECK_AT(&p.f, begin + lengths[i]);
        put_small(&p);
        begin = p.f.now; /* no slot */
        CHECK_RC(peers_put_until(p.w, 3, SMALL, begin + lengths[i]), FIPC_TIMEOUT);
        CHECK_AT(&p.f, begin + lengths[i]);
        CHECK(p.f.longest <= FIPC_SLICE_NS);
        take_everything(&p);
        pair_close(&p);
    }
}

static void a_poll_does_not_sleep(void) {
    struct pair p;
    pair_open(&p, 2, 2, 1);
    struct fipc_error err;
    struct fipc_call poll = {0};
    void *ptr;
    uint8_t ready;
    fate_count(&p.f);
    CHECK_RC(fipc_queue_wait_ready(p.w, &poll, &err), FIPC_TIMEOUT);
    pair_attach(&p);
    p.f.step = 0; /* a poll may look at the clock, but not wait for it */
    fate_count(&p.f);
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &poll, &err), FIPC_TIMEOUT);
    CHECK_RC(fipc_queue_wait_any(&p.r[0], 1, &poll, &ready), FIPC_TIMEOUT);
    CHECK_EQ(ready, 0);
    put_big(&p);
    CHECK_RC(peers_put_until(p.w, 2, BIG, 0), FIPC_TIMEOUT);
    CHECK_RC(fipc_queue_loan(p.w, BIG, &poll, &ptr, &err), FIPC_TIMEOUT);
    put_small(&p);
    CHECK_RC(peers_put_until(p.w, 3, SMALL, 0), FIPC_TIMEOUT);
    CHECK_RC(fipc_queue_loan(p.w, SMALL, &poll, &ptr, &err), FIPC_TIMEOUT);
    CHECK_RC(fipc_queue_wait_any(&p.r[0], 1, &poll, &ready), FIPC_OK);
    CHECK_EQ(ready, 1);
    CHECK_EQ(p.f.sleeps, 0);
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &poll, &err), FIPC_OK);
    take_everything(&p);
    pair_close(&p);
}

/* ---- spinning ------------------------------------------------------------------------------ */

/* One wait of about that length. */
static void one_wait(struct pair *p, uint64_t length) {
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint64_t when = p->f.now + length;
    at(&p->f, when, put_small, p);
    wait_readable(p, &call);
    CHECK(p->f.now >= when && p->f.now <= when + 100 * p->f.step);
    take(p, 0);
}

static void the_spin_budget_learns(void) {
    struct pair p;
    pair_open(&p, 1, 8, 2);
    p.f.step = 500;
    pair_attach(&p);
    CHECK(budget(p.r[0]) > 0); /* at first it hopes */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 8; i++) {
            one_wait(&p, 10 * FIPC_MS);
        }
        CHECK_EQ(budget(p.r[0]), 0);
        fate_count(&p.f); /* and so it doesn't: */
        one_wait(&p, 10 * FIPC_MS);
        CHECK(p.f.sleeps >= 1 && p.f.looks < 20);

        for (int i = 0; i < 8; i++) {
            one_wait(&p, 20 * US);
        }
        CHECK(budget(p.r[0]) > 0);
        fate_count(&p.f);
        one_wait(&p, 20 * US);
        CHECK_EQ(p.f.sleeps, 0);
    }
    pair_close(&p);
}

/* What is waited for comes only once the waiter sleeps: it spun on the CPU that the peer needed. */
static void who_spins_on_the_peers_cpu_sleeps_at_once_for_a_while(void) {
    struct pair p;
    pair_open(&p, 1, 8, 2);
    p.f.step = 500;
    pair_attach(&p);
    uint64_t in_vain = budget(p.r[0]) + 20 * US;
    for (int sentence = 8; sentence <= 32; sentence *= 2) {
        fate_count(&p.f);
        one_wait(&p, in_vain);
        CHECK(p.f.looks > 50 && p.f.sleeps == 1);
        for (int i = 0; i < sentence; i++) {
            fate_count(&p.f);
            one_wait(&p, 20 * US);
            CHECK(p.f.looks < 20 && p.f.sleeps == 1);
        }
    }
    fate_count(&p.f);
    one_wait(&p, 20 * US); /* the next spin is of use: all is forgotten */
    CHECK_EQ(p.f.sleeps, 0);
    one_wait(&p, in_vain);
    for (int i = 0; i < 8; i++) {
        one_wait(&p, 20 * US);
    }
    fate_count(&p.f);
    one_wait(&p, 20 * US);
    CHECK_EQ(p.f.sleeps, 0);
    pair_close(&p);
}

static void a_spin_ends(void) {
    for (int writer = 0; writer < 2; writer++) {
        struct pair p;
        pair_open(&p, 1, 2, 2);
        p.c.spin_ns = 200 * (int64_t)US;
        pair_attach(&p);
        put_small(&p);
        put_small(&p);
        if (!writer) {
            take_everything(&p);
        }
        fipc_queue *q = writer ? p.w : p.r[0];
        uint64_t longest = budget(q);
        CHECK(longest > 0 && longest < FIPC_MS);
        CHECK(writer || longest == 200 * US);
        p.f.step = US;
        fate_count(&p.f);
        uint64_t begin = p.f.now;
        at(&p.f, begin + 5 * FIPC_MS, writer ? take_from_first : put_small, &p);
        struct fipc_call call = {.deadline = FIPC_FOREVER};
        if (writer) {
            put_small(&p);
        } else {
            wait_readable(&p, &call);
        }
        CHECK(p.f.looks > 50); /* it did spin */
        CHECK(p.f.first_sleep >= begin + longest);
        CHECK(p.f.first_sleep <= begin + longest + 20 * p.f.step);
        take_everything(&p);
        pair_close(&p);
    }
}

static void nobody_spins_with_too_few_cpus(void) {
    for (uint32_t readers = 1; readers <= MOST; readers++) {
        for (uint32_t cpus = 1; cpus <= MOST + 2; cpus++) {
            struct pair p;
            pair_open(&p, readers, 2, 2);
            p.c.n_cpus = cpus;
            fipc_queue_free(p.w);
            p.w = peers_create(&p.c);
            pair_attach(&p);
            bool may = readers + 1 <= cpus;
            CHECK_EQ(budget(p.r[0]) > 0, may);
            CHECK_EQ(budget(p.w) > 0, may);
            fate_count(&p.f);
            one_wait(&p, 20 * US);
            CHECK_EQ(p.f.sleeps, may ? 0 : 1);
            take_everything(&p);
            put_small(&p);
            put_small(&p);
            fate_count(&p.f);
            at(&p.f, p.f.now + 20 * US, take_everything, &p);
            put_small(&p);
            CHECK_EQ(p.f.sleeps, may ? 0 : 1);
            /* a reader that leaves makes room for the others to spin */
            if (readers > 1) {
                take_everything(&p);
                fipc_queue_close(p.r[readers - 1]);
                p.taken[readers - 1] = UINT64_MAX;
                put_small(&p);
                CHECK_EQ(budget(p.r[0]) > 0, readers <= cpus);
                take(&p, 0);
            }
            pair_close(&p);
        }
    }
}

static void spin_0_means_never(void) {
    struct pair p;
    pair_open(&p, 1, 2, 2);
    without_spin(&p);
    fipc_queue_free(p.w);
    p.w = peers_create(&p.c);
    pair_attach(&p);
    CHECK_EQ(budget(p.w), 0);
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(budget(p.r[0]), 0);
        fate_count(&p.f);
        one_wait(&p, 2 * US);
        CHECK_EQ(p.f.sleeps, 1);
    }
    pair_close(&p);
}

/* ---- what comes up ------------------------------------------------------------------------- */

static void a_signal_comes_up_and_the_wait_goes_on(void) {
    struct pair p;
    pair_open(&p, 1, 2, 2);
    pair_attach(&p);
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint64_t begin = p.f.now;
    at(&p.f, begin + 100 * FIPC_MS, NULL, NULL);
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_INTERRUPTED);
    CHECK_AT(&p.f, begin + 100 * FIPC_MS);
    at(&p.f, begin + 700 * FIPC_MS, NULL, NULL);
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_INTERRUPTED);
    CHECK_AT(&p.f, begin + 700 * FIPC_MS);
    at(&p.f, begin + 800 * FIPC_MS, put_small, &p);
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_OK);
    put_small(&p);

    struct fipc_piece piece = {.ptr = "abc", .len = 3};
    struct fipc_call send = {.deadline = FIPC_FOREVER};
    begin = p.f.now;
    at(&p.f, begin + 100 * FIPC_MS, NULL, NULL);
    CHECK_RC(fipc_queue_send(p.w, &piece, 1, 0, &send, &err), FIPC_INTERRUPTED);
    CHECK_AT(&p.f, begin + 100 * FIPC_MS);
    CHECK(!send.midway); /* nothing of it is on its way, so others may send now */
    void *ptr;
    at(&p.f, begin + 200 * FIPC_MS, NULL, NULL);
    CHECK_RC(fipc_queue_loan(p.w, 3, &send, &ptr, &err), FIPC_INTERRUPTED);
    take_everything(&p);
    put_small(&p);
    take_everything(&p);
    pair_close(&p);
}

static void a_signal_amid_a_message_comes_up_and_the_message_goes_on(void) {
    for (int abandon = 0; abandon < 2; abandon++) {
        struct pair p;
        pair_open(&p, 1, 8, 1);
        pair_attach(&p);
        const uint64_t len = 3 * p.c.chunk_bytes - 100; /* three fragments through one chunk */
        char *bytes = malloc(len);
        CHECK(bytes != NULL);
        pattern_fill(bytes, 1, 0, len);
        struct fipc_piece piece = {.ptr = bytes, .len = len};
        struct fipc_call send = {.deadline = FIPC_FOREVER}, poll = {0};
        struct fipc_error err;
        struct fipc_message m;
        uint64_t begin = p.f.now;
        for (uint64_t i = 1; i <= 2; i++) {
            at(&p.f, begin + i * FIPC_S, NULL, NULL);
            CHECK_RC(fipc_queue_send(p.w, &piece, 1, 1, &send, &err), FIPC_INTERRUPTED);
            CHECK_AT(&p.f, begin + i * FIPC_S);
            CHECK(send.midway);
            CHECK_RC(fipc_queue_recv(p.r[0], &poll, &m, &err), FIPC_WOULD_BLOCK);
        }
        if (abandon) {
            fipc_queue_send_abandon(p.w, &send);
            CHECK(!send.midway);
            CHECK_RC(fipc_queue_recv(p.r[0], &poll, &m, &err), FIPC_WOULD_BLOCK);
            p.sent = 1;
            p.taken[0] = 1;
        } else {
            CHECK_RC(fipc_queue_send(p.w, &piece, 1, 1, &send, &err), FIPC_OK);
            peers_get(p.r[0], 1, len);
            p.sent = p.taken[0] = 1;
        }
        put_small(&p);
        put_big(&p);
        take_everything(&p);
        free(bytes);
        pair_close(&p);
    }
}

static void signals_are_looked_for_soon_and_then_after_each_sleep(void) {
    struct pair p;
    pair_open(&p, 1, 2, 2);
    pair_attach(&p);
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = true};
    uint64_t begin = p.f.now;
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_INTERRUPTED);
    /* one that came just before the sleep is served within 100 ms */
    CHECK(p.f.now > begin && p.f.now <= begin + 100 * FIPC_MS);
    for (int i = 0; i < 5; i++) {
        begin = p.f.now;
        CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_INTERRUPTED);
        CHECK(p.f.now >= begin + FIPC_SLICE_NS && p.f.now <= begin + FIPC_S);
    }
    pair_close(&p);
}

static void a_long_wait_is_reported(void) {
    struct pair p;
    pair_open(&p, 3, 2, 2);
    p.c.warn_ns = 2 * FIPC_S;
    fipc_queue_free(p.w);
    p.w = peers_create(&p.c);
    pair_attach(&p);
    put_small(&p);
    put_small(&p);
    take(&p, 0);
    take(&p, 0);
    take(&p, 2);
    struct fipc_error err;
    struct fipc_piece piece = {.ptr = "abc", .len = 3};
    struct fipc_call send = {.deadline = FIPC_FOREVER};
    uint64_t begin = p.f.now;
    for (uint64_t i = 1; i <= 3; i++) {
        CHECK_RC(fipc_queue_send(p.w, &piece, 1, 0, &send, &err), FIPC_LONG_WAIT);
        CHECK(p.f.now >= begin + 2 * i * FIPC_S);
        CHECK(p.f.now <= begin + 2 * i * FIPC_S + FIPC_SLICE_NS + 100 * p.f.step);
        CHECK_EQ(err.reader, 1); /* the slowest */
        CHECK_EQ(err.pid, getpid());
        CHECK(strcmp(err.host, "testhost") == 0);
        CHECK_EQ(err.seq, 1);
        CHECK(err.waited_ns >= 2 * i * FIPC_S && err.waited_ns <= p.f.now - begin);
    }
    take(&p, 1);
    CHECK_RC(fipc_queue_send(p.w, &piece, 1, 0, &send, &err), FIPC_OK);

    /* a reader that is merely idle says nothing */
    take(&p, 1);
    struct fipc_message m;
    CHECK_RC(peers_recv(p.r[1], FIPC_FOREVER, &m, &err), FIPC_OK);
    fipc_message_clear(&m);
    struct fipc_call idle = {.deadline = p.f.now + 20 * FIPC_S};
    CHECK_RC(fipc_queue_wait_readable(p.r[1], &idle, &err), FIPC_TIMEOUT);
    pair_close(&p);
}

static void a_reader_with_half_a_message_reports_a_long_wait(void) {
    struct pair p;
    pair_open(&p, 1, 8, 1);
    p.c.warn_ns = 2 * FIPC_S;
    pair_attach(&p);
    char *bytes = calloc(1, 3 * p.c.chunk_bytes);
    CHECK(bytes != NULL);
    struct fipc_piece piece = {.ptr = bytes, .len = 3 * p.c.chunk_bytes};
    struct fipc_call send = {.deadline = FIPC_FOREVER}, call = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    struct fipc_message m;
    at(&p.f, p.f.now + FIPC_MS, NULL, NULL);
    CHECK_RC(fipc_queue_send(p.w, &piece, 1, 0, &send, &err), FIPC_INTERRUPTED);
    CHECK(send.midway);
    CHECK_RC(fipc_queue_recv(p.r[0], &call, &m, &err), FIPC_WOULD_BLOCK);
    uint64_t begin = p.f.now;
    CHECK_RC(fipc_queue_wait_readable(p.r[0], &call, &err), FIPC_LONG_WAIT);
    CHECK(p.f.now >= begin + 2 * FIPC_S);
    CHECK(err.reader == -1);
    CHECK_EQ(err.pid, getpid());
    CHECK_EQ(err.seq, 2);
    fipc_queue_send_abandon(p.w, &send);
    free(bytes);
    pair_close(&p);
}

/* ---- several queues ------------------------------------------------------------------------ */

/* The k-th of n queues gets a message; all but the first have the same fate. */
static void one_of_several_queues_wakes_the_waiter(void) {
    for (uint32_t n = 1; n <= 5; n++) {
        for (uint32_t k = 0; k < n; k++) {
            for (int lost = 0; lost < 2; lost++) {
                struct pair p[5];
                fipc_queue *q[5];
                uint8_t ready[5];
                for (uint32_t i = 0; i < n; i++) {
                    pair_open(&p[i], 1, 4, 2);
                    p[i].c.ops = &p[0].f.ops;
                    fipc_queue_free(p[i].w);
                    p[i].w = peers_create(&p[i].c);
                    pair_attach(&p[i]);
                    q[i] = p[i].r[0];
                }
                struct fate *f = &p[0].f;
                f->lose_wakes = lost;
                fate_count(f);
                struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = lost};
                uint64_t when = f->now + 2 * FIPC_S + test_below(FIPC_S);
                at(f, when, put_small, &p[k]);
                int rc;
                do {
                    rc = fipc_queue_wait_any(q, n, &call, ready);
                } while (rc == FIPC_INTERRUPTED);
                CHECK_RC(rc, FIPC_OK);
                CHECK(f->now >= when && f->now <= when + LATE);
                CHECK(f->longest <= FIPC_SLICE_NS);
                for (uint32_t i = 0; i < n; i++) {
                    CHECK_EQ(ready[i], i == k);
                }
                struct fipc_call poll = {0};
                take(&p[k], 0);
                CHECK_RC(fipc_queue_wait_any(q, n, &poll, ready), FIPC_TIMEOUT);
                uint64_t end = f->now + FIPC_S;
                poll.deadline = end;
                CHECK_RC(fipc_queue_wait_any(q, n, &poll, ready), FIPC_TIMEOUT);
                CHECK(f->now >= end);
                for (uint32_t i = 0; i < n; i++) {
                    pair_close(&p[i]);
                }
            }
        }
    }
}

/* A queue whose next call would fail is ready too: the caller wants to know. */
static void a_queue_that_ends_is_ready(void) {
    for (int how = 0; how < 2; how++) {
        struct pair p[2];
        fipc_queue *q[2];
        uint8_t ready[2];
        for (int i = 0; i < 2; i++) {
            pair_open(&p[i], 1, 4, 2);
            pair_attach(&p[i]);
            q[i] = p[i].r[0];
        }
        if (how == 0) {
            fipc_queue_close(p[1].w);
        } else {
            fipc_queue_shutdown(q[1]);
        }
        struct fipc_call call = {.deadline = FIPC_FOREVER};
        CHECK_RC(fipc_queue_wait_any(q, 2, &call, ready), FIPC_OK);
        CHECK(!ready[0] && ready[1]);
        pair_close(&p[0]);
        pair_close(&p[1]);
    }
}

/* ---- the platform's own -------------------------------------------------------------------- */

#define WORDS 200

struct sleeper {
    fipc_a32 words[WORDS];
    uint32_t n;
    uint64_t deadline;
    fipc_a32 started, done;
    int rc;
};

static void *sleep_on_words(void *arg) {
    struct sleeper *s = arg;
    const fipc_a32 *words[WORDS];
    uint32_t expected[WORDS];
    for (uint32_t i = 0; i < s->n; i++) {
        words[i] = &s->words[i];
        expected[i] = 0;
    }
    fipc_store32_release(&s->started, 1);
    bool changed = false;
    while (!changed) { /* it may return for no reason */
        s->rc = fipc_wait_words(&fipc_wait_platform, words, expected, s->n, s->deadline);
        for (uint32_t i = 0; i < s->n; i++) {
            changed = changed || fipc_load32_acquire(&s->words[i]) != 0;
        }
        if (s->rc != FIPC_OK || fipc_now() >= s->deadline) {
            break;
        }
    }
    fipc_store32_release(&s->done, 1);
    return NULL;
}

static void any_of_many_words_wakes_a_real_sleeper(void) {
    static const uint32_t counts[] = {1, 2, 3, 127, 128, 129, WORDS};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int which = 0; which < 3; which++) {
            uint32_t n = counts[i];
            uint32_t k = which == 0 ? 0 : which == 1 ? n / 2 : n - 1;
            struct sleeper s = {.n = n, .deadline = FIPC_FOREVER};
            pthread_t t;
            CHECK(pthread_create(&t, NULL, sleep_on_words, &s) == 0);
            UNTIL(fipc_load32_acquire(&s.started));
            test_nap(); /* asleep or not yet: both must end */
            fipc_store32_release(&s.words[k], 1);
            fipc_wait_platform.wake(fipc_wait_platform.ctx, &s.words[k]);
            pthread_join(t, NULL);
            CHECK_RC(s.rc, FIPC_OK);
        }
    }
}

static void a_real_sleep_ends_at_its_deadline(void) {
    static const uint32_t counts[] = {1, 2, WORDS};
    for (size_t i = 0; i < 3; i++) {
        struct sleeper s = {.n = counts[i], .deadline = fipc_now() + 20 * FIPC_MS};
        sleep_on_words(&s);
        CHECK_RC(s.rc, FIPC_OK);
        CHECK(fipc_now() >= s.deadline);
        s.deadline = 0; /* long past */
        sleep_on_words(&s);
        CHECK_RC(s.rc, FIPC_OK);
    }
}

static void on_signal(int signal) { (void)signal; }

static void a_real_signal_ends_a_real_sleep(void) {
    static const uint32_t counts[] = {1, 2, WORDS};
    struct sigaction act = {.sa_handler = on_signal}, old;
    sigaction(SIGUSR1, &act, &old);
    for (size_t i = 0; i < 3; i++) {
        struct sleeper s = {.n = counts[i], .deadline = FIPC_FOREVER};
        pthread_t t;
        CHECK(pthread_create(&t, NULL, sleep_on_words, &s) == 0);
        while (!fipc_load32_acquire(&s.done)) {
            pthread_kill(t, SIGUSR1);
            test_nap();
        }
        pthread_join(t, NULL);
        CHECK_RC(s.rc, FIPC_INTERRUPTED);
    }
    sigaction(SIGUSR1, &old, NULL);
}

static void a_word_that_differs_already_is_not_slept_on(void) {
    fipc_a32 words[3] = {0, 7, 0};
    const fipc_a32 *at_words[3] = {&words[0], &words[1], &words[2]};
    const uint32_t expected[3] = {0, 6, 0};
    CHECK_RC(fipc_wait_words(&fipc_wait_platform, at_words, expected, 3, FIPC_FOREVER), FIPC_OK);
    CHECK_RC(fipc_wait_platform.wait(NULL, &words[1], 6, FIPC_FOREVER), FIPC_OK);
}

/* A sleep may end for no reason, but one that always does is a spin. */
static void words_of_different_values_are_slept_on(void) {
    fipc_a32 words[3] = {5, 7, 9};
    const fipc_a32 *at_words[3] = {&words[0], &words[1], &words[2]};
    const uint32_t expected[3] = {5, 7, 9};
    uint64_t deadline = fipc_now() + 20 * FIPC_MS, returns = 0;
    while (fipc_now() < deadline) {
        CHECK_RC(fipc_wait_words(&fipc_wait_platform, at_words, expected, 3, deadline), FIPC_OK);
        returns++;
    }
    CHECK(returns < 100);
}

static const struct test_case cases[] = {
    {"an idle reader wakes 45 times in 10 s at most", an_idle_reader_wakes_45_times_in_10_s},
    {"a blocked writer sleeps in slices too", a_blocked_writer_sleeps_in_slices_too},
    {"a message arrives soon though its wake-up is lost",
     a_message_arrives_soon_though_its_wake_up_is_lost},
    {"room is found soon though its wake-up is lost",
     room_is_found_soon_though_its_wake_up_is_lost},
    {"only a sleeper is woken", only_a_sleeper_is_woken},
    {"a writer is woken for a batch", a_writer_is_woken_for_a_batch},
    {"the kernel is asked about peers often enough and not too often",
     the_kernel_is_asked_about_peers_often_enough_and_not_too_often},
    {"an evicted reader is not waited for by the others' bell",
     an_evicted_reader_is_not_waited_for_by_the_others_bell},
    {"a deadline is kept on both sides", a_deadline_is_kept_on_both_sides},
    {"a poll does not sleep", a_poll_does_not_sleep},
    {"the spin budget learns", the_spin_budget_learns},
    {"who spins on the peer's CPU sleeps at once for a while",
     who_spins_on_the_peers_cpu_sleeps_at_once_for_a_while},
    {"a spin ends", a_spin_ends},
    {"nobody spins with too few CPUs", nobody_spins_with_too_few_cpus},
    {"spin 0 means never", spin_0_means_never},
    {"a signal comes up and the wait goes on", a_signal_comes_up_and_the_wait_goes_on},
    {"a signal amid a message comes up and the message goes on",
     a_signal_amid_a_message_comes_up_and_the_message_goes_on},
    {"signals are looked for soon, and then after each sleep",
     signals_are_looked_for_soon_and_then_after_each_sleep},
    {"a long wait is reported", a_long_wait_is_reported},
    {"a reader with half a message reports a long wait",
     a_reader_with_half_a_message_reports_a_long_wait},
    {"one of several queues wakes the waiter", one_of_several_queues_wakes_the_waiter},
    {"a queue that ends is ready", a_queue_that_ends_is_ready},
    {"any of many words wakes a real sleeper", any_of_many_words_wakes_a_real_sleeper},
    {"a real sleep ends at its deadline", a_real_sleep_ends_at_its_deadline},
    {"a real signal ends a real sleep", a_real_signal_ends_a_real_sleep},
    {"words of different values are slept on", words_of_different_values_are_slept_on},
    {"a word that differs already is not slept on", a_word_that_differs_already_is_not_slept_on},
};

TEST_MAIN(cases)
