/* client_queue.c: whole queues (everything in csrc/ but fipc_mem.c, in whose place is memory.c), of
 * two slots and one chunk. A thread is a process here, and its fipc_queue its own, except where two
 * threads share one.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fipc_queue.h"
#include "verify.h"

#define SLOTS 2
#define MOST 8

static fipc_queue *writer, *reader[2];
static uint64_t got[VERIFY_MAX_THREADS][MOST]; /* per thread: what it took, in order */
static unsigned n_got[VERIFY_MAX_THREADS];
static bool evicted;

/* ---- calls as the users of fastipc.h make them ------------------------------------------------ */

static struct fipc_call forever(void) { return (struct fipc_call){.deadline = FIPC_FOREVER}; }

static void create(uint32_t n_readers, bool evict) {
    verify_memory_reset();
    memset(got, 0, sizeof got);
    memset(n_got, 0, sizeof n_got);
    evicted = false;
    reader[0] = reader[1] = NULL;
    struct fipc_config c = {.n_readers = n_readers,
                            .n_slots = SLOTS,
                            .inline_bytes = 64,
                            .n_chunks = 1,
                            .chunk_bytes = 64,
                            .id = {1},
                            .host = "here",
                            .n_cpus = 4,
                            .spin_ns = 0,
                            .warn_ns = FIPC_FOREVER,
                            .evict = evict,
                            .ops = &verify_ops};
    struct fipc_error err;
    REQUIRE(fipc_queue_create(&writer, &c, &err) == FIPC_OK);
}

static int attach_as(uint32_t i, fipc_queue **out) {
    struct fipc_address a;
    struct fipc_attach_options o = {
        .host = "there", .n_cpus = 4, .spin_ns = 0, .warn_ns = FIPC_FOREVER, .ops = &verify_ops};
    struct fipc_error err;
    verify_address(&a);
    return fipc_queue_attach(out, &a, i, &o, &err);
}

static void attach(uint32_t i) { REQUIRE(attach_as(i, &reader[i]) == FIPC_OK); }

static int send_until(uint64_t value, uint64_t deadline) {
    struct fipc_piece piece = {.ptr = &value, .len = sizeof value};
    struct fipc_call call = {.deadline = deadline};
    struct fipc_error err;
    int rc;
    do {
        rc = fipc_queue_send(writer, &piece, 1, (uint32_t)value, &call, &err);
        if (rc == FIPC_EVICTED) {
            evicted = true;
        }
    } while (rc == FIPC_EVICTED);
    return rc;
}
static int send(uint64_t value) { return send_until(value, FIPC_FOREVER); }

/* One message, or the reason why there is none. */
static int receive_until(fipc_queue *q, unsigned thread, uint64_t deadline) {
    struct fipc_error err;
    for (;;) {
        struct fipc_message m;
        struct fipc_call call = {.deadline = deadline};
        int rc = fipc_queue_recv(q, &call, &m, &err);
        if (rc == FIPC_OK) {
            REQUIRE(m.n == 1 && m.blocks[0].len == 8 && n_got[thread] < MOST);
            uint64_t value;
            memcpy(&value, m.blocks[0].ptr, 8);
            REQUIRE(m.tag == value);
            got[thread][n_got[thread]++] = value;
            fipc_message_clear(&m);
            return rc;
        }
        if (rc != FIPC_WOULD_BLOCK || deadline == 0) {
            return rc;
        }
        call = (struct fipc_call){.deadline = deadline};
        rc = fipc_queue_wait_readable(q, &call, &err);
        if (rc != FIPC_OK) {
            return rc;
        }
    }
}

static int receive(fipc_queue *q, unsigned thread) {
    return receive_until(q, thread, FIPC_FOREVER);
}

/* When the threads have ended nobody is left who could end a wait. */
static int send_now(uint64_t value) { return send_until(value, 0); }
static int receive_now(fipc_queue *q, unsigned thread) { return receive_until(q, thread, 0); }

