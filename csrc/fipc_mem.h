/* fipc_mem.h: the segment: making it, finding it, and having its pages before they are touched.
 *
 * Two kinds. A memfd has no name and dies with its last descriptor; a reader opens it through
 * /proc/<pid>/fd/<n>. A named file (shm_dir) is for where that can't work; it gets its name only
 * when its header is complete and loses it when all readers have attached.
 */
#ifndef FIPC_MEM_H
#define FIPC_MEM_H

#include "fastipc.h"

struct fipc_segment {
    int fd;      /* maps the segment, and lets others open it; -1 when closed */
    int lock_fd; /* a second open file description, never mapped: holds this end's lock */
    void *base;  /* NULL when not mapped */
    uint64_t bytes;
    char path[FIPC_PATH_BYTES]; /* "" for a memfd */
    bool linked;                /* the path exists, and removing it is ours to do */
};

/* Creates and maps `bytes` of address space; no page is allocated yet. The header is not visible
 * to anyone until fipc_mem_publish. Takes the lock byte `lock_index`. */
int fipc_mem_create(struct fipc_segment *s, uint64_t bytes, const char *shm_dir,
                    const uint8_t id[FIPC_ID_BYTES], uint32_t lock_index, struct fipc_error *err);
/* Gives a named one its final name. */
int fipc_mem_publish(struct fipc_segment *s, const uint8_t id[FIPC_ID_BYTES],
                     struct fipc_error *err);

/* Opens what `a` names, without mapping it. FIPC_GONE, FIPC_SYSTEM. */
int fipc_mem_open(struct fipc_segment *s, const struct fipc_address *a, struct fipc_error *err);
int fipc_mem_map(struct fipc_segment *s, uint64_t bytes, struct fipc_error *err);
int fipc_mem_read(const struct fipc_segment *s, void *buf, uint64_t len, uint64_t *file_bytes);

/* Really allocates the pages of [off, off + len), so that no later touch can fail.
 * FIPC_NO_SPACE with err->needed and err->available. */
int fipc_mem_reserve(struct fipc_segment *s, uint64_t off, uint64_t len, struct fipc_error *err);
/* Maps pages that exist for reading, all at once; failure doesn't matter. */
void fipc_mem_prefault(struct fipc_segment *s, uint64_t off, uint64_t len);
/* Gives the pages back; they read as zero from now on. */
void fipc_mem_discard(struct fipc_segment *s, uint64_t off, uint64_t len);

void fipc_mem_unlink(struct fipc_segment *s);
void fipc_mem_unmap(struct fipc_segment *s);
/* Closes both descriptors: with the lock's the kernel releases the lock. */
void fipc_mem_close(struct fipc_segment *s);

/* ---- locks on one byte, of the open file description, released by the kernel however its
 * holder ends ---- */
int fipc_lock_byte_take(int fd, uint32_t index);  /* FIPC_OK, FIPC_RANK_TAKEN, FIPC_SYSTEM */
bool fipc_lock_byte_held(int fd, uint32_t index); /* by another description than fd's */

/* Keeps a forked child from holding its parent's lock: registers the segment, whose descriptors
 * the child closes before fork returns. Both, and whatever opens or closes the descriptors, run
 * while forks are held off: a fork in between would give the child a descriptor that nobody
 * knows of. FIPC_OK, FIPC_NO_MEMORY (then the segment is closed). */
int fipc_mem_register(struct fipc_segment *s);
void fipc_mem_unregister(struct fipc_segment *s);
void fipc_mem_hold_forks(bool hold);
/* Changes in every forked child; a stored older value means: this object is the parent's. */
uint32_t fipc_fork_generation(void);

#endif /* FIPC_MEM_H */
