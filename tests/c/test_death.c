/* Death: a process is killed as reader and as writer, and the survivors are blocked or busy. They
 * are told who it was, or go on without it; nothing that was published is lost, and nothing is left
 * behind. (test_matrix does that at every point there is; here are the cases with a story.)
 *
 * The clock runs 20 times as fast as the real one, so that slices and probes are short.
 */
#include "test.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <sys/stat.h>

#include "fipc_queue.h"
#include "fipc_test.h"
#include "peers.h"

extern char **environ;

enum offspring { NONE, FORKED, SPAWNED, OFFSPRINGS };

/* What the test and the victim share. */
struct scene {
    struct fipc_config c;
    char dir[64]; /* of named segments, else "" */
    struct fipc_address address;
    const char *point;
    char spec[64]; /* the point, how often it is passed, what happens then */
    uint64_t seq_bytes[3];
    uint32_t reader;
    enum offspring offspring;
    fipc_a64 offspring_pid;
    fipc_a32 born;
    fipc_a32 phase;
    fipc_a32 go;
    fipc_a64 sent; /* by a writer: messages whose sending has returned */
};

static struct scene *scene_open(uint32_t readers) {
    struct scene *s = test_share(sizeof *s);
    s->c = peers_config(readers);
    s->c.ops = &peers_fast;
    s->c.n_chunks = 2;
    s->seq_bytes[0] = 100;   /* in a slot */
    s->seq_bytes[1] = 5000;  /* in a chunk */
    s->seq_bytes[2] = 40000; /* through three chunks, of which there are two */
    return s;
}

static void scene_close(struct scene *s) { test_unshare(s, sizeof *s); }

static uint64_t bytes_of(const struct scene *s, uint64_t seq) { return s->seq_bytes[seq % 3]; }

static void set_point(struct scene *s, const char *point, int count, const char *action) {
    s->point = point;
    snprintf(s->spec, sizeof s->spec, "%s:%d:%s", point, count, action);
}

static bool has_segment(pid_t pid) {
    char path[64], target[256];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    CHECK(d != NULL);
    bool has = false;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        ssize_t n = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        has = has || strstr(target, "fastipc") != NULL || strstr(target, "fipc-death") != NULL;
    }
    closedir(d);
    return has;
}

/* A child of the victim's that lives on after it. It has what a fork or an exec leaves it. */
static void beget(struct scene *s) {
    pid_t pid = 0;
    if (s->offspring == FORKED || (s->offspring == SPAWNED && TEST_QEMU)) { /* no vfork there */
        fipc_store32_release(&s->born, 0);
        pid = fork();
        if (pid == 0) {
            fipc_store32_release(&s->born, 1);
            alarm(test_watchdog_s); /* should the test not live to end it */
            for (;;) {
                pause();
            }
        }
        UNTIL(fipc_load32_acquire(&s->born)); /* until then it holds what its parent holds */
    } else if (s->offspring == SPAWNED) {
        char *argv[] = {"sleep", "300", NULL};
        CHECK(posix_spawnp(&pid, "sleep", NULL, NULL, argv, environ) == 0);
        UNTIL(!has_segment(pid)); /* it returns a moment before the descriptors are closed */
    }
    fipc_store64_release(&s->offspring_pid, (uint64_t)pid);
}

static bool adopts; /* the victims' children come to us; not under qemu-user */

/* The victim has a child, and it lives, so far. */
static void end_offspring(struct scene *s) {
    pid_t pid = (pid_t)fipc_load64_acquire(&s->offspring_pid);
    if (pid != 0) {
        CHECK(kill(pid, 0) == 0);
        kill(pid, SIGKILL);
        if (adopts) {
            CHECK_KILLED(pid);
        }
    }
}

/* ---- a reader dies ------------------------------------------------------------------------- */

struct point {
    const char *name;
    enum { FREE_AGAIN, DEAD, LEFT, DRAINED, CLOSED, NOT_BORN } outcome;
};

static const struct point reader_points[] = {
    {"attach-begin", FREE_AGAIN}, {"attach-locked", FREE_AGAIN}, {"attach-counted", FREE_AGAIN},
    {"attach-joined", DEAD},      {"attach-done", DEAD},         {"asleep", DEAD},
    {"mid-read", DEAD},           {"before-ack", DEAD},          {"acknowledged", DEAD},
    {"close-begin", DEAD},        {"close-told", LEFT},
};

static const struct point writer_points[] = {
    {"create-begin", NOT_BORN},  {"create-file", NOT_BORN},      {"create-complete", NOT_BORN},
    {"create-linked", NOT_BORN}, {"mid-write", DRAINED},         {"before-publish", DRAINED},
    {"published", DRAINED},      {"between-fragments", DRAINED}, {"asleep", DRAINED},
    {"evict", DRAINED},          {"close-begin", DRAINED},       {"close-told", CLOSED},
};

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void victim_reader(void *arg) {
    struct scene *s = arg;
    fipc_test_set(s->spec, 0);
    fipc_queue *r = peers_attach_at(&s->address, s->reader, &s->c);
    beget(s);
    fipc_store32_release(&s->phase, 1);
    bool closes = strncmp(s->point, "close", 5) == 0;
    for (uint64_t n = 0; !closes || n < 2; n++) {
        struct fipc_message m;
        struct fipc_error err;
        CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_OK);
        fipc_message_clear(&m);
    }
    fipc_queue_free(r);
    FAIL("\"%s\" was not passed", s->spec);
}