static void end(void) {
    fipc_queue_free(writer);
    for (int i = 0; i < 2; i++) {
        fipc_queue_free(reader[i]);
    }
}

static void require_sequence(unsigned thread, uint64_t from, uint64_t to) {
    REQUIRE(n_got[thread] == to - from + 1);
    for (uint64_t i = from; i <= to; i++) {
        REQUIRE(got[thread][i - from] == i);
    }
}

static void send_three(void) {
    for (uint64_t i = 1; i <= 3; i++) {
        REQUIRE(send(i) == FIPC_OK);
    }
}
static void receive_three_0(void) {
    for (int i = 0; i < 3; i++) {
        REQUIRE(receive(reader[0], 1) == FIPC_OK);
    }
}

/* ---- passing messages ------------------------------------------------------------------------- */

static void one_reader(void) {
    create(1, false);
    attach(0);
}
static void pass_finish(void) {
    require_sequence(1, 1, 3);
    REQUIRE(fipc_queue_size(writer) == 0 && fipc_queue_size(reader[0]) == 0);
    end();
}
const struct verify_client verify_queue_pass = {
    "queue-pass",
    "three messages through a queue, each side sleeps in fipc_queue_wait_for",
    2,
    false,
    0,
    one_reader,
    {send_three, receive_three_0},
    pass_finish};

static void two_readers(void) {
    create(2, false);
    attach(0);
    attach(1);
}
static void receive_three_1(void) {
    for (int i = 0; i < 3; i++) {
        REQUIRE(receive(reader[1], 2) == FIPC_OK);
    }
}
static void pass_2_finish(void) {
    require_sequence(1, 1, 3);
    require_sequence(2, 1, 3);
    end();
}
const struct verify_client verify_queue_pass_2 = {"queue-pass-2",
                                                  "the same to two readers",
                                                  3,
                                                  true,
                                                  0,
                                                  two_readers,
                                                  {send_three, receive_three_0, receive_three_1},
                                                  pass_2_finish};

/* ---- attaching -------------------------------------------------------------------------------- */

static void nobody(void) { create(1, false); }
static void ready(fipc_queue *q) {
    struct fipc_call call = forever();
    struct fipc_error err;
    REQUIRE(fipc_queue_wait_ready(q, &call, &err) == FIPC_OK);
    for (uint32_t i = 0; i < fipc_queue_n_readers(q); i++) {
        struct fipc_peer_info info;
        REQUIRE(fipc_queue_peer(q, i, &info) == FIPC_OK);
        REQUIRE(info.state != FIPC_PEER_FREE && info.epoch == 1 && info.pid == getpid());
        REQUIRE(strcmp(info.host, "there") == 0);
    }
}
static void attach_write(void) {
    REQUIRE(send(1) == FIPC_OK); /* kept for who attaches */
    ready(writer);
    REQUIRE(send(2) == FIPC_OK);
}
static void attach_read(void) {
    attach(0);
    ready(reader[0]);
    for (int i = 0; i < 2; i++) {
        REQUIRE(receive(reader[0], 1) == FIPC_OK);
    }
}
static void attach_finish(void) {
    require_sequence(1, 1, 2);
    end();
}
const struct verify_client verify_attach = {
    "attach",
    "a reader attaches while the writer sends and waits for it; both then know each other",
    2,
    false,
    0,
    nobody,
    {attach_write, attach_read},
    attach_finish};

/* Asks who is there, as any thread may at any time. */
static void look_at_peer(void) {
    struct fipc_peer_info info;
    REQUIRE(fipc_queue_peer(writer, 0, &info) == FIPC_OK);
    if (info.state != FIPC_PEER_FREE) {
        REQUIRE(info.epoch == 1 && info.pid == getpid() && strcmp(info.host, "there") == 0);
    }
    if (info.state == FIPC_PEER_LEFT) {
        REQUIRE(info.lag == 0);
    }
}
static void attach_and_leave(void) {
    attach(0);
    fipc_queue_close(reader[0]);
}
static void look_finish(void) { end(); }
const struct verify_client verify_look = {
    "look", "who sees a rank's state sees whose it is", 2,          false, 0,
    nobody, {look_at_peer, attach_and_leave},           look_finish};

