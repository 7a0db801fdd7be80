/* fipc_peer.c: the registry of ranks.
 *
 * Pairs (that in fipc_ring.h counts as well)
 *   P-state  state: store release in fipc_peer_join, fipc_queue_close -> load acquire,
 *            cas acquire in fipc_queue_members, admit, fipc_queue_peer, fipc_peer_dead. Travels:
 *            pid, pid_ns, host and epoch of the rank. (The writer changes a state by
 *            read-modify-writes only, which hand on what they read.)
 *
 * Relaxed
 *   pid, pid_ns, host, epoch: they travel with the state, or are the rank's own.
 *   state: where its owner or the writer looks at what it stored itself; in fipc_peer_dead the first
 *          look, since the kernel's lock orders it and the second.
 */
#include "fipc_peer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fipc_test.h"

#ifdef __linux__
#include <stdlib.h>
uint64_t fipc_process_start(int64_t pid) {
    char path[64];
    char buf[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return 0;
    }
    size_t n = fread(buf, 1, sizeof buf - 1, f);
    fclose(f);
    buf[n] = 0;
    /* field 22; the second field is a name that may hold anything, up to the last ')' */
    char *p = strrchr(buf, ')');
    for (int field = 2; p != NULL && field < 22; field++) {
        p = strchr(p + 1, ' ');
    }
    return p == NULL ? 0 : strtoull(p, NULL, 10);
}
#else
uint64_t fipc_process_start(int64_t pid) {
    (void)pid;
    return 0;
}
#endif

static uint64_t pid_namespace(void) {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

void fipc_peer_describe(struct fipc_peer *p, const char *host) {
    char name[FIPC_HOST_BYTES] = {0};
    snprintf(name, sizeof name, "%s", host);
    /* relaxed: the release of the state, which follows, publishes them */
    fipc_store64_relaxed(&p->pid, (uint64_t)getpid());
    fipc_store64_relaxed(&p->pid_ns, pid_namespace());
    for (size_t i = 0; i < FIPC_HOST_BYTES / 8; i++) {
        uint64_t word;
        memcpy(&word, name + 8 * i, 8);
        fipc_store64_relaxed(&p->host[i], word);
    }
}

void fipc_peer_host(const struct fipc_peer *p, char out[FIPC_HOST_BYTES]) {
    for (size_t i = 0; i < FIPC_HOST_BYTES / 8; i++) {
        uint64_t word = fipc_load64_relaxed(&p->host[i]);
        memcpy(out + 8 * i, &word, 8);
    }
    out[FIPC_HOST_BYTES - 1] = 0; /* a peer's bytes: don't trust their end */
}

int fipc_peer_join(struct fipc_peer *p, const struct fipc_segment *s, uint32_t reader,
                   const char *host, uint32_t *epoch, struct fipc_error *err) {
    fipc_point("attach-begin");
    int rc = fipc_lock_byte_take(s->lock_fd, FIPC_READER_LOCK(reader));
    if (rc == FIPC_SYSTEM) {
        err->sys_errno = errno;
        snprintf(err->text, sizeof err->text, "locking the rank: %s", strerror(errno));
        return rc;
    }
    if (rc != FIPC_OK) {
        err->reader = (int32_t)reader;
        err->pid = (int64_t)fipc_load64_relaxed(&p->pid);
        fipc_peer_host(p, err->host);
        return rc;
    }
    fipc_point("attach-locked");
    fipc_peer_describe(p, host);
    fipc_point("attach-described");
    /* relaxed: only the holder of the byte stores the epoch; and FREE too. (FREE with an epoch is
     * what a process left that died right here: this one is still the first.) */
    bool first = fipc_load32_relaxed(&p->state) == FIPC_PEER_FREE;
    *epoch = first ? 1 : fipc_load32_relaxed(&p->epoch) + 1;
    fipc_store32_relaxed(&p->epoch, *epoch);
    fipc_point("attach-counted");
    fipc_store32_release(&p->state, FIPC_PEER_JOINING); /* P-state */
    fipc_point("attach-joined");
    return FIPC_OK;
}

bool fipc_peer_dead(const struct fipc_peer *p, const struct fipc_segment *s, uint32_t reader) {
    /* relaxed: asking the kernel lies between this look and the other, and orders them. Its lock makes
     * what came before the byte was given back visible to whoever finds it free (who asks holds a
     * byte of its own, so that the kernel really takes that lock). */
    uint32_t before = fipc_load32_relaxed(&p->state);
    uint32_t epoch = fipc_load32_relaxed(&p->epoch);
    if (before != FIPC_PEER_JOINING && before != FIPC_PEER_ACTIVE) {
        return before == FIPC_PEER_DEAD;
    }
    if (fipc_lock_byte_held(s->lock_fd, FIPC_READER_LOCK(reader))) {
        return false;
    }
    /* It may have closed in an orderly way, or been replaced, between the two looks; and a
     * replacement that took the byte after the question is not ordered by the kernel. */
    uint32_t after = fipc_load32_acquire(&p->state); /* P-state */
    return (after == FIPC_PEER_JOINING || after == FIPC_PEER_ACTIVE) &&
           fipc_load32_relaxed(&p->epoch) == epoch;
}
