/* fipc_test.h: points at which a test may stop or kill the process, and lost wake-ups. Compiled
 * in only with FIPC_TEST_HOOKS; a test of the built package checks that they are absent from it. */
#ifndef FIPC_TEST_H
#define FIPC_TEST_H

#ifdef FIPC_TEST_HOOKS
#include <stdbool.h>
/* Does what FIPC_TEST_POINT="name[:count[:action]]" says when the point is passed for the
 * count-th time (default 1); action is kill (default), stop or pause (sleep until killed). */
void fipc_test_point(const char *name);
/* FIPC_TEST_DROP_WAKES=1: no wake-up is ever delivered. */
bool fipc_test_drop_wake(void);
void fipc_test_set(const char *point, int drop_wakes);
#define fipc_point(name) fipc_test_point(name)
#define fipc_drop_wake() fipc_test_drop_wake()
#else
#define fipc_point(name) ((void)0)
#define fipc_drop_wake() false
#endif

#endif /* FIPC_TEST_H */
