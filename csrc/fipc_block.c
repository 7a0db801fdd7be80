/* fipc_block.c: memory for what is received.
 *
 * Small blocks come from malloc. A large fresh block costs a page fault and the kernel's zeroing
 * for every page, which is as dear as the copy into it, and malloc gives every block above 32 MiB
 * back at once. So a few large ones are kept after they are freed. What is kept is bounded
 * (KEEP_BYTES) and short-lived (KEEP_NS): a process that receives large arrays reuses one or two
 * blocks, and one that has stopped doing so gives them back with the next large allocation.
 *
 * Pairs in this file
 *   K-drop  busy: store release in leave -> K-take cas acquire in enter. Travels: the kept blocks.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fipc_atomic.h"
#include "fipc_wait.h"

#define LARGE (UINT64_C(1) << 20)     /* from here on blocks are mapped and kept */
#define HUGE_PAGE (UINT64_C(2) << 20) /* also the alignment of large blocks */
#define KEEP_BYTES (UINT64_C(96) << 20)
#define KEEP_SLOTS 8
#define KEEP_NS (10 * FIPC_S)

static struct kept {
    void *ptr;
    uint64_t bytes, since;
} kept[KEEP_SLOTS];
static uint64_t kept_bytes;

/* Whoever doesn't get it does without the kept blocks. So nobody waits, and a child forked while
 * another thread was inside merely never reuses a block. */
static fipc_a32 busy;

static bool enter(void) {
    uint32_t free_now = 0;
    return fipc_cas32_acquire(&busy, &free_now, 1); /* K-take */
}
static void leave(void) { fipc_store32_release(&busy, 0); /* K-drop */ }

static uint64_t mapped_size(uint64_t len) {
    uint64_t grain = len >= 2 * HUGE_PAGE ? HUGE_PAGE : UINT64_C(64) << 10;
    return (len + grain - 1) / grain * grain;
}

static void unmap_slot(int i) {
    munmap(kept[i].ptr, (size_t)kept[i].bytes);
    kept_bytes -= kept[i].bytes;
    kept[i].ptr = NULL;
}

static void *take_kept(uint64_t bytes) {
    void *found = NULL;
    if (!enter()) {
        return NULL;
    }
    uint64_t now = fipc_now();
    for (int i = 0; i < KEEP_SLOTS; i++) {
        if (kept[i].ptr == NULL) {
            continue;
        }
        if (found == NULL && kept[i].bytes == bytes) {
            found = kept[i].ptr;
            kept_bytes -= bytes;
            kept[i].ptr = NULL;
        } else if (now - kept[i].since > KEEP_NS) {
            unmap_slot(i);
        }
    }
    leave();
    return found;
}

static bool give_kept(void *ptr, uint64_t bytes) {
    if (bytes > KEEP_BYTES || !enter()) {
        return false;
    }
    int place = -1;
    while (place < 0 || kept_bytes + bytes > KEEP_BYTES) {
        int oldest = -1;
        for (int i = 0; i < KEEP_SLOTS; i++) {
            if (kept[i].ptr == NULL) {
                place = i;
            } else if (oldest < 0 || kept[i].since < kept[oldest].since) {
                oldest = i;
            }
        }
        if (place < 0 || kept_bytes + bytes > KEEP_BYTES) {
            unmap_slot(oldest);
        }
    }
    kept[place] = (struct kept){ptr, bytes, fipc_now()};
    kept_bytes += bytes;
    leave();
    return true;
}

/* Aligned to a huge page, so that the kernel can use them: 16 faults for 32 MiB, not 8,192. */
static void *map_large(uint64_t bytes) {
    size_t room = (size_t)(bytes + HUGE_PAGE);
    char *p = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (p == MAP_FAILED) {
        return NULL;
    }
    size_t before = (size_t)((0 - (uintptr_t)p) & (HUGE_PAGE - 1));
    size_t after = room - before - (size_t)bytes;
    if (before > 0) {
        munmap(p, before);
    }
    if (after > 0) {
        munmap(p + before + bytes, after);
    }
#ifdef MADV_HUGEPAGE
    madvise(p + before, (size_t)bytes, MADV_HUGEPAGE);
#endif
    return p + before;
}

void *fipc_block_alloc(uint64_t len) {
    if (len > SIZE_MAX / 2) {
        return NULL;
    }
    if (len < LARGE) {
        void *p = NULL;
        return posix_memalign(&p, FIPC_ALIGN, (size_t)len) == 0 ? p : NULL;
    }
    uint64_t bytes = mapped_size(len);
    void *p = take_kept(bytes);
    return p != NULL ? p : map_large(bytes);
}

void fipc_block_free(void *ptr, uint64_t len) {
    if (ptr == NULL) {
        return;
    }
    if (len < LARGE) {
        free(ptr);
        return;
    }
    uint64_t bytes = mapped_size(len);
    if (!give_kept(ptr, bytes)) {
        munmap(ptr, (size_t)bytes);
    }
}

void fipc_message_clear(struct fipc_message *m) {
    for (uint64_t i = 0; i < m->n; i++) {
        fipc_block_free(m->blocks[i].ptr, m->blocks[i].len);
    }
    free(m->blocks);
    memset(m, 0, sizeof *m);
}
