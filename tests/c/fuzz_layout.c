/* Fuzz target: the header of a segment, and attaching to it. What is accepted is a layout in which
 * no access can leave the file; and a reader attaches to a file with that header, or is refused
 * with a reason, and leaves nothing open. */
#include <fcntl.h>
#include <sys/mman.h>

#include "fuzz.h"
#include "layout_oracle.h"
#include "peers.h"

#define FILE_MOST (UINT64_C(4) << 20) /* of the files that are really made */

/* A header with sizes from the input, as a writer plans it. */
static struct fipc_header planned(struct input *in) {
    struct fipc_header h;
    memset(&h, 0, sizeof h);
    h.n_readers = (uint32_t)input_size(in, FIPC_MAX_READERS);
    h.n_slots = (uint32_t)input_size(in, UINT32_MAX);
    h.inline_bytes = (uint32_t)input_size(in, UINT32_MAX);
    h.n_chunks = (uint32_t)input_size(in, UINT32_MAX);
    h.chunk_bytes = input_size(in, UINT64_C(1) << 46);
    int rc = fipc_layout_plan(&h);
    CHECK(rc == FIPC_OK || rc == FIPC_INVALID);
    return h;
}

/* Attaches to a file of so many bytes that begins with h and else holds zeros or noise. Only one
 * that nobody can shorten is a segment. */
static void attach(const struct fipc_header *h, uint64_t file_bytes, bool valid, uint64_t seed) {
    int fd = memfd_create("fastipc-fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)file_bytes) == 0);
    uint64_t noise[512];
    for (unsigned i = 0; i < 512; i++) {
        noise[i] = seed % 2 ? test_mix(seed + i) : 0;
    }
    for (uint64_t at = 0; at + sizeof noise <= file_bytes; at += UINT64_C(4096)) {
        CHECK(pwrite(fd, noise, sizeof noise, (off_t)at) == (ssize_t)sizeof noise);
    }
    uint64_t head = sizeof *h < file_bytes ? sizeof *h : file_bytes;
    CHECK(pwrite(fd, h, head, 0) == (ssize_t)head);
    if (seed % 8 != 7) {
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    } else {
        valid = false;
    }
    struct fipc_address a = {.pid = (int64_t)getpid(), .fd = fd, .n_readers = h->n_readers};
    a.start_time = fipc_process_start(a.pid);
    memcpy(a.id, h->id, sizeof a.id);
    struct fipc_attach_options o = {.host = "fuzz", .n_cpus = 1, .warn_ns = FIPC_FOREVER};
    fipc_queue *q;
    struct fipc_error err;
    int rc = fipc_queue_attach(&q, &a, h->n_readers - 1, &o, &err);
    if (rc != FIPC_OK) {
        CHECK(q == NULL);
        CHECK(rc == FIPC_NO_MEMORY || rc == FIPC_INVALID || err.text[0] != 0);
        CHECK(!valid);
    } else {
        CHECK(valid);
        struct fipc_call call = {.deadline = 0};
        struct fipc_message m;
        struct fipc_peer_info info;
        for (int i = 0; i < 4; i++) {
            if (fipc_queue_wait_readable(q, &call, &err) == FIPC_OK &&
                fipc_queue_recv(q, &call, &m, &err) == FIPC_OK) {
                fipc_message_clear(&m);
            }
        }
        fipc_queue_peer(q, -1, &info);
        fipc_queue_peer(q, h->n_readers - 1, &info);
        fipc_queue_free(q);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    uint8_t kind = input_byte(&in);
    struct fipc_header h = planned(&in);
    for (unsigned i = 0; i < kind % 8; i++) { /* then some of its words become others */
        uint8_t at = input_byte(&in) % (sizeof h / 4);
        uint32_t word = (uint32_t)input_size(&in, UINT32_MAX);
        memcpy((char *)&h + 4 * at, &word, 4);
    }
    uint64_t file_bytes = kind & 8 ? input_size(&in, h.total_bytes) : h.total_bytes;
    bool valid = fipc_layout_valid(&h, file_bytes);
    const char *why = why_not(&h, file_bytes);
    if (valid && (why != NULL || h.n_chunks > file_bytes / FIPC_PAGE)) {
        FAIL("accepted, though %s", why != NULL ? why : "there are more chunks than pages");
    }
    if (file_bytes <= FILE_MOST) {
        attach(&h, file_bytes, valid, kind >> 4);
    }
    return 0;
}
