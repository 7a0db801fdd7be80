/* Every point at which a process may die (points.h), in every role, among one to four readers,
 * while the survivors are blocked or busy.
 *
 * All are processes: the writer, the readers, the one that dies, the one that takes its rank over.
 * In each cell the survivors must be told who died (or go on, when evicting), read exactly what was
 * published and no corrupt message, and end; the replacement sees every message from its joining
 * on; then the survivors carry 1,000 messages over a fresh queue; and nothing is left: no file, no
 * descriptor, no mapping, no process. FIPC_TEST_SEED changes when in a run a point strikes, and
 * swaps evicting with raising and named segments with memfds.
 *
 * The clock runs 20 times as fast as the real one, so that slices and probes are short.
 */
#include "test.h"

#include <sched.h>

#include "fipc_queue.h"
#include "fipc_test.h"
#include "peers.h"
#include "points.h"

enum outcome { NONE, FREE_AGAIN, DEAD, LEFT, NOT_BORN, DRAINED, CLOSED };

struct point {
    const char *name, *step;
    enum outcome reader, writer;
};

static const struct point points[] = {
#define POINT(name, step, reader, writer) {name, step, reader, writer},
    POINTS
#undef POINT
};

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define MAX_READERS 4u
#define FRESH_MESSAGES 1000u
#define AFTER_JOINING 30u /* messages that a replacement shares with the others */
#define BEFORE_HOLDING 5u /* messages: the ring has gone round once */
#define CELL_WATCHDOG_S 60u

static bool is(const struct point *p, const char *name) { return strcmp(p->name, name) == 0; }
static bool step_is(const struct point *p, const char *step) { return strcmp(p->step, step) == 0; }

/* What a reader has to say when it has read all. */
struct report {
    uint64_t first, last, n;
    int rc;
    int32_t who;
    int64_t pid;
    uint64_t told; /* when */
};

enum role { AS_READER, AS_REPLACEMENT, AS_WRITER };

/* What all processes of a cell share. */
struct cell {
    struct fipc_config c, fresh_config;
    struct fipc_address address, fresh_address;
    const struct point *point;
    char spec[64];
    char dir[64];
    uint64_t bytes[3];
    enum role role;
    bool busy;
    bool early;       /* the replacement comes, and dies, before its forerunner is evicted */
    uint32_t n, rank; /* readers; the rank that somebody dies as */

    fipc_a32 created, attached, go, fresh, doomed_attached;
    fipc_a32 told;    /* how often the writer was told of a death */
    fipc_a32 evicted; /* and then was rid of the dead */
    fipc_a32 hold;    /* the writer, once told, doesn't evict yet */
    fipc_a32 joined;  /* the replacement has attached */
    fipc_a64 victim;  /* pid */
    fipc_a64 killed;  /* when; 0: not yet */
    fipc_a64 sent;    /* messages whose sending has returned */
    fipc_a64 shared;  /* from here on everybody must have everything */
    uint64_t told_at;
    struct report reports[MAX_READERS];
};

static struct {
    uint64_t cells, deaths, messages, fresh, longest;
} total;

static const char *case_name;

static uint64_t bytes_of(const struct cell *s, uint64_t seq) { return s->bytes[seq % 3]; }

/* ---- readers ------------------------------------------------------------------------------- */

/* A writer that is to die while it waits must come to wait; readers that look all the time would
 * never let it. So these are busy with something else, until it's dead. */
static bool holds_up(const struct cell *s) {
    return s->role == AS_WRITER && s->busy && step_is(s->point, "wait");
}

