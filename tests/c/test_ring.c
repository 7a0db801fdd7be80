/* The ring: single-threaded against a simple model of its state machine, then one writer and
 * several readers over one buffer.
 *
 * The threads sleep without any time limit: a wake-up that the protocol owes and doesn't give is a
 * hang, and the watchdog's. They share one mapping, so that the thread sanitizer sees every pair.
 */
#include "test.h"

#include <pthread.h>

#include "fipc_ring.h"
#include "fipc_wait.h"
#include "pattern.h"

#define MAX_READERS 8
#define MAX_SLOTS 16
#define MAX_CHUNKS 4

static struct fipc_header layout(uint32_t readers, uint32_t slots, uint32_t inline_bytes,
                                 uint32_t chunks, uint64_t chunk_bytes) {
    struct fipc_header h;
    memset(&h, 0, sizeof h);
    h.n_readers = readers;
    h.n_slots = slots;
    h.inline_bytes = inline_bytes;
    h.n_chunks = chunks;
    h.chunk_bytes = chunk_bytes;
    CHECK_RC(fipc_layout_plan(&h), FIPC_OK);
    return h;
}

static void *buffer_for(const struct fipc_header *h) {
    size_t bytes = (h->total_bytes + FIPC_PAGE - 1) / FIPC_PAGE * FIPC_PAGE;
    void *p = aligned_alloc(FIPC_PAGE, bytes);
    CHECK(p != NULL);
    memset(p, 0, bytes);
    return p;
}

static void bind_writer(struct fipc_ring *r, void *base, const struct fipc_header *h) {
    memset(r, 0, sizeof *r);
    fipc_ring_bind(r, base, h);
    r->counted = malloc(h->n_readers);
    r->chunk_until = calloc(h->n_chunks, sizeof *r->chunk_until);
    CHECK(r->counted != NULL && r->chunk_until != NULL);
    memset(r->counted, 1, h->n_readers);
}

static void unbind_writer(struct fipc_ring *r) {
    free(r->counted);
    free(r->chunk_until);
}

static void bind_reader(struct fipc_ring *r, void *base, const struct fipc_header *h, uint32_t i) {
    memset(r, 0, sizeof *r);
    fipc_ring_bind(r, base, h);
    r->reader = i;
}

/* ---- the model ----------------------------------------------------------------------------- */

struct model {
    uint64_t published;
    struct fipc_record log[MAX_SLOTS]; /* by seq % slots */
    uint64_t message[MAX_SLOTS];
    uint64_t read[MAX_READERS]; /* UINT64_MAX: has left */
    bool counted[MAX_READERS];
    uint64_t chunk_last[MAX_CHUNKS];
    uint64_t messages;
    bool midway; /* the last slot was not the end of its message */
    bool data_parked, room_parked;
    uint64_t room_target;
};

struct world {
    struct fipc_header h;
    void *base;
    struct fipc_ring writer;
    struct fipc_ring reader[MAX_READERS];
    struct model m;
    uint64_t n_published, n_read, n_refused, n_rung; /* that something was tested at all */
};

static uint64_t model_slowest(const struct world *w) {
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < w->h.n_readers; i++) {
        if (w->m.counted[i] && w->m.read[i] < least) {
            least = w->m.read[i];
        }
    }
    return least;
}

static bool model_may_read(const struct world *w, uint32_t i) {
    return w->m.counted[i] && w->m.read[i] < w->m.published;
}

static uint64_t model_slots_free(const struct world *w) {
    uint64_t slowest = model_slowest(w);
    uint64_t held = slowest < w->m.published ? w->m.published - slowest : 0;
    CHECK(held <= w->h.n_slots);
    return w->h.n_slots - held;
}

/* Of the free chunks that which was used last. */
static uint32_t model_chunk(const struct world *w, uint32_t *n_free) {
    uint32_t best = FIPC_NO_CHUNK;
    *n_free = 0;
    for (uint32_t c = 0; c < w->h.n_chunks; c++) {
        if (w->m.chunk_last[c] <= model_slowest(w)) {
            ++*n_free;
            if (best == FIPC_NO_CHUNK || w->m.chunk_last[c] > w->m.chunk_last[best]) {
                best = c;
            }
        }
    }
    return best;
}

/* ---- one step of each kind ----------------------------------------------------------------- */

