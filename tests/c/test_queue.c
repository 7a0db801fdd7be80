/* The queue as its users see it: everything arrives exactly once, in order and whole; and what
 * can't arrive is said.
 *
 *   test_queue             all cases
 *   test_queue closing     those whose name contains it
 *   test_queue 1000000     the streams, with so many messages each
 */
#include "test.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "fipc_queue.h"
#include "peers.h"

/* ---- streams: one writer, several reader processes ----------------------------------------- */

static uint64_t stream_count;

struct stream {
    struct fipc_config c;
    struct fipc_address address;
    uint32_t reader;
    uint64_t count, longest;
};

static uint64_t length_of(const struct stream *s, uint64_t seq) {
    return test_log_uniform(test_mix(seq * 2 + 1), s->longest);
}

/* Sends a message in one of the ways that there are; chosen by its number. */
static void send_somehow(fipc_queue *w, const struct stream *s, uint64_t seq, char *buffer) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint64_t len = length_of(s, seq);
    uint64_t random = test_mix(seq ^ s->c.n_slots);
    struct fipc_piece pieces[5];
    uint64_t n = 1;
    uint32_t tag = (uint32_t)seq;
    int rc;
    if (random % 8 == 0 && len <= s->c.chunk_bytes) {
        void *ptr;
        while ((rc = fipc_queue_loan(w, len, &call, &ptr, &err)) == FIPC_INTERRUPTED) {
        }
        CHECK_RC(rc, FIPC_OK);
        pattern_fill(ptr, seq, 0, len);
        w->loan.tag = tag; /* a loan's message has no tag of its own */
        fipc_queue_loan_commit(w, len);
        return;
    }
    pattern_fill(buffer, seq, 0, len);
    if (random % 8 == 1 || random % 8 == 2) { /* several buffers, or one made of several pieces */
        n = 2 + random / 8 % 4;
    }
    uint64_t at = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t end = i == n - 1 ? len : at + test_mix(random + i) % (len - at + 1);
        pieces[i] = (struct fipc_piece){
            .ptr = buffer + at, .len = end - at, .joins = i > 0 && random % 8 == 2};
        at = end;
    }
    rc = FIPC_WOULD_BLOCK;
    if (random % 2 == 1) {
        rc = fipc_queue_send_inline(w, pieces, n, tag, &err);
    }
    while (rc == FIPC_WOULD_BLOCK || rc == FIPC_INTERRUPTED) {
        rc = fipc_queue_send(w, pieces, n, tag, &call, &err);
    }
    if (rc != FIPC_OK) {
        FAIL("message %" PRIu64 ": %s, reader %d", seq, fipc_status_text(rc), err.reader);
    }
}

static void receive_somehow(fipc_queue *r, const struct stream *s, uint64_t seq) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint64_t len = length_of(s, seq);
    uint64_t random = test_mix(seq + s->reader);
    if (random % 4 == 0) {
        const void *ptr;
        uint64_t got;
        uint32_t tag;
        int rc;
        while ((rc = fipc_queue_wait_readable(r, &call, &err)) == FIPC_INTERRUPTED) {
        }
        CHECK_RC(rc, FIPC_OK);
        rc = fipc_queue_peek(r, random % 8 == 0 ? UINT64_MAX : 500, &ptr, &got, &tag, &err);
        if (rc == FIPC_OK) {
            CHECK_EQ(got, len);
            CHECK_EQ(tag, (uint32_t)seq);
            CHECK(pattern_is(ptr, seq, 0, len));
            if (random / 8 % 2 == 0) {
                fipc_queue_peek_done(r);
                return;
            }
            fipc_queue_peek_undo(r);
        } else {
            CHECK_RC(rc, FIPC_INVALID);
        }
    }
    peers_get(r, seq, len);
}

static void stream_reader(void *arg) {
    const struct stream *s = arg;
    fipc_queue *r = peers_attach_at(&s->address, s->reader, &s->c);
    for (uint64_t seq = 1; seq <= s->count; seq++) {
        receive_somehow(r, s, seq);
    }
    struct fipc_message m;
    struct fipc_error err;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_CLOSED);
    struct fipc_stats stats;
    fipc_queue_stats(r, &stats);
    CHECK_EQ(stats.messages, s->count);
    fipc_queue_free(r);
}

static void stream(uint32_t readers, uint32_t slots, uint64_t chunk_bytes, uint64_t count) {
    struct stream s = {.c = peers_config(readers), .count = count, .longest = 3 * chunk_bytes};
    s.c.n_slots = slots;
    s.c.chunk_bytes = chunk_bytes;
    fipc_queue *w = peers_create(&s.c);
    s.address = peers_address(w);
    pid_t pids[8];
    for (s.reader = 0; s.reader < readers; s.reader++) {
        pids[s.reader] = test_fork(stream_reader, &s);
    }
    char *buffer = malloc(s.longest);
    CHECK(buffer != NULL);
    for (uint64_t seq = 1; seq <= count; seq++) {
        send_somehow(w, &s, seq, buffer);
    }
    free(buffer);
    fipc_queue_close(w);
    for (uint32_t i = 0; i < readers; i++) {
        CHECK_EXITED(pids[i]);
    }
    fipc_queue_free(w);
}

static uint64_t stream_length(uint64_t quick) {
    return stream_count != 0 ? stream_count : TEST_TSAN ? quick / 20 : (uint64_t)TEST_SCALE(quick);
}

#define STREAM(readers)                                                                            \
    static void stream_to_##readers##_readers(void) {                                              \
        stream(readers, 2, 16384, stream_length(6000 / readers));                                  \
        stream(readers, 256, 16384, stream_length(40000 / readers));                               \
    }
STREAM(1)
STREAM(2)
STREAM(4)
STREAM(7)
STREAM(8)

static void stream_through_odd_sizes(void) {
    stream(2, 5, 64, stream_length(4000)); /* inline capped at the chunk, and hundreds of parts */
    stream(2, 3, 1000, stream_length(4000));
}

static void stream_in_parts(void) { /* a chunk is published in several parts */
    if (stream_count == 0) {
        stream(1, 2, UINT64_C(5) << 20, TEST_SCALE(60));
        stream(2, 256, UINT64_C(3) << 20, TEST_SCALE(100));
    }
}

/* ---- sizes --------------------------------------------------------------------------------- */

/* One message that has room at once, there and back; as one buffer, then as two. */
static void there_and_back(fipc_queue *w, fipc_queue *r, uint64_t seq, uint64_t len) {
    CHECK_RC(peers_put_until(w, seq, len, 0), FIPC_OK);
    peers_get(r, seq, len);
    char *p = malloc(len + 1);
    CHECK(p != NULL);
    pattern_fill(p, seq, 0, len);
    uint64_t cut = test_below(len + 1);
    struct fipc_piece two[2] = {{.ptr = p, .len = cut}, {.ptr = p + cut, .len = len - cut}};
    struct fipc_call poll = {0};
    struct fipc_error err;
    CHECK_RC(fipc_queue_send(w, two, 2, (uint32_t)seq, &poll, &err), FIPC_OK);
    peers_get(r, seq, len);
    free(p);
}

static void every_size_around_a_limit_arrives(void) {
    static const uint32_t inline_bytes[] = {0, 1, 100, 1024};
    static const uint64_t chunk_bytes[] = {128, 4096, 5000};
    for (size_t i = 0; i < 4; i++) {
        for (size_t c = 0; c < 3; c++) {
            struct fipc_config config = peers_config(1);
            config.inline_bytes = inline_bytes[i];
            config.chunk_bytes = chunk_bytes[c];
            config.n_chunks = 16;
            config.n_slots = 17;
            fipc_queue *w = peers_create(&config);
            fipc_queue *r = peers_attach(w, 0, &config);
            uint64_t seq = 0;
            for (int64_t k = -80; k <= 80; k++) {
                for (uint64_t times = 0; times < 4; times++) {
                    int64_t base =
                        times == 0 ? (int64_t)inline_bytes[i] : (int64_t)(times * chunk_bytes[c]);
                    if (base + k >= 0) {
                        there_and_back(w, r, ++seq, (uint64_t)(base + k));
                    }
                }
            }
            fipc_queue_free(r);
            fipc_queue_free(w);
        }
    }
}

static void any_number_of_buffers_arrives(void) {
    static const uint64_t counts[] = {1, 2, 3, 255, 256, 257, 65535, 65536};
    struct fipc_config c = peers_config(1);
    c.n_chunks = 4;
    c.n_slots = 4;
    c.chunk_bytes = UINT64_C(3) << 20; /* of 4 MiB, 65,536 paddings: the poll must have room */
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct fipc_piece *pieces = calloc(65536, sizeof *pieces);
    char bytes[4 * 7];
    CHECK(pieces != NULL);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint64_t n = counts[i];
        uint64_t seq = i + 1;
        pattern_fill(bytes, seq, 0, sizeof bytes);
        for (uint64_t k = 0; k < n; k++) {
            pieces[k] = (struct fipc_piece){.ptr = bytes + k % 7, .len = k % 8};
        }
        struct fipc_call poll = {0};
        struct fipc_error err;
        struct fipc_message m;
        CHECK_RC(fipc_queue_send(w, pieces, n, (uint32_t)seq, &poll, &err), FIPC_OK);
        CHECK_RC(peers_recv(r, 0, &m, &err), FIPC_OK);
        CHECK_EQ(m.n, n);
        for (uint64_t k = 0; k < n; k++) {
            CHECK_EQ(m.blocks[k].len, k % 8);
            CHECK(k % 8 == 0 || memcmp(m.blocks[k].ptr, bytes + k % 7, k % 8) == 0);
        }
        fipc_message_clear(&m);
    }
    struct fipc_call poll = {0};
    struct fipc_error err;
    CHECK_RC(fipc_queue_send(w, pieces, 0, 0, &poll, &err), FIPC_INVALID);
    pieces[0].joins = true;
    CHECK_RC(fipc_queue_send(w, pieces, 2, 0, &poll, &err), FIPC_INVALID);
    CHECK_RC(fipc_queue_send_inline(w, pieces, 2, 0, &err), FIPC_INVALID);
    peers_nothing(r, FIPC_TIMEOUT);
    free(pieces);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

