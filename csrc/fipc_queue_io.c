/* fipc_queue_io.c: sending and receiving.
 *
 * A message goes inline into one slot, or into chunks. A chunk is published in parts of about
 * 1 MiB, each with a slot of its own, so that the reader copies one part out while the writer
 * copies the next in; all parts of a chunk belong to one message. The first slot of a message
 * says FIRST, the last LAST; a FIRST where a LAST was due voids the unfinished message before
 * it, so a message can be abandoned at any point without a further slot.
 */
#include "fipc_queue.h"

#include <string.h>

#include "fipc_test.h"

/* A long message that never has to wait looks for signals after so many parts, about 16 MiB. */
#define PARTS_BETWEEN_SIGNALS 16

static void no_error(struct fipc_error *err) {
    memset(err, 0, sizeof *err);
    err->reader = -2;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t divide_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

static uint64_t chunk_offset(const struct fipc_queue *q, uint32_t c) {
    return (uint64_t)(fipc_ring_chunk(&q->ring, c) - (char *)q->seg.base);
}

/* ---- the writer ---------------------------------------------------------------------------- */

/* Pages for the first `need` bytes of the chunk, before anything touches them. */
static int have_pages(struct fipc_queue *q, uint32_t c, uint64_t need, struct fipc_error *err) {
    uint64_t have = q->chunk_have[c];
    if (need <= have) {
        return FIPC_OK;
    }
    /* in steps of 256 KiB: growing messages shouldn't mean a system call each */
    const uint64_t step = UINT64_C(256) << 10;
    uint64_t want = least(divide_up(need, step) * step, q->ring.chunk_stride);
    int rc = fipc_mem_reserve(&q->seg, chunk_offset(q, c) + have, want - have, err);
    if (rc == FIPC_OK) {
        fipc_point("pages-reserved");
        q->resident += want - have;
        q->chunk_have[c] = want;
    }
    return rc;
}

static void publish(struct fipc_queue *q, const struct fipc_record *record) {
    fipc_point("before-publish");
    bool ring = fipc_ring_publish(&q->ring, record);
    fipc_point("published");
    q->fragments++;
    if (ring) {
        fipc_queue_wake_readers(q);
    }
}

static void count_sent(struct fipc_queue *q, uint64_t total) {
    q->bytes += total;
    q->bytes_copied += total;
}

static uint32_t shape_flags(const struct fipc_gather *g) { return g->bare ? FIPC_SLOT_BARE : 0; }

static void send_inline(struct fipc_queue *q, struct fipc_gather *g, uint32_t tag) {
    struct fipc_record record = {
        .len = g->total,
        .total = g->total,
        .flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | shape_flags(g),
        .tag = tag,
    };
    fipc_ring_begin(&q->ring);
    fipc_point("mid-write");
    fipc_gather_copy(g, fipc_ring_inline(fipc_ring_slot(&q->ring)), g->total);
    publish(q, &record);
    count_sent(q, g->total);
}

/* For the calls that never wait. (Clearing *err costs as much as they do: not without need.) */
static int enter_briefly(struct fipc_queue *q, struct fipc_error *err) {
    int rc = fipc_queue_usable(q);
    if (rc == FIPC_OK && !fipc_lock_try(&q->lock)) {
        rc = fipc_lock_mine(&q->lock) ? FIPC_REENTRANT : FIPC_WOULD_BLOCK;
    }
    if (rc != FIPC_OK) {
        no_error(err);
    }
    return rc;
}

int fipc_queue_send_inline(fipc_queue *q, const struct fipc_piece *pieces, uint64_t n, uint32_t tag,
                           struct fipc_error *err) {
    int rc = enter_briefly(q, err);
    if (rc != FIPC_OK) {
        return rc;
    }
    struct fipc_gather g;
    rc = FIPC_WOULD_BLOCK;
    /* Whatever is unusual goes the long way: newcomers, the dead, the moment to probe. (relaxed: the
     * long way looks again with J.) */
    if (fipc_load32_relaxed(&q->ring.control->members) == q->members_seen && q->n_dead == 0 &&
        !q->everyone_left && !fipc_queue_probe_due(q)) {
        int init = fipc_gather_init(&g, pieces, n);
        if (init != FIPC_OK) {
            no_error(err);
            rc = init;
        } else {
            if (g.total <= least(q->ring.inline_bytes, FIPC_BRIEF_BYTES) &&
                (fipc_ring_slot_free(&q->ring) ||
                 (fipc_ring_scan(&q->ring), fipc_ring_slot_free(&q->ring)))) {
                send_inline(q, &g, tag);
                rc = FIPC_OK;
            }
            fipc_gather_free(&g);
        }
    }
    fipc_queue_leave(q);
    return rc;
}

/* How much of a chunk to publish at once, given the slots that are free now: what can go without
 * waiting must not wait for slots only because it was cut small. */
static uint64_t choose_part(const struct fipc_queue *q, uint64_t total) {
    const struct fipc_ring *r = &q->ring;
    uint64_t chunks = divide_up(total, r->chunk_bytes);
    uint64_t in_chunk = least(total, r->chunk_bytes);
    uint64_t parts = least(fipc_ring_slots_free(r) / chunks, FIPC_PARTS_MAX);
    uint64_t part = divide_up(in_chunk, parts > 0 ? parts : 1);
    part = part > FIPC_PART_BYTES ? part : FIPC_PART_BYTES;
    return divide_up(part, FIPC_ALIGN) * FIPC_ALIGN;
}

/* A poll either sends the whole message or nothing: looks whether all of it has room now. */
static bool whole_has_room(struct fipc_queue *q, uint64_t total) {
    uint32_t n_free;
    fipc_ring_scan(&q->ring);
    fipc_ring_chunk_free(&q->ring, &n_free);
    uint64_t chunks = divide_up(total, q->ring.chunk_bytes);
    return n_free >= chunks && fipc_ring_slots_free(&q->ring) >= chunks;
}

static uint64_t bytes_ahead(const struct fipc_queue *q) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < FIPC_PARTS_KNOWN; i++) {
        sum += q->parts[i].seq > q->ring.slowest ? q->parts[i].bytes : 0;
    }
    return sum;
}

