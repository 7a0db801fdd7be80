#include "fipc_mem.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "fipc_layout.h"
#include "fipc_peer.h"
#include "fipc_test.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifdef __APPLE__ /* the kernel has had them since 10.15, the public header has not */
#ifndef F_OFD_SETLK
#define F_OFD_SETLK 90
#define F_OFD_GETLK 92
#endif
#endif

#define NAME_PREFIX "fastipc-"
/* A sweeper may take a file in the moment before its maker has locked it; the maker then begins
 * anew under another name, at most so many times. */
#define CREATE_TRIES 100

static int system_error(struct fipc_error *err, const char *what) {
    err->sys_errno = errno;
    snprintf(err->text, sizeof err->text, "%s: %s", what, strerror(errno));
    return FIPC_SYSTEM;
}

/* ---- locks --------------------------------------------------------------------------------- */

static struct flock lock_of(uint32_t index, short type) {
    struct flock l;
    memset(&l, 0, sizeof l); /* l_pid must be 0 for these locks */
    l.l_type = type;
    l.l_whence = SEEK_SET;
    l.l_start = (off_t)(FIPC_LOCK_BASE + (int64_t)index);
    l.l_len = 1;
    return l;
}

int fipc_lock_byte_take(int fd, uint32_t index) {
    struct flock l = lock_of(index, F_WRLCK);
    if (fcntl(fd, F_OFD_SETLK, &l) == 0) {
        return FIPC_OK;
    }
    return errno == EAGAIN || errno == EACCES ? FIPC_RANK_TAKEN : FIPC_SYSTEM;
}

bool fipc_lock_byte_held(int fd, uint32_t index) {
    /* GETLK, since taking the byte for a test would make a concurrent attach fail */
    struct flock l = lock_of(index, F_WRLCK);
    return fcntl(fd, F_OFD_GETLK, &l) == 0 ? l.l_type != F_UNLCK : true;
}

/* ---- fork ---------------------------------------------------------------------------------- */

static pthread_mutex_t registry_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t registry_once = PTHREAD_ONCE_INIT;
static struct fipc_segment **registry; /* a plain array: the child must not allocate or free */
static size_t registry_n, registry_room;
static uint32_t fork_generation;

static void before_fork(void) { pthread_mutex_lock(&registry_mutex); }
static void after_fork_parent(void) { pthread_mutex_unlock(&registry_mutex); }

/* Close, never unlock: an unlock in the child would release the parent's lock. The mapping stays
 * for whoever holds a view of it, but lock_fd was never mapped, so closing is all it takes. */
static void after_fork_child(void) {
    fork_generation++;
    for (size_t i = 0; i < registry_n; i++) {
        fipc_mem_close(registry[i]);
        registry[i]->linked = false;
    }
    registry_n = 0;
    pthread_mutex_unlock(&registry_mutex);
}