/* Elements are cut by the ends of fragments. */
static void a_strided_array_arrives_in_fragments(void) {
    struct fipc_config c = peers_config(1);
    c.chunk_bytes = 1000;
    c.inline_bytes = 100;
    c.n_chunks = 50;
    c.n_slots = 64;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    for (uint32_t size = 1; size <= 17; size++) {
        const int64_t rows = 40, columns = 30;
        uint8_t *memory = malloc((size_t)(rows * columns) * size);
        CHECK(memory != NULL);
        for (int64_t i = 0; i < rows * columns * size; i++) {
            memory[i] = (uint8_t)test_random();
        }
        const int64_t shape[] = {columns, rows}; /* transposed, and its rows from the last to the
                                                    first */
        const int64_t strides[] = {size, -columns * size};
        struct fipc_piece piece = {.ptr = memory + (rows - 1) * columns * size,
                                   .len = (uint64_t)(rows * columns) * size,
                                   .shape = shape,
                                   .strides = strides,
                                   .itemsize = size,
                                   .ndim = 2};
        struct fipc_call poll = {0};
        struct fipc_error err;
        struct fipc_message m;
        CHECK_RC(fipc_queue_send(w, &piece, 1, 0, &poll, &err), FIPC_OK);
        CHECK_RC(peers_recv(r, 0, &m, &err), FIPC_OK);
        CHECK_EQ(m.blocks[0].len, piece.len);
        const uint8_t *got = m.blocks[0].ptr;
        for (int64_t k = 0; k < columns * rows; k++) {
            int64_t row = rows - 1 - k % rows, column = k / rows;
            CHECK(memcmp(got + k * size, memory + (row * columns + column) * size, size) == 0);
        }
        fipc_message_clear(&m);
        free(memory);
    }
    fipc_queue_free(r);
    fipc_queue_free(w);
}

/* ---- the ways in and out ------------------------------------------------------------------- */

