/* Fuzz target: frames. Bytes that a peer says are a frame are refused, or come out as the buffers
 * that an independent reading of the same bytes finds; in however many portions they come. Pieces
 * that the input describes come back as they were. */
#include "fuzz.h"

#include "fipc_frame.h"

static uint64_t padded(uint64_t at) { return (at + FIPC_ALIGN - 1) / FIPC_ALIGN * FIPC_ALIGN; }

static uint64_t word(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* The description in fipc_frame.h, read once more: true, and where each buffer is, when it fits. */
static bool expected(const uint8_t *data, uint64_t size, const struct fipc_message *m) {
    if (size < 16 || word(data) == 0 || word(data) > (size - 8) / 8) {
        return false;
    }
    uint64_t count = word(data);
    uint64_t at = 8 * (count + 1);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t len = word(data + 8 * (i + 1));
        at = padded(at);
        if (at > size || len > size - at) {
            return false;
        }
        if (m != NULL) {
            CHECK(i < m->n);
            CHECK_EQ(m->blocks[i].len, len);
            CHECK((uintptr_t)m->blocks[i].ptr % FIPC_ALIGN == 0);
            CHECK(len == 0 || memcmp(m->blocks[i].ptr, data + at, len) == 0);
        }
        at += len;
    }
    CHECK(m == NULL || m->n == count);
    return at == size;
}

static int in_portions(const uint8_t *data, uint64_t size, uint64_t total, bool bare, uint64_t seed,
                       struct fipc_message *out) {
    struct fipc_scatter s;
    fipc_scatter_begin(&s, total, bare, 7);
    int rc = FIPC_OK;
    uint64_t at = 0;
    do { /* an empty message comes as one empty portion */
        uint64_t n = test_next(&seed) % 97;
        n = n < size - at ? n : size - at;
        rc = fipc_scatter_feed(&s, (const char *)data + at, n);
        at += n;
    } while (rc == FIPC_OK && at < size);
    rc = rc == FIPC_OK ? fipc_scatter_finish(&s, out) : rc;
    if (rc != FIPC_OK) {
        fipc_scatter_drop(&s);
    }
    return rc;
}

static void check_split(const uint8_t *data, uint64_t size, bool bare, uint64_t seed) {
    struct fipc_message m = {0};
    int rc = fipc_split(data, size, bare, &m);
    bool fits = bare || expected(data, size, NULL);
    CHECK_RC(rc, fits ? FIPC_OK : FIPC_CORRUPT);
    if (rc == FIPC_OK && bare) {
        CHECK_EQ(m.n, 1);
        CHECK_EQ(m.blocks[0].len, size);
        CHECK(size == 0 || memcmp(m.blocks[0].ptr, data, size) == 0);
    } else if (rc == FIPC_OK) {
        CHECK(expected(data, size, &m));
    }
    struct fipc_message again = {0};
    CHECK_RC(in_portions(data, size, size, bare, seed, &again), rc);
    if (rc == FIPC_OK) {
        CHECK_EQ(again.n, m.n);
        CHECK_EQ(again.tag, 7);
        for (uint64_t i = 0; i < m.n; i++) {
            CHECK_EQ(again.blocks[i].len, m.blocks[i].len);
            CHECK(m.blocks[i].len == 0 ||
                  memcmp(again.blocks[i].ptr, m.blocks[i].ptr, m.blocks[i].len) == 0);
        }
        fipc_message_clear(&again);
        fipc_message_clear(&m);
    }
}

/* A total that is not what comes is never a message. */
static void check_wrong_total(const uint8_t *data, uint64_t size, uint64_t total, bool bare,
                              uint64_t seed) {
    struct fipc_message m = {0};
    int rc = in_portions(data, size, total, bare, seed, &m);
    CHECK(rc == FIPC_CORRUPT || rc == FIPC_NO_MEMORY || (rc == FIPC_OK && total == size));
    fipc_message_clear(&m);
}

#define PIECES 40
#define BYTES 4096