static void nobody_2(void) { create(2, false); }
static void ready_write(void) {
    ready(writer);
    REQUIRE(send(1) == FIPC_OK);
}
static void ready_read_0(void) {
    attach(0);
    ready(reader[0]);
    REQUIRE(receive(reader[0], 1) == FIPC_OK);
}
static void ready_read_1(void) {
    attach(1);
    ready(reader[1]);
    REQUIRE(receive(reader[1], 2) == FIPC_OK);
}
static void ready_finish(void) {
    require_sequence(1, 1, 1);
    require_sequence(2, 1, 1);
    end();
}
const struct verify_client verify_attach_2 = {
    "attach-2",
    "two readers attach: whoever knows that all are there sees them all",
    3,
    true,
    0,
    nobody_2,
    {ready_write, ready_read_0, ready_read_1},
    ready_finish};

/* ---- leaving ---------------------------------------------------------------------------------- */

static void leave_write(void) {
    unsigned probe = verify_choose(4);
    for (uint64_t i = 1; i <= 4; i++) {
        if (i == probe + 1) { /* it is time to ask who is alive */
            fipc_store64_relaxed(&writer->next_probe, 0);
        }
        int rc = send(i);
        REQUIRE(rc == FIPC_OK || rc == FIPC_CLOSED);
        if (rc == FIPC_CLOSED) {
            break;
        }
    }
}
static void leave_read(void) {
    REQUIRE(receive(reader[0], 1) == FIPC_OK);
    fipc_queue_close(reader[0]);
}
static void leave_finish(void) {
    require_sequence(1, 1, 1);
    REQUIRE(send_now(9) == FIPC_CLOSED);
    end();
}
const struct verify_client verify_leave = {
    "leave",
    "a reader leaves: a writer that waits for it, or asks whether it lives, goes on",
    2,
    false,
    0,
    one_reader,
    {leave_write, leave_read},
    leave_finish};

static void leave_2_write(void) {
    for (uint64_t i = 1; i <= 4; i++) {
        if (verify_choose(2)) {
            fipc_store64_relaxed(&writer->next_probe, 0);
        }
        REQUIRE(send(i) == FIPC_OK);
    }
}
static void leave_2_stay(void) {
    for (int i = 0; i < 4; i++) {
        REQUIRE(receive(reader[0], 1) == FIPC_OK);
    }
}
static void leave_2_go(void) {
    REQUIRE(receive(reader[1], 2) == FIPC_OK);
    fipc_queue_close(reader[1]);
}
static void leave_2_finish(void) {
    require_sequence(1, 1, 4);
    require_sequence(2, 1, 1);
    end();
}
const struct verify_client verify_leave_2 = {
    "leave-2",
    "one of two readers leaves: what it has read may be overwritten, and nothing else",
    3,
    true,
    0,
    two_readers,
    {leave_2_write, leave_2_stay, leave_2_go},
    leave_2_finish};

static void close_write(void) {
    REQUIRE(send(1) == FIPC_OK);
    REQUIRE(send(2) == FIPC_OK);
    fipc_queue_close(writer);
}
static void close_read(void) {
    int rc;
    unsigned probe = verify_choose(3);
    while ((rc = receive(reader[0], 1)) == FIPC_OK) {
        if (n_got[1] == probe) {
            fipc_store64_relaxed(&reader[0]->next_probe, 0);
        }
    }
    REQUIRE(rc == FIPC_CLOSED);
}
static void close_finish(void) {
    require_sequence(1, 1, 2);
    end();
}
const struct verify_client verify_close = {
    "close",
    "the writer closes: the reader drains, and then is told that it closed",
    2,
    false,
    0,
    one_reader,
    {close_write, close_read},
    close_finish};