static void registry_init(void) {
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

uint32_t fipc_fork_generation(void) { return fork_generation; }

void fipc_mem_hold_forks(bool hold) {
    pthread_once(&registry_once, registry_init);
    if (hold) {
        pthread_mutex_lock(&registry_mutex);
    } else {
        pthread_mutex_unlock(&registry_mutex);
    }
}

int fipc_mem_register(struct fipc_segment *s) {
    if (registry_n == registry_room) {
        size_t room = registry_room ? 2 * registry_room : 16;
        struct fipc_segment **bigger = realloc(registry, room * sizeof(struct fipc_segment *));
        if (bigger == NULL) {
            fipc_mem_unlink(s);
            fipc_mem_unmap(s);
            fipc_mem_close(s);
            return FIPC_NO_MEMORY;
        }
        registry = bigger;
        registry_room = room;
    }
    registry[registry_n++] = s;
    return FIPC_OK;
}

void fipc_mem_unregister(struct fipc_segment *s) {
    for (size_t i = 0; i < registry_n; i++) {
        if (registry[i] == s) {
            registry[i] = registry[--registry_n];
            break;
        }
    }
}

/* ---- making -------------------------------------------------------------------------------- */

/* A second description of the same file. Through the path while there is one, since that works
 * without /proc; never by dup, which would share the first one's locks. */
static int reopen(int fd, const char *path) {
    char proc[64];
    if (path == NULL) {
        snprintf(proc, sizeof proc, "/proc/self/fd/%d", fd);
        path = proc;
    }
    return open(path, O_RDWR | O_CLOEXEC);
}

static void hex_name(char *out, size_t room, const char *dir, const char *prefix,
                     const uint8_t id[FIPC_ID_BYTES]) {
    int n = snprintf(out, room, "%s/%s" NAME_PREFIX, dir, prefix);
    for (int i = 0; i < FIPC_ID_BYTES && n > 0 && (size_t)n + 2 < room; i++) {
        n += snprintf(out + n, room - (size_t)n, "%02x", id[i]);
    }
}

static int lock_new(struct fipc_segment *s, uint32_t lock_index, struct fipc_error *err) {
    fipc_point("create-file");
    int rc = fipc_lock_byte_take(s->lock_fd, lock_index);
    return rc != FIPC_SYSTEM ? rc
                             : system_error(err, "locking the segment (its file system must "
                                                 "support open file description locks)");
}

static int create_memfd(struct fipc_segment *s, uint32_t lock_index, struct fipc_error *err) {
#ifdef __linux__
    s->fd = memfd_create("fastipc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (s->fd < 0) {
        return system_error(err, "memfd_create");
    }
    fipc_point("create-opened");
    /* A memfd is born with mode 0777: what keeps others out are the rules of /proc alone. */
    if (fchmod(s->fd, 0600) != 0 || ftruncate(s->fd, (off_t)s->bytes) != 0) {
        return system_error(err, "ftruncate of the segment");
    }
    /* Without this a peer could truncate the segment under us, and the next touch would be SIGBUS. */
    if (fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return system_error(err, "sealing the segment");
    }
    s->lock_fd = reopen(s->fd, NULL);
    if (s->lock_fd < 0) {
        return system_error(err,
                            "opening /proc/self/fd (is /proc mounted? shm_dir= works without)");
    }
    return lock_new(s, lock_index, err);
#else
    (void)s, (void)lock_index;
    snprintf(err->text, sizeof err->text, "memfd is not available on this system: give shm_dir=");
    return FIPC_SYSTEM;
#endif
}

/* True while `name` in directory `dir_fd` is the file that `fd` has open. */
static bool names(int dir_fd, const char *name, int fd) {
    struct stat one, two;
    return fstat(fd, &one) == 0 && fstatat(dir_fd, name, &two, AT_SYMLINK_NOFOLLOW) == 0 &&
           one.st_ino == two.st_ino && one.st_dev == two.st_dev;
}

/* FIPC_GONE: a sweeper was faster. */
static int try_create_named(struct fipc_segment *s, uint32_t lock_index, struct fipc_error *err) {
    s->fd = open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (s->fd < 0) {
        int rc = system_error(err, s->path);
        s->path[0] = 0;
        return rc;
    }
    s->linked = true;
    fipc_point("create-opened");
    if (ftruncate(s->fd, (off_t)s->bytes) != 0) {
        return system_error(err, "ftruncate of the segment");
    }
    s->lock_fd = reopen(s->fd, s->path);
    if (s->lock_fd < 0) {
        return errno == ENOENT ? FIPC_GONE : system_error(err, s->path);
    }
    int rc = lock_new(s, lock_index, err);
    if (rc == FIPC_OK &&
        (fipc_lock_byte_held(s->lock_fd, FIPC_SWEEP_LOCK) || !names(AT_FDCWD, s->path, s->fd) ||
         !names(AT_FDCWD, s->path, s->lock_fd))) {
        return FIPC_GONE;
    }
    return rc;
}

static int create_named(struct fipc_segment *s, const char *dir, const uint8_t id[FIPC_ID_BYTES],
                        uint32_t lock_index, struct fipc_error *err) {
    if (strlen(dir) + sizeof "/." NAME_PREFIX + (size_t)2 * FIPC_ID_BYTES > sizeof s->path) {
        errno = ENAMETOOLONG;
        return system_error(err, "shm_dir");
    }
    /* A hidden name first, so that nobody can find it unfinished. (O_TMPFILE would need /proc to
     * get a name at all.) */
    uint8_t hidden[FIPC_ID_BYTES];
    memcpy(hidden, id, sizeof hidden);
    int rc = FIPC_GONE;
    for (int i = 0; i < CREATE_TRIES && rc == FIPC_GONE; i++) {
        fipc_mem_close(s);
        fipc_mem_unlink(s);
        hidden[0] = (uint8_t)(id[0] + i);
        hex_name(s->path, sizeof s->path, dir, ".", hidden);
        rc = try_create_named(s, lock_index, err);
    }
    if (rc == FIPC_GONE) {
        errno = EAGAIN;
        rc = system_error(err, "the segment is swept away each time before it can be locked");
    }
    return rc;
}

int fipc_mem_create(struct fipc_segment *s, uint64_t bytes, const char *shm_dir,
                    const uint8_t id[FIPC_ID_BYTES], uint32_t lock_index, struct fipc_error *err) {
    memset(s, 0, sizeof *s);
    s->fd = s->lock_fd = -1;
    s->bytes = bytes;
    fipc_point("create-begin");
    int rc =
        shm_dir ? create_named(s, shm_dir, id, lock_index, err) : create_memfd(s, lock_index, err);
    if (rc == FIPC_OK) {
        fipc_point("create-locked");
        rc = fipc_mem_map(s, bytes, err);
        fipc_point("create-mapped");
    }
    if (rc != FIPC_OK) {
        fipc_mem_unlink(s);
        fipc_mem_close(s);
    }
    return rc;
}

int fipc_mem_publish(struct fipc_segment *s, const uint8_t id[FIPC_ID_BYTES],
                     struct fipc_error *err) {
    fipc_point("create-complete");
    if (s->path[0] == 0) {
        return FIPC_OK;
    }
    char dir[FIPC_PATH_BYTES], final_path[FIPC_PATH_BYTES];
    snprintf(dir, sizeof dir, "%.*s", (int)(strrchr(s->path, '/') - s->path), s->path);
    hex_name(final_path, sizeof final_path, dir, "", id);
    if (rename(s->path, final_path) != 0) {
        return system_error(err, final_path);
    }
    memcpy(s->path, final_path, sizeof s->path);
    fipc_point("create-linked");
    return FIPC_OK;
}

/* ---- finding ------------------------------------------------------------------------------- */

/* NONBLOCK and NOCTTY: after the writer has closed, its descriptor's number may mean a terminal or
 * a pipe. */
static int open_found(const char *path) {
    return open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

static int not_found(const struct fipc_address *a, const char *path, struct fipc_error *err) {
    err->sys_errno = errno;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
        return system_error(err, path);
    }
    if (errno == EACCES || errno == EPERM) {
        snprintf(err->text, sizeof err->text,
                 "this process may not open the segment of the writer (pid %lld): both must run as "
                 "the same user, and %s must be accessible%s",
                 (long long)a->pid, a->path[0] ? "shm_dir" : "/proc",
                 a->path[0] ? "" : " (from another PID namespace give the writer shm_dir=)");
        return FIPC_MISMATCH;
    }
    snprintf(
        err->text, sizeof err->text,
        "the segment is gone: its writer (pid %lld) has closed it or ended, or runs in another "
        "PID namespace (then give the writer shm_dir=)",
        (long long)a->pid);
    return FIPC_GONE;
}

/* Opens both descriptors through one path, and makes sure that they are of one file. */
static int open_both(struct fipc_segment *s, const char *path) {
    struct stat one, two;
    s->fd = open_found(path);
    s->lock_fd = s->fd < 0 ? -1 : open_found(path);
    if (s->lock_fd >= 0 && fstat(s->fd, &one) == 0 && fstat(s->lock_fd, &two) == 0) {
        /* Another user who knows the name could lay a segment of his own there, once ours has lost
         * its name; and root could open it. */
        bool ours = one.st_uid == geteuid();
        if (ours && one.st_ino == two.st_ino && one.st_dev == two.st_dev) {
            return FIPC_OK;
        }
        errno = ours ? ENOENT /* replaced meanwhile */ : EACCES;
    }
    int why = errno;
    fipc_mem_close(s);
    errno = why;
    return FIPC_GONE;
}

int fipc_mem_open(struct fipc_segment *s, const struct fipc_address *a, struct fipc_error *err) {
    memset(s, 0, sizeof *s);
    s->fd = s->lock_fd = -1;
    char proc[64];
    snprintf(proc, sizeof proc, "/proc/%lld/fd/%d", (long long)a->pid, a->fd);
    if (a->path[0]) {
        if (open_both(s, a->path) == FIPC_OK) {
            return FIPC_OK;
        }
        if (errno != ENOENT) {
            return not_found(a, a->path, err);
        }
        /* The name is gone because everybody had attached: a replacement reader of the same PID
         * namespace still finds the file through its writer. */
    }
    if (open_both(s, proc) != FIPC_OK) {
        return not_found(a, proc, err);
    }
#ifdef F_GET_SEALS
    /* A memfd that could be truncated would be a SIGBUS waiting to happen. */
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
    if (!a->path[0] && (fcntl(s->fd, F_GET_SEALS) & seals) != seals) {
        snprintf(err->text, sizeof err->text,
                 "what is at the handle's address is not a queue's memory: the writer (pid %lld) "
                 "has closed it, or is in another PID namespace",
                 (long long)a->pid);
        fipc_mem_close(s);
        return FIPC_MISMATCH;
    }
#endif
    return FIPC_OK;
}

int fipc_mem_read(const struct fipc_segment *s, void *buf, uint64_t len, uint64_t *file_bytes) {
    struct stat st;
    if (fstat(s->fd, &st) != 0 || !S_ISREG(st.st_mode) ||
        pread(s->fd, buf, (size_t)len, 0) != (ssize_t)len) {
        return FIPC_MISMATCH;
    }
    *file_bytes = (uint64_t)st.st_size;
    return FIPC_OK;
}

int fipc_mem_map(struct fipc_segment *s, uint64_t bytes, struct fipc_error *err) {
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
    if (p == MAP_FAILED) {
        return system_error(err, "mapping the segment");
    }
    s->base = p;
    s->bytes = bytes;
    return FIPC_OK;
}

/* ---- pages --------------------------------------------------------------------------------- */

static int no_space(struct fipc_segment *s, uint64_t needed, struct fipc_error *err) {
    struct statvfs v;
    err->sys_errno = ENOSPC;
    err->needed = needed;
    err->available = fstatvfs(s->fd, &v) == 0 ? (uint64_t)v.f_bavail * v.f_bsize : 0;
    return FIPC_NO_SPACE;
}

int fipc_mem_reserve(struct fipc_segment *s, uint64_t off, uint64_t len, struct fipc_error *err) {
#ifdef __linux__
    /* 1 MiB at a time: older kernels begin anew after each signal, and a long call with a timer
     * signal would then never end. */
    const uint64_t step = UINT64_C(1) << 20;
    for (uint64_t done = 0; done < len;) {
        uint64_t n = len - done < step ? len - done : step;
        if (fallocate(s->fd, 0, (off_t)(off + done), (off_t)n) == 0) {
            done += n;
        } else if (errno == ENOSPC || errno == ENOMEM || errno == EDQUOT) {
            if (done > 0) {
                fipc_mem_discard(s, off, done); /* take nothing when not all can be had */
            }
            return no_space(s, len, err); /* after that: what is free without us, for all of it */
        } else if (errno != EINTR) {
            return system_error(err, "allocating pages of the segment");
        }
    }
    /* The pages exist; map them at once rather than by a fault each. */
    uint64_t a = off / FIPC_PAGE * FIPC_PAGE;
    madvise((char *)s->base + a, (size_t)(off + len - a), MADV_POPULATE_WRITE);
    return FIPC_OK;
#elif defined(__APPLE__)
    fstore_t st = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, (off_t)len, 0};
    (void)off; /* the file is sparse only until it is first written; the call reserves blocks */
    if (fcntl(s->fd, F_PREALLOCATE, &st) != 0 && errno == ENOSPC) {
        return no_space(s, len, err);
    }
    return FIPC_OK;
#else
    return posix_fallocate(s->fd, (off_t)off, (off_t)len) == ENOSPC ? no_space(s, len, err)
                                                                    : FIPC_OK;
#endif
}

