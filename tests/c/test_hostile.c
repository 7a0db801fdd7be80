/* A peer that scribbles over all that is shared, all the time, while others send and read: what
 * was checked may be something else a moment later. Nobody crashes, nothing beyond the segment is
 * read or written, and no call that polls waits. (What is done step by step is in fuzz_ring.c.) */
#include <fcntl.h>
#include <sys/mman.h>

#include "fipc_queue.h"
#include "peers.h"

#define READERS 2

struct target {
    char *base;
    size_t off_control, off_slots, end_slots, bytes;
    uint64_t slot_stride;
};

/* The child: plausible numbers to where the others look next, and any number to anywhere. */
static void scribble(void *arg) {
    const struct target *t = arg;
    static const uint64_t plausible[] = {0, 1, 2, 3, 7, 64, 1024, 1025, 16384, 16385, 1 << 20};
    uint64_t random = (uint64_t)getpid();
    for (;;) {
        uint64_t r = test_next(&random);
        size_t at;
        if (r % 4 != 0) { /* a slot's record, but for its sequence */
            size_t slots = (t->end_slots - t->off_slots) / t->slot_stride;
            at = t->off_slots + (r >> 8) % slots * t->slot_stride + 8 + (r >> 32) % 7 * 8;
        } else if (r % 8 == 0) {
            at = t->off_control + (r >> 8) % (t->off_slots - t->off_control) / 8 * 8;
        } else {
            at = t->off_control + (r >> 8) % (t->bytes - t->off_control) / 8 * 8;
        }
        uint64_t v = test_next(&random);
        v = v % 8 ? plausible[(v >> 8) % (sizeof plausible / 8)] : v;
        __atomic_store_n((uint64_t *)(void *)(t->base + at), v, __ATOMIC_RELAXED);
    }
}

static volatile uint8_t sink;

static void touch(const void *p, uint64_t n) {
    const volatile uint8_t *b = p;
    for (uint64_t i = 0; i < n; i += 500) {
        sink = (uint8_t)(sink ^ b[i]);
    }
    sink = n > 0 ? b[n - 1] : sink;
}

static uint64_t read_some(fipc_queue *q) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = 0};
    struct fipc_message m;
    const void *p;
    uint64_t len;
    uint32_t tag;
    if (test_chance(2) && fipc_queue_peek(q, 16384, &p, &len, &tag, &err) == FIPC_OK) {
        CHECK(len <= 16384);
        touch(p, len);
        fipc_queue_peek_done(q);
        return 1;
    }
    fipc_queue_wait_readable(q, &call, &err);
    if (fipc_queue_recv(q, &call, &m, &err) != FIPC_OK) {
        return 0;
    }
    uint64_t sum = 0;
    for (uint64_t i = 0; i < m.n; i++) {
        sum += m.blocks[i].len;
        if (sum < UINT64_C(1) << 28) { /* more is empty pages, of which there may be too many */
            touch(m.blocks[i].ptr, m.blocks[i].len);
        }
    }
    fipc_message_clear(&m);
    return 1;
}

/* New ends each round: a reader that is told a far sequence has nothing to read any more. */
static void round_of(const char *text, uint64_t *sent, uint64_t *got) {
    struct fipc_config c = peers_config(READERS);
    c.evict = test_chance(2);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[READERS];
    for (uint32_t i = 0; i < READERS; i++) {
        r[i] = peers_attach(w, i, &c);
    }
    struct target t = {
        .base = w->seg.base,
        .off_control = (size_t)((char *)w->ring.control - (char *)w->seg.base),
        .off_slots = (size_t)(w->ring.slots - (char *)w->seg.base),
        .bytes = w->seg.bytes,
        .slot_stride = w->ring.slot_stride,
    };
    t.end_slots = t.off_slots + c.n_slots * t.slot_stride;
    for (uint64_t seq = 1; seq <= 2 * c.n_slots; seq++) { /* all pages that will be touched exist */
        peers_put(w, seq, seq % 2 ? 3 * c.chunk_bytes : 100);
        for (uint32_t i = 0; i < READERS; i++) {
            peers_get(r[i], seq, seq % 2 ? 3 * c.chunk_bytes : 100);
        }
    }
    pid_t child = test_fork(scribble, &t);
    struct fipc_error err;
    for (int i = 0; i < 400; i++) {
        *sent += peers_send(w, text, test_log_uniform(test_random(), 3 * c.chunk_bytes), 0, 0,
                            &err) == FIPC_OK;
        for (uint32_t k = 0; k < READERS; k++) {
            *got += read_some(r[k]);
        }
        if (i % 50 == 0) {
            struct fipc_peer_info info;
            struct fipc_stats stats;
            fipc_queue_peer(w, test_chance(2) ? -1 : 1, &info);
            CHECK(memchr(info.host, 0, sizeof info.host) != NULL);
            fipc_queue_stats(r[0], &stats);
        }
    }
    kill(child, SIGKILL);
    CHECK_KILLED(child);
    for (uint32_t i = 0; i < READERS; i++) {
        fipc_queue_free(r[i]);
    }
    fipc_queue_free(w);
}

static void a_peer_that_scribbles_harms_nobody(void) {
    char *text = calloc(1, 3 * 16384 + 1);
    CHECK(text != NULL);
    uint64_t sent = 0, got = 0;
    for (int i = 0; i < TEST_SCALE(200); i++) {
        round_of(text, &sent, &got);
    }
    /* that something was tested at all */
    CHECK(sent > (uint64_t)TEST_SCALE(200));
    CHECK(got > (uint64_t)TEST_SCALE(200));
    free(text);
}

static const struct test_case cases[] = {
    {"a peer that scribbles harms nobody", a_peer_that_scribbles_harms_nobody},
};

TEST_MAIN(cases)