static void write_one(struct world *w) {
    struct fipc_ring *r = &w->writer;
    struct model *m = &w->m;
    fipc_ring_scan(r);
    if (model_slots_free(w) == 0) {
        CHECK(!fipc_ring_slot_free(r));
        w->n_refused++;
        return;
    }
    uint32_t n_free, n_free_got;
    uint32_t chunk = model_chunk(w, &n_free);
    CHECK_EQ(fipc_ring_chunk_free(r, &n_free_got), chunk);
    CHECK_EQ(n_free_got, n_free);
    struct fipc_record rec = {.tag = (uint32_t)test_random()};
    bool in_chunk = test_chance(2) && chunk != FIPC_NO_CHUNK;
    uint64_t room = in_chunk ? w->h.chunk_bytes : w->h.inline_bytes;
    rec.len = test_below(room + 1);
    if (in_chunk) {
        rec.flags |= FIPC_SLOT_CHUNK;
        rec.chunk = chunk;
        rec.offset = test_below(room - rec.len + 1);
    }
    rec.flags |= m->midway ? 0 : FIPC_SLOT_FIRST;
    rec.flags |= test_chance(3) ? 0 : FIPC_SLOT_LAST;
    bool whole = (rec.flags & FIPC_SLOT_FIRST) && (rec.flags & FIPC_SLOT_LAST);
    rec.total = rec.len + (whole ? 0 : test_below(1000));

    uint64_t seq = ++m->published;
    fipc_ring_begin(r);
    CHECK_EQ(fipc_load64_relaxed(&r->control->writing), seq);
    pattern_fill(in_chunk ? fipc_ring_chunk(r, chunk) + rec.offset
                          : fipc_ring_inline(fipc_ring_slot(r)),
                 seq, 0, rec.len);
    bool ring = fipc_ring_publish(r, &rec);
    m->midway = !(rec.flags & FIPC_SLOT_LAST);
    m->messages += !m->midway;
    m->log[seq % w->h.n_slots] = rec;
    m->message[seq % w->h.n_slots] = m->messages;
    if (in_chunk) {
        m->chunk_last[chunk] = seq;
    }
    CHECK_EQ(ring, m->data_parked);
    if (ring) {
        uint32_t before = fipc_load32_relaxed(&r->control->data_bell);
        fipc_bell_ring(&r->control->data_bell);
        uint32_t after = fipc_load32_relaxed(&r->control->data_bell);
        CHECK(before != after && (before | FIPC_BELL_SLEEPER) != after &&
              !(after & FIPC_BELL_SLEEPER));
        m->data_parked = false;
        w->n_rung++;
    }
    CHECK_EQ(fipc_load64_relaxed(&r->control->writing), 0);
    CHECK_EQ(fipc_load64_relaxed(&r->control->head), seq);
    CHECK_EQ(fipc_load64_relaxed(&r->control->messages), m->messages);
    w->n_published++;
}

static void read_one(struct world *w, uint32_t i) {
    struct fipc_ring *r = &w->reader[i];
    struct model *m = &w->m;
    if (m->read[i] == UINT64_MAX || !m->counted[i]) {
        return; /* it is no more */
    }
    struct fipc_record rec;
    bool bad = true;
    struct fipc_slot *slot = fipc_ring_peek(r, &rec, &bad);
    if (!model_may_read(w, i)) {
        CHECK(slot == NULL);
        w->n_refused++;
        return;
    }
    CHECK(slot != NULL && !bad);
    uint64_t seq = m->read[i] + 1;
    const struct fipc_record *want = &m->log[seq % w->h.n_slots];
    CHECK(rec.len == want->len && rec.total == want->total && rec.flags == want->flags &&
          rec.chunk == want->chunk && rec.offset == want->offset && rec.tag == want->tag);
    const char *payload = rec.flags & FIPC_SLOT_CHUNK ? fipc_ring_chunk(r, rec.chunk) + rec.offset
                                                      : fipc_ring_inline(slot);
    CHECK(pattern_is(payload, seq, 0, rec.len));
    if (test_chance(4)) {
        return; /* looked, not acknowledged */
    }
    bool last = (rec.flags & FIPC_SLOT_LAST) != 0;
    bool ring = fipc_ring_ack(r, last);
    m->read[i] = seq;
    uint64_t slowest = UINT64_MAX;
    for (uint32_t k = 0; k < w->h.n_readers; k++) {
        slowest = m->read[k] < slowest ? m->read[k] : slowest;
    }
    CHECK_EQ(ring, m->room_parked && slowest >= m->room_target);
    if (ring) {
        fipc_bell_ring(&r->control->room_bell);
        CHECK(!(fipc_load32_relaxed(&r->control->room_bell) & FIPC_BELL_SLEEPER));
        m->room_parked = false;
        w->n_rung++;
    }
    if (last) {
        CHECK_EQ(r->messages, m->message[seq % w->h.n_slots]);
    }
    w->n_read++;
}

