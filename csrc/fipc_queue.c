/* fipc_queue.c: the life of a queue's end, who is alive, and waiting.
 *
 * Pairs in this file (those of the ring are in fipc_ring.h, those of peers in fipc_peer.c)
 *   C-set  writer_state: store in fipc_queue_close -> C-get load in writer_gone. Travels: all that
 *          the writer published before it, so that a reader that sees "closed" and then an empty
 *          slot has drained.
 *   E-set  ready: store in fipc_queue_members -> E-get load in ready_ready. Travels: everybody's
 *          state, so that who knows that all have attached sees them all.
 *
 * Relaxed in this file
 *   stop: nothing travels with it; that a sleeper sees it is the bell's doing (pair B).
 *   adopted: under the lock, which orders it; or a hint, as next_seen.
 *   granted: what the writer stored itself, or, at creation, before anyone can attach.
 *   seq: looks that change nothing (name_culprit, has_room, size); the writer's own line
 *         once its owner is gone, handed over with G or found by who sees the bell's bit.
 *   ready: what the writer stored itself.
 *   state: the writer's change by exchange hands on what it read (P-state).
 *   writer_state: nothing is read on its account (peer), or the kernel's lock orders it (writer_gone).
 *   epoch, pid: they travel with the state.
 *   messages, next_seen, attached, counter: hints and statistics.
 *   next_probe, penance, sentence, history, partial, writer_dead: hints among one end's threads.
 *   waits, sleeps, wakes: statistics.
 */
#include "fipc_queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fipc_test.h"

/* Longest spin. A wake-up across cores costs 40 to 70 us plus what the sleeper's CPU needs to
 * become fast again; a peer's pickling of a few KiB lasts about 100 us, 200 on a slow day. */
#define SPIN_DEFAULT_NS (300 * UINT64_C(1000))
/* A signal that comes during the sleep ends it. One that comes just before it doesn't: so the
 * first sleep is short, and after each the caller is asked to look for signals. Only a thread that
 * runs handlers (call->signals) does that. */
#define FIRST_CHECK_NS (50 * FIPC_MS)
#define NEXT_CHECK_NS FIPC_SLICE_NS
/* A writer that isn't blocked asks for dead readers this often. */
#define PROBE_BUSY_NS (500 * FIPC_MS)
/* A reader maps the slots at once, up to this much. */
#define PREFAULT_MAX (UINT64_C(64) << 20)
/* A chunk unused for this long gives its pages back. */
#define CHUNK_IDLE_NS (60 * FIPC_S)

static void bump(fipc_a64 *counter) {
    /* relaxed, not a read-modify-write: a statistic that may miss one is still one */
    fipc_store64_relaxed(counter, fipc_load64_relaxed(counter) + 1);
}

static uint64_t now_of(const struct fipc_queue *q) { return q->ops->now(q->ops->ctx); }

static void wake(struct fipc_queue *q, fipc_a32 *bell) {
    fipc_bell_ring(bell);
    bump(&q->wakes);
    fipc_point("bell-rung");
    if (!fipc_drop_wake()) {
        q->ops->wake(q->ops->ctx, bell);
    }
}

void fipc_queue_wake_readers(struct fipc_queue *q) { wake(q, &q->ring.control->data_bell); }
void fipc_queue_wake_writer(struct fipc_queue *q) { wake(q, &q->ring.control->room_bell); }

/* ---- guards -------------------------------------------------------------------------------- */

bool fipc_queue_forked(const fipc_queue *q) { return q->fork_generation != fipc_fork_generation(); }

int fipc_queue_usable(struct fipc_queue *q) {
    if (q->fork_generation != fipc_fork_generation()) {
        return FIPC_FORKED;
    }
    return q->closed || fipc_load32_relaxed(&q->stop) ? FIPC_SHUTDOWN : FIPC_OK;
}

int fipc_queue_enter(struct fipc_queue *q, struct fipc_call *call) {
    int rc = fipc_queue_usable(q);
    return rc != FIPC_OK ? rc : fipc_lock_take(&q->lock, q->ops, &q->stop, call->deadline);
}

void fipc_queue_leave(struct fipc_queue *q) { fipc_lock_drop(&q->lock, q->ops); }

/* ---- making and finding -------------------------------------------------------------------- */

static void *zeros(uint64_t n, uint64_t size) { return calloc((size_t)(n ? n : 1), (size_t)size); }

static void destroy(struct fipc_queue *q) {
    if (q == NULL) {
        return;
    }
    free(q->ring.counted);
    free(q->ring.chunk_until);
    free(q->dead);
    free(q->chunk_have);
    free(q->chunk_used);
    free(q->chunk_seen);
    free(q);
}

static bool prepare(struct fipc_queue *q, const struct fipc_header *h, bool is_writer) {
    q->is_writer = is_writer;
    q->fork_generation = fipc_fork_generation();
    q->part_chunk = FIPC_NO_CHUNK;
    memcpy(q->id, h->id, sizeof q->id);
    /* Half of the last waits short: spinning begins at once, and ends when five waits in a row
     * turn out long. */
    fipc_store32_relaxed(&q->history, 0x0f);
    if (!is_writer) {
        q->chunk_seen = zeros(h->n_chunks, 8);
        return q->chunk_seen != NULL;
    }
    q->ring.counted = zeros(h->n_readers, 1);
    q->dead = zeros(h->n_readers, 1);
    q->ring.chunk_until = zeros(h->n_chunks, 8);
    q->chunk_have = zeros(h->n_chunks, 8);
    q->chunk_used = zeros(h->n_chunks, 8);
    return q->ring.counted && q->dead && q->ring.chunk_until && q->chunk_have && q->chunk_used;
}