/* The writer, and what the surviving reader has read. */
struct survivors {
    struct scene *s;
    fipc_queue *w, *r;
    uint64_t sent, got;
    uint64_t evicted;
    struct fipc_error err, died;
};

static void read_what_there_is(struct survivors *v) {
    struct fipc_message m;
    struct fipc_error err;
    while (peers_recv(v->r, 0, &m, &err) == FIPC_OK) {
        v->got++;
        peers_check(&m, v->got, bytes_of(v->s, v->got));
        fipc_message_clear(&m);
    }
}

/* Sends the next message, for as long as that takes. The survivor reads meanwhile. */
static int send_next(struct survivors *v) {
    uint64_t len = bytes_of(v->s, v->sent + 1);
    char *bytes = malloc(len);
    CHECK(bytes != NULL);
    pattern_fill(bytes, v->sent + 1, 0, len);
    struct fipc_piece piece = {.ptr = bytes, .len = len};
    struct fipc_call call = {.deadline = FIPC_FOREVER, .signals = true};
    int rc;
    do { /* it comes up for signals now and then, also when only the victim is in its way */
        rc = fipc_queue_send(v->w, &piece, 1, (uint32_t)(v->sent + 1), &call, &v->err);
        if (rc == FIPC_EVICTED || rc == FIPC_PEER_DIED) {
            v->evicted += rc == FIPC_EVICTED;
            v->died = v->err;
        }
        if (rc == FIPC_INTERRUPTED || rc == FIPC_EVICTED) {
            read_what_there_is(v);
        }
    } while (rc == FIPC_INTERRUPTED || (rc == FIPC_EVICTED && v->evicted < 10));
    free(bytes);
    v->sent += rc == FIPC_OK;
    read_what_there_is(v);
    return rc;
}

static void check_named(const struct fipc_error *err, int32_t reader, pid_t pid) {
    CHECK_EQ(err->reader, reader);
    CHECK_EQ(err->pid, pid);
    CHECK(strcmp(err->host, "testhost") == 0);
}

static enum fipc_peer_state state_of(fipc_queue *q, int64_t reader) {
    struct fipc_peer_info info;
    CHECK_RC(fipc_queue_peer(q, reader, &info), FIPC_OK);
    return info.state;
}

static void send_some(struct survivors *v, fipc_queue *also) {
    for (int i = 0; i < 7; i++) {
        uint64_t len = bytes_of(v->s, v->sent + 1);
        if (also != NULL && len > v->s->c.n_chunks * v->s->c.chunk_bytes) {
            v->sent++; /* would need both to read meanwhile: not sent, not expected */
            v->got++;
            continue;
        }
        CHECK_RC(send_next(v), FIPC_OK);
        CHECK_EQ(v->got, v->sent);
        if (also != NULL) {
            peers_get(also, v->sent, len);
        }
    }
}

static void kill_reader(const struct point *p, int count, bool busy, bool evict,
                        enum offspring offspring) {
    struct scene *s = scene_open(2);
    s->c.n_slots = busy ? 8192 : 4;
    if (busy) { /* never blocked: neither by slots nor by chunks */
        s->seq_bytes[0] = s->seq_bytes[1] = s->seq_bytes[2] = 100;
    }
    s->c.evict = evict;
    s->offspring = offspring;
    set_point(s, p->name, count, "kill");
    struct survivors v = {.s = s, .w = peers_create(&s->c)};
    s->address = peers_address(v.w);
    v.r = peers_attach(v.w, 0, &s->c);
    s->reader = 1;
    pid_t pid = test_fork(victim_reader, s);
    int rc = FIPC_OK;
    if (p->outcome == LEFT) { /* it leaves after two messages */
        CHECK_RC(send_next(&v), FIPC_OK);
        CHECK_RC(send_next(&v), FIPC_OK);
    }
    if (p->outcome == DEAD && strncmp(p->name, "attach", 6) != 0 &&
        strcmp(p->name, "asleep") != 0) {
        UNTIL(fipc_load32_acquire(&s->phase)); /* it is dying while the writer sends */
    } else {
        CHECK_KILLED(pid);
        pid = -pid;
    }
    if (p->outcome == FREE_AGAIN) {
        CHECK_EQ(state_of(v.w, 1), FIPC_PEER_FREE);
        CHECK_RC(send_next(&v), FIPC_OK);
    } else if (p->outcome == LEFT) {
        CHECK_EQ(state_of(v.w, 1), FIPC_PEER_LEFT);
    } else {
        while (rc == FIPC_OK && v.evicted == 0) {
            rc = send_next(&v);
            if (busy) {
                test_nap();
            }
        }
        check_named(&v.died, 1, pid < 0 ? -pid : pid);
        CHECK_RC(rc, evict ? FIPC_OK : FIPC_PEER_DIED);
        CHECK(!busy || fipc_load64_relaxed(&v.w->sleeps) == 0); /* it asked without being blocked */
        CHECK_EQ(v.evicted, evict);
        CHECK_EQ(v.got, v.sent);
        if (!evict) {
            CHECK_RC(send_next(&v), FIPC_PEER_DIED); /* and still */
            check_named(&v.died, 1, pid < 0 ? -pid : pid);
            CHECK_RC(fipc_queue_evict(v.w, 1, &v.err), FIPC_OK);
        }
        CHECK_EQ(state_of(v.r, 1), FIPC_PEER_DEAD);
    }
    if (pid > 0) {
        CHECK_KILLED(pid);
    }
    if (p->outcome == FREE_AGAIN) { /* whoever comes has missed nothing */
        fipc_queue *r = peers_attach(v.w, 1, &s->c);
        peers_get(r, 1, bytes_of(s, 1));
        send_some(&v, r);
        fipc_queue_free(r);
    } else {
        send_some(&v, NULL);
        fipc_queue *r = peers_attach(v.w, 1, &s->c);
        send_some(&v, r);
        fipc_queue_free(r);
    }
    end_offspring(s);
    fipc_queue_free(v.r);
    fipc_queue_free(v.w);
    scene_close(s);
}