static void park(struct world *w) {
    struct fipc_control *c = w->writer.control;
    if (test_chance(2)) {
        uint32_t seen = fipc_bell_park(&c->data_bell);
        CHECK(seen & FIPC_BELL_SLEEPER);
        CHECK_EQ(fipc_load32_relaxed(&c->data_bell), seen);
        w->m.data_parked = true;
    } else {
        w->m.room_target = w->m.published - test_below(w->m.published + 1) % (w->h.n_slots + 1u);
        fipc_store64_relaxed(&c->room_target, w->m.room_target);
        uint32_t seen = fipc_bell_park(&c->room_bell);
        CHECK_EQ(fipc_load32_relaxed(&c->room_bell), seen);
        w->m.room_parked = true;
        CHECK_EQ(fipc_ring_scan_parked(&w->writer), model_slowest(w));
    }
}

/* A reader leaves, and is noticed; or another comes in its place. */
static void come_or_go(struct world *w, uint32_t i) {
    struct fipc_ring *r = &w->writer;
    if (w->m.read[i] != UINT64_MAX && w->m.counted[i]) {
        fipc_store64_seqcst(&r->cursors[i].seq, FIPC_CURSOR_LEFT);
        w->m.read[i] = UINT64_MAX;
    } else if (w->m.counted[i]) {
        r->counted[i] = 0;
        w->m.counted[i] = false;
    } else {
        fipc_store64_relaxed(&r->cursors[i].seq, w->m.published);
        r->counted[i] = 1;
        w->m.counted[i] = true;
        w->m.read[i] = w->m.published;
        fipc_ring_seek(&w->reader[i], w->m.published + 1);
        fipc_ring_scan(r);
    }
}

/* The whole state, slot by slot: the cases of the table in fipc_ring.h. */
static void compare(struct world *w) {
    for (uint32_t i = 0; i < w->h.n_readers; i++) {
        if (w->m.counted[i] && w->m.read[i] != UINT64_MAX) {
            bool may = model_may_read(w, i);
            CHECK_EQ(fipc_ring_readable(&w->reader[i]), may);
            CHECK_EQ(fipc_ring_readable_parked(&w->reader[i]), may);
        }
    }
    CHECK_EQ(fipc_ring_scan(&w->writer), model_slowest(w));
    CHECK_EQ(fipc_ring_slots_free(&w->writer), model_slots_free(w));
    CHECK_EQ(fipc_ring_slot_free(&w->writer), model_slots_free(w) > 0);
    uint64_t oldest = UINT64_MAX;
    for (uint32_t c = 0; c < w->h.n_chunks; c++) {
        oldest = w->m.chunk_last[c] < oldest ? w->m.chunk_last[c] : oldest;
    }
    CHECK_EQ(fipc_ring_chunk_oldest(&w->writer), oldest);
    for (uint32_t k = 0; k < w->h.n_slots; k++) {
        /* the greatest published sequence with this slot */
        uint64_t want = 0;
        for (uint64_t s = w->m.published; s > 0 && s + w->h.n_slots > w->m.published; s--) {
            if ((s - 1) % w->h.n_slots == k) {
                want = s;
            }
        }
        const struct fipc_slot *slot = (void *)(w->writer.slots + k * w->writer.slot_stride);
        CHECK_EQ(fipc_load64_relaxed(&slot->written), want);
    }
}

