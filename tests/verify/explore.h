/* explore.h: the explorer. See explore.c. */
#ifndef VERIFY_EXPLORE_H
#define VERIFY_EXPLORE_H

#include "verify.h"

struct explore_options {
    bool at_random; /* also where the client could be explored exhaustively */
    bool plain;     /* exhaustive without any reduction: every interleaving, every stale read */
    bool trace;     /* print the execution that fails */
    uint64_t seed;
    uint64_t random_executions;
    uint64_t most_executions; /* of an exhaustive search; more: counts.cut_short */
};

struct explore_counts {
    bool at_random, cut_short;
    uint64_t executions;
    uint64_t blocked;   /* of these ended at a look in vain */
    uint64_t redundant; /* of these turned out to repeat another */
    uint64_t states;    /* points at which a thread was chosen for the first time */
    uint64_t branches;  /* of these read a stale value, or stored behind a newer one */
    uint64_t steps;     /* operations carried out, replays included */
    int deepest;        /* most operations in one execution */
    char failure[512];
};

/* True when no execution fails. */
bool explore(const struct verify_client *c, const struct explore_options *o,
             struct explore_counts *out);

/* A name for an address, for people. */
const char *explore_place(const void *address);

#endif /* VERIFY_EXPLORE_H */
