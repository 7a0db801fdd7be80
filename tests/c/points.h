/* points.h: every crash point of the sources, what step it belongs to, and what its death means to
 * those who live on. The one list: test_matrix dies at each of them in each role, and fails when
 * the sources have one that is missing here; tests/test_death.py takes its choice from it.
 *
 * One line each, as POINT(name, step, as a reader, as a writer):
 *   -           the role doesn't come by
 *   FREE_AGAIN  it never was a reader: nobody is told, and the rank has missed nothing
 *   DEAD        the writer is told, or evicts it
 *   LEFT        it had left, in order
 *   NOT_BORN    there is no queue; what has a name already is swept
 *   DRAINED     readers read what was published, and are told
 *   CLOSED      it had closed, in order
 */
#define POINTS                                                                                     \
    POINT("create-begin", "create", NONE, NOT_BORN)                                                \
    POINT("create-opened", "create", NONE, NOT_BORN)                                               \
    POINT("create-file", "create", NONE, NOT_BORN)                                                 \
    POINT("create-locked", "create", NONE, NOT_BORN)                                               \
    POINT("create-mapped", "create", NONE, NOT_BORN)                                               \
    POINT("create-reserved", "create", NONE, NOT_BORN)                                             \
    POINT("create-complete", "create", NONE, NOT_BORN)                                             \
    POINT("create-linked", "create", NONE, NOT_BORN)                                               \
    POINT("sweep-found", "sweep", NONE, NOT_BORN)                                                  \
    POINT("sweep-removed", "sweep", NONE, NOT_BORN)                                                \
    POINT("attach-opened", "attach", FREE_AGAIN, NONE)                                             \
    POINT("attach-mapped", "attach", FREE_AGAIN, NONE)                                             \
    POINT("attach-begin", "attach", FREE_AGAIN, NONE)                                              \
    POINT("attach-locked", "attach", FREE_AGAIN, NONE)                                             \
    POINT("attach-described", "attach", FREE_AGAIN, NONE)                                          \
    POINT("attach-counted", "attach", FREE_AGAIN, NONE)                                            \
    POINT("attach-joined", "attach", DEAD, NONE)                                                   \
    POINT("attach-told", "attach", DEAD, NONE)                                                     \
    POINT("attach-done", "attach", DEAD, NONE)                                                     \
    POINT("asleep", "wait", DEAD, DRAINED)                                                         \
    POINT("bell-rung", "wake", DEAD, DRAINED)                                                      \
    POINT("mid-write", "write", NONE, DRAINED)                                                     \
    POINT("pages-reserved", "write", NONE, DRAINED)                                                \
    POINT("loan-lent", "write", NONE, DRAINED)                                                     \
    POINT("before-publish", "publish", NONE, DRAINED)                                              \
    POINT("write-recorded", "publish", NONE, DRAINED)                                              \
    POINT("write-flagged", "publish", NONE, DRAINED)                                               \
    POINT("published", "publish", NONE, DRAINED)                                                   \
    POINT("between-fragments", "fragment", NONE, DRAINED)                                          \
    POINT("mid-read", "read", DEAD, NONE)                                                          \
    POINT("part-taken", "fragment", DEAD, NONE)                                                    \
    POINT("before-ack", "acknowledge", DEAD, NONE)                                                 \
    POINT("ack-stored", "acknowledge", DEAD, NONE)                                                 \
    POINT("acknowledged", "acknowledge", DEAD, NONE)                                               \
    POINT("found-dead", "evict", NONE, DRAINED)                                                    \
    POINT("evict", "evict", NONE, DRAINED)                                                         \
    POINT("evict-cursor", "evict", NONE, DRAINED)                                                  \
    POINT("evicted", "evict", NONE, DRAINED)                                                       \
    POINT("grant-begin", "replace", NONE, DRAINED)                                                 \
    POINT("granted", "replace", NONE, DRAINED)                                                     \
    POINT("ready-stored", "attach", NONE, DRAINED)                                                 \
    POINT("name-gone", "attach", NONE, DRAINED)                                                    \
    POINT("close-begin", "close", DEAD, DRAINED)                                                   \
    POINT("close-stored", "close", NONE, CLOSED)                                                   \
    POINT("close-cursor", "close", DEAD, NONE)                                                     \
    POINT("close-left", "close", LEFT, NONE)                                                       \
    POINT("close-told", "close", LEFT, CLOSED)                                                     \
    POINT("close-unmapped", "close", LEFT, CLOSED)
