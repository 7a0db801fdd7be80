/* Fuzz target: a queue in hostile memory. The input is a list of steps: a message is sent, read,
 * looked at in place, or a peer scribbles over what is shared: a slot's record, a payload, cursors,
 * doorbells, states. Until the first scribble every message arrives, whole and in order. After it,
 * anything may arrive or be refused, but every byte that is handed out can be read, nobody reads or
 * writes beyond the segment, and no call that polls waits.
 *
 * The clock is the target's own: it moves a little with each look, so a run repeats itself. */
#include "fuzz.h"
#include "peers.h"

#include "fipc_queue.h"

#define READERS 2
#define SLOTS 4
#define INLINE 128
#define CHUNKS 2
#define CHUNK 8192

static uint64_t the_time;

static uint64_t clock_now(void *ctx) {
    (void)ctx;
    return the_time += 1000;
}
static int clock_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    (void)ctx, (void)word, (void)expected;
    the_time = deadline != FIPC_FOREVER && deadline > the_time ? deadline : the_time + 1000;
    return FIPC_OK;
}
static void clock_wake(void *ctx, const void *word) { (void)ctx, (void)word; }
static const struct fipc_waitops clock_ops = {clock_now, clock_wait, clock_wake, NULL};

struct world {
    fipc_queue *writer, *reader[READERS];
    uint64_t sent, read[READERS]; /* while nothing was scribbled on */
    uint64_t len[64];             /* of message n, at n % 64 */
    bool hostile;
};

static volatile uint8_t sink;

static void touch(const void *p, uint64_t n) {
    const volatile uint8_t *b = p;
    for (uint64_t i = 0; i < n; i += 61) {
        sink = (uint8_t)(sink ^ b[i]);
    }
    sink = n > 0 ? b[n - 1] : sink;
}

/* Pages behind a segment that nobody may touch. */
static void *guard(const fipc_queue *q) {
    char *end = (char *)q->seg.base + q->seg.bytes;
    void *p =
        mmap(end, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    return p == end ? p : NULL;
}

static void send_one(struct world *w, struct input *in) {
    uint8_t kind = input_byte(in);
    uint64_t len = input_size(in, kind & 1 ? INLINE : CHUNK) % (3 * CHUNK);
    static char bytes[3 * CHUNK];
    struct fipc_piece pieces[3];
    uint64_t n = 1 + kind / 2 % 3;
    pattern_fill(bytes, w->sent + 1, 0, len);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t from = len * i / n, to = len * (i + 1) / n;
        pieces[i] = (struct fipc_piece){.ptr = bytes + from, .len = to - from};
    }
    struct fipc_call call = {.deadline = kind & 64 ? 0 : the_time + 50000};
    struct fipc_error err;
    int rc = kind & 128 ? fipc_queue_send_inline(w->writer, pieces, n, (uint32_t)w->sent + 1, &err)
                        : fipc_queue_send(w->writer, pieces, n, (uint32_t)w->sent + 1, &call, &err);
    if (rc == FIPC_INTERRUPTED || rc == FIPC_LONG_WAIT || rc == FIPC_EVICTED) {
        fipc_queue_send_abandon(w->writer, &call);
    }
    if (!w->hostile) {
        CHECK(rc == FIPC_OK || rc == FIPC_TIMEOUT || (rc == FIPC_WOULD_BLOCK && (kind & 128)));
    }
    if (rc == FIPC_OK) {
        w->sent++;
        w->len[w->sent % 64] = len;
    }
}

static void lend(struct world *w, struct input *in) {
    uint64_t len = input_size(in, CHUNK);
    struct fipc_call call = {.deadline = 0};
    struct fipc_error err;
    void *p;
    int rc = fipc_queue_loan(w->writer, len, &call, &p, &err);
    if (rc != FIPC_OK) {
        CHECK(w->hostile || rc == FIPC_TIMEOUT || (rc == FIPC_INVALID && len > CHUNK));
        return;
    }
    CHECK(len <= CHUNK);
    pattern_fill(p, w->sent + 1, 0, len);
    if (input_byte(in) % 4 == 0) {
        fipc_queue_loan_abort(w->writer);
        return;
    }
    fipc_queue_loan_commit(w->writer, len);
    w->sent++;
    w->len[w->sent % 64] = len;
}

