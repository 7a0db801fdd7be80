/* memory.c: fipc_mem.h without a kernel: one segment in a buffer, one lock byte per participant. A
 * lock byte is taken, given back and asked for under the kernel's own lock: read-modify-writes that
 * acquire and release. */
#include "fipc_mem.h"

#include <string.h>

#include "fipc_atomic.h"
#include "fipc_queue.h"
#include "verify.h"

#define ROOM (UINT64_C(1) << 16)
#define PARTICIPANTS 8

static _Alignas(FIPC_PAGE) char room[ROOM];
static uint64_t used;
static fipc_a32 byte[PARTICIPANTS]; /* the descriptor that holds it, 0: free */
static fipc_a32 last_fd;

void verify_memory_reset(void) {
    memset(room, 0, used);
    memset(byte, 0, sizeof byte);
    memset(&last_fd, 0, sizeof last_fd);
}

void verify_address(struct fipc_address *out) {
    const struct fipc_header *h = (void *)room;
    memset(out, 0, sizeof *out);
    memcpy(out->id, h->id, sizeof out->id);
    out->n_readers = h->n_readers;
}

static int open_lock(void) { return (int)fipc_add32_relaxed(&last_fd, 1) + 1; }

int fipc_mem_create(struct fipc_segment *s, uint64_t bytes, const char *shm_dir,
                    const uint8_t id[FIPC_ID_BYTES], uint32_t lock_index, struct fipc_error *err) {
    (void)shm_dir;
    (void)id;
    (void)err;
    REQUIRE(bytes <= ROOM);
    used = bytes;
    *s = (struct fipc_segment){.fd = -1, .lock_fd = open_lock(), .base = room, .bytes = bytes};
    return fipc_lock_byte_take(s->lock_fd, lock_index);
}

int fipc_mem_publish(struct fipc_segment *s, const uint8_t id[FIPC_ID_BYTES],
                     struct fipc_error *err) {
    (void)id;
    (void)s;
    (void)err;
    return FIPC_OK;
}

int fipc_mem_open(struct fipc_segment *s, const struct fipc_address *a, struct fipc_error *err) {
    (void)a;
    (void)err;
    *s = (struct fipc_segment){.fd = -1, .lock_fd = open_lock()};
    return FIPC_OK;
}

int fipc_mem_map(struct fipc_segment *s, uint64_t bytes, struct fipc_error *err) {
    (void)err;
    s->base = room;
    s->bytes = bytes;
    return FIPC_OK;
}

int fipc_mem_read(const struct fipc_segment *s, void *buf, uint64_t len, uint64_t *file_bytes) {
    (void)s;
    memcpy(buf, room, len);
    *file_bytes = ROOM;
    return FIPC_OK;
}

int fipc_mem_reserve(struct fipc_segment *s, uint64_t off, uint64_t len, struct fipc_error *err) {
    (void)s;
    (void)err;
    REQUIRE(off + len <= ROOM);
    return FIPC_OK;
}

void fipc_mem_prefault(struct fipc_segment *s, uint64_t off, uint64_t len) {
    (void)s;
    (void)off;
    (void)len;
}

void fipc_mem_discard(struct fipc_segment *s, uint64_t off, uint64_t len) {
    memset((char *)s->base + off, 0, len);
}

void fipc_mem_unlink(struct fipc_segment *s) { s->linked = false; }
void fipc_mem_unmap(struct fipc_segment *s) { s->base = NULL; }

void fipc_mem_close(struct fipc_segment *s) {
    for (uint32_t i = 0; i < PARTICIPANTS; i++) {
        uint32_t mine = (uint32_t)s->lock_fd;
        fipc_cas32_acqrel(&byte[i], &mine, 0);
    }
    s->lock_fd = -1;
}

int fipc_lock_byte_take(int fd, uint32_t index) {
    uint32_t nobody = 0;
    return fipc_cas32_acqrel(&byte[index], &nobody, (uint32_t)fd) ? FIPC_OK : FIPC_RANK_TAKEN;
}

bool fipc_lock_byte_held(int fd, uint32_t index) {
    uint32_t by = fipc_or32_acqrel(&byte[index], 0);
    return by != 0 && by != (uint32_t)fd;
}

int fipc_mem_register(struct fipc_segment *s) {
    (void)s;
    return FIPC_OK;
}
void fipc_mem_unregister(struct fipc_segment *s) { (void)s; }
void fipc_mem_hold_forks(bool hold) { (void)hold; }
uint32_t fipc_fork_generation(void) { return 0; }

int fipc_sweep(const char *dir, bool dry_run, void (*seen)(void *ctx, const char *path, int status),
               void *ctx) {
    (void)dir;
    (void)dry_run;
    (void)seen;
    (void)ctx;
    return 0;
}

void verify_die(struct fipc_queue *q) { fipc_mem_close(&q->seg); }