/* Lets readers that are busy reading come close before more is written. A writer that runs ahead
 * through all the chunks makes both sides work from main memory, at less than half of the speed
 * that they reach in the cache; and it gains nothing, since it then waits for a chunk. Readers that
 * make no progress for the length of a spin are left behind: they have other things to do, and
 * chunks are there to be filled meanwhile. */
static void keep_close(struct fipc_queue *q, uint64_t deadline) {
    fipc_ring_scan(&q->ring);
    uint64_t ahead = bytes_ahead(q);
    if (ahead == 0) {
        q->aloof = false;
    }
    if (ahead <= FIPC_AHEAD_BYTES || q->aloof || deadline == 0 || !fipc_queue_may_spin(q)) {
        return;
    }
    uint64_t seen = q->ring.slowest;
    uint64_t since = q->ops->now(q->ops->ctx);
    for (uint32_t i = 1; bytes_ahead(q) > FIPC_AHEAD_BYTES; i++) {
        fipc_pause();
        if (i % 16 != 0) {
            continue;
        }
        fipc_ring_scan(&q->ring);
        uint64_t now = q->ops->now(q->ops->ctx);
        if (q->ring.slowest != seen) {
            seen = q->ring.slowest;
            since = now;
        } else if (now - since > q->spin_ns) {
            q->aloof = true;
            return;
        }
        if (now >= deadline || fipc_load32_relaxed(&q->stop)) {
            return;
        }
    }
}

/* Where the next part goes: where one of this message's earlier parts was that everybody has read,
 * for it is still in the cache; else behind them. UINT64_MAX: the chunk is full. */
static uint64_t place_part(struct fipc_queue *q, uint64_t n) {
    for (uint32_t i = 1; i <= FIPC_PARTS_KNOWN && i <= q->n_parts; i++) {
        struct fipc_part *part = &q->parts[(q->n_parts - i) % FIPC_PARTS_KNOWN];
        if (part->seq < q->part_first) {
            break;
        }
        if (part->seq <= q->ring.slowest && part->bytes >= n && part->chunk == q->part_chunk) {
            part->bytes = 0;
            return part->offset;
        }
    }
    uint64_t end = q->part_used;
    if (n > q->ring.chunk_bytes - end) {
        return UINT64_MAX;
    }
    q->part_used += n;
    return end;
}