static void set_waiting(struct fipc_queue *q, const struct fipc_waitops *ops, uint32_t n_cpus,
                        int64_t spin_ns, uint64_t warn_ns) {
    q->ops = ops != NULL ? ops : &fipc_wait_platform;
    q->n_cpus = n_cpus;
    q->spin_ns = spin_ns < 0 ? SPIN_DEFAULT_NS : (uint64_t)spin_ns;
    q->warn_ns = warn_ns;
}

static int invalid(struct fipc_error *err, const char *text) {
    snprintf(err->text, sizeof err->text, "%s", text);
    return FIPC_INVALID;
}

static void clear_error(struct fipc_error *err) {
    memset(err, 0, sizeof *err);
    err->reader = -2;
}

/* Ends the segment without a word to anyone. */
static void drop_segment(struct fipc_queue *q) {
    fipc_mem_unlink(&q->seg);
    fipc_mem_unmap(&q->seg);
    fipc_point("close-unmapped");
    fipc_mem_hold_forks(true);
    fipc_mem_close(&q->seg);
    fipc_mem_unregister(&q->seg);
    fipc_mem_hold_forks(false);
}

static void give_up(struct fipc_queue *q) {
    drop_segment(q);
    destroy(q);
}

/* The layout of the segment that `c` asks for. */
static int plan_segment(const struct fipc_config *c, struct fipc_header *h,
                        struct fipc_error *err) {
    if (c->n_readers < 1 || c->n_readers > FIPC_MAX_READERS) {
        return invalid(err, "the number of readers must be 1 to 1024");
    }
    if (c->n_slots < 2 || c->n_chunks < 1 || c->chunk_bytes < FIPC_ALIGN) {
        return invalid(err, "slots must be at least 2, max_chunks 1, max_chunk_bytes 64");
    }
    memset(h, 0, sizeof *h);
    memcpy(h->id, c->id, sizeof h->id);
    h->n_readers = c->n_readers;
    h->n_slots = c->n_slots;
    h->n_chunks = c->n_chunks;
    h->chunk_bytes = c->chunk_bytes;
    h->inline_bytes = c->inline_bytes < c->chunk_bytes ? c->inline_bytes : (uint32_t)c->chunk_bytes;
    if (fipc_layout_plan(h) != FIPC_OK) {
        return invalid(err, "the sizes asked for don't fit into an address space");
    }
    return FIPC_OK;
}

int fipc_queue_plan(const struct fipc_config *c, uint64_t *at_once, uint64_t *at_most,
                    struct fipc_error *err) {
    struct fipc_header h;
    clear_error(err);
    int rc = plan_segment(c, &h, err);
    if (rc == FIPC_OK) {
        *at_once = h.off_chunks;
        *at_most = h.total_bytes;
    }
    return rc;
}

int fipc_queue_create(fipc_queue **out, const struct fipc_config *c, struct fipc_error *err) {
    clear_error(err);
    *out = NULL;
    struct fipc_header h;
    int planned = plan_segment(c, &h, err);
    if (planned != FIPC_OK) {
        return planned;
    }
    if (c->shm_dir != NULL) {
        fipc_sweep(c->shm_dir, false, NULL, NULL);
    }
    struct fipc_queue *q = calloc(1, sizeof *q);
    if (q == NULL || !prepare(q, &h, true)) {
        destroy(q);
        return FIPC_NO_MEMORY;
    }
    set_waiting(q, c->ops, c->n_cpus, c->spin_ns, c->warn_ns);
    q->evict = c->evict;
    fipc_mem_hold_forks(true);
    int rc = fipc_mem_create(&q->seg, h.total_bytes, c->shm_dir, h.id, FIPC_WRITER_LOCK, err);
    if (rc == FIPC_OK) {
        rc = fipc_mem_register(&q->seg);
    }
    fipc_mem_hold_forks(false);
    if (rc != FIPC_OK) {
        destroy(q);
        return rc;
    }
    rc = fipc_mem_reserve(&q->seg, 0, h.off_chunks, err);
    if (rc == FIPC_OK) {
        fipc_point("create-reserved");
        fipc_ring_bind(&q->ring, q->seg.base, &h);
        memcpy(q->seg.base, &h, sizeof h);
        fipc_peer_describe(&q->ring.peers[h.n_readers], c->host);
        for (uint32_t i = 0; i < h.n_readers; i++) {
            q->ring.counted[i] = 1;
            fipc_store32_relaxed(&q->ring.peers[i].granted, 1); /* from the first message on */
        }
        q->resident = h.off_chunks;
        fipc_store64_relaxed(&q->next_probe, now_of(q) + PROBE_BUSY_NS);
        rc = fipc_mem_publish(&q->seg, h.id, err);
    }
    if (rc != FIPC_OK) {
        give_up(q);
        return rc;
    }
    *out = q;
    return FIPC_OK;
}