static void readers_at_every_point(bool busy, bool evict, enum offspring offspring) {
    for (size_t i = 0; i < COUNT(reader_points); i++) {
        const struct point *p = &reader_points[i];
        bool repeats = strstr("mid-read before-ack acknowledged", p->name) != NULL;
        for (int count = 1; count <= (repeats ? 5 : 1); count += 2) {
            kill_reader(p, count, busy, evict, offspring);
        }
    }
}

static void a_blocked_writer_is_told_of_a_dead_reader(void) {
    readers_at_every_point(false, false, NONE);
}
static void a_busy_writer_is_told_of_a_dead_reader(void) {
    readers_at_every_point(true, false, NONE);
}
static void a_blocked_writer_evicts_a_dead_reader(void) {
    readers_at_every_point(false, true, NONE);
}
static void a_busy_writer_evicts_a_dead_reader(void) { readers_at_every_point(true, true, NONE); }
static void a_dead_readers_children_keep_nothing_alive(void) {
    readers_at_every_point(false, false, FORKED);
    readers_at_every_point(true, true, SPAWNED);
}

static void a_reader_that_dies_joining_ends_the_wait_for_readers(void) {
    struct scene *s = scene_open(3);
    set_point(s, "attach-joined", 1, "kill");
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    s->reader = 1;
    fipc_queue *r = peers_attach(w, 0, &s->c);
    pid_t pid = test_fork(victim_reader, s);
    CHECK_KILLED(pid);
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    int rc;
    while ((rc = fipc_queue_wait_ready(w, &call, &err)) == FIPC_INTERRUPTED) {
    }
    CHECK_RC(rc, FIPC_PEER_DIED);
    check_named(&err, 1, pid);
    fipc_queue_free(r);
    fipc_queue_free(w);
    scene_close(s);
}

/* ---- a writer dies ------------------------------------------------------------------------- */

static void victim_writer(void *arg) {
    struct scene *s = arg;
    if (s->dir[0] != 0) {
        s->c.shm_dir = s->dir;
    }
    bool born = strncmp(s->point, "create", 6) != 0;
    if (!born) {
        fipc_test_set(s->spec, 0);
    }
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    beget(s);
    fipc_store32_release(&s->phase, 1);
    struct fipc_call ready = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    CHECK_RC(fipc_queue_wait_ready(w, &ready, &err), FIPC_OK);
    fipc_store32_release(&s->phase, 2);
    UNTIL(fipc_load32_acquire(&s->go));
    fipc_test_set(s->spec, 0);
    bool closes = strncmp(s->point, "close", 5) == 0;
    for (uint64_t seq = 1; !closes || seq <= 4; seq++) {
        peers_put(w, seq, bytes_of(s, seq));
        fipc_store64_release(&s->sent, seq);
    }
    fipc_queue_free(w);
    FAIL("\"%s\" was not passed", s->spec);
}

/* A reader that only attaches, to be found dead. */
static void doomed_reader(void *arg) {
    struct scene *s = arg;
    peers_attach_at(&s->address, 1, &s->c);
    UNTIL(fipc_load32_acquire(&s->go));
}

struct survivor {
    const struct scene *s;
    fipc_queue *r;
    bool busy;
    uint64_t got;
    int rc;
    struct fipc_error err;
};

