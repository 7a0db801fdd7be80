/* Frames: what goes into gather in pieces comes out of scatter as buffers, however the stream is
 * cut; and what can't be a frame is FIPC_CORRUPT, whatever it says.
 *
 * The oracle (struct model) builds buffers and stream by itself, an element and a byte at a time.
 * Every portion is in a heap block of exactly its size, so that the address sanitizer sees a read
 * or write beyond it.
 */
#include "test.h"

#include <pthread.h>

#include "fipc_frame.h"

#define MAX_NDIM 5

/* A message by hand. */
struct model {
    struct fipc_piece *pieces;
    uint64_t n, room;
    char **buffers;
    uint64_t *lengths;
    uint64_t count;
    bool bare;
    char *stream;
    uint64_t total;
    void **owned; /* the pieces' memory */
    uint64_t n_owned, owned_room;
};

static void *exactly(uint64_t n) {
    char *p = malloc(n > 0 ? (size_t)n : 1);
    CHECK(p != NULL);
    return p;
}

static void *random_bytes(uint64_t n) {
    uint8_t *p = exactly(n);
    for (uint64_t i = 0; i < n; i++) {
        p[i] = (uint8_t)test_random();
    }
    return p;
}

static void *own(struct model *m, void *p) {
    if (m->n_owned == m->owned_room) {
        m->owned_room = m->owned_room ? 2 * m->owned_room : 16;
        m->owned = realloc(m->owned, m->owned_room * sizeof *m->owned);
        CHECK(m->owned != NULL);
    }
    m->owned[m->n_owned++] = p;
    return p;
}

static void model_free(struct model *m) {
    for (uint64_t i = 0; i < m->n_owned; i++) {
        free(m->owned[i]);
    }
    for (uint64_t i = 0; i < m->count; i++) {
        free(m->buffers[i]);
    }
    free(m->owned);
    free(m->buffers);
    free(m->lengths);
    free(m->pieces);
    free(m->stream);
    memset(m, 0, sizeof *m);
}

/* ---- building ------------------------------------------------------------------------------ */

/* The elements one by one, in C order. */
static char *elements(char *dst, const struct fipc_piece *p, int axis, const char *at) {
    if (axis == p->ndim) {
        memcpy(dst, at, p->itemsize);
        return dst + p->itemsize;
    }
    for (int64_t i = 0; i < p->shape[axis]; i++) {
        dst = elements(dst, p, axis + 1, at + i * p->strides[axis]);
    }
    return dst;
}

/* An array of random shape, its axes in random order in memory, some backwards, some broadcast,
 * some with gaps, in a block that has not a byte more than its elements span. */
static struct fipc_piece strided(struct model *m, uint32_t itemsize, uint16_t ndim,
                                 uint64_t max_extent) {
    int64_t *shape = own(m, exactly(ndim * sizeof(int64_t)));
    int64_t *strides = own(m, exactly(ndim * sizeof(int64_t)));
    unsigned order[MAX_NDIM];
    for (unsigned d = 0; d < ndim; d++) {
        order[d] = d;
        shape[d] = test_chance(20) ? 0 : (int64_t)(1 + test_below(max_extent));
    }
    for (unsigned d = ndim; d > 1 && !test_chance(3); d--) {
        unsigned other = (unsigned)test_below(d);
        unsigned swap = order[d - 1];
        order[d - 1] = order[other];
        order[other] = swap;
    }
    int64_t distance = itemsize;
    int64_t first = 0; /* offset of element 0 */
    int64_t end = itemsize;
    uint64_t len = itemsize;
    for (unsigned k = 0; k < ndim; k++) { /* from the innermost axis */
        unsigned d = order[ndim - 1 - k];
        if (test_chance(4)) {
            distance += (int64_t)test_below(20);
        }
        int64_t stride = test_chance(10) ? 0 : test_chance(30) ? 1 : distance;
        int64_t span = shape[d] > 0 ? (shape[d] - 1) * stride : 0;
        end += span;
        distance += span;
        if (test_chance(3)) {
            first += span;
            stride = -stride;
        }
        strides[d] = stride;
        len *= (uint64_t)shape[d];
    }
    char *memory = own(m, random_bytes((uint64_t)end));
    return (struct fipc_piece){.ptr = memory + first,
                               .len = len,
                               .shape = shape,
                               .strides = strides,
                               .itemsize = itemsize,
                               .ndim = ndim};
}