/* Pieces of one buffer of bytes, some of which continue the buffer before, some strided. */
static void check_pieces(struct input *in) {
    static uint8_t bytes[BYTES];
    for (unsigned i = 0; i < BYTES && bytes[BYTES - 1] == 0; i++) {
        bytes[i] = (uint8_t)(test_mix(i) | 1);
    }
    struct fipc_piece pieces[PIECES];
    int64_t shapes[PIECES][2], strides[PIECES][2];
    uint64_t n = 1 + input_byte(in) % PIECES;
    for (uint64_t i = 0; i < n; i++) {
        uint8_t kind = input_byte(in);
        struct fipc_piece *p = &pieces[i];
        *p = (struct fipc_piece){.joins = (kind & 1) != 0};
        if (kind & 2) { /* an array of which the elements lie apart, in any direction */
            int64_t *shape = shapes[i], *stride = strides[i];
            p->itemsize = 1 + (kind >> 2) % 17;
            shape[0] = 1 + input_byte(in) % 6;
            shape[1] = 1 + input_byte(in) % 6;
            /* elements at least 17 apart, rows at least 6 elements of 34 */
            stride[1] = (kind & 4 ? -1 : 1) * (17 + input_byte(in) % 18);
            stride[0] = (kind & 8 ? -1 : 1) * (204 + input_byte(in) % 100);
            p->shape = shape;
            p->strides = stride;
            p->ndim = 2;
            p->ptr = bytes + BYTES / 2; /* 5 * 304 + 5 * 34 + 17 < 2,048 on either side */
            p->len = (uint64_t)(shape[0] * shape[1]) * p->itemsize;
        } else {
            p->ptr = bytes + input_byte(in);
            p->len = input_number(in, 1 + (kind >> 7)) % (BYTES - 256);
        }
    }
    uint64_t size;
    bool bare;
    int rc = fipc_join_size(pieces, n, &size, &bare);
    if (pieces[0].joins) {
        CHECK_RC(rc, FIPC_INVALID);
        return;
    }
    CHECK_RC(rc, FIPC_OK);
    uint8_t *joined = malloc(size + 1);
    CHECK(joined != NULL);
    joined[size] = 0xa5;
    CHECK_RC(fipc_join(pieces, n, joined), FIPC_OK);
    CHECK_EQ(joined[size], 0xa5);
    struct fipc_message m;
    CHECK_RC(fipc_split(joined, size, bare, &m), FIPC_OK);
    uint64_t buffer = 0, at = 0;
    for (uint64_t i = 0; i < n; i++) {
        const struct fipc_piece *p = &pieces[i];
        if (i > 0 && !p->joins) {
            CHECK_EQ(at, m.blocks[buffer].len);
            buffer++;
            at = 0;
        }
        const uint8_t *got = m.blocks[buffer].ptr;
        CHECK(p->len <= m.blocks[buffer].len - at);
        uint64_t step = p->ndim > 0 ? p->itemsize : p->len;
        for (uint64_t k = 0; k < p->len; k += step) {
            const uint8_t *want = p->ptr;
            if (p->ndim > 0) {
                int64_t element = (int64_t)(k / step);
                want +=
                    element / p->shape[1] * p->strides[0] + element % p->shape[1] * p->strides[1];
            }
            CHECK(memcmp(got + at + k, want, step) == 0);
        }
        at += p->len;
    }
    CHECK_EQ(at, m.blocks[buffer].len);
    CHECK_EQ(buffer + 1, m.n);
    check_split(joined, size, bare, n);
    fipc_message_clear(&m);
    free(joined);
}

/* A frame as the input describes it: mostly one that fits, or nearly. */
static void check_described(struct input *in) {
    static uint64_t frame[(1 << 16) / 8];
    uint8_t *bytes = (uint8_t *)frame;
    uint8_t count = input_byte(in) % 40;
    uint64_t at = 8 * (count + UINT64_C(1));
    frame[0] = count;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t len = input_size(in, FIPC_ALIGN);
        frame[i + 1] = len;
        at = padded(at) + (len <= sizeof frame ? len : 0);
        at = at < sizeof frame ? at : sizeof frame;
    }
    uint8_t how = input_byte(in);
    uint64_t size = at + (how % 8 == 0 ? 4u : how % 8u) - 4; /* 3 too few to 3 too many */
    if (how & 8) {
        size = input_number(in, 2);
    }
    size = size < sizeof frame ? size : sizeof frame;
    if (how & 16) { /* a number in the head becomes another */
        uint64_t word = input_byte(in) % (count + UINT64_C(1));
        frame[word] = input_size(in, size);
    }
    for (uint64_t i = 8 * (count + UINT64_C(1)); i < size; i++) {
        bytes[i] = (uint8_t)test_mix(i);
    }
    check_split(bytes, size, false, how);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    uint8_t kind = input_byte(&in);
    bool bare = (kind & 4) != 0;
    if (kind % 4 == 0) {
        check_pieces(&in);
    } else if (kind % 4 == 3) {
        check_described(&in);
    } else if (kind % 4 == 1) {
        uint64_t total = input_size(&in, (uint64_t)(in.end - in.at));
        check_wrong_total(in.at, (uint64_t)(in.end - in.at), total, bare, kind);
    } else {
        check_split(in.at, (uint64_t)(in.end - in.at), bare, kind);
    }
    return 0;
}
