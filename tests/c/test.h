/* test.h: what every pure-C test shares: checks that name their line, a watchdog, forked helpers,
 * and a look for leftovers after each case.
 *
 * A test is a table of cases whose names are sentences about the unit. The binary runs all of them,
 * or those whose name contains the first argument; it ends with 0, with 1 at the first failure, or
 * with 77 when a case could not run here.
 */
#ifndef FIPC_TESTS_TEST_H
#define FIPC_TESTS_TEST_H

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fastipc.h"

#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define TEST_TSAN 1
#endif
#if __has_feature(address_sanitizer)
#define TEST_ASAN 1
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define TEST_TSAN 1
#endif
#ifdef __SANITIZE_ADDRESS__
#define TEST_ASAN 1
#endif
#ifndef TEST_TSAN
#define TEST_TSAN 0
#endif
#ifndef TEST_ASAN
#define TEST_ASAN 0
#endif
#ifndef TEST_QEMU
#define TEST_QEMU 0
#endif
/* How much of a long random run to do: instrumented and emulated code is ten times slower. */
#define TEST_SCALE(n) (TEST_TSAN || TEST_ASAN || TEST_QEMU ? ((n) + 9) / 10 : (n))

static unsigned test_watchdog_s = 300; /* per case: a hang, never a slow machine */
static const char *volatile test_name = "(none)";
static bool test_skipped;
static uint64_t test_random_state;
static uint64_t test_first_seed = 1; /* FIPC_TEST_SEED */

/* ---- checks ------------------------------------------------------------------------------- */

__attribute__((noreturn, format(printf, 3, 4))) static inline void
test_fail(const char *file, int line, const char *format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "FAILED in \"%s\" (pid %d): %s:%d: %s\n", test_name, (int)getpid(), file, line,
            text);
    fflush(stderr);
    _exit(1);
}

#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            test_fail(__FILE__, __LINE__, "%s", #condition);                                       \
        }                                                                                          \
    } while (0)
/* Two unsigned or non-negative numbers. */
#define CHECK_EQ(got, want)                                                                        \
    test_check_eq(__FILE__, __LINE__, #got " == " #want, (uint64_t)(got), (uint64_t)(want))
/* Two values of enum fipc_status. */
#define CHECK_RC(got, want) test_check_rc(__FILE__, __LINE__, #got, (got), (want))

static inline void test_check_eq(const char *file, int line, const char *what, uint64_t got,
                                 uint64_t want) {
    if (got != want) {
        test_fail(file, line,
                  "%s: got %" PRIu64 " (0x%" PRIx64 "), want %" PRIu64 " (0x%" PRIx64 ")", what,
                  got, got, want, want);
    }
}

static inline void test_check_rc(const char *file, int line, const char *what, int got, int want) {
    if (got != want) {
        test_fail(file, line, "%s: got %d (%s), want %d (%s)", what, got, fipc_status_text(got),
                  want, fipc_status_text(want));
    }
}

/* Notes that the case can't run here; the caller then returns. */
__attribute__((format(printf, 1, 2))) static inline void test_skip(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("SKIPPED \"%s\": ", test_name);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    test_skipped = true;
}

/* ---- random numbers ----------------------------------------------------------------------- */

static inline uint64_t test_mix(uint64_t z) { /* splitmix64's finalizer */
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* A stream of its own, for a thread. */
static inline uint64_t test_next(uint64_t *state) {
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return test_mix(*state);
}

static inline uint64_t test_random(void) { return test_next(&test_random_state); }

/* 0 .. n-1 */
static inline uint64_t test_below(uint64_t n) { return test_random() % n; }

static inline bool test_chance(uint64_t one_in) { return test_below(one_in) == 0; }

/* Each power of two equally likely, from 1 to max. */
static inline uint64_t test_log_uniform(uint64_t random, uint64_t max) {
    unsigned bits = 0;
    while (bits < 63 && max >> (bits + 1) != 0) {
        bits++;
    }
    uint64_t low = UINT64_C(1) << random % (bits + 1);
    uint64_t high = low <= max / 2 ? 2 * low - 1 : max;
    return low + test_mix(random) % (high - low + 1);
}

static inline uint64_t test_random_seed(void) { return test_first_seed; }

/* ---- waiting, processes ------------------------------------------------------------------- */

static inline void test_nap(void) {
    struct timespec t = {.tv_nsec = 200000};
    nanosleep(&t, NULL);
}

/* Waits for a condition; only the watchdog bounds it. */
#define UNTIL(condition)                                                                           \
    while (!(condition)) {                                                                         \
        test_nap();                                                                                \
    }

/* Memory that forked helpers share with the test; unmapped by test_unshare. */
static inline void *test_share(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}
static inline void test_unshare(void *p, size_t bytes) { munmap(p, bytes); }

/* Runs fn in a child that dies with this process. */
static inline pid_t test_fork(void (*fn)(void *), void *arg) {
    fflush(NULL);
    pid_t parent = getpid();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        fn(arg);
        fflush(NULL);
        _exit(0);
    }
    return pid;
}

static inline int test_wait_status(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) != pid) {
        CHECK(errno == EINTR);
    }
    return status;
}