static struct report read_all(const struct cell *s, fipc_queue *r) {
    struct report it = {0};
    struct fipc_message m;
    struct fipc_error err;
    for (;;) {
        it.rc = peers_recv(r, s->busy ? 0 : FIPC_FOREVER, &m, &err);
        if (s->busy && it.rc == FIPC_TIMEOUT) {
            sched_yield();
            continue;
        }
        if (it.rc != FIPC_OK) {
            break;
        }
        it.first = it.n == 0 ? m.tag : it.first;
        if (it.n > 0) { /* none lost, none twice */
            CHECK_EQ(m.tag, it.last + 1);
        }
        it.last = m.tag;
        it.n++;
        if (it.n == BEFORE_HOLDING && holds_up(s)) {
            UNTIL(fipc_load64_acquire(&s->killed));
        }
        peers_check(&m, m.tag, bytes_of(s, m.tag));
        fipc_message_clear(&m);
    }
    it.told = fipc_now();
    it.who = err.reader;
    it.pid = err.pid;
    CHECK_RC(peers_recv(r, 0, &m, &err), it.rc); /* and it stays so */
    return it;
}

static void read_fresh(struct cell *s, uint32_t rank) {
    UNTIL(fipc_load32_acquire(&s->fresh));
    fipc_queue *r = peers_attach_at(&s->fresh_address, rank, &s->fresh_config);
    for (uint64_t seq = 1; seq <= FRESH_MESSAGES; seq++) {
        peers_get(r, seq, 1 + seq * 7 % 1500);
    }
    struct fipc_message m;
    struct fipc_error err;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_CLOSED);
    fipc_queue_free(r);
}

struct seat {
    struct cell *s;
    uint32_t rank;
    bool replaces;
};

static void reader(void *arg) {
    const struct seat *seat = arg;
    struct cell *s = seat->s;
    fipc_queue *r = peers_attach_at(&s->address, seat->rank, &s->c);
    if (seat->replaces) {
        fipc_store32_release(&s->joined, 1);
    } else {
        fipc_add32_acqrel(&s->attached, 1);
    }
    s->reports[seat->rank] = read_all(s, r);
    fipc_queue_free(r);
    read_fresh(s, seat->rank);
}

/* Killed by the test, somewhere in here. */
static void doomed_reader(void *arg) {
    struct cell *s = arg;
    peers_attach_at(&s->address, s->rank, &s->c);
    fipc_store32_release(&s->doomed_attached, 1);
    for (;;) {
        pause();
    }
}

static void victim_reader(void *arg) {
    struct cell *s = arg;
    fipc_test_set(s->spec, 0);
    fipc_queue *r = peers_attach_at(&s->address, s->rank, &s->c);
    bool closes = step_is(s->point, "close");
    for (uint64_t n = 0; !closes || n < 2; n++) {
        struct fipc_message m;
        struct fipc_error err;
        CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_OK);
        fipc_message_clear(&m);
    }
    fipc_queue_free(r);
    FAIL("\"%s\" was not passed", s->spec);
}

/* ---- the writer ---------------------------------------------------------------------------- */

static int send_or_lend(struct cell *s, fipc_queue *w, uint64_t seq, struct fipc_error *err) {
    uint64_t len = bytes_of(s, seq);
    char *bytes = malloc(len);
    CHECK(bytes != NULL);
    pattern_fill(bytes, seq, 0, len);
    struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = true};
    struct fipc_piece piece = {.ptr = bytes, .len = len};
    int rc;
    if (is(s->point, "loan-lent")) {
        void *to;
        do {
            rc = fipc_queue_loan(w, len, &call, &to, err);
        } while (rc == FIPC_INTERRUPTED);
        CHECK_RC(rc, FIPC_OK);
        memcpy(to, bytes, len);
        FAIL("\"%s\" was not passed", s->spec);
    }
    do {
        rc = fipc_queue_send(w, &piece, 1, (uint32_t)seq, &call, err);
    } while (rc == FIPC_INTERRUPTED);
    if (rc == FIPC_EVICTED) {
        fipc_queue_send_abandon(w, &call);
    }
    free(bytes);
    return rc;
}

static void note_death(struct cell *s, const struct fipc_error *err) {
    CHECK_EQ(err->reader, s->rank);
    CHECK(strcmp(err->host, "testhost") == 0);
    UNTIL(fipc_load64_acquire(&s->killed)); /* the test reaps a moment later */
    CHECK_EQ(err->pid, fipc_load64_acquire(&s->victim));
    s->told_at = fipc_now();
    fipc_add32_acqrel(&s->told, 1);
}