/* Reads until the end. */
static void *survive(void *arg) {
    struct survivor *v = arg;
    for (;;) {
        struct fipc_message m;
        v->rc = peers_recv(v->r, v->busy ? 0 : FIPC_FOREVER, &m, &v->err);
        if (v->busy && v->rc == FIPC_TIMEOUT) {
            sched_yield();
            continue;
        }
        if (v->rc != FIPC_OK) {
            return NULL;
        }
        v->got++;
        peers_check(&m, v->got, bytes_of(v->s, v->got));
        fipc_message_clear(&m);
    }
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

static void kill_writer(const struct point *p, int count, uint64_t first, bool busy, bool named,
                        enum offspring offspring) {
    struct scene *s = scene_open(2);
    s->offspring = offspring;
    bool evict = strcmp(p->name, "evict") == 0;
    bool asleep = strcmp(p->name, "asleep") == 0;
    s->c.evict = evict;
    s->c.n_slots = asleep ? 2 : 8;
    for (int i = 0; i < 3; i++) { /* every kind of message may be the first */
        s->seq_bytes[i] = (uint64_t[]){40000, 100, 5000}[(i + (int)first) % 3];
    }
    if (named) {
        strcpy(s->dir, "/tmp/fipc-death-XXXXXX");
        CHECK(mkdtemp(s->dir) != NULL);
    }
    set_point(s, p->name, count, "kill");
    pid_t pid = test_fork(victim_writer, s);
    UNTIL(fipc_load32_acquire(&s->phase));
    struct survivor v[2];
    uint32_t n = evict ? 1 : 2;
    for (uint32_t i = 0; i < n; i++) {
        v[i] = (struct survivor){.s = s, .r = peers_attach_at(&s->address, i, &s->c), .busy = busy};
    }
    pid_t doomed = evict ? test_fork(doomed_reader, s) : 0;
    UNTIL(fipc_load32_acquire(&s->phase) == 2);
    if (evict) {
        kill(doomed, SIGKILL);
        CHECK_KILLED(doomed);
    }
    fipc_store32_release(&s->go, 1);
    if (asleep) { /* it sleeps only while nobody reads */
        CHECK_KILLED(pid);
    }
    pthread_t threads[2];
    for (uint32_t i = 0; i < n; i++) {
        CHECK(pthread_create(&threads[i], NULL, survive, &v[i]) == 0);
    }
    if (!asleep) {
        CHECK_KILLED(pid);
    }
    for (uint32_t i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        uint64_t sent = fipc_load64_acquire(&s->sent);
        CHECK_RC(v[i].rc, p->outcome == CLOSED ? FIPC_CLOSED : FIPC_PEER_DIED);
        check_named(&v[i].err, -1, pid);
        bool published = strcmp(p->name, "published") == 0;
        if (published) { /* the last part of a message makes it whole */
            CHECK(v[i].got == sent || v[i].got == sent + 1);
            CHECK(v[i].got == sent + 1 || bytes_of(s, sent + 1) == 40000);
        } else {
            CHECK_EQ(v[i].got, sent);
        }
        struct fipc_message m;
        CHECK_RC(peers_recv(v[i].r, 0, &m, &v[i].err), v[i].rc); /* and still, at once */
    }
    fipc_queue *late;
    struct fipc_error err;
    if (!named) {
        CHECK_RC(peers_try_attach(&late, &s->address, 0, &s->c, &err), FIPC_GONE);
    }
    end_offspring(s);
    for (uint32_t i = 0; i < n; i++) {
        fipc_queue_free(v[i].r);
    }
    if (named) {
        CHECK_EQ(files_in(s->dir), 0); /* everybody had attached, so it had lost its name */
        CHECK(rmdir(s->dir) == 0);
    }
    scene_close(s);
}

static void writers_at_every_point(bool busy, bool named, enum offspring offspring) {
    for (size_t i = 0; i < COUNT(writer_points); i++) {
        const struct point *p = &writer_points[i];
        if (p->outcome == NOT_BORN) {
            continue;
        }
        bool repeats = strstr("mid-write before-publish published", p->name) != NULL;
        for (int count = 1; count <= (repeats ? 6 : 1); count += 2) {
            kill_writer(p, count, test_below(3), busy, named, offspring);
        }
    }
}

static void blocked_readers_drain_and_are_told_of_a_dead_writer(void) {
    writers_at_every_point(false, false, NONE);
}
static void busy_readers_drain_and_are_told_of_a_dead_writer(void) {
    writers_at_every_point(true, false, NONE);
}
static void a_dead_writers_named_segment_has_no_name(void) {
    writers_at_every_point(false, true, NONE);
}
static void a_dead_writers_children_keep_nothing_alive(void) {
    writers_at_every_point(false, false, FORKED);
    writers_at_every_point(false, true, SPAWNED);
}

/* Both learn it: the second one too, though it was the first that asked the kernel. */
static void two_threads_of_a_reader_are_told_of_a_dead_writer(void) {
    struct scene *s = scene_open(1);
    s->seq_bytes[0] = s->seq_bytes[1] = s->seq_bytes[2] = 100;
    set_point(s, "mid-write", 5, "kill");
    pid_t pid = test_fork(victim_writer, s);
    UNTIL(fipc_load32_acquire(&s->phase));
    fipc_queue *r = peers_attach_at(&s->address, 0, &s->c);
    UNTIL(fipc_load32_acquire(&s->phase) == 2);
    fipc_store32_release(&s->go, 1);
    CHECK_KILLED(pid);
    for (uint64_t seq = 1; seq <= fipc_load64_acquire(&s->sent); seq++) {
        peers_get(r, seq, 100);
    }
    for (int round = 0; round < 3; round++) {
        struct survivor both[2] = {{.s = s, .r = r}, {.s = s, .r = r}};
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) {
            CHECK(pthread_create(&threads[i], NULL, survive, &both[i]) == 0);
        }
        for (int i = 0; i < 2; i++) {
            pthread_join(threads[i], NULL);
            CHECK_RC(both[i].rc, FIPC_PEER_DIED);
            check_named(&both[i].err, -1, pid);
            CHECK_EQ(both[i].got, 0);
        }
    }
    fipc_queue_free(r);
    scene_close(s);
}

static void a_dead_writer_ends_the_wait_for_readers(void) {
    struct scene *s = scene_open(2);
    set_point(s, "mid-write", 1, "kill");
    pid_t pid = test_fork(victim_writer, s);
    UNTIL(fipc_load32_acquire(&s->phase));
    fipc_queue *r = peers_attach_at(&s->address, 0, &s->c);
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    int rc;
    while ((rc = fipc_queue_wait_ready(r, &call, &err)) == FIPC_INTERRUPTED) {
    }
    CHECK_RC(rc, FIPC_PEER_DIED);
    check_named(&err, -1, pid);
    fipc_queue_free(r);
    scene_close(s);
}

/* The kernel says that the writer is gone, and since the reader last looked there was a message;
 * or it has closed. */