void fipc_mem_prefault(struct fipc_segment *s, uint64_t off, uint64_t len) {
#ifdef __linux__
    uint64_t a = off / FIPC_PAGE * FIPC_PAGE;
    madvise((char *)s->base + a, (size_t)(off + len - a), MADV_POPULATE_READ);
#else
    (void)s, (void)off, (void)len;
#endif
}

void fipc_mem_discard(struct fipc_segment *s, uint64_t off, uint64_t len) {
#ifdef __linux__
    int rc = fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off, (off_t)len);
    (void)rc; /* then the pages simply stay */
#else
    (void)s, (void)off, (void)len;
#endif
}

/* ---- ending -------------------------------------------------------------------------------- */

void fipc_mem_unlink(struct fipc_segment *s) {
    if (s->linked) {
        unlink(s->path);
        s->linked = false;
    }
}

void fipc_mem_unmap(struct fipc_segment *s) {
    if (s->base != NULL) {
        munmap(s->base, (size_t)s->bytes);
        s->base = NULL;
    }
}

void fipc_mem_close(struct fipc_segment *s) {
    if (s->fd >= 0) {
        close(s->fd);
        s->fd = -1;
    }
    if (s->lock_fd >= 0) {
        close(s->lock_fd);
        s->lock_fd = -1;
    }
}

