/* fipc_ring.c: see the table and the list of pairs in fipc_ring.h. */
#include "fipc_ring.h"

#include "fipc_test.h"

void fipc_ring_bind(struct fipc_ring *r, void *base, const struct fipc_header *h) {
    char *b = base;
    r->header = base;
    r->control = (void *)(b + h->off_control);
    r->peers = (void *)(b + h->off_peers);
    r->cursors = (void *)(b + h->off_cursors);
    r->slots = b + h->off_slots;
    r->chunks = b + h->off_chunks;
    r->slot_stride = h->slot_stride;
    r->chunk_stride = h->chunk_stride;
    r->chunk_bytes = h->chunk_bytes;
    r->n_readers = h->n_readers;
    r->n_slots = h->n_slots;
    r->inline_bytes = h->inline_bytes;
    r->n_chunks = h->n_chunks;
    r->next = 1;
    r->index = 0;
    fipc_store64_relaxed(&r->next_seen, 1);
    r->messages = 0;
    r->slowest = 0;
}

struct fipc_slot *fipc_ring_slot(const struct fipc_ring *r) {
    return (void *)(r->slots + r->index * r->slot_stride);
}

char *fipc_ring_inline(struct fipc_slot *slot) { return (char *)(slot + 1); }

char *fipc_ring_chunk(const struct fipc_ring *r, uint32_t chunk) {
    return r->chunks + chunk * r->chunk_stride;
}

static void step(struct fipc_ring *r) {
    r->next++;
    if (++r->index == r->n_slots) {
        r->index = 0;
    }
    fipc_store64_relaxed(&r->next_seen, r->next);
}

/* ---- writer -------------------------------------------------------------------------------- */

uint64_t fipc_ring_scan(struct fipc_ring *r) {
    uint64_t least = FIPC_CURSOR_LEFT;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        if (r->counted[i]) {
            uint64_t c = fipc_load64_acquire(&r->cursors[i].seq); /* R1 */
            least = c < least ? c : least;
        }
    }
    r->slowest = least;
    return least;
}

uint64_t fipc_ring_scan_parked(struct fipc_ring *r) {
    uint64_t least = FIPC_CURSOR_LEFT;
    for (uint32_t i = 0; i < r->n_readers; i++) {
        if (r->counted[i]) {
            uint64_t c = fipc_load64_seqcst(&r->cursors[i].seq); /* R1, M */
            least = c < least ? c : least;
        }
    }
    r->slowest = least;
    return least;
}

uint64_t fipc_ring_slots_free(const struct fipc_ring *r) {
    uint64_t published = r->next - 1;
    /* A cursor can't pass what is published, except that of a reader that has left; and a peer
     * may write nonsense into its line: both mean that nothing is held. */
    uint64_t held = r->slowest < published ? published - r->slowest : 0;
    return held < r->n_slots ? r->n_slots - held : 0;
}

bool fipc_ring_slot_free(const struct fipc_ring *r) { return fipc_ring_slots_free(r) != 0; }

uint32_t fipc_ring_chunk_free(const struct fipc_ring *r, uint32_t *n_free) {
    uint32_t best = FIPC_NO_CHUNK;
    uint32_t n = 0;
    for (uint32_t c = 0; c < r->n_chunks; c++) {
        if (r->chunk_until[c] <= r->slowest) {
            n++;
            if (best == FIPC_NO_CHUNK || r->chunk_until[c] > r->chunk_until[best]) {
                best = c;
            }
        }
    }
    if (n_free != NULL) {
        *n_free = n;
    }
    return best;
}

uint64_t fipc_ring_chunk_oldest(const struct fipc_ring *r) {
    uint64_t least = UINT64_MAX;
    for (uint32_t c = 0; c < r->n_chunks; c++) {
        least = r->chunk_until[c] < least ? r->chunk_until[c] : least;
    }
    return least;
}

void fipc_ring_begin(struct fipc_ring *r) {
    /* The mark is on the writer's own line rather than in the slot: a reader that spins on the
     * slot would else fetch its line once more in the middle of the write. Relaxed: it is read
     * only after the writer's death, or by people. */
    fipc_store64_relaxed(&r->control->writing, r->next);
}

bool fipc_ring_publish(struct fipc_ring *r, const struct fipc_record *record) {
    struct fipc_slot *slot = fipc_ring_slot(r);
    if (record->flags & FIPC_SLOT_LAST) {
        r->messages++;
    }
    slot->len = record->len;
    slot->total = record->total;
    slot->message = r->messages;
    slot->offset = record->offset;
    slot->flags = record->flags;
    slot->chunk = record->chunk;
    slot->tag = record->tag;
    if (record->flags & FIPC_SLOT_CHUNK) {
        r->chunk_until[record->chunk] = r->next;
    }
    fipc_point("write-recorded");
    fipc_store64_seqcst(&slot->written, r->next); /* W1, D */
    fipc_point("write-flagged");
    /* relaxed: for people and statistics */
    fipc_store64_relaxed(&r->control->head, r->next);
    fipc_store64_relaxed(&r->control->messages, r->messages);
    fipc_store64_relaxed(&r->control->writing, 0);
    step(r);
    return (fipc_load32_seqcst(&r->control->data_bell) & FIPC_BELL_SLEEPER) != 0; /* D */
}