static fipc_queue *last_words;
static bool last_sends, last_closes;

bool __real_fipc_lock_byte_held(int fd, uint32_t index);
bool __wrap_fipc_lock_byte_held(int fd, uint32_t index);

bool __wrap_fipc_lock_byte_held(int fd, uint32_t index) {
    if (last_words == NULL || index != FIPC_WRITER_LOCK) {
        return __real_fipc_lock_byte_held(fd, index);
    }
    if (last_sends) {
        peers_put(last_words, 1, 100);
        peers_put(last_words, 2, 5000);
    }
    if (last_closes) {
        fipc_queue_close(last_words);
    }
    last_words = NULL;
    return false;
}

static void the_last_words_are_heard(void) {
    for (int closes = 0; closes < 2; closes++) {
        struct scene *s = scene_open(1);
        fipc_queue *w = peers_create(&s->c);
        fipc_queue *r = peers_attach(w, 0, &s->c);
        last_closes = closes;
        last_sends = true;
        last_words = w;
        peers_get(r, 1, 100);
        CHECK(last_words == NULL);
        peers_get(r, 2, 5000);
        if (closes) {
            peers_nothing(r, FIPC_CLOSED);
        }
        fipc_queue_free(r);
        fipc_queue_free(w);
        scene_close(s);
    }
    /* it had closed, in order, just before it gave its lock back */
    struct scene *s = scene_open(1);
    fipc_queue *w = peers_create(&s->c);
    fipc_queue *r = peers_attach(w, 0, &s->c);
    struct fipc_message m;
    struct fipc_error err;
    last_closes = true;
    last_sends = false;
    last_words = w;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_CLOSED);
    fipc_queue_free(r);
    fipc_queue_free(w);
    scene_close(s);
}

/* ---- a writer dies before there is a queue -------------------------------------------------- */

static void what_dies_in_creation_is_swept(void) {
    for (size_t i = 0; i < COUNT(writer_points); i++) {
        const struct point *p = &writer_points[i];
        for (int named = 0; p->outcome == NOT_BORN && named < 2; named++) {
            if (!named && strcmp(p->name, "create-linked") == 0) {
                continue; /* a memfd has no name to be linked under */
            }
            struct scene *s = scene_open(1);
            strcpy(s->dir, "/tmp/fipc-death-XXXXXX");
            CHECK(mkdtemp(s->dir) != NULL);
            char dir[64];
            strcpy(dir, s->dir);
            if (!named) {
                s->dir[0] = 0;
            }
            set_point(s, p->name, 1, "kill");
            pid_t pid = test_fork(victim_writer, s);
            CHECK_KILLED(pid);
            CHECK_EQ(fipc_load32_acquire(&s->phase), 0);
            bool begun = named && strcmp(p->name, "create-begin") != 0;
            CHECK_EQ(files_in(dir), begun);
            CHECK_EQ(fipc_sweep(dir, true, NULL, NULL), begun);
            CHECK_EQ(files_in(dir), begun);
            CHECK_EQ(fipc_sweep(dir, false, NULL, NULL), begun);
            CHECK_EQ(files_in(dir), 0);
            CHECK(rmdir(dir) == 0);
            scene_close(s);
        }
    }
}

/* ---- who sweeps and who makes, at once ------------------------------------------------------ */

static void wait_stopped(pid_t pid) {
    int status;
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
}

static void stopped_maker(void *arg) {
    struct scene *s = arg;
    s->c.shm_dir = s->dir;
    fipc_test_set(s->spec, 0);
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    fipc_store32_release(&s->phase, 1);
    peers_put(w, 1, bytes_of(s, 1));
    UNTIL(fipc_load32_acquire(&s->go));
    fipc_queue_free(w);
}

/* However long it has stopped: age decides nothing. */
static void a_maker_whose_file_is_swept_before_it_is_locked_begins_anew(void) {
    static const struct {
        const char *name;
        int swept;
    } points[] = {{"create-opened", 1}, {"create-file", 1},     {"create-locked", 0},
                  {"create-mapped", 0}, {"create-complete", 0}, {"create-linked", 0}};
    for (size_t i = 0; i < COUNT(points); i++) {
        struct scene *s = scene_open(1);
        strcpy(s->dir, "/tmp/fipc-death-XXXXXX");
        CHECK(mkdtemp(s->dir) != NULL);
        set_point(s, points[i].name, 1, "stop");
        pid_t pid = test_fork(stopped_maker, s);
        wait_stopped(pid);
        CHECK_EQ(files_in(s->dir), 1);
        CHECK_EQ(fipc_sweep(s->dir, false, NULL, NULL), points[i].swept);
        CHECK_EQ(files_in(s->dir), !points[i].swept);
        kill(pid, SIGCONT);
        UNTIL(fipc_load32_acquire(&s->phase));
        CHECK_EQ(files_in(s->dir), 1);
        fipc_queue *r = peers_attach_at(&s->address, 0, &s->c);
        peers_get(r, 1, bytes_of(s, 1));
        fipc_store32_release(&s->go, 1);
        CHECK_EXITED(pid);
        fipc_queue_free(r);
        CHECK_EQ(files_in(s->dir), 0);
        CHECK(rmdir(s->dir) == 0);
        scene_close(s);
    }
}

static void sweeper(void *arg) {
    struct scene *s = arg;
    fipc_test_set(s->spec, 0);
    CHECK_EQ(fipc_sweep(s->dir, false, NULL, NULL), 1);
}