static void random_operations_agree_with_the_model(void) {
    uint64_t published = 0, read = 0, refused = 0, rung = 0;
    for (int round = 0; round < TEST_SCALE(1000); round++) {
        struct world w;
        memset(&w, 0, sizeof w);
        uint32_t readers = (uint32_t)(1 + test_below(MAX_READERS));
        uint32_t slots = test_chance(3) ? 2 : (uint32_t)(2 + test_below(MAX_SLOTS - 1));
        uint32_t chunks = (uint32_t)(1 + test_below(MAX_CHUNKS));
        w.h = layout(readers, slots, (uint32_t)test_below(200), chunks, 200 + test_below(5000));
        w.base = buffer_for(&w.h);
        bind_writer(&w.writer, w.base, &w.h);
        for (uint32_t i = 0; i < readers; i++) {
            bind_reader(&w.reader[i], w.base, &w.h, i);
            w.m.counted[i] = true;
        }
        uint64_t leaving = test_chance(2) ? 60 : 1000000; /* one in so many steps */
        for (int step = 0; step < 2000; step++) {
            uint32_t i = (uint32_t)test_below(readers);
            if (test_chance(leaving)) {
                come_or_go(&w, i);
            } else if (test_chance(12)) {
                park(&w);
            } else if (test_chance(readers + 1)) {
                write_one(&w);
            } else {
                read_one(&w, i);
            }
            compare(&w);
        }
        published += w.n_published;
        read += w.n_read;
        refused += w.n_refused;
        rung += w.n_rung;
        unbind_writer(&w.writer);
        free(w.base);
    }
    CHECK(published > 1000 && read > 1000 && refused > 1000 && rung > 100);
}

static void a_slot_goes_through_its_four_cases(void) {
    struct fipc_header h = layout(2, 2, 64, 1, 64);
    void *base = buffer_for(&h);
    struct fipc_ring w, r[2];
    bind_writer(&w, base, &h);
    bind_reader(&r[0], base, &h, 0);
    bind_reader(&r[1], base, &h, 1);
    struct fipc_record rec = {.flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST}, got;
    bool bad;
    for (uint64_t s = 1; s < 20; s++) {
        fipc_ring_scan(&w);
        CHECK(fipc_ring_slot_free(&w)); /* 1 */
        CHECK(fipc_ring_peek(&r[0], &got, &bad) == NULL);
        fipc_ring_begin(&w);
        CHECK(fipc_ring_peek(&r[0], &got, &bad) == NULL); /* begun is not written */
        fipc_ring_publish(&w, &rec);
        CHECK(fipc_ring_peek(&r[0], &got, &bad) != NULL); /* 2 */
        CHECK(fipc_ring_peek(&r[1], &got, &bad) != NULL);
        fipc_ring_ack(&r[0], true);
        CHECK(fipc_ring_peek(&r[0], &got, &bad) == NULL); /* 3 */
        CHECK(fipc_ring_peek(&r[1], &got, &bad) != NULL);
        fipc_ring_scan(&w);
        CHECK_EQ(fipc_ring_slots_free(&w), 1); /* the other one */
        fipc_ring_ack(&r[1], true);
        CHECK(fipc_ring_peek(&r[1], &got, &bad) == NULL); /* 4 */
        fipc_ring_scan(&w);
        CHECK_EQ(fipc_ring_slots_free(&w), 2);
    }
    unbind_writer(&w);
    free(base);
}

static void the_chunk_freed_last_is_used_first(void) {
    struct fipc_header h = layout(1, 8, 64, 3, 64);
    void *base = buffer_for(&h);
    struct fipc_ring w, r;
    bind_writer(&w, base, &h);
    bind_reader(&r, base, &h, 0);
    static const uint32_t expected[] = {0, 0, 0, 1, 2};
    for (size_t i = 0; i < 5; i++) {
        uint32_t c = fipc_ring_chunk_free(&w, NULL);
        CHECK_EQ(c, expected[i]);
        struct fipc_record rec = {.flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | FIPC_SLOT_CHUNK,
                                  .chunk = c};
        fipc_ring_publish(&w, &rec);
        if (i < 2) {
            fipc_ring_ack(&r, true);
        }
        fipc_ring_scan(&w);
    }
    CHECK_EQ(fipc_ring_chunk_free(&w, NULL), FIPC_NO_CHUNK);
    CHECK_EQ(fipc_ring_chunk_oldest(&w), 3);
    fipc_ring_ack(&r, true);
    fipc_ring_ack(&r, true);
    fipc_ring_scan(&w);
    CHECK_EQ(fipc_ring_chunk_free(&w, NULL), 1);
    unbind_writer(&w);
    free(base);
}