static void send_inline_takes_what_fits_a_slot_at_once(void) {
    struct fipc_config c = peers_config(1);
    c.n_slots = 4;
    fipc_queue *w = peers_create(&c);
    struct fipc_error err;
    char bytes[2000];
    struct fipc_piece piece = {.ptr = bytes, .len = 1};
    /* newcomers are noticed by the waiting call, until then this one stands aside */
    fipc_queue *r = peers_attach(w, 0, &c);
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK);
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    CHECK_RC(fipc_queue_wait_ready(w, &call, &err), FIPC_OK);
    for (uint64_t seq = 1; seq <= 100; seq++) {
        piece.len = test_below(c.inline_bytes + 1);
        pattern_fill(bytes, seq, 0, piece.len);
        int rc = fipc_queue_send_inline(w, &piece, 1, (uint32_t)seq, &err);
        if (rc == FIPC_WOULD_BLOCK) { /* it is time to ask for the dead */
            rc = peers_send(w, bytes, piece.len, (uint32_t)seq, 0, &err);
        }
        CHECK_RC(rc, FIPC_OK);
        peers_get(r, seq, piece.len);
    }
    piece.len = c.inline_bytes + 1;
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK);
    peers_nothing(r, FIPC_TIMEOUT);
    for (uint64_t seq = 1; seq <= c.n_slots; seq++) {
        peers_put(w, seq, 10);
    }
    piece.len = 10;
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK); /* full */
    for (uint64_t seq = 1; seq <= c.n_slots; seq++) {
        peers_get(r, seq, 10);
    }
    peers_nothing(r, FIPC_TIMEOUT);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_loan_is_filled_in_place(void) {
    struct fipc_config c = peers_config(1);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    void *ptr;
    static const uint64_t sizes[] = {0, 1, 1024, 1025, 16383, 16384};
    for (size_t i = 0; i < 6; i++) {
        for (uint64_t used = 0; used <= sizes[i]; used += sizes[i] > 0 ? sizes[i] : 1) {
            CHECK_RC(fipc_queue_loan(w, sizes[i], &call, &ptr, &err), FIPC_OK);
            CHECK_EQ((uintptr_t)ptr % FIPC_ALIGN, 0);
            memset(ptr, 0xee, sizes[i]); /* all that was lent may be written */
            fipc_queue_loan_abort(w);
            peers_nothing(r, FIPC_TIMEOUT);
            CHECK_RC(fipc_queue_loan(w, sizes[i], &call, &ptr, &err), FIPC_OK);
            pattern_fill(ptr, 0, 0, sizes[i]);
            fipc_queue_loan_commit(w, used);
            peers_get(r, 0, used);
        }
    }
    CHECK_RC(fipc_queue_loan(w, c.chunk_bytes + 1, &call, &ptr, &err), FIPC_INVALID);
    CHECK_RC(fipc_queue_loan(w, UINT64_MAX, &call, &ptr, &err), FIPC_INVALID);

    /* while it is lent this thread is inside */
    CHECK_RC(fipc_queue_loan(w, 10, &call, &ptr, &err), FIPC_OK);
    struct fipc_piece piece = {.ptr = "x", .len = 1};
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_REENTRANT);
    CHECK_RC(fipc_queue_send(w, &piece, 1, 0, &call, &err), FIPC_REENTRANT);
    CHECK_RC(fipc_queue_loan(w, 10, &call, &ptr, &err), FIPC_REENTRANT);
    CHECK_RC(fipc_queue_wait_ready(w, &call, &err), FIPC_REENTRANT);
    CHECK_RC(fipc_queue_evict(w, 0, &err), FIPC_REENTRANT);
    fipc_queue_loan_abort(w);
    peers_put(w, 1, 10);
    peers_get(r, 1, 10);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_look_leaves_the_message_until_it_is_done(void) {
    struct fipc_config c = peers_config(1);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct fipc_error err;
    struct fipc_call poll = {0};
    struct fipc_message m;
    const void *ptr;
    uint64_t len;
    uint32_t tag;
    CHECK_RC(fipc_queue_peek(r, UINT64_MAX, &ptr, &len, &tag, &err), FIPC_WOULD_BLOCK);
    static const uint64_t sizes[] = {0, 1, 1024, 1025, 16384};
    for (size_t i = 0; i < 5; i++) {
        uint64_t seq = i + 1;
        peers_put(w, seq, sizes[i]);
        for (int look = 0; look < 3; look++) {
            CHECK_RC(fipc_queue_peek(r, sizes[i], &ptr, &len, &tag, &err), FIPC_OK);
            CHECK(len == sizes[i] && tag == seq && pattern_is(ptr, seq, 0, len));
            CHECK_RC(fipc_queue_peek(r, sizes[i], &ptr, &len, &tag, &err), FIPC_REENTRANT);
            CHECK_RC(fipc_queue_recv(r, &poll, &m, &err), FIPC_REENTRANT);
            fipc_queue_peek_undo(r);
            CHECK_EQ(fipc_queue_size(r), 1);
        }
        if (sizes[i] > 0) {
            CHECK_RC(fipc_queue_peek(r, sizes[i] - 1, &ptr, &len, &tag, &err), FIPC_INVALID);
        }
        if (i % 2 == 0) {
            peers_get(r, seq, sizes[i]);
        } else {
            CHECK_RC(fipc_queue_peek(r, UINT64_MAX, &ptr, &len, &tag, &err), FIPC_OK);
            fipc_queue_peek_done(r);
        }
        CHECK_RC(fipc_queue_peek(r, UINT64_MAX, &ptr, &len, &tag, &err), FIPC_WOULD_BLOCK);
        CHECK_EQ(fipc_queue_size(r), 0);
    }
    /* fragments, and several buffers, can't be shown in place */
    peers_put(w, 7, c.chunk_bytes + 1);
    CHECK_RC(fipc_queue_peek(r, UINT64_MAX, &ptr, &len, &tag, &err), FIPC_INVALID);
    peers_get(r, 7, c.chunk_bytes + 1);
    struct fipc_piece two[2] = {{.ptr = "ab", .len = 2}, {.ptr = "c", .len = 1}};
    CHECK_RC(fipc_queue_send(w, two, 2, 0, &poll, &err), FIPC_OK);
    CHECK_RC(fipc_queue_peek(r, UINT64_MAX, &ptr, &len, &tag, &err), FIPC_INVALID);
    CHECK_RC(fipc_queue_recv(r, &poll, &m, &err), FIPC_OK);
    CHECK(m.n == 2 && memcmp(m.blocks[0].ptr, "ab", 2) == 0 && m.blocks[1].len == 1);
    fipc_message_clear(&m);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static uint64_t fragments_of(fipc_queue *q) {
    struct fipc_stats s;
    fipc_queue_stats(q, &s);
    return s.fragments;
}

static void a_poll_sends_the_whole_message_or_nothing(void) {
    struct fipc_config c = peers_config(2);
    c.n_chunks = 4;
    c.n_slots = 6;
    c.chunk_bytes = 3000;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
    uint64_t lengths[64];
    uint64_t sent = 0, taken[2] = {0, 0}, refused = 0;
    for (int i = 0; i < TEST_SCALE(20000); i++) {
        uint32_t who = (uint32_t)test_below(2);
        if (test_chance(2) && taken[who] < sent) {
            taken[who]++;
            peers_get(r[who], taken[who], lengths[taken[who] % 64]);
            continue;
        }
        uint64_t len = test_log_uniform(test_random(), 5 * c.chunk_bytes);
        uint64_t before = fragments_of(w);
        int rc = peers_put_until(w, sent + 1, len, 0);
        if (rc == FIPC_OK) {
            lengths[++sent % 64] = len;
        } else {
            CHECK_RC(rc, FIPC_TIMEOUT);
            CHECK_EQ(fragments_of(w), before);
            refused++;
        }
        bool empty = taken[0] == sent && taken[1] == sent;
        if (len > c.n_chunks * c.chunk_bytes) {
            CHECK_RC(rc, FIPC_TIMEOUT); /* never all of it at once */
        }
        if (rc != FIPC_OK && len <= c.n_chunks * c.chunk_bytes) {
            CHECK(!empty); /* nothing but unread messages can be in its way */
        }
    }
    CHECK(sent > 100 && refused > 100);
    for (int k = 0; k < 2; k++) {
        while (taken[k] < sent) {
            taken[k]++;
            peers_get(r[k], taken[k], lengths[taken[k] % 64]);
        }
        fipc_queue_free(r[k]);
    }
    fipc_queue_free(w);
}

/* What has arrived of it is void, whether the reader had taken it or not. */
static void after_a_timeout_amid_a_message_the_next_is_right(void) {
    for (int taken = 0; taken < 2; taken++) {
        struct fipc_config c = peers_config(1);
        c.ops = &peers_fast;
        c.n_chunks = 2;
        c.n_slots = 4;
        fipc_queue *w = peers_create(&c);
        fipc_queue *r = peers_attach(w, 0, &c);
        for (uint64_t seq = 1; seq <= 4; seq++) {
            uint64_t before = fragments_of(w);
            uint64_t deadline = peers_fast_now(NULL) + 100 * FIPC_MS;
            CHECK_RC(peers_put_until(w, 99, 10 * c.chunk_bytes, deadline), FIPC_TIMEOUT);
            CHECK(peers_fast_now(NULL) >= deadline);
            CHECK(fragments_of(w) > before);
            struct fipc_call poll = {0};
            struct fipc_message m;
            struct fipc_error err;
            if (taken) {
                CHECK_RC(fipc_queue_recv(r, &poll, &m, &err), FIPC_WOULD_BLOCK);
                uint64_t len = seq % 2 ? 100 : c.chunk_bytes + 100;
                CHECK_RC(peers_put_until(w, seq, len, 0), FIPC_OK);
                peers_get(r, seq, len);
            } else {
                CHECK_RC(peers_put_until(w, seq, 100, 0), FIPC_OK); /* inline: has room */
                peers_get(r, seq, 100);
            }
        }
        fipc_queue_free(r);
        fipc_queue_free(w);
    }
}

/* ---- several threads at one end ------------------------------------------------------------ */

#define TEAM 3

struct team {
    struct fipc_config c;
    fipc_queue *w, *shared, *alone;
    uint64_t each; /* messages of each writing thread */
    fipc_a32 *seen[TEAM];
    fipc_a32 number;
};

/* Each message: which thread, its how manieth, and a pattern. */
static void *team_writer(void *arg) {
    struct team *t = arg;
    uint64_t me = fipc_add32_acqrel(&t->number, 1);
    char *bytes = malloc(40000);
    CHECK(bytes != NULL);
    for (uint64_t i = 0; i < t->each; i++) {
        struct fipc_call call = {.deadline = FIPC_FOREVER};
        struct fipc_error err;
        uint64_t head[2] = {me, i};
        uint64_t len = test_log_uniform(test_mix(me << 32 | i), 40000);
        struct fipc_piece pieces[2] = {{.ptr = head, .len = sizeof head},
                                       {.ptr = bytes, .len = len}};
        pattern_fill(bytes, me << 32 | i, 0, len);
        int rc = i % 2 ? fipc_queue_send_inline(t->w, pieces, 2, 0, &err) : FIPC_WOULD_BLOCK;
        while (rc == FIPC_WOULD_BLOCK || rc == FIPC_INTERRUPTED) {
            rc = fipc_queue_send(t->w, pieces, 2, 0, &call, &err);
        }
        CHECK_RC(rc, FIPC_OK);
    }
    free(bytes);
    return NULL;
}

/* Takes messages until the end; `last`: the greatest seen so far of each writing thread. */
static uint64_t team_read(struct team *t, fipc_queue *q, fipc_a32 *const *seen) {
    uint64_t last[TEAM] = {0};
    uint64_t n = 0;
    for (;; n++) {
        struct fipc_message m;
        struct fipc_error err;
        int rc = peers_recv(q, FIPC_FOREVER, &m, &err);
        if (rc == FIPC_CLOSED) {
            return n;
        }
        CHECK_RC(rc, FIPC_OK);
        uint64_t head[2];
        CHECK(m.n == 2 && m.blocks[0].len == sizeof head);
        memcpy(head, m.blocks[0].ptr, sizeof head);
        CHECK(head[0] < TEAM && head[1] < t->each);
        CHECK(head[1] + 1 > last[head[0]]);
        last[head[0]] = head[1] + 1;
        uint64_t seq = head[0] << 32 | head[1];
        CHECK_EQ(m.blocks[1].len, test_log_uniform(test_mix(seq), 40000));
        CHECK(pattern_is(m.blocks[1].ptr, seq, 0, m.blocks[1].len));
        if (seen != NULL) {
            CHECK_EQ(fipc_add32_acqrel(&seen[head[0]][head[1]], 1), 0); /* once only */
        }
        fipc_message_clear(&m);
    }
}

static void *team_reader(void *arg) {
    struct team *t = arg;
    team_read(t, t->shared, t->seen);
    return NULL;
}

static void *lone_reader(void *arg) {
    struct team *t = arg;
    CHECK_EQ(team_read(t, t->alone, NULL), TEAM * t->each);
    return NULL;
}

static void threads_may_share_an_end(void) {
    struct team t = {.c = peers_config(2), .each = (uint64_t)TEST_SCALE(4000)};
    t.w = peers_create(&t.c);
    t.shared = peers_attach(t.w, 0, &t.c);
    t.alone = peers_attach(t.w, 1, &t.c);
    pthread_t writers[TEAM], readers[TEAM + 1];
    for (int i = 0; i < TEAM; i++) {
        t.seen[i] = calloc(t.each, sizeof *t.seen[i]);
        CHECK(t.seen[i] != NULL);
    }
    for (int i = 0; i < TEAM; i++) {
        CHECK(pthread_create(&readers[i], NULL, team_reader, &t) == 0);
        CHECK(pthread_create(&writers[i], NULL, team_writer, &t) == 0);
    }
    CHECK(pthread_create(&readers[TEAM], NULL, lone_reader, &t) == 0);
    for (int i = 0; i < TEAM; i++) {
        pthread_join(writers[i], NULL);
    }
    fipc_queue_close(t.w);
    for (int i = 0; i <= TEAM; i++) {
        pthread_join(readers[i], NULL);
    }
    for (int i = 0; i < TEAM; i++) {
        for (uint64_t k = 0; k < t.each; k++) {
            CHECK_EQ(fipc_load32_relaxed(&t.seen[i][k]), 1);
        }
        free(t.seen[i]);
    }
    fipc_queue_free(t.shared);
    fipc_queue_free(t.alone);
    fipc_queue_free(t.w);
}

/* A reader's threads wait before the writer has admitted it. */
static void threads_may_share_a_replacement(void) {
    struct team t = {.c = peers_config(2), .each = 5};
    for (int round = 0; round < TEST_SCALE(100); round++) {
        t.w = peers_create(&t.c);
        t.alone = peers_attach(t.w, 1, &t.c);
        fipc_queue_free(peers_attach(t.w, 0, &t.c));
        t.shared = peers_attach(t.w, 0, &t.c);
        pthread_t readers[TEAM + 1];
        fipc_store32_relaxed(&t.number, 0);
        for (int i = 0; i < TEAM; i++) {
            t.seen[i] = calloc(t.each, sizeof *t.seen[i]);
            CHECK(t.seen[i] != NULL);
        }
        for (int i = 0; i < TEAM; i++) {
            CHECK(pthread_create(&readers[i], NULL, team_reader, &t) == 0);
        }
        CHECK(pthread_create(&readers[TEAM], NULL, lone_reader, &t) == 0);
        for (int i = 0; i < TEAM; i++) {
            team_writer(&t);
        }
        fipc_queue_close(t.w);
        for (int i = 0; i <= TEAM; i++) {
            pthread_join(readers[i], NULL);
        }
        for (int i = 0; i < TEAM; i++) {
            for (uint64_t k = 0; k < t.each; k++) {
                CHECK_EQ(fipc_load32_relaxed(&t.seen[i][k]), 1);
            }
            free(t.seen[i]);
        }
        fipc_queue_free(t.shared);
        fipc_queue_free(t.alone);
        fipc_queue_free(t.w);
    }
}

/* ---- shutting down and closing ------------------------------------------------------------- */

/* Sleeps without a limit: a wake-up that is owed and not given is a hang. */
static int endless_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    (void)deadline;
    return fipc_wait_platform.wait(ctx, word, expected, FIPC_FOREVER);
}

static struct fipc_config endless_config(uint32_t readers) {
    static struct fipc_waitops ops;
    ops = fipc_wait_platform;
    ops.wait = endless_wait;
    struct fipc_config c = peers_config(readers);
    c.ops = &ops;
    return c;
}