static void a_sweeper_that_stops_hides_no_death_and_is_in_nobodys_way(void) {
    struct scene *s = scene_open(2);
    strcpy(s->dir, "/tmp/fipc-death-XXXXXX");
    CHECK(mkdtemp(s->dir) != NULL);
    set_point(s, "mid-write", 1, "kill");
    pid_t writer = test_fork(victim_writer, s);
    UNTIL(fipc_load32_acquire(&s->phase));
    fipc_queue *r = peers_attach_at(&s->address, 0, &s->c);
    kill(writer, SIGKILL);
    CHECK_KILLED(writer);
    set_point(s, "sweep-found", 1, "stop");
    pid_t pid = test_fork(sweeper, s);
    wait_stopped(pid);
    struct fipc_message m;
    struct fipc_error err;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_PEER_DIED);
    fipc_queue *late = peers_attach_at(&s->address, 1, &s->c);
    CHECK_RC(peers_recv(late, FIPC_FOREVER, &m, &err), FIPC_PEER_DIED);
    struct fipc_config next = peers_config(1);
    next.shm_dir = s->dir;
    fipc_queue *w = peers_create(&next);
    CHECK_EQ(fipc_sweep(s->dir, false, NULL, NULL), 0);
    kill(pid, SIGCONT);
    CHECK_EXITED(pid);
    CHECK_EQ(files_in(s->dir), 1);
    fipc_queue_free(w);
    fipc_queue_free(r);
    fipc_queue_free(late);
    CHECK(rmdir(s->dir) == 0);
    scene_close(s);
}

/* ---- what a dead sleeper costs -------------------------------------------------------------- */

static uint64_t wake_calls;
static uint64_t set_clock; /* the writer's: it stands, so that no probe comes in between */

static uint64_t standing_now(void *ctx) {
    (void)ctx;
    return set_clock;
}

static void counting_wake(void *ctx, const void *word) {
    wake_calls++;
    peers_fast_wake(ctx, word);
}

static int send_small(fipc_queue *w) {
    struct fipc_error err;
    return peers_send(w, "abc", 3, 0, FIPC_FOREVER, &err);
}

static void read_all(fipc_queue *r) {
    struct fipc_message m;
    struct fipc_error err;
    while (peers_recv(r, 0, &m, &err) == FIPC_OK) {
        fipc_message_clear(&m);
    }
}

/* Each wake-up is a system call, and a publish makes no other. A sleeper is killed in its sleep:
 * the next message wakes it in vain, and no later one does, whether it is evicted or not. */
static void a_sleeper_killed_in_its_sleep_costs_later_publishes_nothing(void) {
    for (int evict = 0; evict < 2; evict++) {
        struct scene *s = scene_open(2);
        s->c.n_slots = 65536;
        s->seq_bytes[0] = s->seq_bytes[1] = s->seq_bytes[2] = 100;
        struct fipc_config c = s->c;
        struct fipc_waitops counting = {standing_now, peers_fast_wait, counting_wake, NULL};
        set_clock = FIPC_S;
        c.ops = &counting;
        c.evict = evict;
        fipc_queue *w = peers_create(&c);
        s->address = peers_address(w);
        fipc_queue *other = peers_attach(w, 0, &s->c);
        s->reader = 1;
        set_point(s, "asleep", 1, "kill");
        pid_t pid = test_fork(victim_reader, s);
        CHECK_KILLED(pid); /* with its bit in the bell: announced, and not taken back */
        CHECK(fipc_load32_seqcst(&w->ring.control->data_bell) & FIPC_BELL_SLEEPER);
        wake_calls = 0;
        CHECK_RC(send_small(w), FIPC_OK);
        CHECK_EQ(wake_calls, 1); /* (for the newcomers' sake, which this call has noticed) */
        for (int i = 0; i < 50000; i++) {
            CHECK_RC(send_small(w), FIPC_OK);
        }
        CHECK_EQ(wake_calls, 1);
        set_clock += FIPC_S; /* time to look after them */
        CHECK_RC(send_small(w), evict ? FIPC_EVICTED : FIPC_PEER_DIED);
        struct fipc_error err;
        CHECK_RC(fipc_queue_evict(w, 1, &err), FIPC_OK);
        wake_calls = 0;
        for (int round = 0; round < 50; round++) {
            read_all(other);
            for (int i = 0; i < 1000; i++) {
                CHECK_RC(send_small(w), FIPC_OK);
            }
            set_clock += FIPC_S / 4; /* and probes do their part */
        }
        CHECK_EQ(wake_calls, 0);
        fipc_queue_free(other);
        fipc_queue_free(w);
        scene_close(s);
    }
}

/* ---- two million, and one --------------------------------------------------------------------- */

struct millions {
    struct fipc_config c;
    struct fipc_address address;
    fipc_a64 got, resident[2]; /* KiB: early on, and after two million */
    fipc_a32 attached, sleeps;
};

static struct millions *noted_in;

static int noting_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    fipc_store32_release(&noted_in->sleeps, 1);
    return fipc_wait_platform.wait(ctx, word, expected, deadline);
}

static uint64_t resident_kib(void) {
    char line[128];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/self/status", "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "RssAnon: %" SCNu64, &kib) == 1) {
            break;
        }
    }
    fclose(f);
    return kib;
}