static int send_part(struct fipc_queue *q, uint32_t tag, struct fipc_call *call,
                     struct fipc_error *err) {
    struct fipc_ring *r = &q->ring;
    struct fipc_gather *g = &q->gather;
    const uint64_t left = g->total - g->done;
    keep_close(q, call->deadline);
    int rc = fipc_queue_wait_room(q, q->part_chunk == FIPC_NO_CHUNK, call, err);
    if (rc != FIPC_OK) {
        return rc;
    }
    uint64_t n = least(q->part_bytes, left);
    uint64_t offset = UINT64_MAX;
    if (q->part_chunk != FIPC_NO_CHUNK) {
        offset = place_part(q, n);
        if (offset == UINT64_MAX && q->part_used < r->chunk_bytes) {
            n = r->chunk_bytes - q->part_used; /* what is left of the chunk */
            offset = place_part(q, n);
        }
        if (offset == UINT64_MAX) {
            q->part_chunk = FIPC_NO_CHUNK;
            return FIPC_OK; /* once more, with another chunk */
        }
    } else {
        q->part_chunk = fipc_ring_chunk_free(r, NULL);
        q->part_used = 0;
        q->part_first = r->next;
        n = least(n, r->chunk_bytes);
        offset = place_part(q, n);
    }
    rc = have_pages(q, q->part_chunk, offset + n, err);
    if (rc != FIPC_OK) {
        return rc;
    }
    struct fipc_record record = {
        .len = n,
        .total = g->total,
        .offset = offset,
        .flags = (g->done == 0 ? FIPC_SLOT_FIRST : 0u) | (n == left ? FIPC_SLOT_LAST : 0u) |
                 FIPC_SLOT_CHUNK | shape_flags(g),
        .chunk = q->part_chunk,
        .tag = tag,
    };
    char *to = fipc_ring_chunk(r, q->part_chunk) + offset;
    fipc_ring_begin(r);
    fipc_gather_copy(g, to, n / 2);
    fipc_point("mid-write");
    fipc_gather_copy(g, to + n / 2, n - n / 2);
    q->parts[q->n_parts++ % FIPC_PARTS_KNOWN] =
        (struct fipc_part){.seq = r->next, .offset = offset, .bytes = n, .chunk = q->part_chunk};
    publish(q, &record);
    call->midway = true;
    q->chunk_used[q->part_chunk] = q->ops->now(q->ops->ctx);
    if (n != left) {
        fipc_point("between-fragments");
    }
    return FIPC_OK;
}

static int send_locked(struct fipc_queue *q, const struct fipc_piece *pieces, uint64_t n,
                       uint32_t tag, struct fipc_call *call, struct fipc_error *err) {
    struct fipc_gather *g = &q->gather;
    int rc;
    if (!call->midway) {
        rc = fipc_queue_health(q, err);
        if (rc == FIPC_OK) {
            rc = fipc_gather_init(g, pieces, n);
        }
        if (rc != FIPC_OK) {
            return rc;
        }
        bool chunk = g->total > q->ring.inline_bytes;
        rc = fipc_queue_wait_room(q, chunk, call, err);
        if (rc != FIPC_OK) {
            return rc;
        }
        if (!chunk) {
            send_inline(q, g, tag);
            return FIPC_OK;
        }
        if (call->deadline == 0 && !whole_has_room(q, g->total)) {
            return FIPC_TIMEOUT;
        }
        q->part_bytes = choose_part(q, g->total);
        q->part_chunk = FIPC_NO_CHUNK;
    }
    for (uint32_t parts = 1; g->done < g->total; parts++) {
        rc = send_part(q, tag, call, err);
        if (rc != FIPC_OK) {
            return rc;
        }
        if (call->signals && parts % PARTS_BETWEEN_SIGNALS == 0 && g->done < g->total) {
            return FIPC_INTERRUPTED;
        }
    }
    count_sent(q, g->total);
    return FIPC_OK;
}

static void send_end(struct fipc_queue *q, struct fipc_call *call) {
    call->midway = false;
    q->part_chunk = FIPC_NO_CHUNK;
    fipc_gather_free(&q->gather);
    fipc_queue_leave(q);
}