/* ---- reader -------------------------------------------------------------------------------- */

/* Several threads of one reader may wait while another takes: so these two use neither next nor
 * index. */
static const fipc_a64 *written_of(const struct fipc_ring *r, uint64_t seq) {
    const struct fipc_slot *slot = (void *)(r->slots + (seq - 1) % r->n_slots * r->slot_stride);
    return &slot->written;
}

bool fipc_ring_readable(const struct fipc_ring *r) {
    /* relaxed: a hint; whoever takes the message looks again with W1 */
    uint64_t seq = fipc_load64_relaxed(&r->next_seen);
    return fipc_load64_relaxed(written_of(r, seq)) == seq;
}

bool fipc_ring_readable_parked(const struct fipc_ring *r) {
    const fipc_a64 *cursor = &r->cursors[r->reader].seq;
    for (;;) {
        /* Relaxed: another thread of this reader may have gone on unseen. Then the slot may hold a
         * later sequence already, and with that what the writer knew of the cursor is known here. */
        uint64_t seq = fipc_load64_relaxed(cursor) + 1;
        if (fipc_load64_seqcst(written_of(r, seq)) == seq) { /* D */
            return true;
        }
        if (fipc_load64_relaxed(cursor) + 1 == seq) {
            return false;
        }
    }
}

void fipc_ring_seek(struct fipc_ring *r, uint64_t seq) {
    r->next = seq;
    r->index = (uint32_t)((seq - 1) % r->n_slots);
    fipc_store64_relaxed(&r->next_seen, seq);
}

struct fipc_slot *fipc_ring_peek(const struct fipc_ring *r, struct fipc_record *record, bool *bad) {
    struct fipc_slot *slot = fipc_ring_slot(r);
    if (fipc_load64_acquire(&slot->written) != r->next) { /* W1 */
        return NULL;
    }
    /* What is looked at below is what is used, whatever a hostile writer stores meanwhile. */
    *record = (struct fipc_record){.len = fipc_once64(&slot->len),
                                   .total = fipc_once64(&slot->total),
                                   .offset = fipc_once64(&slot->offset),
                                   .flags = fipc_once32(&slot->flags),
                                   .chunk = fipc_once32(&slot->chunk),
                                   .tag = fipc_once32(&slot->tag)};
    uint64_t room = record->flags & FIPC_SLOT_CHUNK ? r->chunk_bytes : r->inline_bytes;
    bool whole = (record->flags & FIPC_SLOT_FIRST) && (record->flags & FIPC_SLOT_LAST);
    *bad = record->len > room || record->offset > room - record->len ||
           record->len > record->total ||
           ((record->flags & FIPC_SLOT_CHUNK) && record->chunk >= r->n_chunks) ||
           (whole && record->len != record->total);
    return slot;
}

bool fipc_ring_ack(struct fipc_ring *r, bool last) {
    struct fipc_cursor *mine = &r->cursors[r->reader];
    uint64_t seq = r->next;
    if (last) {
        r->messages = fipc_ring_slot(r)->message;
        fipc_store64_relaxed(&mine->messages, r->messages); /* for statistics */
    }
    step(r);
    fipc_store64_seqcst(&mine->seq, seq); /* R1, M, T */
    fipc_point("ack-stored");
    if (!(fipc_load32_seqcst(&r->control->room_bell) & FIPC_BELL_SLEEPER)) { /* M */
        return false;
    }
    /* relaxed: the bell's bit brought it along, and a later target does as well */
    uint64_t target = fipc_load64_relaxed(&r->control->room_target);
    if (seq < target) {
        return false;
    }
    for (uint32_t i = 0; i < r->n_readers; i++) {
        /* Somebody slower will ring. If that one is dead the writer's own probe goes on. */
        if (fipc_load64_seqcst(&r->cursors[i].seq) < target) { /* T */
            return false;
        }
    }
    return true;
}

/* ---- doorbells ----------------------------------------------------------------------------- */

uint32_t fipc_bell_park(fipc_a32 *bell) {
    return fipc_or32_seqcst(bell, FIPC_BELL_SLEEPER) | FIPC_BELL_SLEEPER; /* D, M, B */
}

void fipc_bell_ring(fipc_a32 *bell) {
    uint32_t seen = fipc_load32_relaxed(bell); /* relaxed: the exchange below verifies it */
    while (!fipc_cas32_release(bell, &seen, (seen + FIPC_BELL_STEP) & ~FIPC_BELL_SLEEPER)) { /* B */
    }
}