/* Sends one message, whoever dies meanwhile. */
static void send_on(struct cell *s, fipc_queue *w, uint64_t seq) {
    struct fipc_error err, again;
    for (;;) {
        int rc = send_or_lend(s, w, seq, &err);
        if (rc == FIPC_OK) {
            break;
        }
        if (rc == FIPC_EVICTED) {
            CHECK(s->c.evict);
            note_death(s, &err);
            fipc_add32_acqrel(&s->evicted, 1);
        } else if (rc == FIPC_PEER_DIED) {
            CHECK(!s->c.evict);
            CHECK_RC(send_or_lend(s, w, seq, &again), FIPC_PEER_DIED);
            CHECK_EQ(again.reader, err.reader);
            note_death(s, &err);
            UNTIL(!fipc_load32_acquire(&s->hold));
            CHECK_RC(fipc_queue_evict(w, s->rank, &err), FIPC_OK);
            fipc_add32_acqrel(&s->evicted, 1);
            if (s->early && s->point->reader == FREE_AGAIN) { /* nobody else had the rank */
                struct fipc_peer_info info;
                CHECK_RC(fipc_queue_peer(w, s->rank, &info), FIPC_OK);
                CHECK_EQ(info.state, FIPC_PEER_DEAD);
            }
        } else {
            CHECK_RC(rc, FIPC_CLOSED); /* nobody is left, so far */
            CHECK_EQ(s->n, 1);
            test_nap();
        }
    }
    fipc_store64_release(&s->sent, seq);
    if (s->busy) {
        test_nap(); /* so that many slots last for as long as it takes to be told */
    }
}

static fipc_queue *make(struct cell *s) {
    s->c.shm_dir = s->dir[0] ? s->dir : NULL;
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    fipc_store32_release(&s->created, 1);
    UNTIL(fipc_load32_acquire(&s->go));
    return w;
}

/* Lives on: goes on until the replacement has come, and for a while after. */
static void surviving_writer(void *arg) {
    struct cell *s = arg;
    fipc_queue *w = make(s);
    uint64_t seq = 0;
    while (!fipc_load32_acquire(&s->joined)) {
        send_on(s, w, ++seq);
    }
    fipc_store64_release(&s->shared, seq + 1);
    for (uint32_t i = 0; i < AFTER_JOINING; i++) {
        send_on(s, w, ++seq);
    }
    fipc_queue_free(w);
    read_fresh(s, s->n); /* it has a seat of its own there */
}

static void victim_writer(void *arg) {
    struct cell *s = arg;
    fipc_queue *w = make(s);
    fipc_test_set(s->spec, 0);
    bool closes = step_is(s->point, "close");
    for (uint64_t seq = 1; !closes || seq <= 12; seq++) {
        send_on(s, w, seq);
    }
    fipc_queue_free(w);
    FAIL("\"%s\" was not passed", s->spec);
}

static void maker(void *arg) {
    struct cell *s = arg;
    fipc_test_set(s->spec, 0);
    make(s);
    FAIL("\"%s\" was not passed", s->spec);
}

static void maker_that_leaves(void *arg) {
    struct cell *s = arg;
    s->c.shm_dir = s->dir;
    peers_create(&s->c);
    raise(SIGKILL);
}

/* ---- a cell -------------------------------------------------------------------------------- */

