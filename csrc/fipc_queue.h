/* fipc_queue.h: one end of a queue, as this process holds it. Private to fipc_queue.c and
 * fipc_queue_io.c: the first has life, liveness and waiting, the second sends and receives. */
#ifndef FIPC_QUEUE_H
#define FIPC_QUEUE_H

#include "fipc_frame.h"
#include "fipc_mem.h"
#include "fipc_peer.h"
#include "fipc_ring.h"
#include "fipc_wait.h"

/* The part of a chunk that is published at once: while a reader copies one part out, the writer
 * copies the next one in. 1 MiB is long against a wake-up (50 us) and short against the caches. */
#define FIPC_PART_BYTES (UINT64_C(1) << 20)
#define FIPC_PARTS_MAX 16u /* of one chunk */
/* How far the writer may be ahead of readers that keep pace, before it waits for them to come
 * close. Less than it may be in all: see keep_close. */
#define FIPC_AHEAD_BYTES (UINT64_C(2) << 20)
#define FIPC_PARTS_KNOWN 32u

/* A part of a chunk that was published. */
struct fipc_part {
    uint64_t seq, offset, bytes; /* bytes 0: its place was taken again */
    uint32_t chunk;
};

struct fipc_queue {
    struct fipc_ring ring;
    struct fipc_segment seg;
    const struct fipc_waitops *ops;
    bool is_writer;
    bool closed;
    uint32_t fork_generation;
    uint8_t id[FIPC_ID_BYTES];
    fipc_a32 stop;         /* shut down */
    struct fipc_lock lock; /* guards everything below but the relaxed atomics */

    /* waiting */
    uint64_t spin_ns;
    uint32_t n_cpus;
    fipc_a32 penance;  /* waits that won't spin, because spinning kept the peer from running */
    fipc_a32 sentence; /* how many the last time */
    fipc_a32 history;  /* of the last 8 waits, a bit each: it was short */
    uint64_t warn_ns;
    fipc_a64 next_probe; /* when to ask the kernel for the peers' locks again */
    fipc_a64 waits, sleeps, wakes;

    /* writer */
    bool evict;
    bool everyone_left;
    uint32_t members_seen;
    uint32_t n_dead;      /* counted readers known to be dead */
    uint8_t *dead;        /* per reader */
    uint64_t *chunk_have; /* per chunk: bytes from its start that are allocated */
    uint64_t *chunk_used; /* per chunk: when it was used last, ns */
    uint64_t resident;
    struct fipc_gather gather;
    uint32_t part_chunk;                      /* the chunk being filled, FIPC_NO_CHUNK: none */
    uint64_t part_used;                       /* bytes of it that are */
    uint64_t part_bytes;                      /* how much to publish at once */
    uint64_t part_first;                      /* sequence of the first part in this chunk */
    struct fipc_part parts[FIPC_PARTS_KNOWN]; /* the last ones, in a ring */
    uint32_t n_parts;
    bool aloof;      /* readers don't keep pace just now */
    bool want_chunk; /* what the wait for room waits for */
    uint64_t want_slots;
    struct fipc_record loan;

    /* reader */
    uint32_t epoch;
    fipc_a32 adopted;     /* the writer's grant was taken over: next is where it said */
    fipc_a32 partial;     /* part of a message has been taken */
    fipc_a32 writer_dead; /* by any of this reader's threads; the kernel is asked again anyway */
    struct fipc_scatter scatter;
    uint64_t *chunk_seen; /* per chunk: bytes from its start that are mapped here */

    uint64_t bytes, bytes_copied, fragments;
};

/* What a wait is for. ready() looks at shared memory only; parked says that this is the last look
 * before sleeping. */
typedef bool (*fipc_ready_fn)(struct fipc_queue *q, bool parked);

int fipc_queue_usable(struct fipc_queue *q);
int fipc_queue_enter(struct fipc_queue *q, struct fipc_call *call);
void fipc_queue_leave(struct fipc_queue *q);
int fipc_queue_wait_for(struct fipc_queue *q, struct fipc_call *call, fipc_ready_fn ready,
                        bool may_warn, struct fipc_error *err);
/* Writer, locked: takes notice of readers that came or went. */
void fipc_queue_members(struct fipc_queue *q);
/* Writer, locked: a reason not to send: FIPC_CLOSED, FIPC_PEER_DIED, FIPC_EVICTED; probes when
 * due. */
int fipc_queue_health(struct fipc_queue *q, struct fipc_error *err);
bool fipc_queue_probe_due(struct fipc_queue *q);
/* There are CPUs enough for everyone, and spinning isn't switched off. */
bool fipc_queue_may_spin(const struct fipc_queue *q);
void fipc_queue_wake_readers(struct fipc_queue *q);
void fipc_queue_wake_writer(struct fipc_queue *q);
/* Reader, locked: takes over the writer's grant; false when there is none yet. */
bool fipc_queue_adopt(struct fipc_queue *q);
bool fipc_queue_reader_ready(struct fipc_queue *q, bool parked);
bool fipc_queue_room_ready(struct fipc_queue *q, bool parked);
/* Writer, locked: waits for a free slot, and for a free chunk if asked. */
int fipc_queue_wait_room(struct fipc_queue *q, bool chunk, struct fipc_call *call,
                         struct fipc_error *err);

#endif /* FIPC_QUEUE_H */