struct blocked {
    fipc_queue *q;
    int rc;
};

static void *block_in_send(void *arg) {
    struct blocked *b = arg;
    struct fipc_error err;
    b->rc = peers_send(b->q, "abc", 3, 0, FIPC_FOREVER, &err);
    return NULL;
}

static void *block_in_recv(void *arg) {
    struct blocked *b = arg;
    struct fipc_error err;
    struct fipc_message m;
    b->rc = peers_recv(b->q, FIPC_FOREVER, &m, &err);
    return NULL;
}

static void *block_in_wait_ready(void *arg) {
    struct blocked *b = arg;
    struct fipc_error err;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    do {
        b->rc = fipc_queue_wait_ready(b->q, &call, &err);
    } while (b->rc == FIPC_INTERRUPTED);
    return NULL;
}

static void *block_in_wait_any(void *arg) {
    struct blocked *b = arg;
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    uint8_t ready;
    do {
        b->rc = fipc_queue_wait_any(&b->q, 1, &call, &ready);
    } while (b->rc == FIPC_INTERRUPTED);
    return NULL;
}

static void wait_asleep(fipc_queue *q, uint64_t sleeps) {
    UNTIL(fipc_load64_relaxed(&q->sleeps) > sleeps);
}

static void a_shutdown_wakes_all_who_wait_at_this_end(void) {
    for (int writer = 0; writer < 2; writer++) {
        struct fipc_config c = peers_config(1);
        c.n_slots = 2;
        fipc_queue *w = peers_create(&c);
        fipc_queue *r = peers_attach(w, 0, &c);
        if (writer) {
            peers_put(w, 1, 10);
            peers_put(w, 2, 10);
        }
        struct blocked b[3] = {{.q = writer ? w : r}, {.q = writer ? w : r}, {.q = r}};
        pthread_t t[3];
        /* of a writer's two threads one waits for room and the other for the first */
        CHECK(pthread_create(&t[0], NULL, writer ? block_in_send : block_in_recv, &b[0]) == 0);
        CHECK(pthread_create(&t[1], NULL, writer ? block_in_send : block_in_recv, &b[1]) == 0);
        int n = 2;
        if (!writer) {
            CHECK(pthread_create(&t[n++], NULL, block_in_wait_any, &b[2]) == 0);
        }
        wait_asleep(b[0].q, 0);
        fipc_queue_shutdown(b[0].q);
        fipc_queue_shutdown(b[0].q);
        for (int i = 0; i < n; i++) {
            pthread_join(t[i], NULL);
        }
        CHECK_RC(b[0].rc, FIPC_SHUTDOWN);
        CHECK_RC(b[1].rc, FIPC_SHUTDOWN);
        if (!writer) {
            CHECK_RC(b[2].rc, FIPC_OK); /* ready: its next call has something to say */
        }
        struct fipc_error err;
        struct fipc_call poll = {0};
        struct fipc_message m;
        if (writer) {
            struct fipc_piece piece = {.ptr = "x", .len = 1};
            void *ptr;
            CHECK_RC(peers_send(w, "x", 1, 0, 0, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_loan(w, 1, &poll, &ptr, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_wait_ready(w, &poll, &err), FIPC_SHUTDOWN);
            /* the peers notice nothing */
            peers_get(r, 1, 10);
            peers_get(r, 2, 10);
            peers_nothing(r, FIPC_TIMEOUT);
            fipc_queue_close(w);
            peers_nothing(r, FIPC_CLOSED);
        } else {
            const void *ptr;
            uint64_t len;
            uint32_t tag;
            CHECK_RC(fipc_queue_wait_readable(r, &poll, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_recv(r, &poll, &m, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_peek(r, 100, &ptr, &len, &tag, &err), FIPC_SHUTDOWN);
            CHECK_RC(fipc_queue_wait_ready(r, &poll, &err), FIPC_SHUTDOWN);
            peers_put(w, 1, 10);
            peers_put(w, 2, 10);
            CHECK_RC(peers_put_until(w, 3, 10, 0), FIPC_TIMEOUT);
        }
        fipc_queue_free(r);
        fipc_queue_free(w);
    }
}

static void a_shutdown_wakes_one_who_sleeps_without_end(void) {
    struct fipc_config c = endless_config(1);
    c.n_slots = 2;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    for (int writer = 0; writer < 2; writer++) {
        struct blocked b = {.q = writer ? w : r};
        pthread_t t;
        CHECK(pthread_create(&t, NULL, writer ? block_in_send : block_in_recv, &b) == 0);
        wait_asleep(b.q, 0);
        fipc_queue_shutdown(b.q);
        pthread_join(t, NULL);
        CHECK_RC(b.rc, FIPC_SHUTDOWN);
        for (uint64_t seq = 1; !writer && seq <= 2; seq++) {
            peers_put(w, seq, 10);
        }
    }
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_shutdown_ends_a_wait_for_readers(void) {
    struct fipc_config c = endless_config(2);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct blocked b[2] = {{.q = w}, {.q = r}};
    pthread_t t[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&t[i], NULL, block_in_wait_ready, &b[i]) == 0);
    }
    for (int i = 0; i < 2; i++) {
        wait_asleep(b[i].q, 0);
        fipc_queue_shutdown(b[i].q);
        pthread_join(t[i], NULL);
        CHECK_RC(b[i].rc, FIPC_SHUTDOWN);
    }
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void readers_drain_and_then_it_is_closed(void) {
    struct fipc_config c = peers_config(2);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
    struct fipc_address a = peers_address(w);
    peers_put(w, 1, 10);
    peers_put(w, 2, 3 * c.chunk_bytes);
    peers_put(w, 3, 10);
    fipc_queue_close(w);
    fipc_queue_close(w);
    for (int i = 0; i < 2; i++) {
        peers_get(r[i], 1, 10);
        peers_get(r[i], 2, 3 * c.chunk_bytes);
        peers_get(r[i], 3, 10);
        for (int again = 0; again < 3; again++) {
            peers_nothing(r[i], FIPC_CLOSED);
        }
    }
    fipc_queue *late;
    struct fipc_error err;
    fipc_queue_close(r[0]);
    CHECK_RC(peers_try_attach(&late, &a, 0, &c, &err), FIPC_GONE);
    CHECK(late == NULL && err.text[0] != 0);
    struct fipc_call poll = {0};
    struct fipc_message m;
    CHECK_RC(peers_send(w, "x", 1, 0, 0, &err), FIPC_SHUTDOWN);
    CHECK_RC(fipc_queue_recv(r[0], &poll, &m, &err), FIPC_SHUTDOWN);
    CHECK(!fipc_queue_readable(r[0]) && !fipc_queue_has_room(w));
    CHECK_EQ(fipc_queue_size(w), 0);
    fipc_queue_free(r[0]);
    fipc_queue_free(r[1]);
    fipc_queue_free(w);
}

static void a_closing_writer_wakes_its_readers(void) {
    struct fipc_config c = endless_config(1);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct blocked b = {.q = r};
    pthread_t t;
    CHECK(pthread_create(&t, NULL, block_in_recv, &b) == 0);
    wait_asleep(r, 0);
    fipc_queue_free(w);
    pthread_join(t, NULL);
    CHECK_RC(b.rc, FIPC_CLOSED);
    fipc_queue_free(r);
}

static void a_reader_that_left_is_not_waited_for(void) {
    struct fipc_config c = endless_config(3);
    c.n_slots = 2;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[3];
    for (uint32_t i = 0; i < 3; i++) {
        r[i] = peers_attach(w, i, &c);
    }
    uint64_t seq = 0;
    peers_put(w, ++seq, 10);
    peers_put(w, ++seq, 10);
    for (uint32_t i = 1; i < 3; i++) {
        peers_get(r[i], 1, 10);
        peers_get(r[i], 2, 10);
    }
    struct blocked b = {.q = w}; /* waits for reader 0 alone */
    pthread_t t;
    CHECK(pthread_create(&t, NULL, block_in_send, &b) == 0);
    wait_asleep(w, 0);
    fipc_queue_close(r[0]);
    pthread_join(t, NULL);
    CHECK_RC(b.rc, FIPC_OK);
    struct fipc_peer_info info;
    CHECK_RC(fipc_queue_peer(w, 0, &info), FIPC_OK);
    struct fipc_message m;
    struct fipc_error err;
    for (uint32_t i = 1; i < 3; i++) {
        CHECK_RC(peers_recv(r[i], 0, &m, &err), FIPC_OK);
        fipc_message_clear(&m);
    }
    fipc_queue_close(r[1]);
    peers_put(w, 4, 10);
    CHECK_RC(fipc_queue_peer(w, 0, &info), FIPC_OK);
    CHECK_EQ(info.state, FIPC_PEER_LEFT);
    peers_get(r[2], 4, 10);
    fipc_queue_close(r[2]);
    struct fipc_call poll = {0};
    void *ptr;
    struct fipc_piece piece = {.ptr = "x", .len = 1};
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK);
    CHECK_RC(peers_put_until(w, 5, 10, FIPC_FOREVER), FIPC_CLOSED);
    CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK);
    CHECK_RC(fipc_queue_loan(w, 1, &poll, &ptr, &err), FIPC_CLOSED);
    for (uint32_t i = 0; i < 3; i++) {
        fipc_queue_free(r[i]);
    }
    fipc_queue_free(w);
}

/* ---- attaching ----------------------------------------------------------------------------- */

static void messages_before_everyone_is_there_are_kept(void) {
    struct fipc_config c = peers_config(2);
    c.n_slots = 4;
    fipc_queue *w = peers_create(&c);
    for (uint64_t seq = 1; seq <= 2; seq++) {
        peers_put(w, seq, 100);
    }
    fipc_queue *r0 = peers_attach(w, 0, &c);
    peers_put(w, 3, 100);
    peers_put(w, 4, 2000);
    for (uint64_t seq = 1; seq <= 3; seq++) {
        peers_get(r0, seq, 100);
    }
    peers_get(r0, 4, 2000);
    CHECK_RC(peers_put_until(w, 5, 100, 0), FIPC_TIMEOUT); /* full: kept for the other */
    fipc_queue *r1 = peers_attach(w, 1, &c);
    CHECK_EQ(fipc_queue_size(r1), 4);
    for (uint64_t seq = 1; seq <= 3; seq++) {
        peers_get(r1, seq, 100);
    }
    peers_get(r1, 4, 2000);
    peers_put(w, 5, 100);
    peers_get(r1, 5, 100);
    peers_get(r0, 5, 100);
    fipc_queue_free(r0);
    fipc_queue_free(r1);
    fipc_queue_free(w);
}

static enum fipc_peer_state state_of(fipc_queue *q, int64_t reader) {
    struct fipc_peer_info info;
    CHECK_RC(fipc_queue_peer(q, reader, &info), FIPC_OK);
    return info.state;
}

static void it_is_ready_when_all_are_there(void) {
    struct fipc_config c = endless_config(3);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[3] = {peers_attach(w, 0, &c), NULL, peers_attach(w, 2, &c)};
    struct fipc_error err;
    struct fipc_call poll = {0};
    CHECK_RC(fipc_queue_wait_ready(w, &poll, &err), FIPC_TIMEOUT);
    CHECK_RC(fipc_queue_wait_ready(r[0], &poll, &err), FIPC_TIMEOUT);
    for (int64_t side = 0; side < 2; side++) { /* who is missing, at either end */
        fipc_queue *q = side ? r[2] : w;
        CHECK_EQ(state_of(q, 0), FIPC_PEER_ACTIVE);
        CHECK_EQ(state_of(q, 1), FIPC_PEER_FREE);
        CHECK_EQ(state_of(q, 2), FIPC_PEER_ACTIVE);
        CHECK_EQ(state_of(q, -1), FIPC_PEER_ACTIVE);
        struct fipc_peer_info info;
        CHECK_RC(fipc_queue_peer(q, 2, &info), FIPC_OK);
        CHECK(info.pid == getpid() && info.epoch == 1 && strcmp(info.host, "testhost") == 0);
        CHECK_RC(fipc_queue_peer(q, -1, &info), FIPC_OK);
        CHECK(info.pid == getpid() && strcmp(info.host, "testhost") == 0);
        CHECK_RC(fipc_queue_peer(q, 3, &info), FIPC_INVALID);
        CHECK_RC(fipc_queue_peer(q, -2, &info), FIPC_INVALID);
    }
    struct blocked b[3] = {{.q = w}, {.q = r[0]}, {.q = r[2]}};
    pthread_t t[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&t[i], NULL, block_in_wait_ready, &b[i]) == 0);
    }
    for (int i = 0; i < 3; i++) {
        wait_asleep(b[i].q, 0);
    }
    r[1] = peers_attach(w, 1, &c);
    for (int i = 0; i < 3; i++) {
        pthread_join(t[i], NULL);
        CHECK_RC(b[i].rc, FIPC_OK);
    }
    CHECK_RC(fipc_queue_wait_ready(r[1], &poll, &err), FIPC_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(state_of(r[i], 1), FIPC_PEER_ACTIVE);
    }
    for (int i = 0; i < 3; i++) {
        fipc_queue_free(r[i]);
    }
    fipc_queue_free(w);
}

