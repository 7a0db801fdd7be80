#include "fipc_layout.h"

#include <string.h>

static uint32_t layout_hash(void) {
    const uint64_t facts[] = {
        sizeof(struct fipc_header),
        offsetof(struct fipc_header, n_readers),
        offsetof(struct fipc_header, off_control),
        sizeof(struct fipc_control),
        offsetof(struct fipc_control, data_bell),
        offsetof(struct fipc_control, room_bell),
        offsetof(struct fipc_control, room_target),
        offsetof(struct fipc_control, head),
        sizeof(struct fipc_peer),
        offsetof(struct fipc_peer, pid),
        sizeof(struct fipc_cursor),
        sizeof(struct fipc_slot),
        offsetof(struct fipc_slot, len),
        offsetof(struct fipc_slot, flags),
        offsetof(struct fipc_slot, tag),
        FIPC_BELL_STEP,
        UINT64_C(0x0102030405060708), /* and the byte order, since it is hashed bytewise */
    };
    const unsigned char *p = (const unsigned char *)facts;
    uint32_t h = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof facts; i++) {
        h = (h ^ p[i]) * 16777619u;
    }
    return h;
}

static uint64_t round_up(uint64_t v, uint64_t to) { return (v + to - 1) / to * to; }

int fipc_layout_plan(struct fipc_header *h) {
    const uint64_t limit = UINT64_C(1) << 46; /* half of what a 48-bit address space can map */
    /* (chunks of no bytes would let n_chunks be any number in a small file) */
    if (h->chunk_bytes == 0 || h->chunk_bytes > limit || h->n_chunks == 0 || h->n_slots < 2) {
        return FIPC_INVALID;
    }
    memcpy(h->magic, FIPC_MAGIC, sizeof h->magic);
    h->layout_version = FIPC_LAYOUT_VERSION;
    h->layout_hash = layout_hash();
    h->slot_stride = sizeof(struct fipc_slot) + round_up(h->inline_bytes, FIPC_LINE);
    h->chunk_stride = round_up(h->chunk_bytes, FIPC_PAGE);
    if (h->slot_stride > limit / 2 / h->n_slots) { /* before the product can wrap */
        return FIPC_INVALID;
    }
    h->off_control = FIPC_PAGE;
    h->off_peers = h->off_control + sizeof(struct fipc_control);
    h->off_cursors = round_up(h->off_peers + (uint64_t)h->n_readers * sizeof(struct fipc_peer) +
                                  sizeof(struct fipc_peer), /* the last one is the writer's */
                              FIPC_PAGE);
    h->off_slots =
        round_up(h->off_cursors + (uint64_t)h->n_readers * sizeof(struct fipc_cursor), FIPC_PAGE);
    h->off_chunks = round_up(h->off_slots + h->n_slots * h->slot_stride, FIPC_PAGE);
    if (h->chunk_stride > (limit - h->off_chunks) / h->n_chunks) {
        return FIPC_INVALID;
    }
    h->total_bytes = h->off_chunks + h->n_chunks * h->chunk_stride;
    return FIPC_OK;
}

bool fipc_layout_valid(const struct fipc_header *h, uint64_t file_bytes) {
    struct fipc_header want = *h;
    if (memcmp(h->magic, FIPC_MAGIC, sizeof h->magic) != 0 || h->n_readers == 0 ||
        h->n_readers > FIPC_MAX_READERS || fipc_layout_plan(&want) != FIPC_OK) {
        return false;
    }
    return memcmp(&want, h, sizeof want) == 0 && h->total_bytes <= file_bytes &&
           h->inline_bytes <= h->chunk_bytes;
}
