/* The layout: a plan fits and doesn't overlap; what can't be such a plan is never accepted. */
#include "test.h"

#include "layout_oracle.h"

static uint64_t any_size(uint64_t max) {
    switch (test_below(4)) {
    case 0: return test_below(16) < max ? test_below(16) : max;
    case 1: return max - test_below(max < 16 ? max : 16);
    default: return test_log_uniform(test_random(), max);
    }
}

static struct fipc_header any_sizes(void) {
    struct fipc_header h;
    memset(&h, 0, sizeof h);
    h.n_readers = (uint32_t)(1 + test_below(FIPC_MAX_READERS));
    h.n_slots = (uint32_t)any_size(UINT32_MAX);
    h.n_chunks = (uint32_t)any_size(UINT32_MAX);
    h.inline_bytes = (uint32_t)any_size(UINT32_MAX);
    h.chunk_bytes = any_size(test_chance(2) ? UINT64_MAX : UINT64_C(1) << 32);
    if (h.chunk_bytes < h.inline_bytes) { /* as a queue's creation does */
        h.inline_bytes = (uint32_t)h.chunk_bytes;
    }
    return h;
}

static struct fipc_header ordinary(void) {
    struct fipc_header h;
    memset(&h, 0, sizeof h);
    for (int i = 0; i < FIPC_ID_BYTES; i++) {
        h.id[i] = (uint8_t)test_random();
    }
    h.n_readers = (uint32_t)(1 + test_below(64));
    h.n_slots = (uint32_t)(2 + test_below(1000));
    h.n_chunks = (uint32_t)(1 + test_below(20));
    h.chunk_bytes = 64 + test_below(1 << 25);
    h.inline_bytes = (uint32_t)test_below(h.chunk_bytes < 10000 ? h.chunk_bytes : 10000);
    CHECK_RC(fipc_layout_plan(&h), FIPC_OK);
    return h;
}

static void a_plan_fits_and_does_not_overlap(void) {
    uint64_t planned = 0;
    for (int i = 0; i < TEST_SCALE(300000); i++) {
        struct fipc_header h = any_sizes();
        const struct fipc_header asked = h;
        u128 least = (u128)h.n_slots * (h.inline_bytes + sizeof(struct fipc_slot)) +
                     (u128)h.n_chunks * h.chunk_bytes;
        int rc = fipc_layout_plan(&h);
        if (rc == FIPC_OK) {
            planned++;
            const char *why = why_not(&h, h.total_bytes);
            if (why != NULL || h.total_bytes > LIMIT) {
                FAIL("%s: slots %u, inline %u, chunks %u of %" PRIu64 ", total %" PRIu64,
                     why != NULL ? why : "too large", h.n_slots, h.inline_bytes, h.n_chunks,
                     h.chunk_bytes, h.total_bytes);
            }
            CHECK(h.n_slots == asked.n_slots && h.inline_bytes == asked.inline_bytes &&
                  h.n_chunks == asked.n_chunks && h.chunk_bytes == asked.chunk_bytes &&
                  h.n_readers == asked.n_readers);
            CHECK(fipc_layout_valid(&h, h.total_bytes));
            CHECK(fipc_layout_valid(&h, h.total_bytes + 4096));
            CHECK(!fipc_layout_valid(&h, h.total_bytes - 1));
        } else {
            CHECK_RC(rc, FIPC_INVALID);
            /* refused only for a reason; pages and lines add at most a factor of 4097 */
            CHECK(h.n_slots < 2 || h.n_chunks < 1 || h.chunk_bytes < 1 ||
                  h.chunk_bytes > LIMIT / 4 || least > LIMIT / 16384 ||
                  (u128)h.n_chunks * FIPC_PAGE > LIMIT / 16);
        }
    }
    CHECK(planned > 1000);
}

static void sizes_that_wrap_are_refused(void) {
    static const uint32_t many[] = {2, 1u << 20, 1u << 30, UINT32_MAX - 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        for (size_t k = 0; k < sizeof many / sizeof *many; k++) {
            for (uint64_t chunk = UINT64_C(1) << 32; chunk != 0; chunk <<= 1) {
                struct fipc_header h;
                memset(&h, 0, sizeof h);
                h.n_readers = 1;
                h.n_slots = many[i];
                h.inline_bytes = many[k];
                h.n_chunks = many[(i + k) % 5];
                h.chunk_bytes = chunk;
                if (fipc_layout_plan(&h) == FIPC_OK) {
                    CHECK(why_not(&h, h.total_bytes) == NULL);
                    CHECK(h.total_bytes <= LIMIT);
                }
            }
        }
    }
}

/* What a reader allocates for each chunk is bounded by the file: a chunk has at least a page. */
static void chunks_without_room_are_refused(void) {
    struct fipc_header h = ordinary();
    h.chunk_bytes = h.inline_bytes = 0;
    h.n_chunks = UINT32_MAX;
    CHECK_RC(fipc_layout_plan(&h), FIPC_INVALID);
    h.chunk_stride = 0; /* all else as a plan with such chunks would have it */
    h.slot_stride = sizeof(struct fipc_slot);
    h.off_chunks = h.total_bytes = h.off_slots + (h.n_slots * h.slot_stride + 4095) / 4096 * 4096;
    CHECK(!fipc_layout_valid(&h, h.total_bytes));
}