/* ---- another process at the other end ------------------------------------------------------ */

/* What a forked helper and the test tell each other. */
struct helper {
    struct fipc_config c;
    struct fipc_address address;
    uint32_t reader;
    fipc_a32 phase; /* of the helper */
    fipc_a32 go;    /* of the test */
};

static void helper_reader(void *arg) { /* attaches, waits to be told, ends without closing */
    struct helper *h = arg;
    peers_attach_at(&h->address, h->reader, &h->c);
    fipc_store32_release(&h->phase, 1);
    UNTIL(fipc_load32_acquire(&h->go));
}

static void helper_writer(void *arg) {
    struct helper *h = arg;
    fipc_queue *w = peers_create(&h->c);
    h->address = peers_address(w);
    peers_put(w, 1, 10);
    fipc_store32_release(&h->phase, 1);
    UNTIL(fipc_load32_acquire(&h->go));
}

static void a_rank_is_one_living_process(void) {
    struct helper *h = test_share(sizeof *h);
    h->c = peers_config(2);
    fipc_queue *w = peers_create(&h->c);
    h->address = peers_address(w);
    h->reader = 1;
    pid_t pid = test_fork(helper_reader, h);
    UNTIL(fipc_load32_acquire(&h->phase));
    fipc_queue *r;
    struct fipc_error err;
    for (int i = 0; i < 3; i++) {
        CHECK_RC(peers_try_attach(&r, &h->address, 1, &h->c, &err), FIPC_RANK_TAKEN);
        CHECK(r == NULL);
        CHECK_EQ(err.pid, pid);
        CHECK_EQ(err.reader, 1);
        CHECK(strcmp(err.host, "testhost") == 0);
    }
    fipc_queue *other = peers_attach(w, 0, &h->c); /* another rank is free */
    CHECK_RC(peers_try_attach(&r, &h->address, 0, &h->c, &err), FIPC_RANK_TAKEN);
    CHECK_EQ(err.pid, getpid());
    fipc_store32_release(&h->go, 1);
    CHECK_EXITED(pid);
    r = peers_attach(w, 1, &h->c); /* the kernel gave it back */
    fipc_queue_free(r);
    fipc_queue_free(other);
    r = peers_attach(w, 0, &h->c);
    fipc_queue_free(r);
    fipc_queue_free(w);
    test_unshare(h, sizeof *h);
}