static void reads_millions(void *arg) {
    struct millions *s = arg;
    const uint64_t n = TEST_SCALE(2000000);
    struct fipc_waitops ops = fipc_wait_platform;
    ops.wait = noting_wait;
    noted_in = s;
    struct fipc_config c = s->c;
    c.ops = &ops;
    fipc_queue *r = peers_attach_at(&s->address, 0, &c);
    fipc_store32_release(&s->attached, 1);
    struct fipc_message m;
    struct fipc_error err;
    for (uint64_t seq = 1; seq <= n;) {
        int rc = peers_recv(r, 0, &m, &err); /* never sleeps */
        if (rc == FIPC_TIMEOUT) {
            sched_yield();
            continue;
        }
        CHECK_RC(rc, FIPC_OK);
        CHECK_EQ(m.tag, (uint32_t)seq);
        CHECK_EQ(m.blocks[0].len, 8);
        CHECK(memcmp(m.blocks[0].ptr, &seq, 8) == 0);
        fipc_message_clear(&m);
        if (seq == n / 20) {
            fipc_store64_release(&s->resident[0], resident_kib());
        }
        fipc_store64_release(&s->got, seq++);
    }
    fipc_store64_release(&s->resident[1], resident_kib());
    CHECK_EQ(fipc_load64_relaxed(&r->sleeps), 0);
    CHECK_EQ(fipc_load32_relaxed(&s->sleeps), 0);
    uint64_t last = n + 1;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_OK);
    CHECK(m.tag == (uint32_t)last && memcmp(m.blocks[0].ptr, &last, 8) == 0);
    CHECK(fipc_load64_relaxed(&r->sleeps) > 0);
    fipc_message_clear(&m);
    fipc_queue_free(r);
}

static void two_million_to_one_that_never_sleeps_and_one_to_the_same_asleep(void) {
    const uint64_t n = TEST_SCALE(2000000);
    struct millions *s = test_share(sizeof *s);
    s->c = peers_config(1);
    s->c.n_slots = 256;
    s->c.warn_ns = FIPC_FOREVER;
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    pid_t pid = test_fork(reads_millions, s);
    UNTIL(fipc_load32_acquire(&s->attached));
    struct fipc_error err;
    for (uint64_t seq = 1; seq <= n; seq++) {
        CHECK_RC(peers_send(w, &seq, 8, (uint32_t)seq, FIPC_FOREVER, &err), FIPC_OK);
    }
    /* The bit in its bell would be too early: a message that comes just after is found before it
     * falls asleep. */
    UNTIL(fipc_load32_acquire(&s->sleeps));
    uint64_t seq = n + 1;
    CHECK_RC(peers_send(w, &seq, 8, (uint32_t)seq, FIPC_FOREVER, &err), FIPC_OK);
    CHECK_EXITED(pid);
    uint64_t before = fipc_load64_acquire(&s->resident[0]);
    uint64_t after = fipc_load64_acquire(&s->resident[1]);
    printf("          %" PRIu64 " messages; the reader's memory was %" PRIu64 " KiB after a "
           "twentieth of them, %" PRIu64 " at the end\n",
           n + 1, before, after);
    CHECK(TEST_TSAN || TEST_ASAN || after <= before + 64); /* sanitizers keep what is freed */
    fipc_queue_free(w);
    test_unshare(s, sizeof *s);
}

/* ---- slow is not dead ---------------------------------------------------------------------- */

static void a_stopped_reader_is_reported_not_declared_dead(void) {
    struct scene *s = scene_open(2);
    s->c.n_slots = 4;
    s->c.warn_ns = FIPC_S;
    set_point(s, "mid-read", 1, "stop");
    fipc_queue *w = peers_create(&s->c);
    s->address = peers_address(w);
    fipc_queue *r = peers_attach(w, 0, &s->c);
    s->reader = 1;
    pid_t pid = test_fork(victim_reader, s);
    peers_put(w, 1, 100);
    wait_stopped(pid);
    for (uint64_t seq = 2; seq <= 4; seq++) {
        peers_put(w, seq, 100);
    }
    for (uint64_t seq = 1; seq <= 4; seq++) {
        peers_get(r, seq, 100);
    }
    struct fipc_piece piece = {.ptr = "abc", .len = 3};
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    for (uint64_t i = 1; i <= 8; i++) { /* 32 slices, each with a look at its lock */
        int rc;
        while ((rc = fipc_queue_send(w, &piece, 1, 5, &call, &err)) == FIPC_INTERRUPTED) {
        }
        CHECK_RC(rc, FIPC_LONG_WAIT);
        check_named(&err, 1, pid);
        CHECK(err.waited_ns >= i * FIPC_S);
        CHECK_EQ(err.seq, 1);
    }
    kill(pid, SIGCONT);
    int rc;
    while ((rc = fipc_queue_send(w, &piece, 1, 5, &call, &err)) == FIPC_INTERRUPTED ||
           rc == FIPC_LONG_WAIT) {
    }
    CHECK_RC(rc, FIPC_OK);
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    fipc_queue_free(r);
    fipc_queue_free(w);
    scene_close(s);
}

