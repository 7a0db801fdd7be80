/* floor.c: what the machine itself allows, for the benchmarks to be compared with.
 *
 * As a program it prints one line of JSON:
 *
 *     floor [--only pingpong|futex|memcpy] [--ms N]
 *
 *     pingpong_ns   a cache line there and back between two spinning processes
 *     futex_us      a wake-up there and back between two sleeping processes
 *     memcpy_gbs    copies into warm shared memory, by size in bytes
 *
 * The two processes are pinned, so that the scheduler's choice of processors is no part of it.
 *
 * As a shared library (-shared -fPIC) it offers floor_publish and floor_await: the bare mailbox
 * that floor.py's pickling ping-pong is made of. Both are built from this one file by floor.py:
 *
 *     cc -O2 -pthread floor.c -o floor
 *
 * Whoever spins without its peer stops: a forked child looks at its parent, floor_await at the
 * clock, and floor.py runs the program under a time limit.
 */
#define _GNU_SOURCE

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#define LINE 64u

/* Looking at the clock or at the parent costs as much as the thing measured: once in 2^22 turns
 * (a few milliseconds) it costs nothing, and a lost peer is still noticed at once. */
#define LOOK_UP_EVERY (1u << 22)

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- the mailbox --------------------------------------------------------------------------- */

/* One direction between one sender and one receiver. The payload follows at LINE bytes. The sender
 * must not publish before the receiver has answered the last message: a ping-pong does not. */
struct mailbox {
    _Alignas(LINE) _Atomic uint64_t seq;
    uint64_t length; /* travels with seq's release, in the same line: no second miss */
};
_Static_assert(sizeof(struct mailbox) == LINE, "the payload starts on the next line");

void floor_publish(struct mailbox *box, const void *data, uint64_t length, uint64_t seq);
int64_t floor_await(struct mailbox *box, uint64_t seq, double seconds);

void floor_publish(struct mailbox *box, const void *data, uint64_t length, uint64_t seq) {
    memcpy((char *)box + LINE, data, length);
    box->length = length;
    /* Pairs with the acquire in floor_await: payload and length before the sequence number. */
    atomic_store_explicit(&box->seq, seq, memory_order_release);
}

/* The length of message seq, or -1 when it has not come within so many seconds. */
int64_t floor_await(struct mailbox *box, uint64_t seq, double seconds) {
    uint64_t until = 0;
    uint32_t turns = 0;

    while (atomic_load_explicit(&box->seq, memory_order_acquire) != seq) {
        if (++turns % LOOK_UP_EVERY != 0) {
            continue;
        }
        if (until == 0) {
            until = now_ns() + (uint64_t)(seconds * 1e9);
        }
        if (now_ns() > until) {
            return -1;
        }
    }
    return (int64_t)box->length;
}

/* ---- two processes ------------------------------------------------------------------------- */

/* Each word on its own line; 128 bytes, because some processors fetch lines in pairs. */
struct shared {
    _Alignas(128) _Atomic uint64_t ball; /* both play it: odd is a question, even an answer */
    _Alignas(128) _Atomic uint32_t there;
    _Alignas(128) _Atomic uint32_t back;
};

static void *map_shared(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return p;
}

/* The processors that were allowed when the program began; main fills it. */
#ifdef __linux__
static cpu_set_t allowed;
#endif

/* Pins this process to the nth allowed processor; the last one, if there are fewer. */
static void pin(int nth) {
#ifdef __linux__
    cpu_set_t one;
    CPU_ZERO(&one);
    for (unsigned cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            if (nth-- == 0) {
                break;
            }
        }
    }
    sched_setaffinity(0, sizeof one, &one);
#else
    (void)nth;
#endif
}

static void unpin(void) {
#ifdef __linux__
    sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}

/* The caller plays on the first processor, the child on the second. */
static pid_t start(void (*play)(struct shared *), struct shared *shared) {
    pid_t parent = getpid();
    pid_t child;

    pin(0);
    child = fork();
    if (child < 0) {
        perror("fork");
        exit(2);
    }
    if (child == 0) {
#ifdef __linux__
        prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
        pin(1);
        if (getppid() == parent) {
            play(shared);
        }
        _exit(0);
    }
    return child;
}

