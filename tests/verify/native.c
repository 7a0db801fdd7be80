/* native.c: the clients with POSIX threads, on what the machine does by itself; and under the thread
 * sanitizer. A sleep ends only by a wake-up (except where time passes in the client): a lost one is
 * a hang, and the alarm's. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fipc_wait.h"
#include "verify.h"

#define WATCHDOG_S 300

static const struct verify_client *client;
static unsigned long long executions;
static pthread_barrier_t barrier;
static _Atomic uint64_t choices;

_Noreturn void verify_fail(const char *file, int line, const char *what) {
    fprintf(stderr, "%s: %s:%d: %s (execution %llu)\n", client->name, file, line, what, executions);
    abort();
}

void verify_poll(void) { sched_yield(); }

unsigned verify_choose(unsigned n) {
    uint64_t c = atomic_fetch_add_explicit(&choices, 1, memory_order_relaxed);
    return (unsigned)((c * UINT64_C(0x9E3779B97F4A7C15) >> 40) % n);
}

static uint64_t native_now(void *ctx) {
    (void)ctx;
    return fipc_now();
}
static int native_wait(void *ctx, const void *word, uint32_t expected, uint64_t deadline) {
    uint64_t end = client->time_outs > 0 ? deadline : FIPC_FOREVER;
    return fipc_wait_platform.wait(ctx, word, expected, end);
}
static void native_wake(void *ctx, const void *word) { fipc_wait_platform.wake(ctx, word); }

const struct fipc_waitops verify_ops = {native_now, native_wait, native_wake, NULL};

static void *thread(void *run) {
    pthread_barrier_wait(&barrier);
    (*(void (*const *)(void))run)();
    return NULL;
}

static void once(void) {
    pthread_t threads[VERIFY_MAX_THREADS];
    client->setup();
    pthread_barrier_init(&barrier, NULL, client->n);
    for (unsigned i = 0; i < client->n; i++) {
        if (pthread_create(&threads[i], NULL, thread, (void *)(uintptr_t)&client->run[i]) != 0) {
            verify_fail(__FILE__, __LINE__, "no thread");
        }
    }
    for (unsigned i = 0; i < client->n; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&barrier);
    client->finish();
    executions++;
}

/* native SECONDS [client ...]: each of them for its share of the seconds, and once at least. */
int main(int argc, char **argv) {
    int n = 0;
    while (verify_clients[n] != NULL) {
        n++;
    }
    int wanted = argc > 2 ? argc - 2 : n;
    uint64_t share = (uint64_t)(strtod(argc > 1 ? argv[1] : "2", NULL) * 1e9) / (uint64_t)wanted;
    for (int i = 0; i < n; i++) {
        client = verify_clients[i];
        bool mine = argc <= 2;
        for (int k = 2; k < argc; k++) {
            mine = mine || strcmp(argv[k], client->name) == 0;
        }
        if (!mine) {
            continue;
        }
        executions = 0;
        uint64_t end = fipc_now() + share;
        alarm(WATCHDOG_S);
        do {
            once();
        } while (fipc_now() < end);
        alarm(0);
        printf("%-14s %10llu executions\n", client->name, executions);
        fflush(stdout);
    }
    return 0;
}
