#include "fipc_frame.h"

#include <stdlib.h>
#include <string.h>

static uint64_t padding(uint64_t at) { return (0 - at) & (FIPC_ALIGN - 1); }

/* ---- gather -------------------------------------------------------------------------------- */

int fipc_gather_init(struct fipc_gather *g, const struct fipc_piece *pieces, uint64_t n) {
    g->pieces = pieces;
    g->n = n;
    g->head = NULL;
    g->head_bytes = 0;
    g->done = g->piece = g->in_piece = g->pad = 0;
    uint64_t count = 0;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        count += !pieces[i].joins;
        if (__builtin_add_overflow(sum, pieces[i].len, &sum)) {
            return FIPC_INVALID;
        }
    }
    /* with room for the header and paddings the total must still be far from overflow */
    if (n == 0 || pieces[0].joins || sum > UINT64_MAX / 4 || n > UINT64_MAX / 1024) {
        return FIPC_INVALID;
    }
    g->bare = count == 1;
    if (g->bare) {
        g->total = sum;
        return FIPC_OK;
    }
    g->head_bytes = 8 * (count + 1);
    g->head = g->head_room;
    if (count > FIPC_GATHER_INLINE) {
        g->head = malloc((size_t)g->head_bytes);
        if (g->head == NULL) {
            return FIPC_NO_MEMORY;
        }
    }
    g->head[0] = count;
    uint64_t buffer = 0;
    uint64_t at = g->head_bytes;
    for (uint64_t i = 0; i < n; i++) {
        if (!pieces[i].joins) {
            g->head[++buffer] = 0;
            at += padding(at);
        }
        g->head[buffer] += pieces[i].len;
        at += pieces[i].len;
    }
    g->total = at;
    return FIPC_OK;
}