/* ---- dying ------------------------------------------------------------------------------------ */

static void die_write(void) {
    REQUIRE(send(1) == FIPC_OK);
    if (verify_choose(2)) {
        REQUIRE(send(2) == FIPC_OK);
    }
    verify_die(writer);
}
static void die_read(void) {
    int rc;
    while ((rc = receive(reader[0], 1)) == FIPC_OK) {
    }
    REQUIRE(rc == FIPC_PEER_DIED);
}
static void die_finish(void) {
    REQUIRE(n_got[1] >= 1);
    require_sequence(1, 1, fipc_load64_relaxed(&writer->ring.control->head));
    end();
}
const struct verify_client verify_writer_dies = {
    "writer-dies",
    "the writer dies: the reader drains, and then is told that it died",
    2,
    false,
    1,
    one_reader,
    {die_write, die_read},
    die_finish};

static void one_mortal(void) {
    create(1, true);
    attach(0);
}
/* Dies at any step of reading. */
static void mortal(fipc_queue *q, unsigned thread) {
    const void *p;
    uint64_t len;
    uint32_t tag;
    struct fipc_error err;
    switch (verify_choose(4)) {
    case 0: break; /* before anything */
    case 1:        /* while it reads */
        if (fipc_queue_peek(q, 64, &p, &len, &tag, &err) == FIPC_OK) {
            uint64_t value;
            memcpy(&value, p, sizeof value);
            REQUIRE(value == 1);
        }
        break;
    case 2: /* between two messages */ REQUIRE(receive(q, thread) == FIPC_OK); break;
    case 3: /* when it has announced that it sleeps */
        fipc_bell_park(&q->ring.control->data_bell);
        break;
    }
    verify_die(q);
}
static void evict_write(void) {
    for (uint64_t i = 1; i <= 4; i++) {
        int rc = send(i);
        REQUIRE(rc == FIPC_OK || (rc == FIPC_CLOSED && evicted));
    }
    REQUIRE(evicted);
}
static void evict_die(void) { mortal(reader[0], 1); }
static void evict_finish(void) {
    REQUIRE(n_got[1] <= 1);
    REQUIRE(send_now(9) == FIPC_CLOSED);
    end();
}
const struct verify_client verify_evict = {"evict",
                                           "the reader dies at any step: the writer evicts it",
                                           2,
                                           false,
                                           1,
                                           one_mortal,
                                           {evict_write, evict_die},
                                           evict_finish};

static void two_mortals(void) {
    create(2, true);
    attach(0);
    attach(1);
}
static void evict_2_write(void) {
    for (uint64_t i = 1; i <= 6; i++) {
        REQUIRE(send(i) == FIPC_OK);
    }
    REQUIRE(evicted);
}
static void evict_2_live(void) {
    for (int i = 0; i < 6; i++) {
        REQUIRE(receive(reader[0], 1) == FIPC_OK);
    }
}
static void evict_2_die(void) { mortal(reader[1], 2); }
static void evict_2_finish(void) {
    require_sequence(1, 1, 6);
    end();
}
const struct verify_client verify_evict_2 = {
    "evict-2",
    "one of two readers dies at any step: the other gets everything, and one slice is all it costs",
    3,
    true,
    1,
    two_mortals,
    {evict_2_write, evict_2_live, evict_2_die},
    evict_2_finish};

/* ---- coming back ------------------------------------------------------------------------------- */

static bool granted_to_second(void) {
    return fipc_load32_relaxed(&writer->ring.peers[0].granted) == 2; /* its own store */
}

