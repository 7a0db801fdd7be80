/* Named segments (shm_dir): on a file system that is too small, or becomes full; who sweeps what;
 * when the name goes; and from another PID namespace.
 *
 * Each case gets a small tmpfs in a mount namespace of its own, in a child, so that nothing needs
 * to be unmounted. Root may do that, others where user namespaces are allowed; else it is skipped.
 */
#include "test.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "fipc_layout.h"
#include "fipc_queue.h"
#include "peers.h"

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)

static char dir[64]; /* the mount point */

/* ---- a file system of our own -------------------------------------------------------------- */

static bool write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : write(fd, text, strlen(text));
    if (fd >= 0) {
        close(fd);
    }
    return n == (ssize_t)strlen(text);
}

static bool may_mount(int more_flags) {
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWNS | more_flags) != 0) {
        if (errno != EPERM || unshare(CLONE_NEWUSER | CLONE_NEWNS | more_flags) != 0) {
            return false;
        }
        char map[64];
        snprintf(map, sizeof map, "0 %u 1", uid);
        write_file("/proc/self/setgroups", "deny");
        if (!write_file("/proc/self/uid_map", map)) {
            return false;
        }
        snprintf(map, sizeof map, "0 %u 1", gid);
        if (!write_file("/proc/self/gid_map", map)) {
            return false;
        }
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

struct small {
    void (*run)(void);
    const char *options;
    int flags;
};

#define CAN_NOT 75

static void in_small(void *arg) {
    const struct small *s = arg;
    alarm(test_watchdog_s);
    if (!may_mount(s->flags) || mount("none", dir, "tmpfs", 0, s->options) != 0) {
        fprintf(stderr, "%s\n", strerror(errno));
        _exit(CAN_NOT);
    }
    unsigned fds = test_open_fds();
    s->run();
    CHECK_EQ(test_open_fds(), fds);
    CHECK_EQ(test_mappings("/fastipc-"), 0);
}

/* Runs it where `dir` is a tmpfs of so many KiB. */
static void with_tmpfs(uint64_t kib, int flags, void (*run)(void)) {
    char options[64];
    snprintf(options, sizeof options, "size=%" PRIu64 "k,mode=0700", kib);
    struct small s = {run, options, flags};
    strcpy(dir, "/tmp/fipc-named-XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    int status = test_wait_status(test_fork(in_small, &s));
    CHECK(rmdir(dir) == 0); /* empty: the tmpfs was the child's */
    if (WIFEXITED(status) && WEXITSTATUS(status) == CAN_NOT) {
        test_skip("this process may not mount a tmpfs");
    } else if (WIFSIGNALED(status)) {
        FAIL("ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    } else {
        CHECK_EQ(status, 0);
    }
}

static uint64_t free_bytes(void) {
    struct statvfs v;
    CHECK(statvfs(dir, &v) == 0);
    return (uint64_t)v.f_bavail * v.f_bsize;
}

static unsigned files(void) {
    unsigned n = 0;
    DIR *d = opendir(dir);
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(d);
    return n;
}

static const char *in_dir(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

/* Takes all the room but `but` bytes. */
static void fill(uint64_t but) {
    int fd = open(in_dir("filler"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    uint64_t left = free_bytes();
    CHECK(left >= but);
    if (left > but) {
        struct stat st;
        CHECK(fstat(fd, &st) == 0);
        CHECK(fallocate(fd, 0, st.st_size, (off_t)(left - but)) == 0);
    }
    close(fd);
    CHECK_EQ(free_bytes(), but);
}

static void make_room(void) { CHECK(unlink(in_dir("filler")) == 0); }

static struct fipc_config named(uint32_t readers) {
    struct fipc_config c = peers_config(readers);
    c.shm_dir = dir;
    return c;
}

/* ---- too small ----------------------------------------------------------------------------- */

static void a_ring_of_8_in_1(void) {
    struct fipc_config c = named(1);
    c.n_slots = 1024;
    c.inline_bytes = 8192;
    uint64_t before = free_bytes();
    for (int i = 0; i < 3; i++) {
        fipc_queue *q = (void *)&c;
        struct fipc_error err;
        CHECK_RC(fipc_queue_create(&q, &c, &err), FIPC_NO_SPACE);
        CHECK(q == NULL);
        CHECK_EQ(err.sys_errno, ENOSPC);
        CHECK(err.needed >= 8 * MIB && err.needed < 9 * MIB); /* all that was asked for */
        CHECK_EQ(err.available, before);                      /* all that there is */
        CHECK_EQ(files(), 0);
        CHECK_EQ(free_bytes(), before);
    }
    c.n_slots = 16; /* a small one fits, however large its chunks' address space is */
    c.chunk_bytes = 64 * MIB;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    peers_put(w, 1, 8000);
    peers_put(w, 2, 100000);
    peers_get(r, 1, 8000);
    peers_get(r, 2, 100000);
    fipc_queue_free(r);
    fipc_queue_free(w);
    CHECK_EQ(files(), 0);
    CHECK_EQ(free_bytes(), before);
}

static void a_memfd(void) {
    struct fipc_config c = peers_config(1); /* no shm_dir: the small tmpfs doesn't matter */
    c.n_slots = 1024;
    c.inline_bytes = 8192;
    fill(0);
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    peers_put(w, 1, 16000);
    peers_get(r, 1, 16000);
    fipc_queue_free(r);
    fipc_queue_free(w);
    make_room();
}

static void a_ring_of_8_mib_in_a_tmpfs_of_1_mib_is_no_space(void) {
    with_tmpfs(1024, 0, a_ring_of_8_in_1);
}

static void a_full_tmpfs_does_not_matter_to_a_memfd(void) { with_tmpfs(1024, 0, a_memfd); }

/* ---- filled up afterwards ------------------------------------------------------------------ */

static int try_put(fipc_queue *w, uint64_t seq, uint64_t len, struct fipc_error *err) {
    char *p = malloc(len);
    CHECK(p != NULL);
    pattern_fill(p, seq, 0, len);
    int rc = peers_send(w, p, len, (uint32_t)seq, 0, err);
    free(p);
    return rc;
}

static void filled_after_creation(void) {
    struct fipc_config c = named(2);
    c.chunk_bytes = MIB;
    c.n_chunks = 4;
    c.n_slots = 32;
    fipc_queue *w = peers_create(&c);
    fipc_queue *r = peers_attach(w, 0, &c);
    struct fipc_error err;
    uint64_t seq = 0;
    for (uint64_t left = 0; left <= 2 * MIB; left += 340 * KIB) {
        fill(left);
        fipc_queue *other = peers_attach(w, 1, &c); /* attaching needs no room */
        uint64_t len = left + 300 * KIB;            /* more than there is */
        CHECK_RC(try_put(w, 99, len, &err), FIPC_NO_SPACE);
        CHECK_EQ(err.sys_errno, ENOSPC);
        CHECK(err.needed > 0 && err.needed <= MIB);
        CHECK(err.available < err.needed);
        struct fipc_message m;
        CHECK_RC(peers_recv(r, 0, &m, &err), FIPC_TIMEOUT); /* nothing, or the void front of it */
        CHECK_RC(peers_recv(other, 0, &m, &err), FIPC_TIMEOUT);
        for (int i = 0; i < 20; i++) { /* slots have their room */
            CHECK_RC(try_put(w, ++seq, 1000, &err), FIPC_OK);
            peers_get(r, seq, 1000);
            peers_get(other, seq, 1000);
        }
        if (left < MIB - 300 * KIB) {
            struct fipc_call poll = {0};
            void *ptr;
            CHECK_RC(fipc_queue_loan(w, MIB, &poll, &ptr, &err), FIPC_NO_SPACE);
        }
        make_room();
        for (int i = 0; i < 3; i++) {
            uint64_t size = i == 0 ? len : i == 1 ? MIB : 3 * MIB;
            CHECK_RC(try_put(w, ++seq, size, &err), FIPC_OK);
            peers_get(r, seq, size);
            peers_get(other, seq, size);
        }
        fipc_queue_free(other);
        fill(0); /* what is allocated may be used again in a full file system */
        other = peers_attach(w, 1, &c);
        CHECK_RC(try_put(w, ++seq, 3 * MIB, &err), FIPC_OK);
        peers_get(r, seq, 3 * MIB);
        peers_get(other, seq, 3 * MIB);
        make_room();
        fipc_queue_free(other);
        fipc_queue_free(r);
        fipc_queue_free(w);
        CHECK_EQ(files(), 0);
        c = named(2); /* none of its chunks is allocated */
        c.chunk_bytes = MIB;
        c.n_chunks = 4;
        c.n_slots = 32;
        w = peers_create(&c);
        r = peers_attach(w, 0, &c);
    }
    fipc_queue_free(r);
    fipc_queue_free(w);
}

static void a_tmpfs_filled_after_creation_is_no_space_until_there_is_room(void) {
    with_tmpfs(8 * 1024, 0, filled_after_creation);
}

/* ---- names --------------------------------------------------------------------------------- */

static void the_name_goes(void) {
    struct fipc_config c = named(2);
    fipc_queue *w = peers_create(&c);
    struct fipc_address a = peers_address(w);
    CHECK(strncmp(a.path, dir, strlen(dir)) == 0);
    CHECK_EQ(files(), 1);
    struct stat st;
    CHECK(stat(a.path, &st) == 0);
    CHECK_EQ(st.st_mode & 07777, 0600);
    const char *name = strrchr(a.path, '/') + 1; /* fastipc- and the whole id */
    CHECK(strncmp(name, "fastipc-", 8) == 0);
    CHECK_EQ(strlen(name), 8 + 2 * FIPC_ID_BYTES);
    fipc_queue *r[2];
    r[0] = peers_attach_at(&a, 0, &c);
    peers_put(w, 1, 100);
    CHECK_EQ(files(), 1);
    r[1] = peers_attach_at(&a, 1, &c);
    peers_put(w, 2, 3000); /* the writer's next call notices that all are there */
    CHECK_EQ(files(), 0);
    for (int i = 0; i < 2; i++) {
        peers_get(r[i], 1, 100);
        peers_get(r[i], 2, 3000);
    }
    fipc_queue_free(r[1]); /* a replacement finds it through its writer */
    r[1] = peers_attach_at(&a, 1, &c);
    peers_put(w, 3, 100);
    peers_get(r[1], 3, 100);
    peers_get(r[0], 3, 100);
    fipc_queue_free(w);
    struct fipc_error err;
    fipc_queue *late;
    fipc_queue_close(r[0]);
    CHECK_RC(peers_try_attach(&late, &a, 0, &c, &err), FIPC_GONE);
    fipc_queue_free(r[0]);
    fipc_queue_free(r[1]);

    w = peers_create(&c); /* and a writer that closes before anybody came takes it along */
    CHECK_EQ(files(), 1);
    fipc_queue_free(w);
    CHECK_EQ(files(), 0);
}

static void the_name_goes_when_all_have_attached(void) { with_tmpfs(1024, 0, the_name_goes); }

static void make_file(const char *name, const void *bytes, size_t n, bool old) {
    int fd = open(in_dir(name), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    CHECK(!old || futimens(fd, times) == 0);
    close(fd);
}

static unsigned seen_count;
static char seen_path[FIPC_PATH_BYTES];

static void seen(void *ctx, const char *path, int sys_errno) {
    CHECK(ctx == &seen_count);
    CHECK_EQ(sys_errno, 0);
    seen_count++;
    snprintf(seen_path, sizeof seen_path, "%s", path);
}

static void writer_that_dies(void *arg) {
    struct fipc_config *c = arg;
    peers_create(c);
    kill(getpid(), SIGKILL);
}

#define ID "0123456789abcdef0123456789abcdef"

static void sweeping(void) {
    struct fipc_config c = named(1), mine = named(1), theirs = named(1);
    fipc_queue *w = peers_create(&mine); /* lives */
    char theirs_name[64] = "fipc";
    for (int i = 0, n = snprintf(theirs_name, sizeof theirs_name, "fastipc-"); i < FIPC_ID_BYTES;
         i++) {
        n += snprintf(theirs_name + n, sizeof theirs_name - (size_t)n, "%02x", theirs.id[i]);
    }
    /* what isn't a segment, whatever its age */
    struct fipc_header h = {.magic = FIPC_MAGIC};
    make_file("fastipc-" ID "x", &h, sizeof h, true); /* longer */
    make_file("fastipc-0123", &h, sizeof h, true);    /* shorter */
    make_file("fastipd-" ID, &h, sizeof h, true);
    make_file("something", &h, sizeof h, true);
    char zeros[128] = {0};
    make_file("fastipc-" ID, zeros, sizeof zeros, true); /* no magic: not one of ours */
    CHECK(mkdir(in_dir("fastipc-1123456789abcdef0123456789abcdef"), 0700) == 0);
    CHECK(symlink("something", in_dir("fastipc-2123456789abcdef0123456789abcdef")) == 0);
    CHECK(mkfifo(in_dir("fastipc-3123456789abcdef0123456789abcdef"), 0600) == 0);
    make_file("fastipc-0123456789ABCDEF0123456789ABCDEF", &h, sizeof h, true);
    /* one that is being made, by whoever has its lock, however old it is */
    make_file(".fastipc-4123456789abcdef0123456789abcdef", zeros, sizeof zeros, true);
    int maker = open(in_dir(".fastipc-4123456789abcdef0123456789abcdef"), O_RDWR | O_CLOEXEC);
    CHECK_RC(fipc_lock_byte_take(maker, FIPC_WRITER_LOCK), FIPC_OK);
    pid_t theirs_pid =
        test_fork(writer_that_dies, &theirs); /* another user's; root alone can tell */
    CHECK_KILLED(theirs_pid);
    if (chown(in_dir(theirs_name), 12345, (gid_t)-1) != 0) {
        CHECK(unlink(in_dir(theirs_name)) == 0);
    }
    unsigned others = files();
    CHECK_EQ(fipc_sweep(dir, false, seen, &seen_count), 0);
    CHECK_EQ(seen_count, 0);
    CHECK_EQ(files(), others);

    pid_t pid = test_fork(writer_that_dies, &c);
    CHECK_KILLED(pid);
    CHECK_EQ(files(), others + 1);
    CHECK_EQ(fipc_sweep(dir, true, seen, &seen_count), 1);
    CHECK_EQ(seen_count, 1);
    CHECK_EQ(files(), others + 1); /* a dry run */
    CHECK(access(seen_path, F_OK) == 0);
    CHECK_EQ(fipc_sweep(dir, false, seen, &seen_count), 1);
    CHECK_EQ(seen_count, 2);
    CHECK(access(seen_path, F_OK) != 0);
    CHECK_EQ(files(), others);

    close(maker); /* dead now; and the file, however young, is in nobody's hands */
    make_file(".fastipc-5123456789abcdef0123456789abcdef", zeros, sizeof zeros, false);
    CHECK_EQ(fipc_sweep(dir, true, NULL, NULL), 2);
    int sweeper = open(in_dir(".fastipc-5123456789abcdef0123456789abcdef"), O_RDWR | O_CLOEXEC);
    CHECK_RC(fipc_lock_byte_take(sweeper, FIPC_SWEEP_LOCK), FIPC_OK);
    CHECK_EQ(fipc_sweep(dir, false, NULL, NULL), 1); /* the other is another sweeper's */
    close(sweeper);
    CHECK_EQ(fipc_sweep(dir, false, NULL, NULL), 1);
    others--;
    CHECK_EQ(files(), others);

    pid = test_fork(writer_that_dies, &c); /* the next creation sweeps too */
    CHECK_KILLED(pid);
    CHECK_EQ(files(), others + 1);
    struct fipc_config next = named(1);
    fipc_queue *w2 = peers_create(&next);
    CHECK_EQ(files(), others + 1);
    fipc_queue_free(w2);
    CHECK_EQ(files(), others);

    fipc_queue *r = peers_attach(w, 0, &mine); /* none of that touched the living */
    peers_put(w, 1, 5000);
    peers_get(r, 1, 5000);
    fipc_queue_free(r);
    fipc_queue_free(w);
    CHECK_EQ(files(), others - 1);
    CHECK_EQ(fipc_sweep("/nowhere/at/all", false, NULL, NULL), 0);
}

static void only_what_the_dead_left_is_swept(void) { with_tmpfs(1024, 0, sweeping); }

static void a_directory_that_can_not_be_used(void) {
    struct fipc_config c = named(1);
    struct fipc_error err;
    fipc_queue *q;
    c.shm_dir = "/nowhere/at/all";
    CHECK_RC(fipc_queue_create(&q, &c, &err), FIPC_SYSTEM);
    CHECK(err.sys_errno == ENOENT && strstr(err.text, "/nowhere/at/all") != NULL);
    char longer[FIPC_PATH_BYTES + 1];
    memset(longer, 'x', sizeof longer);
    longer[0] = '/';
    longer[FIPC_PATH_BYTES] = 0;
    c.shm_dir = longer;
    CHECK_RC(fipc_queue_create(&q, &c, &err), FIPC_SYSTEM);
    CHECK_EQ(err.sys_errno, ENAMETOOLONG);
    make_file("a-file", "x", 1, false);
    c.shm_dir = in_dir("a-file");
    CHECK_RC(fipc_queue_create(&q, &c, &err), FIPC_SYSTEM);
    CHECK_EQ(err.sys_errno, ENOTDIR);
    CHECK_EQ(files(), 1);
}

static void a_directory_that_can_not_be_used_is_said(void) {
    with_tmpfs(1024, 0, a_directory_that_can_not_be_used);
}

/* ---- another PID namespace ----------------------------------------------------------------- */

struct abroad {
    struct fipc_config c;
    struct fipc_address address;
    fipc_a32 phase, go;
    int64_t pid; /* as it sees itself */
};

static void reader_abroad(void *arg) { /* the first process of its namespace */
    struct abroad *a = arg;
    fipc_queue *r = peers_attach_at(&a->address, 1, &a->c);
    a->pid = getpid();
    fipc_store32_release(&a->phase, 1);
    peers_get(r, 1, 100);
    peers_get(r, 2, 5000);
    fipc_store32_release(&a->phase, 2);
    UNTIL(fipc_load32_acquire(&a->go));
    for (;;) {
        pause();
    }
}

static void readers_abroad(void) {
    struct abroad *a = test_share(sizeof *a);
    a->c = named(2);
    a->c.ops = &peers_fast;
    fipc_queue *w = peers_create(&a->c);
    a->address = peers_address(w);
    fipc_queue *r = peers_attach(w, 0, &a->c);
    fflush(NULL);
    pid_t pid = fork(); /* not test_fork: its parent has no number there */
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        reader_abroad(a);
    }
    UNTIL(fipc_load32_acquire(&a->phase) == 1);
    CHECK_EQ(a->pid, 1);
    struct fipc_peer_info info;
    CHECK_RC(fipc_queue_peer(w, 1, &info), FIPC_OK);
    CHECK_EQ(info.pid, 1);
    peers_put(w, 1, 100);
    peers_put(w, 2, 5000);
    peers_get(r, 1, 100);
    peers_get(r, 2, 5000);
    UNTIL(fipc_load32_acquire(&a->phase) == 2);
    fipc_store32_release(&a->go, 1);
    /* alive, though no process here has its number */
    uint64_t until = peers_fast_now(NULL) + 3 * FIPC_S;
    uint64_t seq = 2;
    while (peers_fast_now(NULL) < until && seq < 8) {
        seq++;
        peers_put(w, seq, 100);
        peers_get(r, seq, 100);
        struct fipc_message m;
        struct fipc_error err;
        CHECK_RC(peers_recv(r, peers_fast_now(NULL) + FIPC_S, &m, &err), FIPC_TIMEOUT);
    }
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    struct fipc_error err;
    int rc = FIPC_OK;
    while (rc == FIPC_OK || rc == FIPC_TIMEOUT) {
        rc = peers_send(w, "x", 1, 0, FIPC_FOREVER, &err);
        struct fipc_message m;
        struct fipc_error e;
        if (rc == FIPC_OK && peers_recv(r, 0, &m, &e) == FIPC_OK) {
            fipc_message_clear(&m);
        }
    }
    CHECK_RC(rc, FIPC_PEER_DIED);
    CHECK_EQ(err.reader, 1);
    CHECK_EQ(err.pid, 1); /* as it sees itself */
    fipc_queue_free(r);
    fipc_queue_free(w);
    test_unshare(a, sizeof *a);
}

static void readers_in_another_pid_namespace_attach_by_name(void) {
    with_tmpfs(1024, CLONE_NEWPID, readers_abroad);
}

static void writer_abroad(void *arg) {
    struct abroad *a = arg;
    fipc_queue *w = peers_create(&a->c);
    a->address = peers_address(w);
    fipc_store32_release(&a->phase, 1);
    for (uint64_t seq = 1; seq <= 3; seq++) {
        peers_put(w, seq, 5000);
    }
    fipc_store32_release(&a->phase, 2);
    for (;;) {
        pause();
    }
}

static void writers_abroad(void) {
    struct abroad *a = test_share(sizeof *a);
    a->c = named(2);
    a->c.ops = &peers_fast;
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        writer_abroad(a);
    }
    UNTIL(fipc_load32_acquire(&a->phase) >= 1);
    CHECK_EQ(a->address.pid, 1); /* another process has that number here */
    fipc_queue *r = peers_attach_at(&a->address, 0, &a->c);
    for (uint64_t seq = 1; seq <= 3; seq++) {
        peers_get(r, seq, 5000);
    }
    struct fipc_message m;
    struct fipc_error err;
    UNTIL(fipc_load32_acquire(&a->phase) == 2);
    CHECK_RC(peers_recv(r, peers_fast_now(NULL) + 2 * FIPC_S, &m, &err), FIPC_TIMEOUT);
    CHECK_EQ(fipc_sweep(dir, false, NULL, NULL), 0); /* its lock holds here, too */
    struct fipc_address unnamed = a->address;        /* what a memfd's would say */
    unnamed.path[0] = 0;
    fipc_queue *lost;
    int rc = peers_try_attach(&lost, &unnamed, 1, &a->c, &err);
    CHECK(rc == FIPC_GONE || rc == FIPC_MISMATCH);
    if (strstr(err.text, "PID namespace") == NULL) {
        FAIL("the remedy isn't named: %s", err.text);
    }
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_PEER_DIED); /* though pid 1 lives */
    CHECK_EQ(err.pid, 1);
    fipc_queue_free(r);
    CHECK_EQ(fipc_sweep(dir, false, NULL, NULL), 1);
    test_unshare(a, sizeof *a);
}

static void a_writer_in_another_pid_namespace_is_alive_by_its_lock(void) {
    with_tmpfs(1024, CLONE_NEWPID, writers_abroad);
}

/* ---- a pid that is used again -------------------------------------------------------------- */

/* Forks a process that gets this very number; only where all forks are ours. */
static pid_t fork_as(pid_t pid, void (*fn)(void *), void *arg) {
    char text[16];
    snprintf(text, sizeof text, "%d", (int)pid - 1);
    if (!write_file("/proc/sys/kernel/ns_last_pid", text)) {
        fprintf(stderr, "ns_last_pid: %s\n", strerror(errno));
        _exit(CAN_NOT);
    }
    CHECK_EQ(test_fork(fn, arg), pid);
    return pid;
}

static void attaches_and_reads(void *arg) {
    struct abroad *a = arg;
    fipc_queue *r = peers_attach_at(&a->address, 0, &a->c);
    fipc_store32_release(&a->phase, 1);
    for (;;) {
        struct fipc_message m;
        struct fipc_error err;
        CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_OK);
        fipc_message_clear(&m);
        fipc_add32_acqrel(&a->go, 1);
    }
}

static void makes_another_queue(void *arg) {
    struct abroad *a = arg;
    struct fipc_config c = peers_config(2);
    fipc_queue *w = peers_create(&c);
    a->address = peers_address(w);
    fipc_store32_release(&a->phase, 1);
    for (;;) {
        pause();
    }
}

static void idles(void *arg) {
    fipc_store32_release(&((struct abroad *)arg)->phase, 1);
    for (;;) {
        pause();
    }
}

static int send_until_told(fipc_queue *w, struct fipc_error *err) {
    int rc;
    while ((rc = peers_send(w, "x", 1, 0, FIPC_FOREVER, err)) == FIPC_OK) {
        test_nap();
    }
    return rc;
}

static void pids_again(void *arg) {
    (void)arg;
    CHECK_EQ(getpid(), 1);
    if (unshare(CLONE_NEWNS) != 0 || mount("proc", "/proc", "proc", 0, NULL) != 0) {
        fprintf(stderr, "mounting /proc: %s\n", strerror(errno));
        _exit(CAN_NOT);
    }
    struct abroad *a = test_share(sizeof *a);
    struct fipc_error err;
    /* a reader's pid: taken by a process that does nothing, and then by its replacement */
    a->c = peers_config(1);
    a->c.ops = &peers_fast;
    fipc_queue *w = peers_create(&a->c);
    a->address = peers_address(w);
    pid_t pid = test_fork(attaches_and_reads, a);
    UNTIL(fipc_load32_acquire(&a->phase));
    for (int again = 0; again < 2; again++) {
        CHECK_RC(peers_send(w, "x", 1, 0, FIPC_FOREVER, &err), FIPC_OK);
        UNTIL(fipc_load32_acquire(&a->go));
        kill(pid, SIGKILL);
        CHECK_KILLED(pid);
        fipc_store32_release(&a->phase, 0);
        fork_as(pid, idles, a);
        UNTIL(fipc_load32_acquire(&a->phase));
        CHECK(kill(pid, 0) == 0);
        CHECK_RC(send_until_told(w, &err), FIPC_PEER_DIED);
        CHECK_EQ(err.pid, pid);
        kill(pid, SIGKILL);
        CHECK_KILLED(pid);
        fipc_store32_release(&a->phase, 0);
        fipc_store32_release(&a->go, 0);
        fork_as(pid, attaches_and_reads, a);
        UNTIL(fipc_load32_acquire(&a->phase));
    }
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    fipc_queue_free(w);
    /* a writer's: taken by the writer of another queue, that lies at the same descriptor */
    fipc_store32_release(&a->phase, 0);
    pid = test_fork(makes_another_queue, a);
    UNTIL(fipc_load32_acquire(&a->phase));
    struct fipc_address old = a->address;
    fipc_queue *r = peers_attach_at(&old, 0, &a->c);
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    fipc_store32_release(&a->phase, 0);
    fork_as(pid, makes_another_queue, a);
    UNTIL(fipc_load32_acquire(&a->phase));
    CHECK_EQ(a->address.pid, old.pid);
    CHECK_EQ(a->address.fd, old.fd);
    struct fipc_message m;
    CHECK_RC(peers_recv(r, FIPC_FOREVER, &m, &err), FIPC_PEER_DIED);
    CHECK_EQ(err.pid, pid);
    fipc_queue *lost;
    CHECK_RC(peers_try_attach(&lost, &old, 1, &a->c, &err), FIPC_MISMATCH);
    fipc_queue_free(r);
    r = peers_attach_at(&a->address, 0, &a->c); /* the new one's own readers come to it */
    fipc_queue_free(r);
    kill(pid, SIGKILL);
    CHECK_KILLED(pid);
    test_unshare(a, sizeof *a);
}

static void pids_used_again(void) { /* the next process is the first of its namespace */
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(test_watchdog_s);
        unsigned fds = test_open_fds();
        pids_again(NULL);
        CHECK_EQ(test_open_fds(), fds);
        fflush(NULL);
        _exit(0);
    }
    int status = test_wait_status(pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CAN_NOT) {
        _exit(CAN_NOT);
    }
    CHECK_EQ(status, 0);
}

static void a_pid_that_is_used_again_is_not_taken_for_the_dead(void) {
    with_tmpfs(1024, CLONE_NEWPID, pids_used_again);
}

static const struct test_case cases[] = {
    {"a ring of 8 MiB in a tmpfs of 1 MiB is no space",
     a_ring_of_8_mib_in_a_tmpfs_of_1_mib_is_no_space},
    {"a full tmpfs does not matter to a memfd", a_full_tmpfs_does_not_matter_to_a_memfd},
    {"a tmpfs filled after creation is no space until there is room",
     a_tmpfs_filled_after_creation_is_no_space_until_there_is_room},
    {"the name goes when all have attached", the_name_goes_when_all_have_attached},
    {"only what the dead left is swept", only_what_the_dead_left_is_swept},
    {"a directory that can not be used is said", a_directory_that_can_not_be_used_is_said},
    {"readers in another PID namespace attach by name",
     readers_in_another_pid_namespace_attach_by_name},
    {"a writer in another PID namespace is alive by its lock",
     a_writer_in_another_pid_namespace_is_alive_by_its_lock},
    {"a pid that is used again is not taken for the dead",
     a_pid_that_is_used_again_is_not_taken_for_the_dead},
};

TEST_MAIN(cases)