static struct fipc_piece plain(struct model *m, uint64_t len) {
    return (struct fipc_piece){.ptr = own(m, random_bytes(len)), .len = len};
}

static void add(struct model *m, struct fipc_piece piece, bool joins) {
    piece.joins = joins && m->count > 0;
    if (m->n == m->room) {
        m->room = m->room ? 2 * m->room : 16;
        m->pieces = realloc(m->pieces, m->room * sizeof *m->pieces);
        m->buffers = realloc(m->buffers, m->room * sizeof *m->buffers);
        m->lengths = realloc(m->lengths, m->room * sizeof *m->lengths);
        CHECK(m->pieces != NULL && m->buffers != NULL && m->lengths != NULL);
    }
    m->pieces[m->n++] = piece;
    if (!piece.joins) {
        m->buffers[m->count] = exactly(0);
        m->lengths[m->count++] = 0;
    }
    uint64_t b = m->count - 1;
    char *bigger = realloc(m->buffers[b], m->lengths[b] + piece.len + 1);
    CHECK(bigger != NULL);
    m->buffers[b] = bigger;
    if (piece.ndim == 0) {
        memcpy(bigger + m->lengths[b], piece.ptr, piece.len);
    } else {
        char *end = elements(bigger + m->lengths[b], &piece, 0, piece.ptr);
        CHECK_EQ(end - bigger, m->lengths[b] + piece.len);
    }
    m->lengths[b] += piece.len;
}

static uint64_t aligned(uint64_t v) { return (v + FIPC_ALIGN - 1) / FIPC_ALIGN * FIPC_ALIGN; }

/* The stream as fipc_frame.h describes it. */
static void close_model(struct model *m) {
    m->bare = m->count == 1;
    uint64_t at = m->bare ? 0 : 8 * (m->count + 1);
    for (uint64_t i = 0; i < m->count; i++) {
        at = (m->bare ? at : aligned(at)) + m->lengths[i];
    }
    m->total = at;
    m->stream = calloc(1, at + 1);
    CHECK(m->stream != NULL);
    if (!m->bare) {
        memcpy(m->stream, &m->count, 8);
        memcpy(m->stream + 8, m->lengths, 8 * m->count);
    }
    at = m->bare ? 0 : 8 * (m->count + 1);
    for (uint64_t i = 0; i < m->count; i++) {
        at = m->bare ? at : aligned(at);
        memcpy(m->stream + at, m->buffers[i], m->lengths[i]);
        at += m->lengths[i];
    }
}

/* ---- driving ------------------------------------------------------------------------------- */

/* The length of the next portion, in one of several styles. */
static uint64_t portion(unsigned style, uint64_t left) {
    uint64_t n = left;
    switch (style) {
    case 0: break;
    case 1: n = 1; break;
    case 2: n = 1 + test_below(9); break;
    case 3: n = 56 + test_below(17); break;
    case 4: n = left > 0 ? test_log_uniform(test_random(), left) : 0; break;
    default: n = test_below(3); break; /* also none at all */
    }
    return n < left ? n : left;
}
#define STYLES 6

static unsigned any_style(uint64_t total) {
    unsigned style = (unsigned)test_below(STYLES);
    bool slow = style == 1 || style == 2 || style == 5;
    return slow && total > 20000 ? 4 : style;
}

static void check_gather(const struct model *m) {
    struct fipc_gather g;
    CHECK_RC(fipc_gather_init(&g, m->pieces, m->n), FIPC_OK);
    CHECK_EQ(g.total, m->total);
    CHECK_EQ(g.bare, m->bare);
    unsigned style = any_style(m->total);
    while (g.done < g.total) {
        uint64_t at = g.done;
        uint64_t n = portion(style, g.total - at);
        char *dst = exactly(n);
        memset(dst, 0xa5, n); /* the padding must be written too */
        fipc_gather_copy(&g, dst, n);
        CHECK_EQ(g.done, at + n);
        if (memcmp(dst, m->stream + at, n) != 0) {
            FAIL("bytes %" PRIu64 " to %" PRIu64 " of %" PRIu64 " differ", at, at + n, m->total);
        }
        free(dst);
    }
    fipc_gather_free(&g);
}