static void one_reader_done(void) {
    one_reader();
    send(1);
    receive(reader[0], 1);
}
static void replace_write(void) {
    if (verify_choose(2)) { /* it looks at the ranks without being told */
        fipc_store64_relaxed(&writer->next_probe, 0);
    }
    for (;;) {
        struct fipc_error err;
        struct fipc_call call = {.deadline = 0};
        int rc = fipc_queue_wait_ready(writer, &call, &err);
        REQUIRE(rc == FIPC_OK || rc == FIPC_CLOSED);
        if (granted_to_second()) {
            break;
        }
        verify_poll();
    }
    REQUIRE(send(2) == FIPC_OK);
    REQUIRE(send(3) == FIPC_OK);
}
static void replace_read(void) {
    fipc_queue_close(reader[0]);
    REQUIRE(attach_as(0, &reader[1]) == FIPC_OK); /* another process, at the same rank */
    REQUIRE(receive(reader[1], 2) == FIPC_OK);
    REQUIRE(receive(reader[1], 2) == FIPC_OK);
}
static void replace_finish(void) {
    require_sequence(1, 1, 1);
    require_sequence(2, 2, 3);
    end();
}
const struct verify_client verify_replace = {
    "replace",
    "a reader leaves and another comes at its rank: it gets what is sent from then on",
    2,
    false,
    0,
    one_reader_done,
    {replace_write, replace_read},
    replace_finish};

/* It is time to ask who is alive. Evicting is for those who are to evict: the others would be told
 * that somebody has died. */
static void look_for_dead(void) {
    struct fipc_error err;
    struct fipc_call call = {.deadline = 0};
    fipc_store64_relaxed(&writer->next_probe, 0);
    int rc = fipc_queue_wait_ready(writer, &call, &err);
    REQUIRE(rc == FIPC_OK || rc == FIPC_CLOSED || (rc == FIPC_EVICTED && writer->evict));
}
static void leave_and_come(void) {
    fipc_queue_close(reader[0]);
    REQUIRE(attach_as(0, &reader[1]) == FIPC_OK);
}
static void ask_finish(void) {
    REQUIRE(send_now(1) == FIPC_OK && receive_now(reader[1], 1) == FIPC_OK);
    end();
}
const struct verify_client verify_ask = {
    "ask",
    "a reader leaves and another comes while the writer asks who is dead: nobody is",
    2,
    false,
    0,
    one_reader,
    {look_for_dead, leave_and_come},
    ask_finish};

/* The first dies, and another comes at its rank while it is evicted, or before, or after. */
static void one_mortal_behind(void) {
    one_mortal();
    send(1);
}
static void succeed_write(void) {
    for (int i = 0; i < 3; i++) {
        look_for_dead();
    }
}
static void die_and_come(void) {
    verify_die(reader[0]);
    REQUIRE(attach_as(0, &reader[1]) == FIPC_OK);
}
static void succeed_finish(void) {
    for (int i = 0; i < 3 && !granted_to_second(); i++) {
        look_for_dead();
    }
    REQUIRE(granted_to_second());
    REQUIRE(send_now(2) == FIPC_OK);
    do {
        REQUIRE(receive_now(reader[1], 2) == FIPC_OK);
    } while (got[2][n_got[2] - 1] != 2);
    /* nothing was read before: so what was sent is kept, unless the dead one was evicted first */
    require_sequence(2, got[2][0], 2);
    end();
}
const struct verify_client verify_succeed = {
    "succeed",
    "a reader dies and another comes at its rank while the writer evicts",
    2,
    false,
    0,
    one_mortal_behind,
    {succeed_write, die_and_come},
    succeed_finish};