static void a_record_that_can_not_be_right_is_bad(void) {
    struct fipc_header h = layout(1, 2, 100, 3, 5000);
    void *base = buffer_for(&h);
    struct fipc_ring w, r;
    bind_writer(&w, base, &h);
    bind_reader(&r, base, &h, 0);
    uint64_t n_bad = 0, n_good = 0;
    for (int i = 0; i < TEST_SCALE(300000); i++) {
        struct fipc_slot *slot = fipc_ring_slot(&w);
        slot->len = test_chance(2) ? test_below(6000) : test_random() >> test_below(64);
        slot->total = test_chance(2) ? slot->len : test_random() >> test_below(64);
        slot->offset = test_chance(2) ? 0 : test_random() >> test_below(64);
        slot->flags = (uint32_t)test_random() >> test_below(32);
        slot->chunk = test_chance(2) ? (uint32_t)test_below(4) : (uint32_t)test_random();
        fipc_store64_seqcst(&slot->written, 1);
        struct fipc_record rec;
        bool bad;
        CHECK(fipc_ring_peek(&r, &rec, &bad) == slot);
        bool in_chunk = (rec.flags & FIPC_SLOT_CHUNK) != 0;
        /* what a user of the record would touch is inside, and a message is at least its part */
        bool inside = in_chunk ? rec.chunk < 3 && rec.len <= 5000 && rec.offset <= 5000 &&
                                     rec.offset + rec.len <= 5000
                               : rec.len <= 100;
        const uint32_t both = FIPC_SLOT_FIRST | FIPC_SLOT_LAST;
        bool sensible =
            rec.len <= rec.total && ((rec.flags & both) != both || rec.len == rec.total);
        if (!inside || !sensible) {
            CHECK(bad);
            n_bad++;
        } else if (in_chunk || rec.offset == 0) { /* an inline payload has no offset */
            CHECK(!bad);
            n_good++;
        }
    }
    CHECK(n_bad > 1000 && n_good > 1000);
    unbind_writer(&w);
    free(base);
}

/* ---- threads ------------------------------------------------------------------------------- */

struct party {
    struct fipc_header h;
    void *base;
    uint64_t count;
    uint32_t spins; /* looks before sleeping; 0 sleeps at once */
};

struct member {
    const struct party *party;
    uint32_t reader;
};

static uint64_t length_of(const struct party *p, uint64_t seq, bool *in_chunk) {
    uint64_t random = test_mix(seq);
    *in_chunk = random % 3 == 0;
    return test_mix(random) % ((*in_chunk ? p->h.chunk_bytes : p->h.inline_bytes) + 1);
}

static bool has_room(const struct fipc_ring *r, bool in_chunk) {
    return fipc_ring_slot_free(r) && (!in_chunk || fipc_ring_chunk_free(r, NULL) != FIPC_NO_CHUNK);
}

static void sleep_on(fipc_a32 *bell, uint32_t seen) {
    fipc_wait_platform.wait(fipc_wait_platform.ctx, bell, seen, FIPC_FOREVER);
}

static void ring_and_wake(fipc_a32 *bell) {
    fipc_bell_ring(bell);
    fipc_wait_platform.wake(fipc_wait_platform.ctx, bell);
}

static void wait_room(const struct party *p, struct fipc_ring *r, bool in_chunk) {
    for (uint32_t i = 0; i < p->spins; i++) {
        if (has_room(r, in_chunk)) {
            return;
        }
        fipc_ring_scan(r);
        fipc_pause();
    }
    while (!has_room(r, in_chunk)) {
        uint64_t target = fipc_ring_slot_free(r) ? fipc_ring_chunk_oldest(r)
                                                 : r->next - r->n_slots + (r->next / 5) % 2;
        if (target >= r->next) {
            target = r->next - 1;
        }
        fipc_store64_relaxed(&r->control->room_target, target);
        uint32_t seen = fipc_bell_park(&r->control->room_bell);
        fipc_ring_scan_parked(r);
        if (!has_room(r, in_chunk)) {
            sleep_on(&r->control->room_bell, seen);
        }
    }
}