int fipc_queue_send(fipc_queue *q, const struct fipc_piece *pieces, uint64_t n, uint32_t tag,
                    struct fipc_call *call, struct fipc_error *err) {
    no_error(err);
    int rc = FIPC_OK;
    if (!call->midway) {
        rc = fipc_queue_enter(q, call);
    } else if (fipc_queue_forked(q)) { /* by a signal handler that ran meanwhile */
        rc = FIPC_FORKED;
    }
    if (rc != FIPC_OK) {
        return rc;
    }
    rc = send_locked(q, pieces, n, tag, call, err);
    bool again = rc == FIPC_INTERRUPTED || rc == FIPC_LONG_WAIT || rc == FIPC_EVICTED;
    if (!(again && call->midway)) {
        send_end(q, call);
    }
    return rc;
}

void fipc_queue_send_abandon(fipc_queue *q, struct fipc_call *call) {
    if (call->midway && !fipc_queue_forked(q)) {
        send_end(q, call);
    }
}

int fipc_queue_loan(fipc_queue *q, uint64_t len, struct fipc_call *call, void **ptr,
                    struct fipc_error *err) {
    no_error(err);
    if (len > q->ring.chunk_bytes) {
        return FIPC_INVALID;
    }
    int rc = fipc_queue_enter(q, call);
    if (rc != FIPC_OK) {
        return rc;
    }
    bool chunk = len > q->ring.inline_bytes;
    rc = fipc_queue_health(q, err);
    rc = rc != FIPC_OK ? rc : fipc_queue_wait_room(q, chunk, call, err);
    q->loan = (struct fipc_record){.flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | FIPC_SLOT_BARE,
                                   .chunk = FIPC_NO_CHUNK};
    if (rc == FIPC_OK && chunk) {
        q->loan.chunk = fipc_ring_chunk_free(&q->ring, NULL);
        q->loan.flags |= FIPC_SLOT_CHUNK;
        rc = have_pages(q, q->loan.chunk, len, err);
    }
    if (rc != FIPC_OK) {
        fipc_queue_leave(q);
        return rc;
    }
    fipc_ring_begin(&q->ring);
    *ptr = chunk ? fipc_ring_chunk(&q->ring, q->loan.chunk)
                 : fipc_ring_inline(fipc_ring_slot(&q->ring));
    fipc_point("loan-lent");
    return FIPC_OK;
}

void fipc_queue_loan_commit(fipc_queue *q, uint64_t len) {
    if (fipc_queue_forked(q)) {
        return;
    }
    q->loan.len = q->loan.total = len;
    if (q->loan.flags & FIPC_SLOT_CHUNK) {
        q->chunk_used[q->loan.chunk] = q->ops->now(q->ops->ctx);
    }
    publish(q, &q->loan);
    q->bytes += len;
    fipc_queue_leave(q);
}

void fipc_queue_loan_abort(fipc_queue *q) {
    if (!fipc_queue_forked(q)) {
        fipc_queue_leave(q);
    }
}

/* ---- the reader ---------------------------------------------------------------------------- */

static void acknowledge(struct fipc_queue *q, bool last) {
    fipc_point("before-ack");
    bool ring = fipc_ring_ack(&q->ring, last);
    fipc_point("acknowledged");
    q->fragments++;
    if (ring) {
        fipc_queue_wake_writer(q);
    }
}

static void drop_partial(struct fipc_queue *q) {
    fipc_scatter_drop(&q->scatter);
    fipc_store32_relaxed(&q->partial, 0);
}

static const char *payload(struct fipc_queue *q, struct fipc_slot *slot,
                           const struct fipc_record *record) {
    if (!(record->flags & FIPC_SLOT_CHUNK)) {
        return fipc_ring_inline(slot);
    }
    uint64_t end = record->offset + record->len;
    if (end > q->chunk_seen[record->chunk]) {
        uint64_t from = q->chunk_seen[record->chunk];
        fipc_mem_prefault(&q->seg, chunk_offset(q, record->chunk) + from, end - from);
        q->chunk_seen[record->chunk] = end;
    }
    return fipc_ring_chunk(&q->ring, record->chunk) + record->offset;
}

#define TOOK_PART 1
#define TOTAL_MAX (UINT64_C(1) << 46) /* half of a 48-bit address space, in bytes */

