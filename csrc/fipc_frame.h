/* fipc_frame.h: what a message looks like in the ring.
 *
 *   bare   one buffer: its bytes, nothing else (FIPC_SLOT_BARE)
 *   frame  u64 count, u64 length[count], padding, buffers; each buffer begins at a multiple of
 *          FIPC_ALIGN from the frame's start. Lengths are in bytes.
 *
 * The sender's side (fipc_gather) walks over the pieces as if they were one stream, so that a
 * fragment may end anywhere; the receiver's (fipc_scatter) takes the stream in any portions and
 * copies each byte once, to where it stays. Nothing read from a peer is used before it has been
 * compared with the message's total.
 */
#ifndef FIPC_FRAME_H
#define FIPC_FRAME_H

#include "fastipc.h"

#define FIPC_GATHER_INLINE 16 /* buffers whose lengths fit without an allocation */

struct fipc_gather {
    const struct fipc_piece *pieces;
    uint64_t n;
    uint64_t total; /* bytes of the stream */
    bool bare;
    uint64_t *head; /* count and lengths, as sent */
    uint64_t head_bytes;
    uint64_t head_room[FIPC_GATHER_INLINE + 1];
    /* position */
    uint64_t done; /* bytes of the stream given out */
    uint64_t piece, in_piece;
    uint64_t pad; /* zero bytes due before the piece */
};

/* FIPC_OK, FIPC_NO_MEMORY, FIPC_INVALID (lengths that overflow, a first piece that joins) */
int fipc_gather_init(struct fipc_gather *g, const struct fipc_piece *pieces, uint64_t n);
/* Copies the next n bytes of the stream. */
void fipc_gather_copy(struct fipc_gather *g, char *dst, uint64_t n);
void fipc_gather_free(struct fipc_gather *g);
/* Copies bytes [from, from + n) of a strided array's elements in C order. */
void fipc_gather_strided(char *dst, const struct fipc_piece *p, uint64_t from, uint64_t n);

struct fipc_scatter {
    bool active;
    bool bare;
    uint64_t total, done;
    uint64_t head_bytes, head_done; /* of count and lengths */
    uint64_t count;
    uint64_t *lengths;
    struct fipc_block *blocks;
    uint64_t block, in_block;
    uint64_t pad;
    uint32_t tag;
    uint8_t count_bytes[8];
};

void fipc_scatter_begin(struct fipc_scatter *s, uint64_t total, bool bare, uint32_t tag);
/* Takes the next n bytes. FIPC_CORRUPT, FIPC_NO_MEMORY: the message is lost; call drop. */
int fipc_scatter_feed(struct fipc_scatter *s, const char *src, uint64_t n);
/* After the last byte: hands the blocks over. FIPC_CORRUPT when bytes are missing. */
int fipc_scatter_finish(struct fipc_scatter *s, struct fipc_message *out);
void fipc_scatter_drop(struct fipc_scatter *s);

#endif /* FIPC_FRAME_H */