#define CHECK_EXITED(pid)                                                                          \
    do {                                                                                           \
        int status_ = test_wait_status(pid);                                                       \
        if (!WIFEXITED(status_) || WEXITSTATUS(status_) != 0) {                                    \
            test_fail(__FILE__, __LINE__, "child %d ended with wait status 0x%x", (int)(pid),      \
                      (unsigned)status_);                                                          \
        }                                                                                          \
    } while (0)

#define CHECK_KILLED(pid)                                                                          \
    do {                                                                                           \
        int status_ = test_wait_status(pid);                                                       \
        if (!WIFSIGNALED(status_) || WTERMSIG(status_) != SIGKILL) {                               \
            test_fail(__FILE__, __LINE__, "child %d was not killed: wait status 0x%x", (int)(pid), \
                      (unsigned)status_);                                                          \
        }                                                                                          \
    } while (0)

/* ---- leftovers ---------------------------------------------------------------------------- */

static inline unsigned test_open_fds(void) {
    unsigned n = 0;
    DIR *d = opendir("/proc/self/fd");
    CHECK(d != NULL);
    while (readdir(d) != NULL) {
        n++;
    }
    closedir(d);
    return n;
}

static inline unsigned test_mappings(const char *of) {
    char line[4096];
    unsigned n = 0;
    FILE *f = fopen("/proc/self/maps", "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        n += strstr(line, of) != NULL;
    }
    fclose(f);
    return n;
}

/* ---- main --------------------------------------------------------------------------------- */

struct test_case {
    const char *name;
    void (*run)(void);
};

static inline void test_bark(int signal) {
    (void)signal;
    static const char text[] = "FAILED: the watchdog's time is over, in: ";
    ssize_t rc = write(2, text, sizeof text - 1);
    rc = write(2, test_name, strlen(test_name));
    rc = write(2, "\n", 1);
    (void)rc;
    _exit(1);
}

static inline int test_main(const struct test_case *cases, size_t n, const char *only) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGALRM, test_bark);
    const char *watchdog = getenv("FIPC_TEST_WATCHDOG");
    test_watchdog_s = watchdog != NULL ? (unsigned)atoi(watchdog) : test_watchdog_s;
    const char *seed = getenv("FIPC_TEST_SEED");
    test_first_seed = seed != NULL ? strtoull(seed, NULL, 0) : 1;
    for (size_t i = 0; i < n; i++) {
        if (only != NULL && strstr(cases[i].name, only) == NULL) {
            continue;
        }
        test_name = cases[i].name;
        test_random_state =
            test_first_seed << 32 | i; /* so that a case alone does what it does in company */
        unsigned fds = test_open_fds();
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        alarm(test_watchdog_s);
        cases[i].run();
        alarm(0);
        clock_gettime(CLOCK_MONOTONIC, &end);
        CHECK_EQ(test_open_fds(), fds);
        CHECK_EQ(test_mappings("memfd:fastipc"), 0);
        CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
        printf("%7.3f s  %s\n",
               (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) / 1e9,
               test_name);
    }
    return test_skipped ? 77 : 0;
}

#define TEST_MAIN(cases)                                                                           \
    int main(int argc, char **argv) {                                                              \
        return test_main(cases, sizeof(cases) / sizeof *(cases), argc > 1 ? argv[1] : NULL);       \
    }

#endif /* FIPC_TESTS_TEST_H */
