#include "fipc_test.h"

#ifdef FIPC_TEST_HOOKS

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char point[64];
static char action[16];
static int countdown;
static int drop_wakes;
static int loaded;

void fipc_test_set(const char *spec, int drop) {
    loaded = 1;
    drop_wakes = drop;
    point[0] = 0;
    countdown = 1;
    snprintf(action, sizeof action, "kill");
    if (spec != NULL) {
        sscanf(spec, "%63[^:]:%d:%15s", point, &countdown, action);
    }
}

static void load(void) {
    if (!loaded) {
        const char *drop = getenv("FIPC_TEST_DROP_WAKES");
        fipc_test_set(getenv("FIPC_TEST_POINT"), drop != NULL && drop[0] == '1');
    }
}

bool fipc_test_drop_wake(void) {
    load();
    return drop_wakes != 0;
}

void fipc_test_point(const char *name) {
    load();
    if (point[0] == 0 || strcmp(point, name) != 0 || --countdown != 0) {
        return;
    }
    if (strcmp(action, "stop") == 0) {
        raise(SIGSTOP);
    } else if (strcmp(action, "pause") == 0) {
        for (;;) {
            pause();
        }
    } else {
        raise(SIGKILL);
    }
}

#else
/* ISO C wants at least one declaration in a file. */
typedef int fipc_test_is_absent;
#endif
