/* peers.h: ends of queues for tests, and messages of known contents between them. */
#ifndef FIPC_TESTS_PEERS_H
#define FIPC_TESTS_PEERS_H

#include <sys/random.h>

#include "fipc_wait.h"
#include "pattern.h"
#include "test.h"

static inline struct fipc_config peers_config(uint32_t readers) {
    struct fipc_config c = {
        .n_readers = readers,
        .n_slots = 8,
        .inline_bytes = 1024,
        .n_chunks = 4,
        .chunk_bytes = 16384,
        .host = "testhost",
        .n_cpus = 2,
        .spin_ns = -1,
        .warn_ns = FIPC_FOREVER,
    };
    /* really random, so that a run never meets what another left behind */
    CHECK(getrandom(c.id, sizeof c.id, 0) == (ssize_t)sizeof c.id);
    return c;
}

static inline fipc_queue *peers_create(const struct fipc_config *c) {
    fipc_queue *q;
    struct fipc_error err;
    int rc = fipc_queue_create(&q, c, &err);
    if (rc != FIPC_OK) {
        FAIL("create: %s: %s", fipc_status_text(rc), err.text);
    }
    return q;
}

static inline struct fipc_address peers_address(const fipc_queue *writer) {
    struct fipc_address a;
    fipc_queue_address(writer, &a);
    return a;
}

static inline int peers_try_attach(fipc_queue **q, const struct fipc_address *a, uint32_t reader,
                                   const struct fipc_config *c, struct fipc_error *err) {
    struct fipc_attach_options o = {.host = c->host,
                                    .n_cpus = c->n_cpus,
                                    .spin_ns = c->spin_ns,
                                    .warn_ns = c->warn_ns,
                                    .ops = c->ops};
    return fipc_queue_attach(q, a, reader, &o, err);
}

static inline fipc_queue *peers_attach_at(const struct fipc_address *a, uint32_t reader,
                                          const struct fipc_config *c) {
    fipc_queue *q;
    struct fipc_error err;
    int rc = peers_try_attach(&q, a, reader, c, &err);
    if (rc != FIPC_OK) {
        FAIL("attach as %u: %s: %s", reader, fipc_status_text(rc), err.text);
    }
    return q;
}

static inline fipc_queue *peers_attach(const fipc_queue *writer, uint32_t reader,
                                       const struct fipc_config *c) {
    struct fipc_address a = peers_address(writer);
    return peers_attach_at(&a, reader, c);
}

/* A clock that runs 20 times as fast: slices, probes and spins of a real wait take a twentieth. */
#define PEERS_FASTER 20

static inline uint64_t peers_fast_now(void *ctx) {
    (void)ctx;
    return fipc_now() * PEERS_FASTER;
}

static inline int peers_fast_wait(void *ctx, const void *word, uint32_t expected,
                                  uint64_t deadline) {
    (void)ctx;
    return fipc_wait_platform.wait(NULL, word, expected, deadline / PEERS_FASTER + 1);
}

static inline void peers_fast_wake(void *ctx, const void *word) {
    (void)ctx;
    fipc_wait_platform.wake(NULL, word);
}

static const struct fipc_waitops peers_fast = {peers_fast_now, peers_fast_wait, peers_fast_wake,
                                               NULL};

/* ---- sending ------------------------------------------------------------------------------ */

/* A message of one piece; what asks for another call gets it, but for FIPC_EVICTED. */
static inline int peers_send(fipc_queue *q, const void *ptr, uint64_t len, uint32_t tag,
                             uint64_t deadline, struct fipc_error *err) {
    struct fipc_call call = {.deadline = deadline};
    struct fipc_piece piece = {.ptr = ptr, .len = len};
    int rc;
    do {
        rc = fipc_queue_send(q, &piece, 1, tag, &call, err);
    } while (rc == FIPC_INTERRUPTED || rc == FIPC_LONG_WAIT);
    if (rc == FIPC_EVICTED) {
        fipc_queue_send_abandon(q, &call);
    }
    return rc;
}

/* Message number `seq`, of the pattern; the tag is the number. */
static inline int peers_put_until(fipc_queue *q, uint64_t seq, uint64_t len, uint64_t deadline) {
    struct fipc_error err;
    char *p = malloc(len + 1);
    CHECK(p != NULL);
    pattern_fill(p, seq, 0, len);
    int rc = peers_send(q, p, len, (uint32_t)seq, deadline, &err);
    free(p);
    return rc;
}

static inline void peers_put(fipc_queue *q, uint64_t seq, uint64_t len) {
    CHECK_RC(peers_put_until(q, seq, len, FIPC_FOREVER), FIPC_OK);
}

/* ---- receiving ---------------------------------------------------------------------------- */

static inline int peers_recv(fipc_queue *q, uint64_t deadline, struct fipc_message *out,
                             struct fipc_error *err) {
    struct fipc_call call = {.deadline = deadline};
    for (;;) {
        int rc = fipc_queue_wait_readable(q, &call, err);
        if (rc == FIPC_INTERRUPTED || rc == FIPC_LONG_WAIT) {
            continue;
        }
        if (rc != FIPC_OK) {
            return rc;
        }
        rc = fipc_queue_recv(q, &call, out, err);
        if (rc != FIPC_WOULD_BLOCK && rc != FIPC_INTERRUPTED) {
            return rc;
        }
    }
}

/* The whole of a message, as one stretch of the pattern, in however many buffers. */
static inline void peers_check(const struct fipc_message *m, uint64_t seq, uint64_t len) {
    CHECK_EQ(m->tag, (uint32_t)seq);
    uint64_t at = 0;
    for (uint64_t i = 0; i < m->n; i++) {
        if (!pattern_is(m->blocks[i].ptr, seq, at, m->blocks[i].len)) {
            FAIL("message %" PRIu64 ": buffer %" PRIu64 " of %" PRIu64 " has wrong bytes", seq, i,
                 m->n);
        }
        at += m->blocks[i].len;
    }
    CHECK_EQ(at, len);
}

static inline void peers_get(fipc_queue *q, uint64_t seq, uint64_t len) {
    struct fipc_message m;
    struct fipc_error err;
    int rc = peers_recv(q, FIPC_FOREVER, &m, &err);
    if (rc != FIPC_OK) {
        FAIL("message %" PRIu64 ": %s (reader %d, pid %" PRId64 ")", seq, fipc_status_text(rc),
             err.reader, err.pid);
    }
    peers_check(&m, seq, len);
    fipc_message_clear(&m);
}

/* Nothing to read now, and the reason is this. */
static inline void peers_nothing(fipc_queue *q, int why) {
    struct fipc_message m;
    struct fipc_error err;
    CHECK_RC(peers_recv(q, 0, &m, &err), why);
}

#endif /* FIPC_TESTS_PEERS_H */