static struct cell *cell_open(const struct point *p, enum role role, uint32_t n, bool busy,
                              bool named) {
    struct cell *s = test_share(sizeof *s);
    *s = (struct cell){.point = p, .role = role, .busy = busy, .n = n};
    s->c = peers_config(n);
    s->c.ops = &peers_fast;
    s->c.n_slots = busy && role != AS_WRITER ? 8192 : 4;
    s->c.n_chunks = busy ? 64 : 2;
    s->bytes[0] = 100;                  /* in a slot */
    s->bytes[1] = 5000;                 /* in a chunk */
    s->bytes[2] = busy ? 17000 : 40000; /* through several chunks */
    if (is(p, "loan-lent")) {
        s->bytes[2] = 16000;
    }
    s->rank = (uint32_t)test_below(n);
    bool repeats = step_is(p, "read") || step_is(p, "acknowledge") || step_is(p, "publish") ||
                   step_is(p, "fragment") || is(p, "mid-write") || is(p, "loan-lent");
    bool once = repeats && !is(p, "loan-lent");
    snprintf(s->spec, sizeof s->spec, "%s:%d:kill", p->name, once ? 1 + (int)test_below(6) : 1);
    if (named) {
        strcpy(s->dir, "/dev/shm/fipc-matrix-XXXXXX");
        CHECK(mkdtemp(s->dir) != NULL);
    }
    static char name[160];
    snprintf(name, sizeof name, "%s as a %s, %u readers, survivors %s, %s", s->spec,
             role == AS_READER   ? "reader"
             : role == AS_WRITER ? "writer"
                                 : "replacement",
             n, busy ? "busy" : "blocked", named ? "named" : "memfd");
    case_name = test_name; /* of the whole case: a failure tells the cell */
    test_name = name;
    alarm(CELL_WATCHDOG_S);
    return s;
}

static unsigned files_in(const char *dir) {
    unsigned n = 0;
    DIR *d = opendir(dir);
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(d);
    return n;
}

static void cell_close(struct cell *s, unsigned fds) {
    if (s->dir[0] != 0) {
        CHECK_EQ(files_in(s->dir), 0);
        CHECK(rmdir(s->dir) == 0);
    }
    CHECK_EQ(test_open_fds(), fds);
    CHECK_EQ(test_mappings("fastipc"), 0);
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    test_unshare(s, sizeof *s);
    test_name = case_name;
    total.cells++;
}

/* A process that has died says nothing any more: so a failed one must not be waited for. */
static void mind(pid_t pid) {
    siginfo_t info = {0};
    CHECK(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0);
    if (info.si_pid == pid && !(info.si_code == CLD_EXITED && info.si_status == 0)) {
        FAIL("process %d has failed (see above)", (int)pid);
    }
}
#define UNTIL_MINDING(pid, condition)                                                              \
    while (!(condition)) {                                                                         \
        mind(pid);                                                                                 \
        test_nap();                                                                                \
    }

static void await_death(struct cell *s, pid_t pid) {
    fipc_store64_release(&s->victim, (uint64_t)pid);
    CHECK_KILLED(pid);
    fipc_store64_release(&s->killed, fipc_now());
    total.deaths++;
}

static void clocked(uint64_t from, uint64_t until) {
    uint64_t took = until > from ? until - from : 0;
    total.longest = took > total.longest ? took : total.longest;
}

/* Those who are left, with one that takes the dead one's place, use another queue. */
static void fresh_queue(struct cell *s, uint32_t seats) {
    s->fresh_config = peers_config(seats);
    s->fresh_config.n_slots = 64;
    fipc_queue *w = peers_create(&s->fresh_config);
    s->fresh_address = peers_address(w);
    fipc_store32_release(&s->fresh, 1);
    for (uint64_t seq = 1; seq <= FRESH_MESSAGES; seq++) {
        peers_put(w, seq, 1 + seq * 7 % 1500);
    }
    struct fipc_call ready = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    CHECK_RC(fipc_queue_wait_ready(w, &ready, &err), FIPC_OK);
    fipc_queue_free(w);
    total.fresh += (uint64_t)FRESH_MESSAGES * seats;
}

/* ---- a reader dies ------------------------------------------------------------------------- */