void fipc_gather_free(struct fipc_gather *g) {
    if (g->head != NULL && g->head != g->head_room) {
        free(g->head);
    }
    g->head = NULL;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

void fipc_gather_strided(char *dst, const struct fipc_piece *p, uint64_t from, uint64_t n) {
    const uint32_t size = p->itemsize;
    const int last = p->ndim - 1;
    uint64_t row = (uint64_t)p->shape[last]; /* elements in the innermost row */
    const int64_t step = p->strides[last];
    while (n > 0) {
        /* where is byte `from`? Divide once a row; the row is then a plain loop. */
        uint64_t element = from / size;
        uint64_t byte = from % size;
        uint64_t column = element % row;
        uint64_t rest = element / row;
        const char *src = p->ptr;
        for (int d = last - 1; d >= 0; d--) {
            uint64_t extent = (uint64_t)p->shape[d];
            src += (int64_t)(rest % extent) * p->strides[d];
            rest /= extent;
        }
        src += (int64_t)column * step;
        uint64_t take = least(n, (row - column) * size - byte);
        from += take;
        n -= take;
        if (step == (int64_t)size) {
            memcpy(dst, src + byte, (size_t)take);
            dst += take;
            continue;
        }
        if (byte != 0) { /* a fragment ended inside an element */
            uint64_t part = least(take, size - byte);
            memcpy(dst, src + byte, (size_t)part);
            dst += part;
            take -= part;
            src += step;
        }
        /* the sizes of ordinary elements as constants, so that each is one load and store */
#define FIPC_COPY_ELEMENTS(bytes)                                                                  \
    for (; take >= (bytes); take -= (bytes)) {                                                     \
        memcpy(dst, src, (bytes));                                                                 \
        dst += (bytes);                                                                            \
        src += step;                                                                               \
    }
        switch (size) {
        case 1: FIPC_COPY_ELEMENTS(1) break;
        case 2: FIPC_COPY_ELEMENTS(2) break;
        case 4: FIPC_COPY_ELEMENTS(4) break;
        case 8: FIPC_COPY_ELEMENTS(8) break;
        case 16: FIPC_COPY_ELEMENTS(16) break;
        default: FIPC_COPY_ELEMENTS(size) break;
        }
#undef FIPC_COPY_ELEMENTS
        memcpy(dst, src, (size_t)take); /* 0, or the front of an element */
        dst += take;
    }
}

void fipc_gather_copy(struct fipc_gather *g, char *dst, uint64_t n) {
    if (g->done < g->head_bytes) {
        uint64_t take = least(n, g->head_bytes - g->done);
        memcpy(dst, (const char *)g->head + g->done, (size_t)take);
        g->done += take;
        dst += take;
        n -= take;
        if (g->done == g->head_bytes) {
            g->pad = padding(g->done);
        }
    }
    while (n > 0) {
        if (g->pad > 0) {
            uint64_t take = least(n, g->pad);
            memset(dst, 0, (size_t)take);
            g->pad -= take;
            g->done += take;
            dst += take;
            n -= take;
            continue;
        }
        const struct fipc_piece *p = &g->pieces[g->piece];
        uint64_t take = least(n, p->len - g->in_piece);
        if (p->ndim > 0) {
            fipc_gather_strided(dst, p, g->in_piece, take);
        } else if (take > 0) {
            memcpy(dst, (const char *)p->ptr + g->in_piece, (size_t)take);
        }
        g->in_piece += take;
        g->done += take;
        dst += take;
        n -= take;
        if (g->in_piece == p->len) {
            g->piece++;
            g->in_piece = 0;
            if (g->piece < g->n && !g->pieces[g->piece].joins) {
                g->pad = padding(g->done);
            }
        }
    }
}

/* ---- scatter ------------------------------------------------------------------------------- */

void fipc_scatter_begin(struct fipc_scatter *s, uint64_t total, bool bare, uint32_t tag) {
    memset(s, 0, sizeof *s);
    s->active = true;
    s->total = total;
    s->bare = bare;
    s->tag = tag;
}

void fipc_scatter_drop(struct fipc_scatter *s) {
    for (uint64_t i = 0; s->blocks != NULL && i < s->count; i++) {
        fipc_block_free(s->blocks[i].ptr, s->blocks[i].len);
    }
    free(s->blocks);
    free(s->lengths);
    memset(s, 0, sizeof *s);
}

/* count and lengths are known: makes sure that they add up to exactly the total, and only then
 * allocates. */
static int allocate(struct fipc_scatter *s, const uint64_t *lengths) {
    uint64_t at = s->head_bytes;
    for (uint64_t i = 0; i < s->count; i++) {
        at += s->bare ? 0 : padding(at);
        if (at > s->total || lengths[i] > s->total - at) {
            return FIPC_CORRUPT;
        }
        at += lengths[i];
    }
    if (at != s->total) {
        return FIPC_CORRUPT;
    }
    s->blocks = calloc((size_t)s->count, sizeof *s->blocks);
    if (s->blocks == NULL) {
        return FIPC_NO_MEMORY;
    }
    for (uint64_t i = 0; i < s->count; i++) {
        if (lengths[i] > 0) {
            s->blocks[i].ptr = fipc_block_alloc(lengths[i]);
            if (s->blocks[i].ptr == NULL) {
                return FIPC_NO_MEMORY;
            }
        }
        s->blocks[i].len = lengths[i];
    }
    s->pad = s->bare ? 0 : padding(s->head_bytes);
    return FIPC_OK;
}

static int feed_head(struct fipc_scatter *s, const char **src, uint64_t *n) {
    while (s->head_done < 8 && *n > 0) {
        s->count_bytes[s->head_done++] = (uint8_t)*(*src)++;
        (*n)--;
        s->done++;
        if (s->head_done == 8) {
            memcpy(&s->count, s->count_bytes, 8);
            if (s->count == 0 || s->count > (s->total - 8) / 8) {
                s->count = 0;
                return FIPC_CORRUPT;
            }
            s->head_bytes = 8 * (s->count + 1);
            s->lengths = malloc((size_t)s->count * 8);
            if (s->lengths == NULL) {
                return FIPC_NO_MEMORY;
            }
        }
    }
    if (s->head_done < 8) {
        return FIPC_OK;
    }
    uint64_t take = least(*n, s->head_bytes - s->head_done);
    memcpy((char *)s->lengths + (s->head_done - 8), *src, (size_t)take);
    s->head_done += take;
    s->done += take;
    *src += take;
    *n -= take;
    return s->head_done == s->head_bytes ? allocate(s, s->lengths) : FIPC_OK;
}

int fipc_scatter_feed(struct fipc_scatter *s, const char *src, uint64_t n) {
    if (n > s->total - s->done) {
        return FIPC_CORRUPT;
    }
    if (s->blocks == NULL) {
        int rc;
        if (s->bare) {
            s->count = 1;
            rc = allocate(s, &s->total);
        } else if (s->total < 16) { /* no room for a count and a length */
            rc = FIPC_CORRUPT;
        } else {
            rc = feed_head(s, &src, &n);
        }
        if (rc != FIPC_OK) {
            return rc;
        }
    }
    while (n > 0) {
        if (s->pad > 0) {
            uint64_t take = least(n, s->pad);
            s->pad -= take;
            s->done += take;
            src += take;
            n -= take;
            continue;
        }
        if (s->block == s->count) {
            return FIPC_CORRUPT;
        }
        struct fipc_block *b = &s->blocks[s->block];
        uint64_t take = least(n, b->len - s->in_block);
        if (take > 0) {
            memcpy((char *)b->ptr + s->in_block, src, (size_t)take);
        }
        s->in_block += take;
        s->done += take;
        src += take;
        n -= take;
        if (s->in_block == b->len) {
            s->block++;
            s->in_block = 0;
            s->pad = s->block < s->count ? padding(s->done) : 0;
        }
    }
    return FIPC_OK;
}

int fipc_scatter_finish(struct fipc_scatter *s, struct fipc_message *out) {
    if (s->done != s->total || s->blocks == NULL) {
        return FIPC_CORRUPT;
    }
    out->blocks = s->blocks;
    out->n = s->count;
    out->tag = s->tag;
    free(s->lengths);
    memset(s, 0, sizeof *s);
    return FIPC_OK;
}