/* Takes one slot. FIPC_OK: that completed a message, *out has it. TOOK_PART: it didn't. */
static int take_slot(struct fipc_queue *q, struct fipc_message *out) {
    struct fipc_record record;
    bool bad;
    struct fipc_slot *slot = fipc_ring_peek(&q->ring, &record, &bad);
    if (slot == NULL) {
        return FIPC_WOULD_BLOCK;
    }
    bool last = (record.flags & FIPC_SLOT_LAST) != 0;
    /* (a total beyond any memory can't be right either, and would be refused for ever) */
    if (bad || record.total > TOTAL_MAX) {
        drop_partial(q);
        acknowledge(q, last);
        return FIPC_CORRUPT;
    }
    if (record.flags & FIPC_SLOT_FIRST) {
        drop_partial(q); /* what came before was abandoned by the writer */
        fipc_scatter_begin(&q->scatter, record.total, (record.flags & FIPC_SLOT_BARE) != 0,
                           record.tag);
        fipc_store32_relaxed(&q->partial, 1);
    } else if (!q->scatter.active) {
        /* the rest of a message that began before this reader did, or that was corrupt */
        acknowledge(q, last);
        return TOOK_PART;
    }
    fipc_point("mid-read");
    int rc = record.total == q->scatter.total
                 ? fipc_scatter_feed(&q->scatter, payload(q, slot, &record), record.len)
                 : FIPC_CORRUPT;
    if (rc == FIPC_NO_MEMORY && (record.flags & FIPC_SLOT_FIRST)) {
        drop_partial(q);
        return rc; /* not acknowledged: it can be tried again */
    }
    q->bytes_copied += record.len;
    if (rc == FIPC_OK && last) {
        q->bytes += record.total;
        rc = fipc_scatter_finish(&q->scatter, out);
    } else if (rc == FIPC_OK) {
        acknowledge(q, false);
        fipc_point("part-taken");
        return TOOK_PART;
    }
    if (rc != FIPC_OK || last) {
        drop_partial(q);
    }
    acknowledge(q, last);
    return rc;
}

int fipc_queue_recv(fipc_queue *q, struct fipc_call *call, struct fipc_message *out,
                    struct fipc_error *err) {
    no_error(err);
    memset(out, 0, sizeof *out);
    int rc = fipc_queue_enter(q, call);
    if (rc != FIPC_OK) {
        return rc;
    }
    rc = fipc_queue_adopt(q) ? TOOK_PART : FIPC_WOULD_BLOCK;
    for (uint32_t parts = 1; rc == TOOK_PART; parts++) {
        rc = take_slot(q, out);
        if (rc == TOOK_PART && parts % PARTS_BETWEEN_SIGNALS == 0) {
            rc = FIPC_INTERRUPTED; /* what was taken stays with the reader */
        }
    }
    fipc_queue_leave(q);
    return rc;
}

static int peek_locked(struct fipc_queue *q, uint64_t limit, const void **ptr, uint64_t *len,
                       uint32_t *tag) {
    struct fipc_record record;
    bool bad;
    const uint32_t whole = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | FIPC_SLOT_BARE;
    struct fipc_slot *slot = fipc_queue_adopt(q) ? fipc_ring_peek(&q->ring, &record, &bad) : NULL;
    if (slot == NULL || bad || (record.flags & whole) != whole || record.len > limit) {
        fipc_queue_leave(q);
        return slot == NULL ? FIPC_WOULD_BLOCK : FIPC_INVALID;
    }
    drop_partial(q);
    fipc_point("mid-read");
    *ptr = payload(q, slot, &record);
    *len = record.len;
    *tag = record.tag;
    return FIPC_OK;
}

int fipc_queue_peek(fipc_queue *q, uint64_t limit, const void **ptr, uint64_t *len, uint32_t *tag,
                    struct fipc_error *err) {
    int rc = enter_briefly(q, err);
    return rc == FIPC_OK ? peek_locked(q, limit, ptr, len, tag) : rc;
}

int fipc_queue_peek_wait(fipc_queue *q, uint64_t limit, struct fipc_call *call, const void **ptr,
                         uint64_t *len, uint32_t *tag, struct fipc_error *err) {
    no_error(err);
    int rc = fipc_queue_enter(q, call);
    return rc == FIPC_OK ? peek_locked(q, limit, ptr, len, tag) : rc;
}

void fipc_queue_peek_done(fipc_queue *q) {
    if (fipc_queue_forked(q)) {
        return;
    }
    uint64_t len = fipc_ring_slot(&q->ring)->len;
    q->bytes += len;
    q->bytes_copied += len;
    acknowledge(q, true);
    fipc_queue_leave(q);
}

void fipc_queue_peek_undo(fipc_queue *q) { fipc_queue_loan_abort(q); }