/* Accepted means at least harmless: a changed number of readers, say, may lie in the same pages. */
static bool check_harmless(const struct fipc_header *h, uint64_t file_bytes) {
    bool accepted = fipc_layout_valid(h, file_bytes);
    if (accepted) {
        const char *why = why_not(h, file_bytes);
        if (why != NULL) {
            FAIL("accepted although %s: slots %u, inline %u, chunks %u of %" PRIu64, why,
                 h->n_slots, h->inline_bytes, h->n_chunks, h->chunk_bytes);
        }
    }
    return accepted;
}

static bool is_inside(size_t at, size_t first, size_t n) { return at >= first && at < first + n; }

static void every_flipped_bit_is_refused_or_harmless(void) {
    for (int round = 0; round < TEST_SCALE(200); round++) {
        struct fipc_header h = ordinary();
        for (size_t bit = 0; bit < 8 * sizeof h; bit++) {
            struct fipc_header bad = h;
            ((unsigned char *)&bad)[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool accepted = check_harmless(&bad, UINT64_MAX);
            /* the id is compared by attach; the sizes may have come to a neighbour's layout */
            size_t at = bit / 8;
            bool may = is_inside(at, offsetof(struct fipc_header, id), FIPC_ID_BYTES) ||
                       is_inside(at, offsetof(struct fipc_header, chunk_bytes), 8) ||
                       is_inside(at, offsetof(struct fipc_header, n_readers), 4) ||
                       is_inside(at, offsetof(struct fipc_header, n_slots), 4) ||
                       is_inside(at, offsetof(struct fipc_header, inline_bytes), 4) ||
                       is_inside(at, offsetof(struct fipc_header, reserved), 8);
            if (accepted && !may) {
                FAIL("bit %zu may be flipped", bit);
            }
        }
    }
}

static void mutated_and_random_headers_are_refused_or_harmless(void) {
    unsigned accepted = 0;
    for (int i = 0; i < TEST_SCALE(2000000); i++) {
        struct fipc_header h = ordinary();
        unsigned char *bytes = (unsigned char *)&h;
        uint64_t *words = (uint64_t *)&h;
        uint64_t file_bytes = test_chance(2) ? h.total_bytes : test_random() >> test_below(64);
        switch (test_below(5)) {
        case 0: /* a few bytes */
            for (uint64_t n = 1 + test_below(4); n > 0; n--) {
                bytes[test_below(sizeof h)] = (unsigned char)test_random();
            }
            break;
        case 1: /* a word that is a special number */
            words[test_below(sizeof h / 8)] =
                test_chance(2) ? UINT64_MAX >> test_below(64) : UINT64_C(1) << test_below(64);
            break;
        case 2: /* other sizes under the same offsets */
            h.n_slots = (uint32_t)test_random() >> test_below(32);
            h.inline_bytes = (uint32_t)test_random() >> test_below(32);
            h.n_chunks = (uint32_t)test_random() >> test_below(32);
            break;
        case 3: { /* the head alone is right */
            size_t head = offsetof(struct fipc_header, id);
            for (size_t k = head; k < sizeof h; k++) {
                bytes[k] = (unsigned char)test_random();
            }
            break;
        }
        default: { /* a plan made with nonsense, sealed with the hash: a hostile peer's */
            struct fipc_header hostile = any_sizes();
            hostile.n_readers = (uint32_t)test_random() >> test_below(32);
            hostile.inline_bytes = (uint32_t)test_random() >> test_below(32);
            (void)fipc_layout_plan(&hostile);
            h = hostile;
            file_bytes = UINT64_MAX;
        }
        }
        accepted += check_harmless(&h, file_bytes);
    }
    CHECK(accepted > 0); /* the oracle was asked */
    struct fipc_header h;
    memset(&h, 0, sizeof h);
    CHECK(!fipc_layout_valid(&h, UINT64_MAX));
    memset(&h, 0xff, sizeof h);
    CHECK(!fipc_layout_valid(&h, UINT64_MAX));
}

static void another_build_is_refused(void) {
    struct fipc_header h = ordinary();
    struct fipc_header other = h;
    other.layout_version++;
    CHECK(!fipc_layout_valid(&other, UINT64_MAX));
    other = h;
    other.layout_hash ^= 1;
    CHECK(!fipc_layout_valid(&other, UINT64_MAX));
    other = h;
    other.magic[0]++;
    CHECK(!fipc_layout_valid(&other, UINT64_MAX));
    CHECK(fipc_layout_valid(&h, UINT64_MAX));
}

static const struct test_case cases[] = {
    {"a plan fits and does not overlap", a_plan_fits_and_does_not_overlap},
    {"sizes that wrap are refused", sizes_that_wrap_are_refused},
    {"chunks without room are refused", chunks_without_room_are_refused},
    {"every flipped bit is refused or harmless", every_flipped_bit_is_refused_or_harmless},
    {"mutated and random headers are refused or harmless",
     mutated_and_random_headers_are_refused_or_harmless},
    {"another build is refused", another_build_is_refused},
};

TEST_MAIN(cases)