static void kill_reader(const struct point *p, enum role role, uint32_t n, bool busy, bool evict,
                        bool early, bool named) {
    unsigned fds = test_open_fds();
    struct cell *s = cell_open(p, role, n, busy, named);
    s->c.evict = evict;
    s->early = early;
    fipc_store32_release(&s->hold, early);
    pid_t writer = test_fork(surviving_writer, s);
    UNTIL_MINDING(writer, fipc_load32_acquire(&s->created));
    pid_t pids[MAX_READERS];
    struct seat seats[MAX_READERS];
    for (uint32_t i = 0; i < n; i++) {
        seats[i] = (struct seat){s, i, i == s->rank};
        pids[i] = i == s->rank ? 0 : test_fork(reader, &seats[i]);
    }
    UNTIL_MINDING(writer, fipc_load32_acquire(&s->attached) == n - 1);
    uint32_t deaths = 0; /* that the writer is told of */
    if (role == AS_REPLACEMENT) {
        pid_t first = test_fork(doomed_reader, s);
        UNTIL_MINDING(writer, fipc_load32_acquire(&s->doomed_attached));
        kill(first, SIGKILL);
        await_death(s, first);
        fipc_store32_release(&s->go, 1);
        UNTIL_MINDING(writer, fipc_load32_acquire(early ? &s->told : &s->evicted) == 1);
        deaths++;
        fipc_store64_release(&s->killed, 0); /* another is to die */
    }
    pid_t victim = test_fork(victim_reader, s);
    fipc_store32_release(&s->go, 1);
    await_death(s, victim);
    fipc_store32_release(&s->hold, 0);
    /* Early, and it is evicted along with the first. And to a writer without any reader one that
     * died before it could say that it was there never was: it is told that nobody is there. */
    bool unsaid = role == AS_REPLACEMENT && n == 1 && is(p, "attach-joined");
    if (early) {
        UNTIL_MINDING(writer, fipc_load32_acquire(&s->evicted) >= 1);
    } else if (p->reader == DEAD && !unsaid) {
        UNTIL_MINDING(writer, fipc_load32_acquire(&s->evicted) == deaths + 1);
        clocked(fipc_load64_acquire(&s->killed), s->told_at);
        deaths++;
    }
    pids[s->rank] = test_fork(reader, &seats[s->rank]);
    for (uint32_t i = 0; i < n; i++) { /* what they have to say is there once they wait for more */
        UNTIL_MINDING(pids[i], s->reports[i].rc != 0);
    }
    fresh_queue(s, n + 1);
    CHECK_EXITED(writer);
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EXITED(pids[i]);
        const struct report *it = &s->reports[i];
        CHECK_RC(it->rc, FIPC_CLOSED);
        CHECK_EQ(it->last, fipc_load64_acquire(&s->sent));
        if (i != s->rank || (p->reader == FREE_AGAIN && role == AS_READER)) {
            CHECK_EQ(it->first, 1);
        } else {
            CHECK(it->first <= fipc_load64_acquire(&s->shared));
        }
        total.messages += it->n;
    }
    CHECK(fipc_load32_acquire(&s->told) == deaths || (early && p->reader == DEAD));
    cell_close(s, fds);
}

/* ---- the writer dies ----------------------------------------------------------------------- */

static void newcomer(void *arg) {
    const struct seat *seat = arg;
    read_fresh(seat->s, seat->rank);
}

