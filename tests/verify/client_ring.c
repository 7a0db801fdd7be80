/* client_ring.c: the ring alone (fipc_ring.c, and nothing that makes a system call): two slots, three
 * messages, one reader or two.
 *
 * With VERIFY_PLAIN this is one translation unit of plain C11 with POSIX threads, for a stateless
 * model checker; VERIFY_CLIENT is then the client, and sleeping is a loop on the bell. See
 * README.md.
 */
#include <stddef.h>
#include <string.h>

#ifdef VERIFY_PLAIN
#include "../../csrc/fipc_ring.c"
#include <assert.h>
#include <pthread.h>
#define REQUIRE(what) assert(what)
#define VERIFY_MAX_THREADS 4
struct verify_client {
    const char *name, *what;
    unsigned n;
    bool at_random;
    unsigned time_outs;
    void (*setup)(void);
    void (*run[VERIFY_MAX_THREADS])(void);
    void (*finish)(void);
};
static void verify_poll(void) {}
static void sleep_on(const fipc_a32 *bell, uint32_t seen) {
    while (fipc_load32_acquire(bell) == seen) {
    }
}
static void wake(const fipc_a32 *bell) { (void)bell; }
#else
#include "fipc_ring.h"
#include "verify.h"
static void sleep_on(const fipc_a32 *bell, uint32_t seen) {
    verify_ops.wait(verify_ops.ctx, bell, seen, FIPC_FOREVER);
}
static void wake(const fipc_a32 *bell) { verify_ops.wake(verify_ops.ctx, bell); }
#endif

#define SLOTS 2
#define MESSAGES 3
#define CHUNKS 2

static struct segment {
    struct fipc_header header;
    struct fipc_control control;
    struct fipc_peer peers[3];
    struct fipc_cursor cursors[2];
    struct {
        struct fipc_slot slot;
        uint64_t payload[FIPC_LINE / 8];
    } slots[SLOTS];
    uint64_t chunks[CHUNKS][FIPC_LINE / 8];
} segment;

static struct fipc_ring writer, reader[2];
static uint8_t counted[2];
static uint64_t chunk_until[CHUNKS];
static uint64_t n_read[2];
static bool reused; /* a chunk was used twice */

static uint64_t pattern(uint64_t seq) { return seq * UINT64_C(0x0101010101010101); }

static void begin(uint32_t n_readers, uint32_t n_chunks) {
    memset(&segment, 0, sizeof segment);
    memset(&writer, 0, sizeof writer);
    memset(reader, 0, sizeof reader);
    memset(chunk_until, 0, sizeof chunk_until);
    memset(n_read, 0, sizeof n_read);
    reused = false;
    struct fipc_header *h = &segment.header;
    h->off_control = offsetof(struct segment, control);
    h->off_peers = offsetof(struct segment, peers);
    h->off_cursors = offsetof(struct segment, cursors);
    h->off_slots = offsetof(struct segment, slots);
    h->off_chunks = offsetof(struct segment, chunks);
    h->slot_stride = sizeof segment.slots[0];
    h->chunk_stride = h->chunk_bytes = sizeof segment.chunks[0];
    h->inline_bytes = FIPC_LINE;
    h->n_readers = n_readers;
    h->n_slots = SLOTS;
    h->n_chunks = n_chunks;
    fipc_ring_bind(&writer, &segment, h);
    writer.counted = counted;
    writer.chunk_until = chunk_until;
    for (uint32_t i = 0; i < n_readers; i++) {
        counted[i] = 1;
        fipc_ring_bind(&reader[i], &segment, h);
        reader[i].reader = i;
    }
}

/* ---- the writer ------------------------------------------------------------------------------ */

static bool room(bool chunk) {
    return fipc_ring_slot_free(&writer) &&
           (!chunk || fipc_ring_chunk_free(&writer, NULL) != FIPC_NO_CHUNK);
}

static void poll_for_room(bool chunk) {
    while (!room(chunk)) {
        fipc_ring_scan(&writer);
        if (!room(chunk)) {
            verify_poll();
        }
    }
}

/* As fipc_queue_wait_for does it. */
static void sleep_for_room(bool chunk) {
    while (!room(chunk)) {
        fipc_ring_scan(&writer);
        if (room(chunk)) {
            break;
        }
        uint64_t target =
            fipc_ring_slot_free(&writer) ? fipc_ring_chunk_oldest(&writer) : writer.next - SLOTS;
        fipc_store64_relaxed(&writer.control->room_target, target);
        uint32_t seen = fipc_bell_park(&writer.control->room_bell);
        fipc_ring_scan_parked(&writer);
        if (!room(chunk)) {
            sleep_on(&writer.control->room_bell, seen);
        }
    }
}

static bool publish(bool chunk) {
    uint64_t seq = writer.next;
    struct fipc_record record = {.len = 8,
                                 .total = 8,
                                 .flags = FIPC_SLOT_FIRST | FIPC_SLOT_LAST | FIPC_SLOT_BARE,
                                 .tag = (uint32_t)seq};
    fipc_ring_begin(&writer);
    if (chunk) {
        record.flags |= FIPC_SLOT_CHUNK;
        record.chunk = fipc_ring_chunk_free(&writer, NULL);
        reused = reused || chunk_until[record.chunk] != 0;
    }
    void *to =
        chunk ? fipc_ring_chunk(&writer, record.chunk) : fipc_ring_inline(fipc_ring_slot(&writer));
    *(uint64_t *)to = pattern(seq);
    return fipc_ring_publish(&writer, &record);
}

static void write_polling(bool chunk) {
    for (int i = 0; i < MESSAGES; i++) {
        poll_for_room(chunk);
        publish(chunk);
    }
}