static void succeed_on_write(void) {
    for (;;) {
        look_for_dead();
        if (granted_to_second()) {
            break;
        }
        verify_poll();
    }
    REQUIRE(send(2) == FIPC_OK);
    REQUIRE(send(3) == FIPC_OK);
}
static void succeed_on_read(void) {
    verify_die(reader[0]);
    REQUIRE(attach_as(0, &reader[1]) == FIPC_OK);
    do {
        REQUIRE(receive(reader[1], 2) == FIPC_OK);
    } while (got[2][n_got[2] - 1] != 3);
}
static void succeed_on_finish(void) {
    /* nothing was read before: so what was sent is kept, unless the dead one was evicted first */
    require_sequence(2, got[2][0], 3);
    REQUIRE(got[2][0] <= 2);
    end();
}
const struct verify_client verify_succeed_on = {"succeed-on",
                                                "the same, and the writer goes on sending",
                                                2,
                                                true,
                                                0,
                                                one_mortal_behind,
                                                {succeed_on_write, succeed_on_read},
                                                succeed_on_finish};

/* ---- threads that share ------------------------------------------------------------------------ */

static void share_send_0(void) { REQUIRE(send(1) == FIPC_OK); }
static void share_send_1(void) { REQUIRE(send(2) == FIPC_OK); }
static void share_send_finish(void) {
    REQUIRE(receive_now(reader[0], 0) == FIPC_OK && receive_now(reader[0], 0) == FIPC_OK);
    REQUIRE(got[0][0] + got[0][1] == 3);
    end();
}
const struct verify_client verify_share_writer = {"share-writer",
                                                  "two threads send through one writer",
                                                  2,
                                                  false,
                                                  0,
                                                  one_reader,
                                                  {share_send_0, share_send_1},
                                                  share_send_finish};

/* The first has messages 1 and 2; the second, at the same rank, was not granted yet. */
static void replaced(void) {
    create(1, false);
    attach(0);
    send(1);
    send(2);
    receive(reader[0], 3);
    receive(reader[0], 3);
    fipc_queue_close(reader[0]);
    attach_as(0, &reader[1]);
}
static void share_write(void) {
    struct fipc_call call = {.deadline = 0};
    struct fipc_error err;
    fipc_queue_wait_ready(writer, &call, &err);
    REQUIRE(send(3) == FIPC_OK);
    REQUIRE(send(4) == FIPC_OK);
}
static void share_take(unsigned thread) { REQUIRE(receive(reader[1], thread) == FIPC_OK); }
static void share_take_1(void) { share_take(1); }
static void share_take_2(void) { share_take(2); }
static void share_finish(void) {
    REQUIRE(n_got[1] == 1 && n_got[2] == 1);
    REQUIRE(got[1][0] + got[2][0] == 7);
    end();
}
const struct verify_client verify_share_reader = {
    "share-reader",
    "two threads wait at one reader that is not granted yet: each gets one message",
    3,
    true,
    0,
    replaced,
    {share_write, share_take_1, share_take_2},
    share_finish};

static void wait_in_vain(void) {
    if (verify_choose(2)) {
        struct fipc_call call = forever();
        uint8_t is_ready;
        REQUIRE(fipc_queue_wait_any(&reader[0], 1, &call, &is_ready) == FIPC_OK && is_ready);
    }
    REQUIRE(receive(reader[0], 0) == FIPC_SHUTDOWN);
}
static void shut_reader(void) { fipc_queue_shutdown(reader[0]); }
static void shut_finish(void) { end(); }
const struct verify_client verify_shutdown = {
    "shutdown",
    "one thread waits for a message, another shuts the reader down",
    2,
    false,
    0,
    one_reader,
    {wait_in_vain, shut_reader},
    shut_finish};

static void full(void) {
    create(1, false);
    attach(0);
    send(1);
    send(2);
}
static void send_in_vain(void) { REQUIRE(send(3) == FIPC_SHUTDOWN); }
static void shut_writer(void) { fipc_queue_shutdown(writer); }
const struct verify_client verify_shutdown_full = {
    "shutdown-full",
    "two threads wait to send, one of them for the other's lock; a third shuts down",
    3,
    true,
    0,
    full,
    {send_in_vain, send_in_vain, shut_writer},
    shut_finish};