static void check_order(struct world *w, unsigned r) {
    w->read[r]++;
    CHECK(w->hostile || w->read[r] <= w->sent);
}

static void read_one(struct world *w, struct input *in, unsigned r, bool peek) {
    struct fipc_call call = {.deadline = 0};
    struct fipc_error err;
    uint64_t seq = w->read[r] + 1;
    int rc;
    if (peek) {
        const void *p;
        uint64_t len;
        uint32_t tag;
        rc = fipc_queue_peek(w->reader[r], CHUNK, &p, &len, &tag, &err);
        if (rc == FIPC_OK) {
            CHECK(len <= CHUNK);
            touch(p, len);
            if (input_byte(in) % 4 == 0) {
                fipc_queue_peek_undo(w->reader[r]);
                return;
            }
            if (!w->hostile && tag == (uint32_t)seq) { /* a loan has no tag */
                CHECK_EQ(len, w->len[seq % 64]);
                CHECK(pattern_is(p, seq, 0, len));
            }
            fipc_queue_peek_done(w->reader[r]);
            check_order(w, r);
            return;
        }
    } else {
        struct fipc_message m;
        rc = fipc_queue_wait_readable(w->reader[r], &call, &err);
        CHECK(w->hostile || rc == (w->sent > w->read[r] ? FIPC_OK : FIPC_TIMEOUT) || rc == FIPC_OK);
        rc = fipc_queue_recv(w->reader[r], &call, &m, &err);
        if (rc == FIPC_OK) {
            uint64_t at = 0;
            for (uint64_t i = 0; i < m.n; i++) {
                touch(m.blocks[i].ptr, m.blocks[i].len);
                CHECK(w->hostile || pattern_is(m.blocks[i].ptr, seq, at, m.blocks[i].len));
                at += m.blocks[i].len;
            }
            CHECK(w->hostile || at == w->len[seq % 64]);
            fipc_message_clear(&m);
            check_order(w, r);
            return;
        }
    }
    CHECK(w->hostile || rc == FIPC_WOULD_BLOCK || (peek && rc == FIPC_INVALID));
}

/* A number that a peer may claim: about a limit, what a message now has, or any. */
static uint64_t claim(const struct world *w, struct input *in) {
    const uint64_t next = w->writer->ring.next;
    const uint64_t limits[] = {INLINE, CHUNK, next, next - SLOTS, CHUNKS, SLOTS, 1 << 20, 0};
    uint8_t kind = input_byte(in);
    return kind & 128 ? input_number(in, 8) : input_size(in, limits[kind % 8]);
}

/* The record of a slot that is about to be read, one field of it or two. */
static void scribble_record(struct world *w, struct input *in) {
    struct fipc_ring *r = &w->writer->ring;
    uint8_t kind = input_byte(in);
    uint64_t seq = kind & 128 ? r->next - 1 : w->reader[kind & 1]->ring.next;
    struct fipc_slot *slot = (void *)(r->slots + (seq - 1) % SLOTS * r->slot_stride);
    for (unsigned i = 0; i <= (kind >> 6 & 1); i++) {
        switch (kind >> (1 + 3 * i) & 7) {
        case 0: slot->flags = input_byte(in) % 16; break;
        case 1: slot->len = claim(w, in); break;
        case 2: slot->total = claim(w, in); break;
        case 3: slot->offset = claim(w, in); break;
        case 4: slot->chunk = (uint32_t)claim(w, in); break;
        case 5: slot->message = claim(w, in); break;
        case 6: slot->flags ^= FIPC_SLOT_CHUNK; break;
        default: fipc_store64_relaxed(&slot->written, seq); break;
        }
    }
    w->hostile = true;
}