static void write_sleeping(bool chunk) {
    for (int i = 0; i < MESSAGES; i++) {
        sleep_for_room(chunk);
        if (publish(chunk)) {
            fipc_bell_ring(&writer.control->data_bell);
            wake(&writer.control->data_bell);
        }
    }
}

/* ---- a reader -------------------------------------------------------------------------------- */

static bool take(uint32_t i) {
    struct fipc_ring *r = &reader[i];
    struct fipc_record record;
    bool bad;
    struct fipc_slot *slot = fipc_ring_peek(r, &record, &bad);
    if (slot == NULL) {
        return false;
    }
    uint64_t seq = n_read[i] + 1;
    REQUIRE(!bad && record.tag == seq && record.len == 8);
    const void *from =
        record.flags & FIPC_SLOT_CHUNK ? fipc_ring_chunk(r, record.chunk) : fipc_ring_inline(slot);
    REQUIRE(*(const uint64_t *)from == pattern(seq));
    n_read[i]++;
    return true;
}

static void read_polling(uint32_t i) {
    while (n_read[i] < MESSAGES) {
        if (take(i)) {
            fipc_ring_ack(&reader[i], true);
        } else {
            verify_poll();
        }
    }
}

static void read_sleeping(uint32_t i) {
    struct fipc_ring *r = &reader[i];
    while (n_read[i] < MESSAGES) {
        if (!fipc_ring_readable(r)) {
            uint32_t seen = fipc_bell_park(&r->control->data_bell);
            if (!fipc_ring_readable_parked(r)) {
                sleep_on(&r->control->data_bell, seen);
                continue;
            }
        }
        REQUIRE(take(i));
        if (fipc_ring_ack(r, true)) {
            fipc_bell_ring(&r->control->room_bell);
            wake(&r->control->room_bell);
        }
    }
}

/* ---- the clients ----------------------------------------------------------------------------- */

static void setup_1(void) { begin(1, 1); }
static void setup_2(void) { begin(2, 1); }
static void setup_2_chunks(void) { begin(1, CHUNKS); }
static void write_poll_slot(void) { write_polling(false); }
static void write_poll_chunk(void) { write_polling(true); }
static void write_sleep_slot(void) { write_sleeping(false); }
static void write_sleep_chunk(void) { write_sleeping(true); }
static void read_poll_0(void) { read_polling(0); }
static void read_poll_1(void) { read_polling(1); }
static void read_sleep_0(void) { read_sleeping(0); }
static void read_sleep_1(void) { read_sleeping(1); }

static void finish(void) {
    for (uint32_t i = 0; i < segment.header.n_readers; i++) {
        REQUIRE(n_read[i] == MESSAGES);
        REQUIRE(fipc_load64_relaxed(&segment.cursors[i].seq) == MESSAGES);
        REQUIRE(fipc_load64_relaxed(&segment.cursors[i].messages) == MESSAGES);
        REQUIRE(reader[i].messages == MESSAGES);
    }
    REQUIRE(writer.messages == MESSAGES && writer.next == MESSAGES + 1);
    REQUIRE(fipc_load64_relaxed(&segment.control.head) == MESSAGES);
    REQUIRE(fipc_load64_relaxed(&segment.control.writing) == 0);
}
static void finish_chunk(void) {
    finish();
    REQUIRE(reused);
}

const struct verify_client verify_ring_pass = {
    "ring-pass",
    "message passing: three messages through two slots, both sides look again and again",
    2,
    false,
    0,
    setup_1,
    {write_poll_slot, read_poll_0},
    finish};
const struct verify_client verify_ring_park = {
    "ring-park",
    "park and notify: the same, both sides sleep when they must wait",
    2,
    false,
    0,
    setup_1,
    {write_sleep_slot, read_sleep_0},
    finish};
const struct verify_client verify_ring_chunk = {"ring-chunk",
                                                "claim and reuse: the same through one chunk",
                                                2,
                                                false,
                                                0,
                                                setup_1,
                                                {write_sleep_chunk, read_sleep_0},
                                                finish_chunk};
const struct verify_client verify_ring_chunks = {
    "ring-chunks",
    "claim and reuse: the same through two chunks, without sleep",
    2,
    false,
    0,
    setup_2_chunks,
    {write_poll_chunk, read_poll_0},
    finish_chunk};
const struct verify_client verify_ring_pass_2 = {"ring-pass-2",
                                                 "message passing to two readers",
                                                 3,
                                                 true,
                                                 0,
                                                 setup_2,
                                                 {write_poll_slot, read_poll_0, read_poll_1},
                                                 finish};
const struct verify_client verify_ring_park_2 = {
    "ring-park-2",
    "park and notify with two readers: the last of them wakes the writer",
    3,
    true,
    0,
    setup_2,
    {write_sleep_slot, read_sleep_0, read_sleep_1},
    finish};
const struct verify_client verify_ring_chunk_2 = {
    "ring-chunk-2", "claim and reuse of one chunk with two readers", 3,           true, 0,
    setup_2,        {write_sleep_chunk, read_sleep_0, read_sleep_1}, finish_chunk};

#ifdef VERIFY_PLAIN
static void *thread(void *run) {
    (*(void (**)(void))run)();
    return NULL;
}

int main(void) {
    struct verify_client c = VERIFY_CLIENT;
    pthread_t threads[VERIFY_MAX_THREADS];
    c.setup();
    for (unsigned i = 0; i < c.n; i++) {
        pthread_create(&threads[i], NULL, thread, &c.run[i]);
    }
    for (unsigned i = 0; i < c.n; i++) {
        pthread_join(threads[i], NULL);
    }
    c.finish();
    return 0;
}
#endif
