/* verify_main.c: the explorer's command line. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "explore.h"
#include "fipc_layout.h"

const char *explore_place(const void *address) {
    static char text[48];
    snprintf(text, sizeof text, "%p", address);
    return text;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int usage(void) {
    fputs("explore [--list] [--random N] [--all-random] [--most N] [--seed N] [--trace] [--first] "
          "[client ...]\n"
          "  --random N    executions of a client that is searched at random (100000)\n"
          "  --all-random  search every client at random\n"
          "  --first       end at the first client that fails; a search cut short is no failure\n"
          "  --most N      executions after which an exhaustive search gives up (20000000)\n",
          stderr);
    return 2;
}

static const struct verify_client *client_named(const char *name) {
    for (int i = 0; verify_clients[i] != NULL; i++) {
        if (strcmp(verify_clients[i]->name, name) == 0) {
            return verify_clients[i];
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    struct explore_options o = {
        .random_executions = 100000, .most_executions = 20000000, .seed = 1};
    bool first_only = false;
    int first = 1;
    for (; first < argc && strncmp(argv[first], "--", 2) == 0; first++) {
        const char *option = argv[first];
        const char *value = first + 1 < argc ? argv[first + 1] : NULL;
        if (strcmp(option, "--list") == 0) {
            for (int i = 0; verify_clients[i] != NULL; i++) {
                printf("%-14s %s\n", verify_clients[i]->name, verify_clients[i]->what);
            }
            return 0;
        } else if (strcmp(option, "--all-random") == 0) {
            o.at_random = true;
        } else if (strcmp(option, "--trace") == 0) {
            o.trace = true;
        } else if (strcmp(option, "--first") == 0) {
            first_only = true;
        } else if (value == NULL) {
            return usage();
        } else if (strcmp(option, "--random") == 0) {
            o.random_executions = strtoull(value, NULL, 10);
            first++;
        } else if (strcmp(option, "--most") == 0) {
            o.most_executions = strtoull(value, NULL, 10);
            first++;
        } else if (strcmp(option, "--seed") == 0) {
            o.seed = strtoull(value, NULL, 10);
            first++;
        } else {
            return usage();
        }
    }
    int n = 0;
    int failed = 0;
    printf("%-14s %-10s %10s %10s %10s %9s %9s %7s %7s\n", "client", "search", "executions",
           "states", "steps", "stale", "blocked", "longest", "CPU s");
    bool all = first == argc;
    for (int i = 0; all ? verify_clients[i] != NULL : first + i < argc; i++) {
        const struct verify_client *c = all ? verify_clients[i] : client_named(argv[first + i]);
        if (c == NULL) {
            continue;
        }
        n++;
        struct explore_counts counts;
        double t0 = seconds();
        bool passed = explore(c, &o, &counts);
        printf("%-14s %-10s %10llu %10llu %10llu %9llu %9llu %7d %7.1f  %s%s\n", c->name,
               counts.at_random ? "random" : "exhaustive", (unsigned long long)counts.executions,
               (unsigned long long)counts.states, (unsigned long long)counts.steps,
               (unsigned long long)counts.branches, (unsigned long long)counts.blocked,
               counts.deepest, seconds() - t0,
               !passed            ? "FAILED: "
               : counts.cut_short ? "CUT SHORT"
                                  : "ok",
               counts.failure);
        fflush(stdout);
        failed += !passed || (counts.cut_short && !first_only);
        if (!passed && first_only) {
            break;
        }
    }
    if (n == 0) {
        fputs("no such client\n", stderr);
        return 2;
    }
    return failed != 0;
}