/* ---- sweeping ------------------------------------------------------------------------------ */

/* Opens the file if it is one of ours, whoever lives; else -1. NOFOLLOW, NONBLOCK, NOCTTY: in a
 * directory that everybody may write to a name like ours can be anything. */
static int open_ours(int dir_fd, const char *name) {
    int fd = openat(dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    static const char nothing[8];
    char magic[8] = {0};
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
        pread(fd, magic, sizeof magic, 0) >= 0 &&
        (memcmp(magic, FIPC_MAGIC, sizeof magic) == 0 ||
         /* a hidden one's header isn't there yet */
         (name[0] == '.' && memcmp(magic, nothing, sizeof magic) == 0))) {
        return fd;
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

/* 1: was removed (or could be); 0: is not abandoned; else a negative errno.
 *
 * A sweeper locks its own byte and then looks at the writer's; a maker locks the writer's and then
 * looks at the sweeper's, and whether its file is still there. So at least one of the two notices
 * the other, however long either stops in between. (With the writer's own byte in its hands a
 * sweeper would look like a writer to those who still read.) */
static int sweep_one(int dir_fd, const char *name, bool dry_run) {
    int fd = open_ours(dir_fd, name);
    if (fd < 0) {
        return 0;
    }
    int rc = 0;
    if (dry_run) {
        rc = !fipc_lock_byte_held(fd, FIPC_WRITER_LOCK);
    } else if (fipc_lock_byte_take(fd, FIPC_SWEEP_LOCK) == FIPC_OK &&
               !fipc_lock_byte_held(fd, FIPC_WRITER_LOCK) && names(dir_fd, name, fd)) {
        fipc_point("sweep-found");
        rc = unlinkat(dir_fd, name, 0) == 0 ? 1 : errno == ENOENT ? 0 : -errno;
        fipc_point("sweep-removed");
    }
    close(fd);
    return rc;
}

int fipc_sweep(const char *dir, bool dry_run,
               void (*seen)(void *ctx, const char *path, int sys_errno), void *ctx) {
    DIR *d = opendir(dir);
    if (d == NULL) {
        return 0;
    }
    int n = 0;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        const char *name = e->d_name + (e->d_name[0] == '.' ? 1 : 0);
        if (strncmp(name, NAME_PREFIX, sizeof NAME_PREFIX - 1) != 0 ||
            strspn(name + sizeof NAME_PREFIX - 1, "0123456789abcdef") != 2 * FIPC_ID_BYTES ||
            strlen(name) != sizeof NAME_PREFIX - 1 + (size_t)2 * FIPC_ID_BYTES) {
            continue;
        }
        int rc = sweep_one(dirfd(d), e->d_name, dry_run);
        n += rc == 1;
        if (rc != 0 && seen != NULL) {
            char path[FIPC_PATH_BYTES + NAME_MAX];
            snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
            seen(ctx, path, rc < 0 ? -rc : 0);
        }
    }
    closedir(d);
    return n;
}