/* What else a peer may write: all that it maps. */
static void scribble(struct world *w, struct input *in) {
    fipc_queue *q = w->writer;
    struct fipc_ring *r = &q->ring;
    uint8_t where = input_byte(in);
    char *p = q->seg.base;
    uint64_t room = q->seg.bytes;
    switch (where % 8) {
    case 0: /* the front of a payload: a frame's head */
    case 1:
        p = r->slots + where / 8 % SLOTS * r->slot_stride + sizeof(struct fipc_slot);
        room = 64;
        break;
    case 2: p = fipc_ring_chunk(r, where / 8 % CHUNKS), room = 64; break;
    case 3: p = r->slots + where / 8 % SLOTS * r->slot_stride, room = FIPC_LINE; break;
    case 4: p = (char *)r->control, room = sizeof *r->control; break;
    case 5: p = (char *)r->cursors, room = READERS * sizeof *r->cursors; break;
    case 6: p = (char *)r->peers, room = (READERS + 1) * sizeof *r->peers; break;
    default: break;
    }
    uint64_t words = 1 + input_byte(in) % 4;
    for (uint64_t i = 0; i < words; i++) {
        uint64_t at = input_number(in, room > 1024 ? 2 : 1) * 8 % room;
        uint64_t v = claim(w, in);
        memcpy(p + at, &v, 8);
    }
    w->hostile = true;
}

static void ask(struct world *w, struct input *in) {
    uint8_t kind = input_byte(in);
    fipc_queue *q = kind & 1 ? w->writer : w->reader[kind / 2 % READERS];
    struct fipc_error err;
    struct fipc_call call = {.deadline = 0};
    struct fipc_peer_info info;
    struct fipc_stats stats;
    uint8_t ready[READERS];
    switch (kind / 4 % 8) {
    case 0: fipc_queue_stats(q, &stats); break;
    case 1: fipc_queue_size(q); break;
    case 2: fipc_queue_peer(q, kind / 32 % (READERS + 1) - 1, &info); break;
    case 3: fipc_queue_wait_ready(q, &call, &err); break;
    case 4: fipc_queue_has_room(w->writer); break;
    case 5: fipc_queue_evict(w->writer, kind / 32 % READERS, &err); break;
    case 6: fipc_queue_wait_any(w->reader, READERS, &call, ready); break;
    default: the_time += UINT64_C(70000000000); break; /* probes are due, idle chunks go */
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    struct world w = {0};
    the_time = 1;
    struct fipc_config c = peers_config(READERS);
    c.n_slots = SLOTS;
    c.inline_bytes = INLINE;
    c.n_chunks = CHUNKS;
    c.chunk_bytes = CHUNK;
    c.ops = &clock_ops;
    c.evict = size % 2 != 0;
    w.writer = peers_create(&c);
    void *guards[1 + READERS] = {guard(w.writer)};
    for (unsigned r = 0; r < READERS; r++) {
        w.reader[r] = peers_attach(w.writer, r, &c);
        guards[1 + r] = guard(w.reader[r]);
    }
    while (!input_over(&in)) {
        uint8_t step = input_byte(&in);
        unsigned r = step / 16 % READERS;
        switch (step % 16) {
        case 0:
        case 1:
        case 2:
        case 3: send_one(&w, &in); break;
        case 4:
        case 5:
        case 6: read_one(&w, &in, r, false); break;
        case 7:
        case 8: read_one(&w, &in, r, true); break;
        case 9: ask(&w, &in); break;
        case 10: lend(&w, &in); break;
        case 11:
        case 12: scribble(&w, &in); break;
        default: scribble_record(&w, &in); break;
        }
    }
    for (unsigned r = 0; r < READERS; r++) {
        fipc_queue_free(w.reader[r]);
    }
    fipc_queue_free(w.writer);
    for (unsigned i = 0; i < 1 + READERS; i++) {
        if (guards[i] != NULL) {
            munmap(guards[i], 1 << 16);
        }
    }
    return 0;
}
