/* fipc_ring.h: the ring's state machine. Works on memory alone: no system call, no clock, no lock;
 * so threads, processes and checkers can drive this very source.
 *
 * A slot, for sequence number s (the first is 1; slot index is (s - 1) modulo slots):
 *
 *   case  state                                   reader i may        writer may
 *   1     written != s                            not read            write s
 *   2     written == s, nobody's cursor >= s      read s              not write
 *   3     written == s, some cursors >= s         read s, if not yet  not write
 *   4     every counted cursor >= s               not read            write s + slots
 *
 *   1 -> 2  the writer's store W1 of `written`
 *   2 -> 3  a reader's store R1 of its cursor; 3 -> 4 the last reader's
 *   4 -> 1  nobody: with s + slots meant, a slot that holds s is in case 1
 *
 * A crash in case 1, even amid the payload's stores, leaves `written` as it was: survivors never
 * look at the payload, and control.writing tells which sequence was begun. A crash in 2 or 3
 * leaves a cursor behind; the writer stops counting it once the kernel says that its owner is
 * gone. "Counted" is the writer's own list, so that a reader's death changes nothing by itself.
 *
 * Sequence numbers count up from 1 in 64 bits and don't wrap in the life of a machine.
 *
 * Pairs (every acquire names its release; "<->" is store buffering: sequentially consistent)
 *   W1  written: store in fipc_ring_publish -> load in fipc_ring_peek. Travels: the slot's record,
 *       the payload, the chunk's bytes.
 *   R1  seq: store in fipc_ring_ack, fipc_queue_close -> load in fipc_ring_scan,
 *       fipc_ring_scan_parked. Travels: the end of the reader's loads from slot and chunk, which the
 *       writer overwrites.
 *   D   written, written_of, data_bell, bell: store, load in fipc_ring_publish <-> or, load in
 *       fipc_bell_park, fipc_ring_readable_parked. Park and publish: a publisher stores W1, then
 *       looks for sleepers; a sleeper announces itself, then looks at W1 again.
 *   M   seq, room_bell, bell: store, load in fipc_ring_ack <-> or, load in fipc_bell_park,
 *       fipc_ring_scan_parked. Park and ack: a reader stores R1, then looks whether the writer
 *       sleeps; the writer announces itself (and before it the target), then looks at R1 again.
 *   T   seq: store, load in fipc_ring_ack <-> store, load in fipc_ring_ack. Two last acks: at least
 *       one of two readers that pass the target together sees that both have.
 *   B   bell: cas in fipc_bell_ring -> or in fipc_bell_park. Travels: what the ringer wants to be
 *       seen, where it rings without looking (members, granted, ready, closed, stop): either the
 *       sleeper announces itself after the ring and sees it, or the ring changes the word under it.
 *   J   members: add in fipc_queue_attach, fipc_queue_close -> load in fipc_queue_members. Travels:
 *       the peer's state.
 *   G   granted: store in grant -> load in fipc_queue_adopt. Travels: the cursor from which it may
 *       read.
 *
 * Relaxed
 *   next_seen: a hint for threads that don't hold the lock; who takes a message looks with W1.
 *   writing, head, messages: for people, statistics, and who looks after a death.
 *   room_target: pair M's bit travels behind it.
 *   cursor: the reader's own, which fipc_ring_readable_parked looks at twice.
 *   written_of: a hint in fipc_ring_readable, as next_seen.
 *   bell: the first look of fipc_bell_ring, which its exchange verifies.
 */
#ifndef FIPC_RING_H
#define FIPC_RING_H

#include "fipc_layout.h"

struct fipc_ring {
    struct fipc_header *header;
    struct fipc_control *control;
    struct fipc_peer *peers; /* n_readers, then the writer's own */
    struct fipc_cursor *cursors;
    char *slots;
    char *chunks;
    /* copies of what the header says, checked once: a peer may scribble over the header later */
    uint64_t slot_stride, chunk_stride, chunk_bytes;
    uint32_t n_readers, n_slots, inline_bytes, n_chunks;

    uint64_t next;      /* sequence to write, or to read, next */
    uint32_t index;     /* of its slot */
    fipc_a64 next_seen; /* `next`, for threads that look without the lock */
    uint64_t messages;  /* whole messages written, or read */

    /* the writer's */
    uint64_t slowest;      /* least counted cursor, as of the last scan */
    uint8_t *counted;      /* per reader: it is waited for */
    uint64_t *chunk_until; /* per chunk: the sequence that uses, or used, it last */
    /* the reader's */
    uint32_t reader;
};

void fipc_ring_bind(struct fipc_ring *r, void *base, const struct fipc_header *h);

/* ---- writer ---- */
#define FIPC_NO_CHUNK UINT32_MAX

/* Least counted cursor; FIPC_CURSOR_LEFT when nobody is counted. */
uint64_t fipc_ring_scan(struct fipc_ring *r);
/* As scan, with the orders of a last look before sleeping (pair M). */
uint64_t fipc_ring_scan_parked(struct fipc_ring *r);
bool fipc_ring_slot_free(const struct fipc_ring *r);
/* Slots that may be written now without another scan. */
uint64_t fipc_ring_slots_free(const struct fipc_ring *r);
/* The chunk to use next: of the free ones that which was freed last, since it is still in the
 * cache. FIPC_NO_CHUNK when all are in use. n_free may be NULL. */
uint32_t fipc_ring_chunk_free(const struct fipc_ring *r, uint32_t *n_free);
/* The least sequence whose reading frees a chunk. */
uint64_t fipc_ring_chunk_oldest(const struct fipc_ring *r);

struct fipc_slot *fipc_ring_slot(const struct fipc_ring *r);
char *fipc_ring_inline(struct fipc_slot *slot);
char *fipc_ring_chunk(const struct fipc_ring *r, uint32_t chunk);

/* The slot's record apart from `written`. */
struct fipc_record {
    uint64_t len, total, offset;
    uint32_t flags, chunk, tag;
};
void fipc_ring_begin(struct fipc_ring *r);
/* True when readers sleep and their bell must be rung. */
bool fipc_ring_publish(struct fipc_ring *r, const struct fipc_record *record);

/* ---- reader ---- */
/* The slot with the next sequence, or NULL. The record is copied and checked: FIPC_CORRUPT in
 * *bad when it can't be right. */
struct fipc_slot *fipc_ring_peek(const struct fipc_ring *r, struct fipc_record *record, bool *bad);
bool fipc_ring_readable(const struct fipc_ring *r);
/* The same with the orders of a last look before sleeping (pair D): what it says when it says no is
 * as good as a sleeper needs, also while another thread takes. From the cursor, where a reader that
 * has not taken over the writer's grant yet will begin. */
bool fipc_ring_readable_parked(const struct fipc_ring *r);
/* Goes to sequence `seq`, as told by the writer. */
void fipc_ring_seek(struct fipc_ring *r, uint64_t seq);
/* Acknowledges the next sequence; `last` ends a message. True when the writer's bell must be
 * rung. */
bool fipc_ring_ack(struct fipc_ring *r, bool last);

/* ---- doorbells ---- */
/* Announces a sleeper; the value to sleep on. Look again before sleeping. */
uint32_t fipc_bell_park(fipc_a32 *bell);
/* Clears the sleepers' bit and changes the word; the caller then wakes. */
void fipc_bell_ring(fipc_a32 *bell);

#endif /* FIPC_RING_H */
