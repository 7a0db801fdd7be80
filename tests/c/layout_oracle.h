/* layout_oracle.h: what any layout must fulfil for every access to be inside the file, computed in
 * 128 bits, so that it can't make the mistake of wrapping. It doesn't repeat the plan. */
#ifndef FIPC_TESTS_LAYOUT_ORACLE_H
#define FIPC_TESTS_LAYOUT_ORACLE_H

#include "fipc_layout.h"

__extension__ typedef unsigned __int128 u128;

#define LIMIT ((u128)1 << 47) /* user address space of a 48-bit machine */

static inline u128 slots_end(const struct fipc_header *h) {
    return h->off_slots + (u128)h->n_slots * h->slot_stride;
}

/* NULL, or what is wrong with it. */
static inline const char *why_not(const struct fipc_header *h, uint64_t file_bytes) {
    if (h->n_readers < 1 || h->n_readers > FIPC_MAX_READERS || h->n_slots < 2 || h->n_chunks < 1) {
        return "a number is out of range";
    }
    if (h->inline_bytes > h->chunk_bytes) {
        return "a slot holds more than a chunk";
    }
    if (h->off_control < sizeof *h || h->off_control % FIPC_LINE != 0 ||
        h->off_peers < (u128)h->off_control + sizeof(struct fipc_control)) {
        return "the control lines overlap a neighbour";
    }
    if (h->off_peers % FIPC_LINE != 0 ||
        h->off_cursors < h->off_peers + (u128)(h->n_readers + 1) * sizeof(struct fipc_peer)) {
        return "the peers overlap the cursors";
    }
    if (h->off_cursors % (2 * FIPC_LINE) != 0 ||
        h->off_slots < h->off_cursors + (u128)h->n_readers * sizeof(struct fipc_cursor)) {
        return "the cursors overlap the slots";
    }
    if (h->off_slots % FIPC_LINE != 0 || h->slot_stride % FIPC_LINE != 0 ||
        h->slot_stride < sizeof(struct fipc_slot) + (u128)h->inline_bytes) {
        return "a slot overlaps the next";
    }
    if (h->off_chunks < slots_end(h)) {
        return "the slots overlap the chunks";
    }
    if (h->off_chunks % FIPC_PAGE != 0 || h->chunk_stride % FIPC_PAGE != 0 ||
        h->chunk_stride < h->chunk_bytes) {
        return "a chunk overlaps the next";
    }
    if (h->total_bytes < h->off_chunks + (u128)h->n_chunks * h->chunk_stride) {
        return "the last chunk ends beyond the total";
    }
    return h->total_bytes > file_bytes ? "the file is too short" : NULL;
}

#endif /* FIPC_TESTS_LAYOUT_ORACLE_H */