int fipc_queue_attach(fipc_queue **out, const struct fipc_address *a, uint32_t reader,
                      const struct fipc_attach_options *o, struct fipc_error *err) {
    clear_error(err);
    *out = NULL;
    if (reader >= a->n_readers) {
        return invalid(err, "no such reader");
    }
    struct fipc_queue *q = calloc(1, sizeof *q);
    if (q == NULL) {
        return FIPC_NO_MEMORY;
    }
    set_waiting(q, o->ops, o->n_cpus, o->spin_ns, o->warn_ns);
    fipc_mem_hold_forks(true);
    int rc = fipc_mem_open(&q->seg, a, err);
    if (rc == FIPC_OK) {
        rc = fipc_mem_register(&q->seg);
    }
    fipc_mem_hold_forks(false);
    if (rc != FIPC_OK) {
        destroy(q);
        return rc;
    }
    fipc_point("attach-opened");
    struct fipc_header h;
    uint64_t file_bytes;
    rc = fipc_mem_read(&q->seg, &h, sizeof h, &file_bytes);
    if (rc == FIPC_OK && (!fipc_layout_valid(&h, file_bytes) || h.n_readers != a->n_readers ||
                          memcmp(h.id, a->id, sizeof h.id) != 0)) {
        rc = FIPC_MISMATCH;
    }
    if (rc == FIPC_MISMATCH) {
        snprintf(err->text, sizeof err->text,
                 "what is at the handle's address is not this queue: its writer (pid %lld) has "
                 "closed it, or is in another PID namespace, or was built from another version",
                 (long long)a->pid);
    }
    if (rc == FIPC_OK) {
        rc = prepare(q, &h, false) ? fipc_mem_map(&q->seg, h.total_bytes, err) : FIPC_NO_MEMORY;
    }
    if (rc == FIPC_OK) {
        fipc_point("attach-mapped");
        fipc_ring_bind(&q->ring, q->seg.base, &h);
        q->ring.reader = reader;
        fipc_mem_prefault(&q->seg, 0, h.off_chunks < PREFAULT_MAX ? h.off_chunks : PREFAULT_MAX);
        rc = fipc_peer_join(&q->ring.peers[reader], &q->seg, reader, o->host, &q->epoch, err);
    }
    if (rc != FIPC_OK) {
        give_up(q);
        return rc;
    }
    fipc_store64_relaxed(&q->next_probe, now_of(q) + FIPC_SLICE_NS);
    fipc_queue_adopt(q);                              /* at once, for the first process of a rank */
    fipc_add32_release(&q->ring.control->members, 1); /* J */
    fipc_point("attach-told");
    fipc_queue_wake_writer(q);
    fipc_point("attach-done");
    *out = q;
    return FIPC_OK;
}

void fipc_queue_address(const fipc_queue *q, struct fipc_address *out) {
    memset(out, 0, sizeof *out);
    memcpy(out->id, q->id, sizeof out->id);
    out->pid = (int64_t)getpid();
    out->start_time = fipc_process_start(out->pid);
    out->fd = q->seg.fd;
    out->n_readers = q->ring.n_readers;
    memcpy(out->path, q->seg.path, sizeof out->path);
}

/* ---- ending -------------------------------------------------------------------------------- */

void fipc_queue_shutdown(fipc_queue *q) {
    if (q->fork_generation != fipc_fork_generation()) {
        return;
    }
    /* relaxed, and so are the looks at it: nothing travels with it, and that a sleeper sees it is
     * the bell's doing (pair B) */
    fipc_store32_relaxed(&q->stop, 1);
    if (q->seg.base != NULL) {
        wake(q, q->is_writer ? &q->ring.control->room_bell : &q->ring.control->data_bell);
    }
    q->ops->wake(q->ops->ctx, &q->lock.word);
}

void fipc_queue_close(fipc_queue *q) {
    if (q->closed) {
        return;
    }
    q->closed = true;
    if (q->fork_generation == fipc_fork_generation() && q->seg.base != NULL) {
        struct fipc_ring *r = &q->ring;
        fipc_point("close-begin");
        if (q->is_writer) {
            fipc_store32_release(&r->control->writer_state, FIPC_WRITER_CLOSED); /* C-set */
            fipc_point("close-stored");
            fipc_queue_wake_readers(q);
        } else {
            /* The cursor first: the writer may stop waiting for this reader at once. */
            fipc_store64_release(&r->cursors[r->reader].seq, FIPC_CURSOR_LEFT); /* R1 */
            fipc_point("close-cursor");
            fipc_store32_release(&r->peers[r->reader].state, FIPC_PEER_LEFT); /* P-state */
            fipc_point("close-left");
            fipc_add32_release(&r->control->members, 1); /* J */
            fipc_queue_wake_writer(q);
        }
        fipc_point("close-told");
    }
    drop_segment(q);
    fipc_scatter_drop(&q->scatter);
    fipc_gather_free(&q->gather);
}

void fipc_queue_free(fipc_queue *q) {
    if (q != NULL) {
        fipc_queue_close(q);
        destroy(q);
    }
}

/* ---- who is there -------------------------------------------------------------------------- */

static void name_peer(struct fipc_queue *q, int64_t reader, struct fipc_error *err) {
    const struct fipc_peer *p = &q->ring.peers[reader < 0 ? (int64_t)q->ring.n_readers : reader];
    err->reader = (int32_t)reader;
    err->pid = (int64_t)fipc_load64_relaxed(&p->pid);
    fipc_peer_host(p, err->host);
}

/* Lets a new process of a rank read, from the next message on. */
static void grant(struct fipc_queue *q, uint32_t i, uint32_t epoch) {
    struct fipc_ring *r = &q->ring;
    /* Where no process of this rank has read anything yet, what was sent is still kept for it. */
    bool untouched = r->counted[i] && !q->dead[i] && fipc_load64_relaxed(&r->cursors[i].seq) == 0;
    if (!untouched) {
        fipc_store64_relaxed(&r->cursors[i].messages, r->messages);
        fipc_store64_relaxed(&r->cursors[i].seq, r->next - 1);
    }
    fipc_point("grant-begin");
    fipc_store32_release(&r->peers[i].granted, epoch); /* G */
    fipc_point("granted");
    r->counted[i] = 1;
    /* With nobody counted the last scan found no end of room. */
    r->slowest = r->slowest < r->next - 1 ? r->slowest : r->next - 1;
    if (q->dead[i]) {
        q->dead[i] = 0;
        q->n_dead--;
    }
}

/* JOINING -> ACTIVE. The exchange comes before the look at the epoch: what was JOINING when the
 * writer looked may be a replacement's by now, and must not become ACTIVE on the grant of the
 * process that died. True when the rank has a new process. False, with the state in *state, also
 * when it has left meanwhile: then members has changed again. */
