/* fipc_join.c: a message as one stretch of bytes, as it lies in the ring (fipc_frame.h), for ways
 * that are not the ring. */
#include "fipc_frame.h"

int fipc_join_size(const struct fipc_piece *pieces, uint64_t n, uint64_t *size, bool *bare) {
    struct fipc_gather g;
    int rc = fipc_gather_init(&g, pieces, n);
    if (rc == FIPC_OK) {
        *size = g.total;
        *bare = g.bare;
        fipc_gather_free(&g);
    }
    return rc;
}

int fipc_join(const struct fipc_piece *pieces, uint64_t n, void *dst) {
    struct fipc_gather g;
    int rc = fipc_gather_init(&g, pieces, n);
    if (rc == FIPC_OK) {
        fipc_gather_copy(&g, dst, g.total);
        fipc_gather_free(&g);
    }
    return rc;
}

int fipc_split(const void *src, uint64_t len, bool bare, struct fipc_message *out) {
    struct fipc_scatter s;
    fipc_scatter_begin(&s, len, bare, 0);
    int rc = fipc_scatter_feed(&s, src, len);
    if (rc == FIPC_OK) {
        rc = fipc_scatter_finish(&s, out);
    }
    if (rc != FIPC_OK) {
        fipc_scatter_drop(&s);
    }
    return rc;
}