/* Feeds a stream; a result that isn't FIPC_OK ends it. */
static int scatter(struct fipc_scatter *s, const char *stream, uint64_t n, uint64_t total,
                   bool bare, struct fipc_message *out) {
    fipc_scatter_begin(s, total, bare, 77);
    unsigned style = any_style(n);
    uint64_t at = 0;
    int rc = FIPC_OK;
    do { /* a slot may be empty, so also an empty message is fed */
        uint64_t take = portion(style, n - at);
        char *src = exactly(take);
        memcpy(src, stream + at, take);
        rc = fipc_scatter_feed(s, src, take);
        free(src);
        at += take;
    } while (rc == FIPC_OK && at < n);
    return rc == FIPC_OK ? fipc_scatter_finish(s, out) : rc;
}

static void check_scatter(const struct model *m) {
    struct fipc_scatter s;
    struct fipc_message out;
    CHECK_RC(scatter(&s, m->stream, m->total, m->total, m->bare, &out), FIPC_OK);
    CHECK(!s.active && s.blocks == NULL && s.lengths == NULL);
    CHECK_EQ(out.tag, 77);
    CHECK_EQ(out.n, m->count);
    for (uint64_t i = 0; i < out.n; i++) {
        CHECK_EQ(out.blocks[i].len, m->lengths[i]);
        CHECK_EQ((uintptr_t)out.blocks[i].ptr % FIPC_ALIGN, 0);
        CHECK((out.blocks[i].ptr == NULL) == (m->lengths[i] == 0));
        if (m->lengths[i] > 0) {
            CHECK(memcmp(out.blocks[i].ptr, m->buffers[i], m->lengths[i]) == 0);
        }
    }
    fipc_message_clear(&out);
    CHECK(out.blocks == NULL && out.n == 0);
}

static void check_round_trip(struct model *m) {
    close_model(m);
    check_gather(m);
    check_scatter(m);
    model_free(m);
}

/* ---- cases --------------------------------------------------------------------------------- */

static uint32_t any_itemsize(void) {
    static const uint32_t odd[] = {17, 20, 24, 31, 32, 100};
    return test_chance(5) ? odd[test_below(6)] : (uint32_t)(1 + test_below(16));
}

static struct fipc_piece any_piece(struct model *m, uint64_t max) {
    if (test_chance(3)) {
        return strided(m, any_itemsize(), (uint16_t)(1 + test_below(MAX_NDIM)), 1 + test_below(5));
    }
    return plain(m, test_chance(6) ? 0 : test_log_uniform(test_random(), max));
}

static void random_pieces_come_back_as_buffers(void) {
    for (int i = 0; i < TEST_SCALE(4000); i++) {
        struct model m = {0};
        uint64_t n = test_log_uniform(test_random(), 40);
        uint64_t joins = 1 + test_below(4); /* 1: all of it is one buffer */
        for (uint64_t k = 0; k < n; k++) {
            add(&m, any_piece(&m, 3000), test_chance(joins));
        }
        check_round_trip(&m);
    }
}

static void any_number_of_buffers_comes_back(void) {
    static const uint64_t counts[] = {1, 2, 3, 15, 16, 17, 255, 256, 257, 65535, 65536, 65537};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int empty = 0; empty < 2; empty++) {
            struct model m = {0};
            for (uint64_t k = 0; k < counts[i]; k++) {
                add(&m, plain(&m, empty ? 0 : test_below(4)), false);
            }
            check_round_trip(&m);
        }
    }
}

static void empty_buffers_come_back_anywhere(void) {
    for (unsigned mask = 0; mask < 1u << 7; mask++) { /* which of 1 to 7 buffers are empty */
        for (unsigned n = 1; n <= 7; n++) {
            struct model m = {0};
            for (unsigned k = 0; k < n; k++) {
                add(&m, plain(&m, mask >> k & 1 ? 0 : 1 + test_below(130)), false);
            }
            check_round_trip(&m);
        }
    }
}

