/* verify.h: what a client is. A client is two or three threads that use the production source on
 * little memory, and an assertion on the whole outcome. native.c runs it with POSIX threads,
 * explore.c under every order, and every stale read, that C11 allows.
 */
#ifndef VERIFY_VERIFY_H
#define VERIFY_VERIFY_H

#include <stdbool.h>
#include <stdint.h>

#include "fastipc.h"

#define VERIFY_MAX_THREADS 4

struct verify_client {
    const char *name;
    const char *what;   /* one line: what must hold */
    unsigned n;         /* threads */
    bool at_random;     /* too large to be explored exhaustively */
    unsigned time_outs; /* how often time may pass a sleeper's deadline: it does so only when
                           everybody sleeps. 0: a sleeper that nobody wakes is a failure. */
    void (*setup)(void);
    void (*run[VERIFY_MAX_THREADS])(void);
    void (*finish)(void); /* after all threads have ended: the assertion on the outcome */
};

/* Ends with NULL. */
extern const struct verify_client *const verify_clients[];

_Noreturn void verify_fail(const char *file, int line, const char *what);
#define REQUIRE(what) ((what) ? (void)0 : verify_fail(__FILE__, __LINE__, #what))

/* After a look in vain: another thread must do something first. (The explorer, when exhaustive,
 * ends the thread here: that the look succeeds later is explored as a later look.) */
void verify_poll(void);
/* One of 0 .. n-1: all of them are explored. */
unsigned verify_choose(unsigned n);
/* The wait seam: sleeps end when the thread is woken, and at no other time (but see time_outs). */
extern const struct fipc_waitops verify_ops;

/* memory.c */
void verify_memory_reset(void);
/* The segment that has been created, for attaching to it. */
void verify_address(struct fipc_address *out);
/* The thread's process ends here, by SIGKILL: the kernel gives up what it holds. */
void verify_die(struct fipc_queue *q);

#endif /* VERIFY_VERIFY_H */