static void scribble(const struct fipc_address *a, off_t at, uint8_t flip) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%" PRId64 "/fd/%d", a->pid, a->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= flip;
    CHECK(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

static void what_is_not_the_queue_is_not_attached(void) {
    struct fipc_config c = peers_config(3);
    fipc_queue *w = peers_create(&c);
    const struct fipc_address good = peers_address(w);
    CHECK(good.pid == getpid() && good.n_readers == 3 && good.path[0] == 0);
    CHECK(memcmp(good.id, c.id, sizeof good.id) == 0 && good.start_time != 0);
    fipc_queue *r;
    struct fipc_error err;
    struct fipc_address a = good;
    for (int i = 0; i < FIPC_ID_BYTES; i++) {
        a.id[i] ^= 1;
        CHECK_RC(peers_try_attach(&r, &a, 0, &c, &err), FIPC_MISMATCH);
        CHECK(r == NULL && err.text[0] != 0);
        a = good;
    }
    a.n_readers = 2;
    CHECK_RC(peers_try_attach(&r, &a, 0, &c, &err), FIPC_MISMATCH);
    a.n_readers = 4;
    CHECK_RC(peers_try_attach(&r, &a, 0, &c, &err), FIPC_MISMATCH);
    CHECK_RC(peers_try_attach(&r, &good, 3, &c, &err), FIPC_INVALID);
    CHECK_RC(peers_try_attach(&r, &good, UINT32_MAX, &c, &err), FIPC_INVALID);
    a = good;
    a.fd = 9999;
    CHECK_RC(peers_try_attach(&r, &a, 0, &c, &err), FIPC_GONE);
    CHECK(err.text[0] != 0);
    a = good;
    a.pid = 0x7ffffff0; /* above any pid */
    CHECK_RC(peers_try_attach(&r, &a, 0, &c, &err), FIPC_GONE);

    /* the descriptor's number was taken by something else */
    int pipes[2], sockets[2];
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    int other[4] = {pipes[0], sockets[0], open("/dev/null", O_RDWR | O_CLOEXEC),
                    memfd_create("other", MFD_CLOEXEC)};
    for (int i = 0; i < 4; i++) {
        CHECK(other[i] >= 0);
        a = good;
        a.fd = other[i];
        int rc = peers_try_attach(&r, &a, 0, &c, &err);
        if (rc != FIPC_GONE && rc != FIPC_MISMATCH) {
            FAIL("another kind of file, %d: %s (%s)", i, fipc_status_text(rc), err.text);
        }
        CHECK(r == NULL);
    }
    close(other[2]);
    close(other[3]);
    for (int i = 0; i < 2; i++) {
        close(pipes[i]);
        close(sockets[i]);
    }

    /* the header was damaged */
    for (off_t at = 0; at < (off_t)sizeof(struct fipc_header); at += 5) {
        if (at >= (off_t)offsetof(struct fipc_header, id) &&
            at < (off_t)(offsetof(struct fipc_header, id) + FIPC_ID_BYTES + 8 * 0)) {
            continue;
        }
        scribble(&good, at, 0x40);
        int rc = peers_try_attach(&r, &good, 0, &c, &err);
        if (rc == FIPC_OK) { /* harmless, as test_layout shows */
            fipc_queue_free(r);
        } else {
            CHECK_RC(rc, FIPC_MISMATCH);
        }
        scribble(&good, at, 0x40);
    }
    scribble(&good, 0, 1);
    CHECK_RC(peers_try_attach(&r, &good, 2, &c, &err), FIPC_MISMATCH);
    scribble(&good, 0, 1);
    r = peers_attach(w, 2, &c);
    fipc_queue_free(r);
    fipc_queue_free(w);
    CHECK_RC(peers_try_attach(&r, &good, 1, &c, &err), FIPC_GONE);
}

static void a_dead_writers_queue_is_gone(void) {
    struct helper *h = test_share(sizeof *h);
    h->c = peers_config(1);
    pid_t pid = test_fork(helper_writer, h);
    UNTIL(fipc_load32_acquire(&h->phase));
    fipc_queue *r = peers_attach_at(&h->address, 0, &h->c);
    peers_get(r, 1, 10);
    fipc_queue_free(r);
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    struct fipc_error err;
    CHECK_RC(peers_try_attach(&r, &h->address, 0, &h->c, &err), FIPC_GONE);
    CHECK(err.text[0] != 0);
    test_unshare(h, sizeof *h);
}

/* ---- replacements -------------------------------------------------------------------------- */

static void a_reader_that_left_may_be_replaced(void) {
    for (int others = 0; others < 2; others++) {
        struct fipc_config c = peers_config(1 + (uint32_t)others);
        fipc_queue *w = peers_create(&c);
        fipc_queue *other = others ? peers_attach(w, 1, &c) : NULL;
        uint64_t seq = 0;
        for (uint32_t epoch = 1; epoch <= 5; epoch++) {
            fipc_queue *r = peers_attach(w, 0, &c);
            if (epoch > 1) {
                peers_nothing(r, FIPC_TIMEOUT); /* not admitted yet */
            }
            uint64_t first = seq + 1;
            for (int i = 0; i < 3; i++) {
                seq++;
                peers_put(w, seq, seq % 2 ? 10 : 3000);
                if (others) {
                    peers_get(other, seq, seq % 2 ? 10 : 3000);
                }
            }
            struct fipc_peer_info info;
            CHECK_RC(fipc_queue_peer(w, 0, &info), FIPC_OK);
            CHECK(info.state == FIPC_PEER_ACTIVE && info.epoch == epoch && info.lag == 3);
            CHECK_EQ(fipc_queue_size(w), 3);
            peers_get(r, first, first % 2 ? 10 : 3000);
            CHECK_RC(fipc_queue_peer(w, 0, &info), FIPC_OK);
            CHECK_EQ(info.lag, 2);
            CHECK_EQ(fipc_queue_size(r), 2);
            fipc_queue_free(r); /* two are left unread: nobody gets them */
            if (!others) {
                CHECK_RC(peers_put_until(w, seq, 10, 0), FIPC_CLOSED);
            }
        }
        fipc_queue_free(other);
        fipc_queue_free(w);
    }
}

/* The writer must not take the last reader's leaving for room without end: its replacement's
 * messages would be overwritten unread. */
static void a_replacement_of_the_last_reader_misses_nothing(void) {
    struct fipc_config c = peers_config(1);
    c.n_slots = 2;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    peers_put(w, 1, 10);
    peers_put(w, 2, 10);
    struct blocked b = {.q = w};
    pthread_t t;
    CHECK(pthread_create(&t, NULL, block_in_send, &b) == 0);
    wait_asleep(w, 0);
    fipc_queue_free(r);
    pthread_join(t, NULL);
    CHECK(b.rc == FIPC_OK || b.rc == FIPC_CLOSED);
    CHECK_RC(peers_put_until(w, 3, 10, 0), FIPC_CLOSED);
    r = peers_attach(w, 0, &c);
    peers_put(w, 4, 10);
    peers_put(w, 5, 10);
    CHECK_RC(peers_put_until(w, 6, 10, 0), FIPC_TIMEOUT);
    CHECK_RC(peers_put_until(w, 6, 3000, 0), FIPC_TIMEOUT);
    peers_get(r, 4, 10);
    peers_get(r, 5, 10);
    peers_nothing(r, FIPC_TIMEOUT);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_replacement_amid_a_message_begins_with_the_next(void) {
    struct fipc_config c = peers_config(2);
    c.n_chunks = 1;
    c.ops = &peers_fast;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
    const uint64_t len = 3 * c.chunk_bytes;
    char *bytes = malloc(len);
    CHECK(bytes != NULL);
    pattern_fill(bytes, 1, 0, len);
    struct fipc_piece piece = {.ptr = bytes, .len = len};
    struct fipc_call send = {.deadline = FIPC_FOREVER, .signals = true};
    struct fipc_call poll = {0};
    struct fipc_error err;
    struct fipc_message m;
    CHECK_RC(fipc_queue_send(w, &piece, 1, 1, &send, &err), FIPC_INTERRUPTED);
    CHECK(send.midway);
    fipc_queue_free(r[1]);
    r[1] = peers_attach(w, 1, &c);
    int rc;
    do {
        CHECK_RC(fipc_queue_recv(r[0], &poll, &m, &err), FIPC_WOULD_BLOCK);
        rc = fipc_queue_recv(r[1], &poll, &m, &err);
        CHECK(rc == FIPC_WOULD_BLOCK);
        rc = fipc_queue_send(w, &piece, 1, 1, &send, &err);
    } while (rc == FIPC_INTERRUPTED);
    CHECK_RC(rc, FIPC_OK);
    peers_get(r[0], 1, len);
    peers_nothing(r[1], FIPC_TIMEOUT); /* not the tail of what it has no head of */
    peers_put(w, 2, 100);
    peers_get(r[0], 2, 100);
    peers_get(r[1], 2, 100);
    free(bytes);
    fipc_queue_free(r[0]);
    fipc_queue_free(r[1]);
    fipc_queue_free(w);
}

/* Kills a helper that is reader 1, having read one of two messages. */
static void one_that_dies(struct helper *h, fipc_queue *w) {
    h->address = peers_address(w);
    h->reader = 1;
    fipc_store32_release(&h->phase, 0);
    pid_t pid = test_fork(helper_reader, h);
    UNTIL(fipc_load32_acquire(&h->phase));
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    struct fipc_peer_info info;
    CHECK_RC(fipc_queue_peer(w, 1, &info), FIPC_OK);
    CHECK_EQ(info.pid, pid);
}

static int put_until_it_fails(fipc_queue *w, fipc_queue *drain, uint64_t *seq,
                              struct fipc_error *err) {
    for (;;) {
        struct fipc_message m;
        struct fipc_error e;
        int rc = peers_send(w, "abc", 3, (uint32_t)(*seq + 1), FIPC_FOREVER, err);
        if (rc != FIPC_OK) {
            return rc;
        }
        ++*seq;
        CHECK_RC(peers_recv(drain, 0, &m, &e), FIPC_OK);
        CHECK_EQ(m.tag, *seq);
        fipc_message_clear(&m);
    }
}

static void a_dead_reader_is_named_until_it_is_evicted_or_replaced(void) {
    for (int replace = 0; replace < 2; replace++) {
        struct helper *h = test_share(sizeof *h);
        h->c = peers_config(2);
        h->c.ops = &peers_fast;
        fipc_queue *w = peers_create(&h->c);
        fipc_queue *r0 = peers_attach(w, 0, &h->c);
        struct fipc_error err;
        uint64_t seq = 0;
        CHECK_RC(fipc_queue_evict(w, 0, &err), FIPC_INVALID);  /* it lives */
        CHECK_RC(fipc_queue_evict(w, 1, &err), FIPC_INVALID);  /* it has not come yet */
        CHECK_RC(fipc_queue_evict(w, 2, &err), FIPC_INVALID);  /* there is none */
        CHECK_RC(fipc_queue_evict(r0, 1, &err), FIPC_INVALID); /* not a writer */
        one_that_dies(h, w);
        struct fipc_peer_info info;
        CHECK_RC(fipc_queue_peer(w, 1, &info), FIPC_OK);
        const int64_t pid = info.pid;
        for (int again = 0; again < 3; again++) {
            CHECK_RC(put_until_it_fails(w, r0, &seq, &err), FIPC_PEER_DIED);
            CHECK_EQ(err.reader, 1);
            CHECK_EQ(err.pid, pid);
            CHECK(strcmp(err.host, "testhost") == 0);
            CHECK_EQ(state_of(w, 1), FIPC_PEER_DEAD);
            peers_nothing(r0, FIPC_TIMEOUT);
        }
        struct fipc_piece piece = {.ptr = "x", .len = 1};
        struct fipc_call poll = {0};
        void *ptr;
        CHECK_RC(fipc_queue_send_inline(w, &piece, 1, 0, &err), FIPC_WOULD_BLOCK);
        CHECK_RC(fipc_queue_loan(w, 1, &poll, &ptr, &err), FIPC_PEER_DIED);
        fipc_queue *r1 = NULL;
        if (replace) {
            r1 = peers_attach(w, 1, &h->c);
        } else {
            CHECK_RC(fipc_queue_evict(w, 1, &err), FIPC_OK);
            CHECK_EQ(state_of(w, 1), FIPC_PEER_DEAD);
            CHECK_RC(fipc_queue_evict(w, 1, &err), FIPC_OK);
        }
        for (int i = 0; i < 20; i++) {
            peers_put(w, ++seq, 100);
            peers_get(r0, seq, 100);
            if (replace) {
                peers_get(r1, seq, 100);
            }
        }
        if (!replace) {
            r1 = peers_attach(w, 1, &h->c); /* also after the eviction */
            peers_put(w, ++seq, 100);
            peers_get(r1, seq, 100);
            peers_get(r0, seq, 100);
        }
        CHECK_EQ(state_of(r0, 1), FIPC_PEER_ACTIVE);
        fipc_queue_free(r0);
        fipc_queue_free(r1);
        fipc_queue_free(w);
        test_unshare(h, sizeof *h);
    }
}

static void a_dead_reader_may_be_evicted_at_once(void) {
    struct helper *h = test_share(sizeof *h);
    h->c = peers_config(2);
    fipc_queue *w = peers_create(&h->c);
    fipc_queue *r0 = peers_attach(w, 0, &h->c);
    one_that_dies(h, w);
    struct fipc_error err;
    CHECK_RC(fipc_queue_evict(w, 1, &err),
             FIPC_OK); /* the kernel is asked, nothing is waited for */
    for (uint64_t seq = 1; seq <= 20; seq++) {
        peers_put(w, seq, 100);
        peers_get(r0, seq, 100);
    }
    fipc_queue_free(r0);
    fipc_queue_free(w);
    test_unshare(h, sizeof *h);
}

/* ---- fork ---------------------------------------------------------------------------------- */

struct forked {
    fipc_queue *w, *r;
};

static void use_parents_ends(void *arg) {
    struct forked *f = arg;
    struct fipc_error err;
    struct fipc_call poll = {0};
    struct fipc_message m;
    struct fipc_piece piece = {.ptr = "x", .len = 1};
    const void *show;
    void *ptr;
    uint64_t len;
    uint32_t tag;
    CHECK_RC(fipc_queue_send(f->w, &piece, 1, 0, &poll, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_send_inline(f->w, &piece, 1, 0, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_loan(f->w, 1, &poll, &ptr, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_wait_ready(f->w, &poll, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_evict(f->w, 0, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_wait_readable(f->r, &poll, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_recv(f->r, &poll, &m, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_peek(f->r, 10, &show, &len, &tag, &err), FIPC_FORKED);
    CHECK_RC(fipc_queue_wait_ready(f->r, &poll, &err), FIPC_FORKED);
    fipc_queue_shutdown(f->w);
    fipc_queue_shutdown(f->r);
    fipc_queue_free(f->r);
    fipc_queue_free(f->w);
    CHECK_EQ(test_mappings("memfd:fastipc"), 1); /* of the end that isn't freed here */
    /* a queue of the child's own */
    struct fipc_config c = peers_config(1);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    peers_put(w, 1, 10);
    peers_get(r, 1, 10);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_child_has_no_part_in_its_parents_queues(void) {
    struct fipc_config c = peers_config(2);
    c.ops = &peers_fast;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
    uint64_t seq = 0;
    for (int i = 0; i < 3; i++) {
        struct forked f = {w, r[i % 2]};
        pid_t pid = test_fork(use_parents_ends, &f);
        CHECK_EXITED(pid);
        /* the parent's locks are as they were: nobody takes anybody for dead, nobody closed */
        uint64_t until = peers_fast_now(NULL) + 2 * FIPC_S;
        struct fipc_message m;
        struct fipc_error err;
        CHECK_RC(peers_recv(r[0], until, &m, &err), FIPC_TIMEOUT);
        peers_put(w, ++seq, 100);
        peers_get(r[0], seq, 100);
        peers_get(r[1], seq, 100);
        CHECK(fipc_lock_byte_held(r[0]->seg.lock_fd, FIPC_WRITER_LOCK));
        CHECK(fipc_lock_byte_held(w->seg.lock_fd, FIPC_READER_LOCK(0)));
        CHECK(fipc_lock_byte_held(w->seg.lock_fd, FIPC_READER_LOCK(1)));
    }
    fipc_queue_free(r[0]);
    fipc_queue_free(r[1]);
    fipc_queue_free(w);
}

/* Another thread forks while queues are made and closed. */
#define FORKS TEST_SCALE(200)

struct forks {
    fipc_a32 end;
    pid_t pids[FORKS];
    uint32_t n;
};

static void *fork_on_and_on(void *arg) {
    struct forks *f = arg;
    for (f->n = 0; f->n < FORKS && !fipc_load32_acquire(&f->end); f->n++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            alarm(test_watchdog_s); /* should the test not live to end it */
            for (;;) {
                pause();
            }
        }
        f->pids[f->n] = pid;
        test_nap();
    }
    fipc_store32_release(&f->end, 1);
    return NULL;
}

static void a_child_forked_meanwhile_keeps_no_lock(void) {
    struct forks f = {.end = 0};
    struct fipc_config c = peers_config(2);
    pthread_t t;
    CHECK(pthread_create(&t, NULL, fork_on_and_on, &f) == 0);
    while (!fipc_load32_acquire(&f.end)) {
        fipc_queue *w = peers_create(&c);
        fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
        fipc_queue_close(r[0]);
        /* a child just born closes what it inherited before its fork returns, so: until */
        UNTIL(!fipc_lock_byte_held(w->seg.lock_fd, FIPC_READER_LOCK(0)));
        fipc_queue_close(w);
        UNTIL(!fipc_lock_byte_held(r[1]->seg.lock_fd, FIPC_WRITER_LOCK));
        for (int i = 0; i < 2; i++) {
            fipc_queue_free(r[i]);
        }
        fipc_queue_free(w);
    }
    pthread_join(t, NULL);
    for (uint32_t i = 0; i < f.n; i++) {
        kill(f.pids[i], SIGKILL);
        CHECK_KILLED(f.pids[i]);
    }
}

/* ---- a peer that writes nonsense ----------------------------------------------------------- */

static void nonsense_from_a_peer_is_corrupt_and_the_next_is_right(void) {
    struct fipc_config c = peers_config(1);
    c.n_slots = 16;
    c.n_chunks = 8;
    c.chunk_bytes = 2000;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    uint64_t corrupt = 0;
    char bytes[6000];
    for (int i = 0; i < TEST_SCALE(20000); i++) {
        uint64_t cut = test_below(700);
        uint64_t len = cut + test_below(test_chance(2) ? 300 : 5000);
        memset(bytes, 7, sizeof bytes);
        struct fipc_piece p[2] = {{.ptr = bytes, .len = cut}, {.ptr = bytes, .len = len - cut}};
        struct fipc_call poll = {0};
        struct fipc_error err;
        struct fipc_message m;
        uint64_t first = w->ring.next;
        CHECK_RC(fipc_queue_send(w, p, 2, 0, &poll, &err), FIPC_OK);
        uint64_t seq = first + test_below(w->ring.next - first);
        struct fipc_slot *slot =
            (void *)(w->ring.slots + (seq - 1) % c.n_slots * w->ring.slot_stride);
        char *payload = slot->flags & FIPC_SLOT_CHUNK
                            ? fipc_ring_chunk(&w->ring, slot->chunk) + slot->offset
                            : fipc_ring_inline(slot);
        switch (test_below(7)) {
        case 0: slot->len = test_random() >> test_below(64); break;
        case 1: slot->total = test_below(10000); break;
        case 2: slot->offset = test_random() >> test_below(64); break;
        case 3: slot->flags = (uint32_t)test_random() >> test_below(32); break;
        case 4: slot->chunk = (uint32_t)test_random() >> test_below(32); break;
        default: { /* the frame's head */
            uint64_t word = test_random() >> test_below(64);
            memcpy(payload + 8 * test_below(3), &word, 8);
        }
        }
        int rc;
        do {
            rc = fipc_queue_recv(r, &poll, &m, &err);
            if (rc == FIPC_OK) {
                fipc_message_clear(&m);
            } else if (rc == FIPC_CORRUPT) {
                corrupt++;
            } else {
                CHECK_RC(rc, FIPC_WOULD_BLOCK);
            }
        } while (rc != FIPC_WOULD_BLOCK);
        uint64_t next = test_log_uniform(test_random(), 5000);
        CHECK_RC(peers_put_until(w, (uint64_t)i, next, 0), FIPC_OK);
        peers_get(r, (uint64_t)i, next);
        peers_nothing(r, FIPC_TIMEOUT);
    }
    CHECK(corrupt > 1000);
    fipc_queue_free(r);
    fipc_queue_free(w);
}

/* ---- memory -------------------------------------------------------------------------------- */

static uint64_t virtual_now;

static uint64_t clock_now(void *ctx) {
    (void)ctx;
    return virtual_now;
}

static int clock_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    (void)ctx;
    (void)word;
    (void)expected;
    virtual_now = deadline;
    return FIPC_OK;
}

static void clock_wake(void *ctx, const void *word) {
    (void)ctx;
    (void)word;
}

static uint64_t resident(fipc_queue *w) {
    struct fipc_stats s;
    fipc_queue_stats(w, &s);
    return s.resident_bytes;
}

static void chunks_are_allocated_when_used_and_given_back_after_disuse(void) {
    const struct fipc_waitops ops = {clock_now, clock_wait, clock_wake, NULL};
    virtual_now = 1000 * FIPC_S;
    struct fipc_config c = peers_config(1);
    c.ops = &ops;
    c.n_chunks = 4;
    c.chunk_bytes = UINT64_C(1) << 20;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct fipc_stats s;
    fipc_queue_stats(w, &s);
    uint64_t bare = s.resident_bytes;
    CHECK(s.segment_bytes >= 4 * c.chunk_bytes && bare < c.chunk_bytes);
    uint64_t at_once, at_most;
    struct fipc_error err;
    CHECK_RC(fipc_queue_plan(&c, &at_once, &at_most, &err), FIPC_OK);
    CHECK(at_once == bare && at_most == s.segment_bytes);
    for (int round = 0; round < 3; round++) {
        peers_put(w, 1, 5000);
        peers_put(w, 2, c.chunk_bytes);
        CHECK(resident(w) > bare + c.chunk_bytes);
        CHECK(resident(w) < bare + 2 * c.chunk_bytes);
        virtual_now += 1000 * FIPC_S; /* unread, so in use however long */
        peers_put(w, 3, 10);
        CHECK(resident(w) > bare + c.chunk_bytes);
        peers_get(r, 1, 5000);
        peers_get(r, 2, c.chunk_bytes);
        peers_get(r, 3, 10);
        for (uint64_t i = 0; i < 40; i++) { /* in use by one at a time: the others may go */
            virtual_now += 5 * FIPC_S;
            peers_put(w, i, 5000);
            peers_get(r, i, 5000);
        }
        CHECK(resident(w) > bare && resident(w) <= bare + c.chunk_bytes);
        virtual_now += 1000 * FIPC_S;
        peers_put(w, 4, 10);
        peers_get(r, 4, 10);
        CHECK_EQ(resident(w), bare);
    }
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void receive_with_little_memory(void *arg) {
    struct helper *h = arg;
    fipc_queue *r = peers_attach_at(&h->address, 0, &h->c);
    struct fipc_call call = {.deadline = FIPC_FOREVER};
    struct fipc_error err;
    struct fipc_message m;
    CHECK_RC(fipc_queue_wait_readable(r, &call, &err), FIPC_OK);
    struct rlimit old, little;
    CHECK(getrlimit(RLIMIT_AS, &old) == 0);
    little = old;
    little.rlim_cur = 1 << 20; /* less than there is already: nothing more can be mapped */
    CHECK(setrlimit(RLIMIT_AS, &little) == 0);
    int rc[3];
    for (int i = 0; i < 3; i++) {
        rc[i] = fipc_queue_recv(r, &call, &m, &err);
    }
    CHECK(setrlimit(RLIMIT_AS, &old) == 0);
    for (int i = 0; i < 3; i++) {
        CHECK_RC(rc[i], FIPC_NO_MEMORY);
    }
    peers_get(r, 1, 8 << 20); /* it is still there */
    peers_get(r, 2, 10);
    fipc_queue_free(r);
}

static void a_message_too_large_for_memory_stays(void) {
    if (TEST_ASAN || TEST_TSAN || TEST_QEMU) {
        return; /* their own memory counts too: the limit can't be set under them */
    }
    struct helper *h = test_share(sizeof *h);
    h->c = peers_config(1);
    h->c.chunk_bytes = 9 << 20;
    h->c.n_slots = 32;
    fipc_queue *w = peers_create(&h->c);
    h->address = peers_address(w);
    peers_put(w, 1, 8 << 20);
    peers_put(w, 2, 10);
    pid_t pid = test_fork(receive_with_little_memory, h);
    CHECK_EXITED(pid);
    fipc_queue_free(w);
    test_unshare(h, sizeof *h);
}

static void sizes_out_of_range_are_invalid(void) {
    struct fipc_error err;
    for (int i = 0; i < 9; i++) {
        struct fipc_config c = peers_config(1);
        fipc_queue *q = (void *)&c;
        switch (i) {
        case 0: c.n_readers = 0; break;
        case 1: c.n_readers = FIPC_MAX_READERS + 1; break;
        case 2: c.n_slots = 0; break;
        case 3: c.n_slots = 1; break;
        case 4: c.n_chunks = 0; break;
        case 5: c.chunk_bytes = 63; break;
        case 6: c.chunk_bytes = UINT64_MAX; break;
        case 7: c.chunk_bytes = UINT64_C(1) << 45, c.n_chunks = 1000; break;
        default: c.n_slots = c.inline_bytes = UINT32_MAX, c.chunk_bytes = UINT64_C(1) << 33;
        }
        CHECK_RC(fipc_queue_create(&q, &c, &err), FIPC_INVALID);
        CHECK(q == NULL && err.text[0] != 0);
    }
}

static void the_most_readers_are_1024(void) {
    struct fipc_config c = peers_config(FIPC_MAX_READERS);
    fipc_queue *w = peers_create(&c);
    static const uint32_t some[] = {0, 1, 511, 1023};
    fipc_queue *r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = peers_attach(w, some[i], &c);
    }
    peers_put(w, 1, 10);
    for (int i = 0; i < 4; i++) {
        peers_get(r[i], 1, 10);
        fipc_queue_free(r[i]);
    }
    CHECK_EQ(fipc_queue_n_readers(w), FIPC_MAX_READERS);
    CHECK_EQ(fipc_queue_chunk_bytes(w), c.chunk_bytes);
    fipc_queue_free(w);
}

static void numbers_are_kept(void) {
    struct fipc_config c = peers_config(2);
    c.n_slots = 4;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r[2] = {peers_attach(w, 0, &c), peers_attach(w, 1, &c)};
    CHECK(fipc_queue_has_room(w) && !fipc_queue_readable(r[0]));
    peers_put(w, 1, 10);
    peers_put(w, 2, 3000);
    peers_put(w, 3, 2 * c.chunk_bytes);
    CHECK(!fipc_queue_has_room(w) && fipc_queue_readable(r[0]) && fipc_queue_readable(r[1]));
    CHECK_EQ(fipc_queue_size(w), 3);
    CHECK_EQ(fipc_queue_size(r[0]), 3);
    peers_get(r[0], 1, 10);
    CHECK_EQ(fipc_queue_size(r[0]), 2);
    CHECK_EQ(fipc_queue_size(w), 3); /* by the slowest */
    CHECK(!fipc_queue_has_room(w));
    peers_get(r[1], 1, 10);
    CHECK_EQ(fipc_queue_size(w), 2);
    CHECK(fipc_queue_has_room(w));
    for (int i = 0; i < 2; i++) {
        peers_get(r[i], 2, 3000);
        peers_get(r[i], 3, 2 * c.chunk_bytes);
    }
    CHECK_EQ(fipc_queue_size(w), 0);
    struct fipc_stats s;
    for (int i = 0; i < 3; i++) {
        fipc_queue_stats(i == 2 ? w : r[i], &s);
        CHECK_EQ(s.messages, 3);
        CHECK_EQ(s.fragments, 4);
        CHECK_EQ(s.bytes, 10 + 3000 + 2 * c.chunk_bytes);
        CHECK_EQ(s.bytes_copied, s.bytes); /* each byte once */
    }
    fipc_queue_free(r[0]);
    fipc_queue_free(r[1]);
    fipc_queue_free(w);
}

static const struct test_case cases[] = {
    {"a stream to 1 reader", stream_to_1_readers},
    {"a stream to 2 readers", stream_to_2_readers},
    {"a stream to 4 readers", stream_to_4_readers},
    {"a stream to 7 readers", stream_to_7_readers},
    {"a stream to 8 readers", stream_to_8_readers},
    {"a stream through odd sizes", stream_through_odd_sizes},
    {"a stream in parts of a chunk", stream_in_parts},
    {"every size around a limit arrives", every_size_around_a_limit_arrives},
    {"any number of buffers arrives", any_number_of_buffers_arrives},
    {"a strided array arrives in fragments", a_strided_array_arrives_in_fragments},
    {"send_inline takes what fits a slot at once", send_inline_takes_what_fits_a_slot_at_once},
    {"a loan is filled in place", a_loan_is_filled_in_place},
    {"a look leaves the message until it is done", a_look_leaves_the_message_until_it_is_done},
    {"a poll sends the whole message or nothing", a_poll_sends_the_whole_message_or_nothing},
    {"after a timeout amid a message the next is right",
     after_a_timeout_amid_a_message_the_next_is_right},
    {"threads may share an end", threads_may_share_an_end},
    {"threads may share a replacement", threads_may_share_a_replacement},
    {"a shutdown wakes all who wait at this end", a_shutdown_wakes_all_who_wait_at_this_end},
    {"a shutdown wakes one who sleeps without end", a_shutdown_wakes_one_who_sleeps_without_end},
    {"a shutdown ends a wait for readers", a_shutdown_ends_a_wait_for_readers},
    {"closing: readers drain and then it is closed", readers_drain_and_then_it_is_closed},
    {"closing: a closing writer wakes its readers", a_closing_writer_wakes_its_readers},
    {"closing: a reader that left is not waited for", a_reader_that_left_is_not_waited_for},
    {"messages before everyone is there are kept", messages_before_everyone_is_there_are_kept},
    {"it is ready when all are there", it_is_ready_when_all_are_there},
    {"a rank is one living process", a_rank_is_one_living_process},
    {"what is not the queue is not attached", what_is_not_the_queue_is_not_attached},
    {"a dead writer's queue is gone", a_dead_writers_queue_is_gone},
    {"replacing: a reader that left may be replaced", a_reader_that_left_may_be_replaced},
    {"replacing: a replacement of the last reader misses nothing",
     a_replacement_of_the_last_reader_misses_nothing},
    {"replacing: a replacement amid a message begins with the next",
     a_replacement_amid_a_message_begins_with_the_next},
    {"a dead reader is named until it is evicted or replaced",
     a_dead_reader_is_named_until_it_is_evicted_or_replaced},
    {"a dead reader may be evicted at once", a_dead_reader_may_be_evicted_at_once},
    {"a child has no part in its parent's queues", a_child_has_no_part_in_its_parents_queues},
    {"a child forked meanwhile keeps no lock", a_child_forked_meanwhile_keeps_no_lock},
    {"nonsense from a peer is corrupt and the next is right",
     nonsense_from_a_peer_is_corrupt_and_the_next_is_right},
    {"chunks are allocated when used and given back after disuse",
     chunks_are_allocated_when_used_and_given_back_after_disuse},
    {"a message too large for memory stays", a_message_too_large_for_memory_stays},
    {"sizes out of range are invalid", sizes_out_of_range_are_invalid},
    {"the most readers are 1024", the_most_readers_are_1024},
    {"numbers are kept", numbers_are_kept},
};

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : NULL;
    if (only != NULL && (stream_count = strtoull(only, NULL, 10)) > 0) {
        only = "a stream";
        test_watchdog_s = 24 * 3600;
    }
    return test_main(cases, sizeof cases / sizeof *cases, only);
}