static bool admit(struct fipc_queue *q, uint32_t i, uint32_t *state) {
    struct fipc_peer *p = &q->ring.peers[i];
    if (!fipc_cas32_acquire(&p->state, state, FIPC_PEER_ACTIVE)) { /* P-state */
        return false;
    }
    uint32_t epoch = fipc_load32_relaxed(&p->epoch);
    if (epoch == fipc_load32_relaxed(&p->granted)) {
        return false;
    }
    grant(q, i, epoch);
    return true;
}

void fipc_queue_members(struct fipc_queue *q) {
    struct fipc_ring *r = &q->ring;
    uint32_t seen = fipc_load32_acquire(&r->control->members); /* J */
    if (seen == q->members_seen) {
        return;
    }
    q->members_seen = seen;
    uint32_t alive = 0;
    uint32_t gone = 0;
    uint32_t absent = 0;
    bool news = false;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        uint32_t state = fipc_load32_acquire(&r->peers[i].state); /* P-state */
        if (state == FIPC_PEER_JOINING) {
            admit(q, i, &state);
            news = true;
        }
        if (state == FIPC_PEER_LEFT) {
            r->counted[i] = 0;
        }
        alive += state == FIPC_PEER_JOINING || state == FIPC_PEER_ACTIVE;
        gone += state == FIPC_PEER_LEFT || state == FIPC_PEER_DEAD;
        absent += state == FIPC_PEER_FREE;
    }
    q->everyone_left = gone == r->n_readers;
    fipc_store32_relaxed(&r->control->attached, alive); /* a hint for spinning */
    if (absent == 0 && !fipc_load32_relaxed(&r->control->ready)) {
        news = true;
        fipc_store32_release(&r->control->ready, 1); /* E-set */
        fipc_point("ready-stored");
        fipc_mem_unlink(&q->seg);
        fipc_point("name-gone");
    }
    if (news) { /* for wait_ready and for a replacement's grant; not at every probe */
        fipc_queue_wake_readers(q);
    }
}

static void evict(struct fipc_queue *q, uint32_t i) {
    struct fipc_ring *r = &q->ring;
    fipc_point("evict");
    r->counted[i] = 0;
    /* The owner is dead, so its line is free to be written: nobody who passes a target waits for
     * this cursor to pass it too. */
    fipc_store64_relaxed(&r->cursors[i].seq, FIPC_CURSOR_LEFT);
    fipc_point("evict-cursor");
    /* A replacement that has joined meanwhile is admitted instead. ACTIVE is the dead one's, whatever
     * the epoch says: its replacement may have died before it could say JOINING. */
    uint32_t state = FIPC_PEER_JOINING;
    if (admit(q, i, &state)) {
        fipc_queue_wake_readers(q); /* members finds nothing new any more */
    } else {
        uint32_t active = FIPC_PEER_ACTIVE;
        fipc_cas32_relaxed(&r->peers[i].state, &active, FIPC_PEER_DEAD);
    }
    fipc_point("evicted");
    if (q->dead[i]) {
        q->dead[i] = 0;
        q->n_dead--;
    }
    q->members_seen--; /* count again */
    fipc_queue_members(q);
}

static void give_back_idle_chunks(struct fipc_queue *q, uint64_t now) {
    struct fipc_ring *r = &q->ring;
    fipc_ring_scan(r); /* small messages alone don't need one for a whole round of the slots */
    for (uint32_t c = 0; c < r->n_chunks; c++) {
        if (q->chunk_have[c] > 0 && r->chunk_until[c] <= r->slowest && c != q->part_chunk &&
            now - q->chunk_used[c] > CHUNK_IDLE_NS) {
            fipc_mem_discard(&q->seg, (uint64_t)(fipc_ring_chunk(r, c) - (char *)q->seg.base),
                             q->chunk_have[c]);
            q->resident -= q->chunk_have[c];
            q->chunk_have[c] = 0;
        }
    }
}

static uint64_t cheap_now(struct fipc_queue *q) {
#ifdef CLOCK_MONOTONIC_COARSE
    if (q->ops == &fipc_wait_platform) { /* a few ns instead of 30; 4 ms coarse */
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
        return (uint64_t)t.tv_sec * FIPC_S + (uint64_t)t.tv_nsec;
    }
#endif
    return now_of(q);
}

bool fipc_queue_probe_due(struct fipc_queue *q) {
    return cheap_now(q) >= fipc_load64_relaxed(&q->next_probe);
}

static int probe_readers(struct fipc_queue *q, struct fipc_error *err) {
    struct fipc_ring *r = &q->ring;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        if (!r->counted[i] || q->dead[i] || !fipc_peer_dead(&r->peers[i], &q->seg, i)) {
            continue;
        }
        name_peer(q, i, err);
        q->dead[i] = 1;
        q->n_dead++;
        fipc_point("found-dead");
        if (q->evict) {
            evict(q, i);
            return FIPC_EVICTED;
        }
        return FIPC_PEER_DIED;
    }
    return FIPC_OK;
}

int fipc_queue_health(struct fipc_queue *q, struct fipc_error *err) {
    fipc_queue_members(q);
    if (q->everyone_left) {
        return FIPC_CLOSED;
    }
    uint64_t now = cheap_now(q);
    if (now >= fipc_load64_relaxed(&q->next_probe)) {
        fipc_store64_relaxed(&q->next_probe, now + PROBE_BUSY_NS);
        give_back_idle_chunks(q, now);
        /* A reader that is killed in the middle of leaving has not told. */
        q->members_seen--;
        fipc_queue_members(q);
        if (q->everyone_left) {
            return FIPC_CLOSED;
        }
        int rc = probe_readers(q, err);
        if (rc != FIPC_OK) {
            fipc_store64_relaxed(&q->next_probe, now); /* others may have died too */
            return rc;
        }
    }
    if (q->n_dead > 0) {
        for (uint32_t i = 0; i < q->ring.n_readers; i++) {
            if (q->dead[i]) {
                name_peer(q, i, err);
                return FIPC_PEER_DIED;
            }
        }
    }
    return FIPC_OK;
}