static void a_stopped_writer_is_not_declared_dead(void) {
    struct scene *s = scene_open(1);
    set_point(s, "mid-write", 3, "stop");
    pid_t pid = test_fork(victim_writer, s);
    UNTIL(fipc_load32_acquire(&s->phase));
    fipc_queue *r = peers_attach_at(&s->address, 0, &s->c);
    fipc_store32_release(&s->go, 1);
    struct fipc_error err;
    struct fipc_message m;
    uint64_t got = 0;
    int rc;
    while ((rc = peers_recv(r, peers_fast_now(NULL) + 5 * FIPC_S, &m, &err)) == FIPC_OK) {
        got++;
        peers_check(&m, got, bytes_of(s, got));
        fipc_message_clear(&m);
    }
    CHECK_RC(rc, FIPC_TIMEOUT);
    wait_stopped(pid);
    kill(pid, SIGCONT);
    for (int i = 0; i < 5; i++) { /* what it was amid arrives whole */
        got++;
        peers_get(r, got, bytes_of(s, got));
    }
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    fipc_queue_free(r);
    scene_close(s);
}

/* ---- a replacement comes while its forerunner is buried ------------------------------------- */

static void replacement(void *arg) {
    struct scene *s = arg;
    fipc_test_set(s->spec, 0);
    fipc_queue *r = peers_attach_at(&s->address, 1, &s->c);
    fipc_store32_release(&s->phase, 1);
    struct fipc_message m;
    struct fipc_error err;
    for (int i = 0; i < 3; i++) {
        CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_OK);
        fipc_message_clear(&m);
        fipc_add32_acqrel(&s->phase, 1);
    }
    fipc_queue_free(r);
}

static void a_replacement_that_joins_during_the_eviction_is_admitted(void) {
    static const char *const points[] = {"attach-begin", "attach-locked", "attach-joined",
                                         "attach-done"};
    for (int at = 0; at < 4; at++) {
        struct scene *s = scene_open(2);
        fipc_queue *w = peers_create(&s->c);
        s->address = peers_address(w);
        fipc_queue *r = peers_attach(w, 0, &s->c);
        s->reader = 1;
        set_point(s, "mid-read", 1, "kill");
        pid_t pid = test_fork(victim_reader, s);
        struct survivors v = {.s = s, .w = w, .r = r};
        int rc;
        while ((rc = send_next(&v)) == FIPC_OK) {
        }
        CHECK_RC(rc, FIPC_PEER_DIED);
        CHECK_KILLED(pid);
        set_point(s, points[at], 1, "stop");
        fipc_store32_release(&s->phase, 0);
        pid = test_fork(replacement, s);
        wait_stopped(pid);
        struct fipc_error err;
        rc = fipc_queue_evict(w, 1, &err);
        CHECK(rc == FIPC_OK ||
              rc == FIPC_INVALID); /* once it has joined there is nobody to evict */
        kill(pid, SIGCONT);
        UNTIL(fipc_load32_acquire(&s->phase) >= 1);
        for (uint32_t i = 0; i < 3; i++) {
            CHECK_RC(send_next(&v), FIPC_OK);
            CHECK(i > 0 || state_of(w, 1) == FIPC_PEER_ACTIVE); /* it leaves after the third */
            UNTIL(fipc_load32_acquire(&s->phase) >= 2 + i);
        }
        CHECK_EXITED(pid);
        fipc_queue_free(r);
        fipc_queue_free(w);
        scene_close(s);
    }
}

static const struct test_case cases[] = {
    {"a blocked writer is told of a dead reader", a_blocked_writer_is_told_of_a_dead_reader},
    {"a busy writer is told of a dead reader", a_busy_writer_is_told_of_a_dead_reader},
    {"a blocked writer evicts a dead reader", a_blocked_writer_evicts_a_dead_reader},
    {"a busy writer evicts a dead reader", a_busy_writer_evicts_a_dead_reader},
    {"a dead reader's children keep nothing alive", a_dead_readers_children_keep_nothing_alive},
    {"a reader that dies joining ends the wait for readers",
     a_reader_that_dies_joining_ends_the_wait_for_readers},
    {"blocked readers drain and are told of a dead writer",
     blocked_readers_drain_and_are_told_of_a_dead_writer},
    {"busy readers drain and are told of a dead writer",
     busy_readers_drain_and_are_told_of_a_dead_writer},
    {"the last words are heard", the_last_words_are_heard},
    {"a dead writer's named segment has no name", a_dead_writers_named_segment_has_no_name},
    {"a dead writer's children keep nothing alive", a_dead_writers_children_keep_nothing_alive},
    {"two threads of a reader are told of a dead writer",
     two_threads_of_a_reader_are_told_of_a_dead_writer},
    {"a dead writer ends the wait for readers", a_dead_writer_ends_the_wait_for_readers},
    {"what dies in creation is swept", what_dies_in_creation_is_swept},
    {"a maker whose file is swept before it is locked begins anew",
     a_maker_whose_file_is_swept_before_it_is_locked_begins_anew},
    {"a sweeper that stops hides no death and is in nobody's way",
     a_sweeper_that_stops_hides_no_death_and_is_in_nobodys_way},
    {"a sleeper killed in its sleep costs later publishes nothing",
     a_sleeper_killed_in_its_sleep_costs_later_publishes_nothing},
    {"two million to one that never sleeps, and one to the same asleep",
     two_million_to_one_that_never_sleeps_and_one_to_the_same_asleep},
    {"a stopped reader is reported, not declared dead",
     a_stopped_reader_is_reported_not_declared_dead},
    {"a stopped writer is not declared dead", a_stopped_writer_is_not_declared_dead},
    {"a replacement that joins during the eviction is admitted",
     a_replacement_that_joins_during_the_eviction_is_admitted},
};

int main(int argc, char **argv) {
    adopts = prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
    return test_main(cases, COUNT(cases), argc > 1 ? argv[1] : NULL);
}