static void finish(pid_t child) {
    kill(child, SIGKILL);
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
    }
    unpin();
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t n) {
    qsort(values, n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

#define MAX_BATCHES 4096

/* Repeats batches of `turns` until `ms` have passed; the median batch, in ns per turn. A median,
 * because other processes interrupt some of them. */
static double per_turn(void (*batch)(struct shared *, uint32_t), struct shared *shared,
                       uint32_t turns, uint64_t ms) {
    static double values[MAX_BATCHES];
    size_t n = 0;
    uint64_t until;

    batch(shared, turns); /* pages and caches */
    until = now_ns() + ms * 1000000u;
    do {
        uint64_t begin = now_ns();
        batch(shared, turns);
        values[n++] = (double)(now_ns() - begin) / turns;
    } while (n < MAX_BATCHES && now_ns() < until);
    return median(values, n);
}

/* ---- the cache line ------------------------------------------------------------------------ */

static void pingpong_child(struct shared *shared) {
    uint64_t expected = 1;
    pid_t parent = getppid();
    uint32_t turns = 0;

    for (;;) {
        while (atomic_load_explicit(&shared->ball, memory_order_acquire) != expected) {
            if (++turns % LOOK_UP_EVERY == 0 && getppid() != parent) {
                return;
            }
        }
        atomic_store_explicit(&shared->ball, expected + 1, memory_order_release);
        expected += 2;
    }
}

static void pingpong_batch(struct shared *shared, uint32_t turns) {
    uint64_t ball = atomic_load_explicit(&shared->ball, memory_order_relaxed);

    for (uint32_t i = 0; i < turns; i++, ball += 2) {
        atomic_store_explicit(&shared->ball, ball + 1, memory_order_release);
        while (atomic_load_explicit(&shared->ball, memory_order_acquire) != ball + 2) {
        }
    }
}

/* Less than 0 where two processes cannot spin at each other: on one processor it would measure
 * the scheduler's time slice. */
static double pingpong_ns(uint64_t ms) {
    struct shared *shared;
    pid_t child;
    double ns;

#ifdef __linux__
    if (CPU_COUNT(&allowed) < 2) {
        return -1;
    }
#endif
    shared = map_shared(sizeof *shared);
    child = start(pingpong_child, shared);
    ns = per_turn(pingpong_batch, shared, 2000, ms);
    finish(child);
    munmap(shared, sizeof *shared);
    return ns;
}

/* ---- the futex ----------------------------------------------------------------------------- */

#ifdef __linux__

/* Wakes somebody who sleeps, and waits for him to do so: two processes that are both awake would
 * otherwise answer each other's words without ever sleeping, and no wake-up would be measured. */
static void futex_wake_sleeper(_Atomic uint32_t *word) {
    while (syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0) != 1) {
        sched_yield(); /* on one processor he cannot fall asleep before we let him run */
    }
}

static void futex_sleep(_Atomic uint32_t *word) {
    /* The word stays 0: only being woken ends this, or a signal. */
    while (syscall(SYS_futex, word, FUTEX_WAIT, 0, NULL, NULL, 0) != 0) {
    }
}

static void futex_child(struct shared *shared) {
    for (;;) {
        futex_sleep(&shared->there);
        futex_wake_sleeper(&shared->back);
    }
}

static void futex_batch(struct shared *shared, uint32_t turns) {
    for (uint32_t i = 0; i < turns; i++) {
        futex_wake_sleeper(&shared->there);
        futex_sleep(&shared->back);
    }
}

static double futex_us(uint64_t ms) {
    struct shared *shared = map_shared(sizeof *shared);
    pid_t child = start(futex_child, shared);
    double ns = per_turn(futex_batch, shared, 20, ms);

    finish(child);
    munmap(shared, sizeof *shared);
    return ns / 1e3;
}

#else

static double futex_us(uint64_t ms) {
    (void)ms;
    return -1;
}

#endif

/* ---- memcpy -------------------------------------------------------------------------------- */

static double memcpy_gbs(size_t size, uint64_t ms) {
    static double values[MAX_BATCHES];
    /* A clock read costs 25 ns: several copies of a small size share one. */
    size_t copies = size < (1u << 20) ? (1u << 20) / size : 1;
    char *from = malloc(size), *to = map_shared(size);
    size_t n = 0;
    uint64_t until;

    if (from == NULL) {
        perror("malloc");
        exit(2);
    }
    memset(from, 1, size);
    memset(to, 2, size); /* pages are there before the clock runs */
    until = now_ns() + ms * 1000000u;
    do {
        uint64_t begin = now_ns();
        for (size_t i = 0; i < copies; i++) {
            memcpy(to, from, size);
            __asm__ volatile("" : : "r"(to), "r"(from) : "memory"); /* the copy must happen */
        }
        values[n++] = (double)(size * copies) / (double)(now_ns() - begin);
    } while (n < MAX_BATCHES && now_ns() < until);
    free(from);
    munmap(to, size);
    return median(values, n);
}

/* ---- the program --------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    static const size_t sizes[] = {1u << 10, 64u << 10, 4u << 20, 32u << 20};
    const char *only = NULL;
    const char *comma = "";
    uint64_t ms = 100;

    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--only") == 0) {
            only = argv[i + 1];
        } else if (i + 1 < argc && strcmp(argv[i], "--ms") == 0) {
            ms = strtoull(argv[i + 1], NULL, 10);
        } else {
            fprintf(stderr, "usage: %s [--only pingpong|futex|memcpy] [--ms N]\n", argv[0]);
            return 2;
        }
    }
#ifdef __linux__
    sched_getaffinity(0, sizeof allowed, &allowed);
#endif
    printf("{");
    fflush(stdout); /* a forked child must not inherit, and print, what is buffered */
    if (only == NULL || strcmp(only, "pingpong") == 0) {
        printf("\"pingpong_ns\": %.1f", pingpong_ns(ms));
        comma = ", ";
        fflush(stdout);
    }
    if (only == NULL || strcmp(only, "futex") == 0) {
        printf("%s\"futex_us\": %.2f", comma, futex_us(ms));
        comma = ", ";
        fflush(stdout);
    }
    if (only == NULL || strcmp(only, "memcpy") == 0) {
        printf("%s\"memcpy_gbs\": {", comma);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            printf("%s\"%zu\": %.2f", i ? ", " : "", sizes[i], memcpy_gbs(sizes[i], ms / 4));
        }
        printf("}");
    }
    printf("}\n");
    return 0;
}