int fipc_queue_evict(fipc_queue *q, uint32_t reader, struct fipc_error *err) {
    clear_error(err);
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    if (!q->is_writer || reader >= q->ring.n_readers) {
        return invalid(err, "no such reader");
    }
    int rc = fipc_queue_enter(q, &call);
    if (rc != FIPC_OK) {
        return rc;
    }
    fipc_queue_members(q);
    if (!q->ring.counted[reader]) {
        rc = FIPC_OK; /* it isn't waited for already */
    } else if (q->dead[reader] || fipc_peer_dead(&q->ring.peers[reader], &q->seg, reader)) {
        evict(q, reader);
    } else {
        rc = invalid(err, "the reader is not dead: it has not attached, or its process lives");
    }
    fipc_queue_leave(q);
    return rc;
}

/* A reader's reason to stop waiting. Drained means: looked at after the reason was seen. */
static int writer_gone(struct fipc_queue *q, bool drain, uint64_t now, struct fipc_error *err) {
    struct fipc_control *c = q->ring.control;
    int reason = FIPC_OK;
    if (fipc_load32_acquire(&c->writer_state) == FIPC_WRITER_CLOSED) { /* C-get */
        reason = FIPC_CLOSED;
    } else if (fipc_load32_relaxed(&q->writer_dead) || now >= fipc_load64_relaxed(&q->next_probe)) {
        fipc_store64_relaxed(&q->next_probe, now + FIPC_SLICE_NS);
        if (!fipc_lock_byte_held(q->seg.lock_fd, FIPC_WRITER_LOCK)) {
            /* it gives its lock back only after it has stored that it closed */
            bool closed = fipc_load32_relaxed(&c->writer_state) == FIPC_WRITER_CLOSED;
            fipc_store32_relaxed(&q->writer_dead, !closed);
            reason = closed ? FIPC_CLOSED : FIPC_PEER_DIED;
        }
    }
    if (reason == FIPC_OK || (drain && fipc_queue_reader_ready(q, true))) {
        return FIPC_OK;
    }
    name_peer(q, -1, err);
    return reason;
}

/* A reason, other than what is waited for, to end a wait. */
static int look(struct fipc_queue *q, bool drain, uint64_t now, struct fipc_error *err) {
    if (fipc_load32_relaxed(&q->stop)) {
        return FIPC_SHUTDOWN;
    }
    if (!q->is_writer) {
        return writer_gone(q, drain, now, err);
    }
    int rc = fipc_queue_health(q, err);
    /* a blocked writer asks more often than a busy one: in its next slice again */
    uint64_t soon = now + FIPC_SLICE_NS;
    if (fipc_load64_relaxed(&q->next_probe) > soon) {
        fipc_store64_relaxed(&q->next_probe, soon);
    }
    return rc;
}

/* ---- waiting ------------------------------------------------------------------------------- */

bool fipc_queue_adopt(struct fipc_queue *q) {
    struct fipc_ring *r = &q->ring;
    if (fipc_load32_relaxed(&q->adopted)) { /* relaxed: the lock orders it */
        return true;
    }
    if (fipc_load32_acquire(&r->peers[r->reader].granted) != q->epoch) { /* G */
        return false;
    }
    fipc_ring_seek(r, fipc_load64_relaxed(&r->cursors[r->reader].seq) + 1);
    r->messages = fipc_load64_relaxed(&r->cursors[r->reader].messages);
    fipc_store32_relaxed(&q->adopted, 1);
    return true;
}

bool fipc_queue_reader_ready(struct fipc_queue *q, bool parked) {
    struct fipc_ring *r = &q->ring;
    if (!parked && fipc_load32_relaxed(&q->adopted)) {
        return fipc_ring_readable(r);
    }
    /* Without the lock, which another thread may hold that has seen no grant yet and will sleep, too:
     * who receives takes the grant over, with G. (relaxed: after a grant the bell is rung, and
     * pair B brings the cursor along.) */
    if (fipc_load32_relaxed(&r->peers[r->reader].granted) != q->epoch) {
        return false;
    }
    return fipc_ring_readable_parked(r);
}

static bool room(const struct fipc_queue *q, uint64_t slots) {
    const struct fipc_ring *r = &q->ring;
    return fipc_ring_slots_free(r) >= slots &&
           (!q->want_chunk || fipc_ring_chunk_free(r, NULL) != FIPC_NO_CHUNK);
}

bool fipc_queue_room_ready(struct fipc_queue *q, bool parked) {
    struct fipc_ring *r = &q->ring;
    if (room(q, q->want_slots)) { /* as of the last scan: no shared line is touched */
        return true;
    }
    if (parked) { /* the spinning is over: whatever there is will do */
        fipc_ring_scan_parked(r);
        return room(q, 1);
    }
    fipc_ring_scan(r);
    return room(q, q->want_slots);
}

int fipc_queue_wait_room(struct fipc_queue *q, bool chunk, struct fipc_call *call,
                         struct fipc_error *err) {
    struct fipc_ring *r = &q->ring;
    q->want_chunk = chunk;
    q->want_slots = 1;
    /* For a chunk always look: which was freed last matters, and the last scan may be old. */
    if (!chunk && room(q, 1)) {
        return FIPC_OK;
    }
    fipc_ring_scan(r);
    if (room(q, 1)) {
        return FIPC_OK;
    }
    if (!fipc_ring_slot_free(r) && call->deadline != 0) {
        /* While it spins it goes on only when it has a batch of slots: taking each as soon as it
         * is read would make every message wait for a cursor's line to come over. */
        q->want_slots = r->n_slots / 8 > 1 ? r->n_slots / 8 : 1;
    }
    int rc = fipc_queue_wait_for(q, call, fipc_queue_room_ready, true, err);
    if (rc == FIPC_OK) { /* room there is also when the last reader has left */
        fipc_queue_members(q);
        rc = q->everyone_left ? FIPC_CLOSED : FIPC_OK;
    }
    return rc;
}

