/* fipc_layout.h: the bytes that processes share. They are a file format: fixed-width fields,
 * natural alignment, offsets instead of pointers, one writer per cache line.
 *
 *   header | control | peers | cursors | slots | chunks
 *
 * The header never changes once the segment can be found. The control lines are the doorbells
 * and the writer's state. Cursors are one line pair per reader, since adjacent lines are fetched
 * together. A slot is one line of record followed by the inline payload.
 */
#ifndef FIPC_LAYOUT_H
#define FIPC_LAYOUT_H

#include "fastipc.h"
#include "fipc_atomic.h"

#define FIPC_MAGIC "fastipc\n"
#define FIPC_LAYOUT_VERSION 1u
#define FIPC_LINE 64u
#define FIPC_PAGE 4096u /* granularity of our offsets; the system's page may be larger */

struct fipc_header {
    char magic[8];
    uint32_t layout_version;
    uint32_t layout_hash; /* of the offsets below: catches a build that differs */
    uint8_t id[FIPC_ID_BYTES];
    uint64_t total_bytes;
    uint64_t chunk_bytes;  /* capacity of a chunk, as asked for */
    uint64_t chunk_stride; /* distance between chunks: whole pages */
    uint64_t slot_stride;  /* distance between slots: whole lines */
    uint64_t off_control, off_peers, off_cursors, off_slots, off_chunks;
    uint32_t n_readers;
    uint32_t n_slots;
    uint32_t inline_bytes;
    uint32_t n_chunks;
    uint64_t reserved;
};
_Static_assert(sizeof(struct fipc_header) == 128, "header is two lines");

enum fipc_writer_state { FIPC_WRITER_OPEN = 0, FIPC_WRITER_CLOSED = 1 };

/* A doorbell: bit 0 says that somebody sleeps (or is about to) on it, the other bits count rings.
 * A killed sleeper leaves the bit set; the next ring clears it, so it costs one wake-up. */
#define FIPC_BELL_SLEEPER 1u
#define FIPC_BELL_STEP 2u

struct fipc_control {
    /* line 0: rarely written. */
    _Alignas(FIPC_LINE) fipc_a32 writer_state; /* stored by the writer */
    fipc_a32 ready;                            /* stored by the writer: all ranks have attached */
    fipc_a32 members;                          /* bumped by readers that attach or leave */
    fipc_a32 attached;                         /* stored by the writer: readers it knows alive */
    /* line 1: readers sleep here; rung by the writer. */
    _Alignas(FIPC_LINE) fipc_a32 data_bell;
    /* line 2: the writer sleeps here; rung by readers. */
    _Alignas(FIPC_LINE) fipc_a32 room_bell;
    fipc_a64 room_target; /* stored by the writer: don't ring before this cursor is reached */
    /* line 3: the writer's diary; nobody polls it. */
    _Alignas(FIPC_LINE) fipc_a64 writing; /* sequence being written, 0 between messages */
    fipc_a64 head;                        /* last sequence published */
    fipc_a64 messages;                    /* whole messages published */
};
_Static_assert(sizeof(struct fipc_control) == 4 * FIPC_LINE, "control is four lines");

/* Who a rank is. The rank's owner (who holds the lock byte) stores pid, pid_ns, host, epoch, and
 * state JOINING and LEFT; the writer stores granted, and state ACTIVE and DEAD. */
struct fipc_peer {
    fipc_a32 state;   /* enum fipc_peer_state */
    fipc_a32 epoch;   /* counts the processes that were this rank, from 1 */
    fipc_a32 granted; /* the epoch that may read, from where the cursor stands */
    fipc_a32 pad;
    fipc_a64 pid;
    fipc_a64 pid_ns; /* inode of its PID namespace */
    fipc_a64 host[FIPC_HOST_BYTES / 8];
    fipc_a64 reserved[4];
};
_Static_assert(sizeof(struct fipc_peer) == 128, "a peer is two lines");

#define FIPC_CURSOR_LEFT UINT64_MAX

struct fipc_cursor {
    _Alignas(2 * FIPC_LINE) fipc_a64 seq; /* last sequence read; FIPC_CURSOR_LEFT after leaving */
    fipc_a64 messages;                    /* whole messages read, in the writer's count */
};
_Static_assert(sizeof(struct fipc_cursor) == 2 * FIPC_LINE, "a cursor is a line pair");

enum fipc_slot_flags {
    FIPC_SLOT_FIRST = 1, /* begins a message; what an unfinished one left behind is void */
    FIPC_SLOT_LAST = 2,  /* ends it */
    FIPC_SLOT_CHUNK = 4, /* the payload is in chunk `chunk`, not inline */
    FIPC_SLOT_BARE = 8,  /* the message is one buffer without a frame header */
};

struct fipc_slot {
    fipc_a64 written; /* the sequence that the rest of the slot belongs to */
    uint64_t len;     /* payload bytes in this slot */
    uint64_t total;   /* payload bytes of the whole message */
    uint64_t message; /* number of this message, from 1 */
    uint64_t offset;  /* of the payload in its chunk */
    uint32_t flags;
    uint32_t chunk;
    uint32_t tag;
    uint32_t pad[3];
    /* the inline payload follows */
};
_Static_assert(sizeof(struct fipc_slot) == FIPC_LINE, "a slot's record is one line");

/* Byte n of the lock area belongs to participant n: 0 the writer, 1 + i reader i; the byte
 * behind the last possible reader's is for who removes what the dead left. Far beyond the end of
 * any segment, where locks need no bytes. */
#define FIPC_LOCK_BASE (INT64_C(1) << 40)

/* Fills in strides, offsets and the hash from the sizes in `h`; FIPC_INVALID when they don't fit
 * into an address space. */
int fipc_layout_plan(struct fipc_header *h);
/* True when `h`, read from a peer's segment of `file_bytes`, is one that this build made. */
bool fipc_layout_valid(const struct fipc_header *h, uint64_t file_bytes);

#endif /* FIPC_LAYOUT_H */