/* Every itemsize, cut at every byte. */
static void a_strided_array_may_be_cut_at_any_byte(void) {
    for (uint32_t itemsize = 1; itemsize <= 33; itemsize++) {
        for (uint16_t ndim = 1; ndim <= MAX_NDIM; ndim++) {
            for (int round = 0; round < TEST_SCALE(40); round++) {
                struct model m = {0};
                struct fipc_piece p = strided(&m, itemsize, ndim, 4);
                char *whole = own(&m, exactly(p.len));
                elements(whole, &p, 0, p.ptr);
                for (int cut = 0; p.len > 0 && cut < 30; cut++) {
                    uint64_t from = test_below(p.len);
                    uint64_t n = test_below(p.len - from + 1);
                    char *dst = exactly(n);
                    fipc_gather_strided(dst, &p, from, n);
                    if (memcmp(dst, whole + from, n) != 0) {
                        FAIL("itemsize %u, ndim %u, bytes %" PRIu64 " to %" PRIu64 " of %" PRIu64,
                             itemsize, ndim, from, from + n, p.len);
                    }
                    free(dst);
                }
                model_free(&m);
            }
        }
    }
}

static void long_rows_come_back(void) {
    for (uint32_t itemsize = 1; itemsize <= 17; itemsize++) {
        for (int backwards = 0; backwards < 2; backwards++) {
            struct model m = {0};
            const int64_t rows = 3;
            const int64_t columns = 501;
            int64_t *shape = own(&m, exactly(2 * sizeof(int64_t)));
            int64_t *strides = own(&m, exactly(2 * sizeof(int64_t)));
            shape[0] = rows;
            shape[1] = columns;
            strides[1] = (backwards ? -1 : 1) * (int64_t)itemsize;
            strides[0] = columns * (int64_t)itemsize;
            char *memory = own(&m, random_bytes((uint64_t)(rows * columns) * itemsize));
            struct fipc_piece p = {
                .ptr = backwards ? memory + (columns - 1) * (int64_t)itemsize : memory,
                .len = (uint64_t)(rows * columns) * itemsize,
                .shape = shape,
                .strides = strides,
                .itemsize = itemsize,
                .ndim = 2,
            };
            add(&m, p, false);
            add(&m, p, false);
            check_round_trip(&m);
        }
    }
}

static void large_buffers_come_back(void) { /* those that are mapped, not malloc'd */
    for (uint64_t k = 0; k < 8; k++) {
        struct model m = {0};
        add(&m, plain(&m, 100), false);
        add(&m, plain(&m, (UINT64_C(1) << 20) - 4 + k), k % 2 == 1);
        add(&m, plain(&m, 3 * (UINT64_C(1) << 20)), k % 4 == 3);
        check_round_trip(&m);
    }
}

static void pieces_that_make_no_sense_are_invalid(void) {
    struct fipc_gather g;
    char byte = 0;
    struct fipc_piece p[3] = {{.ptr = &byte, .len = 1}, {.ptr = &byte, .len = 1}, {.ptr = &byte}};
    CHECK_RC(fipc_gather_init(&g, p, 0), FIPC_INVALID);
    p[0].joins = true;
    CHECK_RC(fipc_gather_init(&g, p, 3), FIPC_INVALID);
    p[0].joins = false;
    for (unsigned shift = 0; shift < 2; shift++) {
        p[0].len = p[1].len = UINT64_MAX >> shift;
        CHECK_RC(fipc_gather_init(&g, p, 3), FIPC_INVALID);
        p[1].joins = true;
        CHECK_RC(fipc_gather_init(&g, p, 2), FIPC_INVALID);
        p[1].joins = false;
    }
    p[0].len = UINT64_MAX / 2;
    p[1].len = 1;
    CHECK_RC(fipc_gather_init(&g, p, 3), FIPC_INVALID);
    p[0].len = p[1].len = 1;
    CHECK_RC(fipc_gather_init(&g, p, 3), FIPC_OK);
    fipc_gather_free(&g);
}