/* The cursor worth waking the writer for. A full ring is worth it only when a quarter is free
 * again: a wake-up for each slot would cost more than the slot's message. */
static uint64_t room_target(const struct fipc_queue *q) {
    const struct fipc_ring *r = &q->ring;
    if (fipc_ring_slot_free(r)) {
        return fipc_ring_chunk_oldest(r);
    }
    uint64_t batch = r->n_slots / 4 > 0 ? r->n_slots / 4 : 1;
    return r->next - 1 - r->n_slots + batch;
}

bool fipc_queue_may_spin(const struct fipc_queue *q) {
    return q->spin_ns > 0 && fipc_load32_relaxed(&q->ring.control->attached) + 1 <= q->n_cpus;
}

static uint64_t spin_budget(const struct fipc_queue *q) {
    bool pays = __builtin_popcount(fipc_load32_relaxed(&q->history) & 0xff) >= 4;
    return pays && fipc_queue_may_spin(q) ? q->spin_ns : 0;
}

/* A spin in vain, and then what was waited for comes as soon as this thread sleeps: the peer had no
 * CPU while this one spun on it (both were put on one, say, and others are busy). Then it pays to
 * sleep at once, for a number of waits that doubles with every such spin and begins anew after one
 * that was of use. */
#define SOON_NS (200 * UINT64_C(1000)) /* a wake-up, and the copy of a message */
#define SENTENCE_FIRST 8u
#define SENTENCE_MAX 1024u

static void repent(struct fipc_queue *q) {
    uint32_t last = fipc_load32_relaxed(&q->sentence);
    uint32_t sentence = last == 0 ? SENTENCE_FIRST : last < SENTENCE_MAX ? 2 * last : last;
    fipc_store32_relaxed(&q->sentence, sentence);
    fipc_store32_relaxed(&q->penance, sentence);
}

static void learn(struct fipc_queue *q, uint64_t waited) {
    uint32_t bit = waited < q->spin_ns;
    fipc_store32_relaxed(&q->history, (fipc_load32_relaxed(&q->history) << 1 | bit) & 0xff);
}