static void kill_writer(const struct point *p, uint32_t n, bool busy, bool named, bool evict) {
    unsigned fds = test_open_fds();
    struct cell *s = cell_open(p, AS_WRITER, n, busy, named);
    bool replaces = step_is(p, "replace");
    bool mourns = replaces || step_is(p, "evict"); /* it dies of another's death */
    s->c.evict = mourns && (evict || !is(p, "found-dead"));
    pid_t writer = test_fork(victim_writer, s);
    UNTIL_MINDING(writer, fipc_load32_acquire(&s->created));
    pid_t pids[MAX_READERS];
    struct seat seats[MAX_READERS];
    for (uint32_t i = 0; i < n; i++) {
        bool doomed = mourns && i == s->rank;
        seats[i] = (struct seat){s, i, doomed};
        pids[i] = doomed ? test_fork(doomed_reader, s) : test_fork(reader, &seats[i]);
    }
    UNTIL_MINDING(writer, fipc_load32_acquire(&s->attached) == n - mourns &&
                              fipc_load32_acquire(&s->doomed_attached) == mourns);
    if (mourns) {
        kill(pids[s->rank], SIGKILL);
        await_death(s, pids[s->rank]);
    }
    fipc_store32_release(&s->go, 1);
    if (replaces) {
        UNTIL_MINDING(writer, fipc_load32_acquire(&s->evicted) == 1);
        pids[s->rank] = test_fork(reader, &seats[s->rank]);
    }
    await_death(s, writer);
    uint64_t sent = fipc_load64_acquire(&s->sent);
    bool perhaps_next = is(p, "write-flagged") || is(p, "published") || is(p, "bell-rung");
    bool absent = mourns && !replaces;
    for (uint32_t i = 0; i < n; i++) {
        if (absent && i == s->rank) {
            pids[i] = test_fork(newcomer, &seats[i]);
            continue;
        }
        UNTIL_MINDING(pids[i], s->reports[i].rc != 0);
    }
    if (named) {
        bool still = is(p, "ready-stored");
        CHECK_EQ(files_in(s->dir), still);
        CHECK_EQ(fipc_sweep(s->dir, false, NULL, NULL), still);
    }
    fresh_queue(s, n);
    uint64_t last = UINT64_MAX;
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EXITED(pids[i]);
        const struct report *it = &s->reports[i];
        if (absent && i == s->rank) {
            continue;
        }
        CHECK_RC(it->rc, p->writer == CLOSED ? FIPC_CLOSED : FIPC_PEER_DIED);
        CHECK_EQ(it->who, -1);
        CHECK_EQ(it->pid, writer);
        total.messages += it->n;
        if (replaces && i == s->rank) { /* what there was came before it */
            CHECK(it->n == 0 || it->last == sent);
            continue;
        }
        CHECK_EQ(it->n, it->last);
        CHECK(it->n == 0 || it->first == 1);
        CHECK(it->last == sent || (perhaps_next && it->last == sent + 1));
        CHECK(last == UINT64_MAX || it->last == last); /* the same to all */
        last = it->last;
        if (p->writer == DRAINED) {
            clocked(fipc_load64_acquire(&s->killed), it->told);
        }
    }
    cell_close(s, fds);
}

static void kill_maker(const struct point *p, uint32_t n, bool named) {
    unsigned fds = test_open_fds();
    struct cell *s = cell_open(p, AS_WRITER, n, false, named);
    bool sweeps = step_is(p, "sweep");
    if (sweeps) {
        pid_t pid = test_fork(maker_that_leaves, s);
        CHECK_KILLED(pid);
        CHECK_EQ(files_in(s->dir), 1);
    }
    await_death(s, test_fork(maker, s));
    CHECK_EQ(fipc_load32_acquire(&s->created), 0);
    if (named) {
        unsigned left = !is(p, "create-begin") && !is(p, "sweep-removed");
        CHECK_EQ(files_in(s->dir), left);
        CHECK_EQ(fipc_sweep(s->dir, true, NULL, NULL), left);
        CHECK_EQ(files_in(s->dir), left);
        struct fipc_config next = peers_config(1);
        next.shm_dir = s->dir;
        fipc_queue *w = peers_create(&next); /* the next creation there sweeps */
        CHECK_EQ(files_in(s->dir), 1);
        fipc_queue_free(w);
        CHECK_EQ(files_in(s->dir), 0);
    }
    pid_t pids[MAX_READERS];
    struct seat seats[MAX_READERS];
    for (uint32_t i = 0; i < n; i++) {
        seats[i] = (struct seat){s, i, false};
        pids[i] = test_fork(newcomer, &seats[i]);
    }
    fresh_queue(s, n);
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EXITED(pids[i]);
    }
    cell_close(s, fds);
}

/* ---- the tables ---------------------------------------------------------------------------- */

/* Instrumented and emulated code takes its turn at a tenth of the cells, by the seed at others. */
static bool passed_over(void) {
    static uint64_t n;
    return TEST_SCALE(10) < 10 && test_random_seed() % 10 != n++ % 10;
}