/* Whether count and lengths describe exactly `total` bytes; the oracle for hostile heads. */
static bool is_frame(const char *stream, uint64_t n, uint64_t total) {
    uint64_t count;
    if (n != total || total < 16) {
        return false;
    }
    memcpy(&count, stream, 8);
    if (count == 0 || count > total / 8 - 1) {
        return false;
    }
    uint64_t at = 8 * (count + 1);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t len;
        memcpy(&len, stream + 8 * (i + 1), 8);
        at = aligned(at);
        if (at > total || len > total - at) {
            return false;
        }
        at += len;
    }
    return at == total;
}

static uint64_t nasty_number(uint64_t near) {
    switch (test_below(6)) {
    case 0: return UINT64_MAX - test_below(130);
    case 1: return UINT64_C(1) << test_below(64);
    case 2: return (UINT64_C(1) << test_below(64)) - 1;
    case 3: return test_below(3);
    case 4: return near + test_below(65);
    default: return near - test_below(65);
    }
}

static void a_hostile_head_is_corrupt(void) {
    uint64_t corrupt = 0;
    for (int i = 0; i < TEST_SCALE(60000); i++) {
        struct model m = {0};
        uint64_t n = 2 + test_below(8);
        for (uint64_t k = 0; k < n; k++) {
            add(&m, plain(&m, test_chance(4) ? 0 : test_below(200)), false);
        }
        close_model(&m);
        uint64_t *head = (void *)m.stream;
        uint64_t total = m.total;
        uint64_t sent = m.total;
        switch (test_below(6)) {
        case 0: head[0] = nasty_number(head[0]); break;
        case 1: head[1 + test_below(n)] = nasty_number(head[1]); break;
        case 2: head[test_below(n + 1)] ^= UINT64_C(1) << test_below(64); break;
        case 3: { /* two lengths whose sum wraps to the right one */
            uint64_t by = nasty_number(64);
            head[1] += by;
            head[n] -= by;
            break;
        }
        case 4: /* fewer bytes, or more, than it says */ sent = test_below(m.total + 1); break;
        default: /* another total; never so large that memory would be asked for in earnest */
            total = test_below(2 * m.total);
            sent = total < m.total ? total : m.total;
            break;
        }
        bool good = is_frame(m.stream, sent, total);
        struct fipc_scatter s;
        struct fipc_message out;
        int rc = scatter(&s, m.stream, sent, total, false, &out);
        if (rc == FIPC_OK) {
            fipc_message_clear(&out);
        } else {
            fipc_scatter_drop(&s);
            CHECK(!s.active && s.blocks == NULL && s.lengths == NULL);
        }
        CHECK_RC(rc, good ? FIPC_OK : FIPC_CORRUPT);
        corrupt += rc == FIPC_CORRUPT;
        model_free(&m);
    }
    CHECK(corrupt > 1000);
}

static void a_stream_of_noise_is_corrupt(void) {
    for (int i = 0; i < TEST_SCALE(100000); i++) {
        uint64_t n = test_below(200);
        char *noise = random_bytes(n);
        if (n >= 8 && test_chance(2)) {
            uint64_t count = test_below(8);
            memcpy(noise, &count, 8);
        }
        bool good = is_frame(noise, n, n);
        struct fipc_scatter s;
        struct fipc_message out;
        int rc = scatter(&s, noise, n, n, false, &out);
        CHECK_RC(rc, good ? FIPC_OK : FIPC_CORRUPT);
        if (rc == FIPC_OK) {
            fipc_message_clear(&out);
        } else {
            fipc_scatter_drop(&s);
        }
        free(noise);
    }
}

static void more_than_the_total_is_corrupt(void) {
    struct fipc_scatter s;
    struct fipc_message out;
    char bytes[64] = {0};
    fipc_scatter_begin(&s, 32, true, 0);
    CHECK_RC(fipc_scatter_feed(&s, bytes, 20), FIPC_OK);
    CHECK_RC(fipc_scatter_feed(&s, bytes, 13), FIPC_CORRUPT);
    fipc_scatter_drop(&s);
    fipc_scatter_begin(&s, 32, true, 0);
    CHECK_RC(fipc_scatter_feed(&s, bytes, 31), FIPC_OK);
    CHECK_RC(fipc_scatter_finish(&s, &out), FIPC_CORRUPT);
    fipc_scatter_drop(&s);
    fipc_scatter_begin(&s, 0, false, 0); /* a frame has at least a count and a length */
    CHECK_RC(fipc_scatter_feed(&s, bytes, 0), FIPC_CORRUPT);
    fipc_scatter_drop(&s);
}