static void start(struct fipc_queue *q, struct fipc_call *call, uint64_t now) {
    if (call->begun == 0) {
        call->begun = now;
        call->next_check = call->signals ? now + FIRST_CHECK_NS : FIPC_FOREVER;
        call->next_warning = q->warn_ns < FIPC_FOREVER - now ? now + q->warn_ns : FIPC_FOREVER;
    }
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool spin(struct fipc_queue *q, fipc_ready_fn ready, uint64_t end) {
    /* The writer waits for room while readers work: each look takes their cursors' lines away. */
    const uint32_t pauses = q->is_writer ? 8 : 1;
    for (uint32_t i = 1;; i++) {
        for (uint32_t k = 0; k < pauses; k++) {
            fipc_pause();
        }
        if (ready(q, false)) {
            return true;
        }
        if (i % 16 == 0 && (fipc_load32_relaxed(&q->stop) || now_of(q) >= end)) {
            return false;
        }
    }
}

/* Who keeps this wait waiting: the writer, or the slowest reader. */
static void name_culprit(struct fipc_queue *q, struct fipc_call *call, uint64_t now,
                         struct fipc_error *err) {
    int64_t who = -1;
    if (q->is_writer) {
        struct fipc_ring *r = &q->ring;
        uint64_t slowest = FIPC_CURSOR_LEFT;
        for (uint32_t i = 0; i < r->n_readers; i++) {
            uint64_t c = fipc_load64_relaxed(&r->cursors[i].seq);
            if (r->counted[i] && c < slowest) {
                slowest = c;
                who = i;
            }
        }
        err->seq = slowest + 1;
    } else {
        err->seq = fipc_load64_relaxed(&q->ring.next_seen); /* without the lock */
    }
    name_peer(q, who, err);
    err->waited_ns = now - call->begun;
}

static int waited(struct fipc_queue *q, struct fipc_call *call, uint64_t now) {
    if (call->spun && now - call->since < q->spin_ns + SOON_NS) {
        repent(q);
    }
    learn(q, now - call->since);
    call->since = 0;
    return FIPC_OK;
}

int fipc_queue_wait_for(struct fipc_queue *q, struct fipc_call *call, fipc_ready_fn ready,
                        bool may_warn, struct fipc_error *err) {
    if (ready(q, false)) {
        call->since = 0;
        return FIPC_OK;
    }
    fipc_a32 *bell = q->is_writer ? &q->ring.control->room_bell : &q->ring.control->data_bell;
    uint64_t now = now_of(q);
    start(q, call, now);
    uint64_t budget = 0;
    if (call->since == 0) { /* not after a look for signals: what was spun is spun */
        call->since = now;
        bump(&q->waits);
        call->spun = false;
        budget = call->deadline > now ? spin_budget(q) : 0;
        uint32_t penance = fipc_load32_relaxed(&q->penance);
        if (penance > 0) {
            fipc_store32_relaxed(&q->penance, penance - 1);
            budget = 0;
        }
    }
    if (budget > 0) {
        if (spin(q, ready, least(now + budget, call->deadline))) {
            fipc_store32_relaxed(&q->sentence, 0);
            return waited(q, call, now_of(q));
        }
        call->spun = true;
    }
    for (;;) {
        if (q->is_writer) {
            /* relaxed: pair M orders it before the bit that makes readers look at it */
            fipc_store64_relaxed(&q->ring.control->room_target, room_target(q));
        }
        /* A poll doesn't announce itself: that would cost the other side a wake-up. */
        const bool poll = call->deadline == 0;
        uint32_t seen = poll ? 0 : fipc_bell_park(bell); /* D, M */
        now = now_of(q);
        if (ready(q, true)) {
            return waited(q, call, now);
        }
        int rc = look(q, ready == fipc_queue_reader_ready, now, err);
        if (rc != FIPC_OK) {
            return rc;
        }
        if (ready(q, true)) { /* look() may have granted, evicted or noticed something */
            return waited(q, call, now);
        }
        if (now >= call->deadline) {
            if (now - call->since >= q->spin_ns) {
                learn(q, now - call->since);
            }
            name_culprit(q, call, now, err);
            return FIPC_TIMEOUT;
        }
        if (now >= call->next_check) {
            call->next_check = now + NEXT_CHECK_NS;
            return FIPC_INTERRUPTED;
        }
        if (may_warn && now >= call->next_warning) {
            call->next_warning = now + q->warn_ns;
            name_culprit(q, call, now, err);
            return FIPC_LONG_WAIT;
        }
        uint64_t end = least(least(call->deadline, now + FIPC_SLICE_NS), call->next_check);
        bump(&q->sleeps);
        fipc_point("asleep");
        rc = q->ops->wait(q->ops->ctx, bell, seen, end);
        if (ready(q, false)) {
            return waited(q, call, now_of(q));
        }
        if (rc == FIPC_INTERRUPTED) {
            return rc;
        }
    }
}

static bool ready_ready(struct fipc_queue *q, bool parked) {
    (void)parked; /* whoever makes it ready rings unconditionally */
    if (q->is_writer) {
        fipc_queue_members(q);
    } else if (fipc_load32_relaxed(&q->ring.peers[q->ring.reader].granted) != q->epoch) {
        return false; /* relaxed: it takes the grant over with G when it reads */
    }
    return fipc_load32_acquire(&q->ring.control->ready) != 0; /* E-get */
}

int fipc_queue_wait_ready(fipc_queue *q, struct fipc_call *call, struct fipc_error *err) {
    clear_error(err);
    if (!q->is_writer) {
        int rc = fipc_queue_usable(q);
        return rc != FIPC_OK ? rc : fipc_queue_wait_for(q, call, ready_ready, true, err);
    }
    int rc = fipc_queue_enter(q, call);
    if (rc == FIPC_OK) {
        rc = fipc_queue_health(q, err);
        rc = rc != FIPC_OK ? rc : fipc_queue_wait_for(q, call, ready_ready, true, err);
        fipc_queue_leave(q);
    }
    return rc;
}

int fipc_queue_wait_readable(fipc_queue *q, struct fipc_call *call, struct fipc_error *err) {
    clear_error(err);
    int rc = fipc_queue_usable(q);
    if (rc != FIPC_OK) {
        return rc;
    }
    /* A reader that is merely idle has nothing to report; one that has half a message has. */
    return fipc_queue_wait_for(q, call, fipc_queue_reader_ready,
                               fipc_load32_relaxed(&q->partial) != 0, err);
}

#define WAIT_ANY_ON_STACK 128

static bool any_readable(fipc_queue *const *queues, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (fipc_queue_reader_ready(queues[i], false) || fipc_load32_relaxed(&queues[i]->stop)) {
            return true;
        }
    }
    return false;
}

int fipc_queue_wait_any(fipc_queue *const *queues, uint32_t n, struct fipc_call *call,
                        uint8_t *ready) {
    const fipc_a32 *few[WAIT_ANY_ON_STACK];
    uint32_t few_seen[WAIT_ANY_ON_STACK];
    const fipc_a32 **bells = few;
    uint32_t *seen = few_seen;
    if (n > WAIT_ANY_ON_STACK) {
        bells = malloc(n * sizeof *bells);
        seen = malloc(n * sizeof *seen);
    }
    int rc = bells == NULL || seen == NULL ? FIPC_NO_MEMORY : FIPC_TIMEOUT;
    struct fipc_queue *first = queues[0];
    const struct fipc_waitops *ops = first->ops;
    const uint64_t t0 = ops->now(ops->ctx);
    start(first, call, t0);
    bump(&first->waits);
    /* n writers and this process; the first queue's memory of waits stands for all */
    bool spinning = n + 1 <= first->n_cpus && spin_budget(first) > 0;
    for (uint32_t pass = 0; rc == FIPC_TIMEOUT; pass++) {
        uint64_t now = ops->now(ops->ctx);
        if (spinning && pass > 0) {
            uint64_t end = least(t0 + first->spin_ns, call->deadline);
            while (now < end && !any_readable(queues, n)) {
                fipc_pause();
                now = ops->now(ops->ctx);
            }
            spinning = false;
        }
        uint32_t n_ready = 0;
        for (uint32_t i = 0; i < n; i++) {
            struct fipc_queue *q = queues[i];
            struct fipc_error why;
            bells[i] = &q->ring.control->data_bell;
            /* look first without announcing: a bell that is announced costs its writer a wake-up */
            seen[i] = pass == 0 ? 0 : fipc_bell_park(&q->ring.control->data_bell); /* D */
            /* a queue whose next call would raise counts as ready: the caller wants to know */
            ready[i] = fipc_queue_usable(q) != FIPC_OK || fipc_queue_reader_ready(q, true) ||
                       look(q, true, now, &why) != FIPC_OK;
            n_ready += ready[i];
        }
        if (n_ready > 0) {
            if (pass > 0) {
                learn(first, now - t0);
            }
            rc = FIPC_OK;
        } else if (now >= call->deadline) {
            break;
        } else if (now >= call->next_check) {
            call->next_check = now + NEXT_CHECK_NS;
            rc = FIPC_INTERRUPTED;
        } else if (pass > 0) {
            bump(&first->sleeps);
            uint64_t end = least(least(call->deadline, now + FIPC_SLICE_NS), call->next_check);
            if (fipc_wait_words(ops, bells, seen, n, end) == FIPC_INTERRUPTED) {
                rc = FIPC_INTERRUPTED;
            }
        }
    }
    if (n > WAIT_ANY_ON_STACK) {
        free(bells);
        free(seen);
    }
    return rc;
}