static void told(void) {
    printf("          %" PRIu64 " cells, %" PRIu64 " deaths, %" PRIu64
           " messages verified by those who lived on, %" PRIu64
           " on fresh queues; told after at most %.0f ms (by a clock that is %d times as fast)\n",
           total.cells, total.deaths, total.messages, total.fresh, (double)total.longest / 1e6,
           PEERS_FASTER);
    memset(&total, 0, sizeof total);
}

static void every_point_in_the_sources_is_in_the_matrix(void) {
    char names[] = FIPC_POINTS;
    size_t n = 0;
    for (char *name = strtok(names, " "); name != NULL; name = strtok(NULL, " ")) {
        bool known = false;
        for (size_t i = 0; i < COUNT(points); i++) {
            known = known || is(&points[i], name);
        }
        if (!known) {
            FAIL("points.h lacks \"%s\"", name);
        }
        n++;
    }
    CHECK_EQ(n, COUNT(points));
    for (size_t i = 0; i < COUNT(points); i++) {
        CHECK(points[i].reader != NONE || points[i].writer != NONE);
    }
}

/* A choice between two that changes from cell to cell, and for each cell with the seed. */
static bool by_turns(size_t i) { return (i + test_random_seed()) % 2; }

static void readers_at_every_point(enum role role) {
    for (size_t i = 0; i < COUNT(points); i++) {
        for (uint32_t n = 1; n <= MAX_READERS && points[i].reader != NONE; n++) {
            for (uint32_t busy = 0; busy < 2; busy++) {
                if (!passed_over()) {
                    kill_reader(&points[i], role, n, busy, by_turns(i + n + busy), false,
                                by_turns(i + n / 2));
                }
            }
        }
    }
    told();
}

static void a_reader_dies_at_every_point(void) { readers_at_every_point(AS_READER); }
static void a_replacement_dies_at_every_point(void) { readers_at_every_point(AS_REPLACEMENT); }

static void a_replacement_dies_before_its_forerunner_is_evicted(void) {
    for (size_t i = 0; i < COUNT(points); i++) {
        bool early = points[i].reader != NONE && step_is(&points[i], "attach");
        for (uint32_t n = 1; n <= MAX_READERS && early; n++) {
            if (!passed_over()) {
                kill_reader(&points[i], AS_REPLACEMENT, n, by_turns(n), false, true, false);
            }
        }
    }
    told();
}

static void a_writer_dies_at_every_point(void) {
    for (size_t i = 0; i < COUNT(points); i++) {
        bool born = points[i].writer != NONE && points[i].writer != NOT_BORN;
        for (uint32_t n = 1; n <= MAX_READERS && born; n++) {
            for (uint32_t busy = 0; busy < 2; busy++) {
                if (!passed_over()) {
                    kill_writer(&points[i], n, busy, by_turns(i + n + busy), by_turns(i + n / 2));
                }
            }
        }
    }
    told();
}

static void a_writer_dies_before_there_is_a_queue(void) {
    for (size_t i = 0; i < COUNT(points); i++) {
        for (uint32_t n = 1; n <= MAX_READERS && points[i].writer == NOT_BORN; n++) {
            for (int named = 0; named < 2; named++) {
                bool needs_name = is(&points[i], "create-linked") || step_is(&points[i], "sweep");
                if ((named || !needs_name) && !passed_over()) {
                    kill_maker(&points[i], n, named);
                }
            }
        }
    }
    told();
}

static const struct test_case cases[] = {
    {"every point in the sources is in the matrix", every_point_in_the_sources_is_in_the_matrix},
    {"a reader dies at every point", a_reader_dies_at_every_point},
    {"a replacement dies at every point", a_replacement_dies_at_every_point},
    {"a replacement dies before its forerunner is evicted",
     a_replacement_dies_before_its_forerunner_is_evicted},
    {"a writer dies at every point", a_writer_dies_at_every_point},
    {"a writer dies before there is a queue", a_writer_dies_before_there_is_a_queue},
};

TEST_MAIN(cases)