static void a_total_beyond_all_memory_is_refused(void) {
    for (unsigned shift = 0; shift < 16; shift++) {
        uint64_t total = UINT64_MAX >> shift;
        struct fipc_scatter s;
        char bytes[64] = {0};
        fipc_scatter_begin(&s, total, true, 0);
        CHECK_RC(fipc_scatter_feed(&s, bytes, sizeof bytes), FIPC_NO_MEMORY);
        fipc_scatter_drop(&s);
        uint64_t head[8] = {total / 8 - 1};
        fipc_scatter_begin(&s, total, false, 0);
        CHECK_RC(fipc_scatter_feed(&s, (void *)head, sizeof head), FIPC_NO_MEMORY);
        fipc_scatter_drop(&s);
        head[0] = 2;
        head[1] = total - 200;
        head[2] = 200 - 64;
        fipc_scatter_begin(&s, total, false, 0);
        int rc = fipc_scatter_feed(&s, (void *)head, sizeof head);
        CHECK(rc == FIPC_NO_MEMORY || rc == FIPC_CORRUPT);
        fipc_scatter_drop(&s);
    }
}

/* Fills blocks with its own number and looks whether it is still there before freeing them. */
static void *use_blocks(void *arg) {
    uint64_t state = (uintptr_t)arg;
    unsigned char mine = (unsigned char)(uintptr_t)arg;
    struct fipc_block held[6] = {{0}};
    for (int i = 0; i < TEST_SCALE(400); i++) {
        struct fipc_block *b = &held[test_next(&state) % 6];
        if (b->ptr != NULL) {
            const unsigned char *p = b->ptr;
            CHECK(p[0] == mine && p[b->len / 2] == mine && p[b->len - 1] == mine);
            fipc_block_free(b->ptr, b->len);
        }
        b->len = test_log_uniform(test_next(&state), UINT64_C(20) << 20);
        b->ptr = fipc_block_alloc(b->len);
        CHECK(b->ptr != NULL);
        CHECK_EQ((uintptr_t)b->ptr % FIPC_ALIGN, 0);
        memset(b->ptr, mine, b->len < 4096 ? b->len : 4096);
        ((unsigned char *)b->ptr)[b->len / 2] = mine;
        ((unsigned char *)b->ptr)[b->len - 1] = mine;
    }
    for (int i = 0; i < 6; i++) {
        fipc_block_free(held[i].ptr, held[i].len);
    }
    return NULL;
}

static void blocks_belong_to_one_owner_at_a_time(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, use_blocks, (void *)(i + 1)) == 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    fipc_block_free(NULL, 10);
    CHECK(fipc_block_alloc(UINT64_MAX) == NULL);
    CHECK(fipc_block_alloc(UINT64_MAX / 2) == NULL);
}

static const struct test_case cases[] = {
    {"random pieces come back as buffers", random_pieces_come_back_as_buffers},
    {"any number of buffers comes back", any_number_of_buffers_comes_back},
    {"empty buffers come back anywhere", empty_buffers_come_back_anywhere},
    {"a strided array may be cut at any byte", a_strided_array_may_be_cut_at_any_byte},
    {"long rows come back", long_rows_come_back},
    {"large buffers come back", large_buffers_come_back},
    {"pieces that make no sense are invalid", pieces_that_make_no_sense_are_invalid},
    {"a hostile head is corrupt", a_hostile_head_is_corrupt},
    {"a stream of noise is corrupt", a_stream_of_noise_is_corrupt},
    {"more than the total is corrupt", more_than_the_total_is_corrupt},
    {"a total beyond all memory is refused", a_total_beyond_all_memory_is_refused},
    {"blocks belong to one owner at a time", blocks_belong_to_one_owner_at_a_time},
};

TEST_MAIN(cases)