/* ---- telling ------------------------------------------------------------------------------- */

int fipc_queue_peer(fipc_queue *q, int64_t reader, struct fipc_peer_info *out) {
    struct fipc_ring *r = &q->ring;
    memset(out, 0, sizeof *out);
    if (q->seg.base == NULL || reader >= (int64_t)r->n_readers || reader < -1) {
        return FIPC_INVALID;
    }
    const struct fipc_peer *p = &r->peers[reader < 0 ? (int64_t)r->n_readers : reader];
    uint32_t state = fipc_load32_acquire(&p->state); /* P-state */
    out->pid = (int64_t)fipc_load64_relaxed(&p->pid);
    fipc_peer_host(p, out->host);
    if (reader < 0) {
        bool closed = fipc_load32_relaxed(&r->control->writer_state) == FIPC_WRITER_CLOSED;
        out->state = closed ? FIPC_PEER_LEFT : FIPC_PEER_ACTIVE;
        return FIPC_OK;
    }
    out->state = state <= FIPC_PEER_DEAD ? (enum fipc_peer_state)state : FIPC_PEER_DEAD;
    if (q->is_writer && q->dead[reader]) {
        out->state = FIPC_PEER_DEAD;
    }
    out->epoch = fipc_load32_relaxed(&p->epoch);
    uint64_t sent = fipc_load64_relaxed(&r->control->messages);
    uint64_t read = fipc_load64_relaxed(&r->cursors[reader].messages);
    out->lag = sent > read ? sent - read : 0;
    return FIPC_OK;
}

void fipc_queue_stats(fipc_queue *q, struct fipc_stats *out) {
    *out = (struct fipc_stats){
        .messages = q->ring.messages,
        .bytes = q->bytes,
        .bytes_copied = q->bytes_copied,
        .fragments = q->fragments,
        .waits = fipc_load64_relaxed(&q->waits),
        .sleeps = fipc_load64_relaxed(&q->sleeps),
        .wakes = fipc_load64_relaxed(&q->wakes),
        .spin_ns = q->seg.base != NULL ? spin_budget(q) : 0,
        .segment_bytes = q->seg.bytes,
        .resident_bytes = q->resident,
    };
}

uint64_t fipc_queue_size(fipc_queue *q) {
    struct fipc_ring *r = &q->ring;
    if (q->seg.base == NULL) {
        return 0;
    }
    if (!q->is_writer) {
        uint64_t sent = fipc_load64_relaxed(&r->control->messages);
        return sent > r->messages ? sent - r->messages : 0;
    }
    uint64_t most = 0;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        uint64_t read = fipc_load64_relaxed(&r->cursors[i].messages);
        uint64_t left = fipc_load64_relaxed(&r->cursors[i].seq) == FIPC_CURSOR_LEFT;
        if (r->counted[i] && !left && r->messages - read > most) {
            most = r->messages - read;
        }
    }
    return most;
}

bool fipc_queue_readable(fipc_queue *q) {
    return !q->is_writer && q->seg.base != NULL && fipc_queue_reader_ready(q, false);
}

bool fipc_queue_has_room(fipc_queue *q) {
    if (!q->is_writer || q->seg.base == NULL) {
        return false;
    }
    /* without the lock: a look at the cursors that changes nothing */
    const struct fipc_ring *r = &q->ring;
    uint64_t published = fipc_load64_relaxed(&r->next_seen) - 1;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        uint64_t c = fipc_load64_relaxed(&r->cursors[i].seq);
        if (r->counted[i] && c < published && published - c >= r->n_slots) {
            return false;
        }
    }
    return true;
}

uint32_t fipc_queue_n_readers(const fipc_queue *q) { return q->ring.n_readers; }
uint64_t fipc_queue_chunk_bytes(const fipc_queue *q) { return q->ring.chunk_bytes; }

const char *fipc_status_text(int status) {
    switch (status) {
    case FIPC_OK: return "ok";
    case FIPC_TIMEOUT: return "timed out";
    case FIPC_WOULD_BLOCK: return "would block";
    case FIPC_CLOSED: return "the other side has closed";
    case FIPC_SHUTDOWN: return "shut down";
    case FIPC_INTERRUPTED: return "interrupted";
    case FIPC_LONG_WAIT: return "waiting for long";
    case FIPC_EVICTED: return "a dead reader was evicted";
    case FIPC_PEER_DIED: return "a peer died";
    case FIPC_NO_SPACE: return "not enough room for shared memory";
    case FIPC_MISMATCH: return "not this queue's segment";
    case FIPC_CORRUPT: return "a frame that can't be right";
    case FIPC_SYSTEM: return "a system call failed";
    case FIPC_NO_MEMORY: return "out of memory";
    case FIPC_INVALID: return "invalid argument";
    case FIPC_RANK_TAKEN: return "the rank is taken";
    case FIPC_REENTRANT: return "re-entrant use";
    case FIPC_FORKED: return "belongs to the parent process";
    case FIPC_GONE: return "the segment is gone";
    default: return "unknown status";
    }
}