static void *write_all(void *arg) {
    const struct party *p = arg;
    struct fipc_ring r;
    bind_writer(&r, p->base, &p->h);
    for (uint64_t seq = 1; seq <= p->count; seq++) {
        bool in_chunk;
        struct fipc_record rec = {.len = length_of(p, seq, &in_chunk), .tag = (uint32_t)seq};
        rec.total = rec.len;
        rec.flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | FIPC_SLOT_BARE;
        wait_room(p, &r, in_chunk);
        if (in_chunk) {
            rec.flags |= FIPC_SLOT_CHUNK;
            rec.chunk = fipc_ring_chunk_free(&r, NULL);
        }
        fipc_ring_begin(&r);
        pattern_fill(in_chunk ? fipc_ring_chunk(&r, rec.chunk)
                              : fipc_ring_inline(fipc_ring_slot(&r)),
                     seq, 0, rec.len);
        if (fipc_ring_publish(&r, &rec)) {
            ring_and_wake(&r.control->data_bell);
        }
    }
    unbind_writer(&r);
    return NULL;
}

static void *read_all(void *arg) {
    const struct member *me = arg;
    const struct party *p = me->party;
    struct fipc_ring r;
    bind_reader(&r, p->base, &p->h, me->reader);
    for (uint64_t seq = 1; seq <= p->count; seq++) {
        struct fipc_record rec;
        bool bad;
        struct fipc_slot *slot;
        uint32_t looks = 0;
        while ((slot = fipc_ring_peek(&r, &rec, &bad)) == NULL) {
            if (looks++ < p->spins) {
                fipc_pause();
                continue;
            }
            uint32_t seen = fipc_bell_park(&r.control->data_bell);
            if (!fipc_ring_readable_parked(&r)) {
                sleep_on(&r.control->data_bell, seen);
            }
        }
        bool in_chunk;
        uint64_t len = length_of(p, seq, &in_chunk);
        CHECK(!bad);
        CHECK_EQ(rec.tag, (uint32_t)seq);
        CHECK_EQ(rec.len, len);
        CHECK_EQ((rec.flags & FIPC_SLOT_CHUNK) != 0, in_chunk);
        const char *payload = in_chunk ? fipc_ring_chunk(&r, rec.chunk) : fipc_ring_inline(slot);
        CHECK(pattern_is(payload, seq, 0, len));
        if (fipc_ring_ack(&r, true)) {
            ring_and_wake(&r.control->room_bell);
        }
    }
    return NULL;
}

static void run_party(uint32_t readers, uint32_t slots, uint32_t chunks, uint32_t spins,
                      uint64_t count) {
    struct party p = {.count = count, .spins = spins};
    p.h = layout(readers, slots, 256, chunks, 4096);
    p.base = buffer_for(&p.h);
    pthread_t threads[MAX_READERS + 1];
    struct member members[MAX_READERS];
    for (uint32_t i = 0; i < readers; i++) {
        members[i] = (struct member){&p, i};
        CHECK(pthread_create(&threads[i], NULL, read_all, &members[i]) == 0);
    }
    CHECK(pthread_create(&threads[readers], NULL, write_all, &p) == 0);
    for (uint32_t i = 0; i <= readers; i++) {
        pthread_join(threads[i], NULL);
    }
    free(p.base);
}

static void readers_get_everything_in_order(void) {
    static const uint32_t readers[] = {1, 2, 4, 7};
    for (size_t i = 0; i < 4; i++) {
        uint64_t count = (uint64_t)TEST_SCALE(20000) / readers[i] / (FIPC_HAVE_FUTEX ? 1 : 8);
        run_party(readers[i], 2, 1, 0, count);
        run_party(readers[i], 3, 2, 50, count);
        run_party(readers[i], 256, 4, 0, count * 4);
        run_party(readers[i], 256, 4, 200, count * 4);
    }
}

static const struct test_case cases[] = {
    {"a slot goes through its four cases", a_slot_goes_through_its_four_cases},
    {"the chunk freed last is used first", the_chunk_freed_last_is_used_first},
    {"random operations agree with the model", random_operations_agree_with_the_model},
    {"a record that can not be right is bad", a_record_that_can_not_be_right_is_bad},
    {"readers get everything in order", readers_get_everything_in_order},
};

TEST_MAIN(cases)
