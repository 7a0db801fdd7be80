/* litmus.c: is the explorer right? Shapes of which the memory model's literature knows whether
 * their weak outcome is allowed: an allowed one must be found, a forbidden one must not. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "explore.h"
#include "fipc_atomic.h"

static fipc_a32 x, y;
static uint32_t data; /* plain */
static uint32_t r[8];
static bool weak; /* the outcome in question, of this execution */
static uint64_t n_weak;

static void setup(void) {
    memset(&x, 0, sizeof x);
    memset(&y, 0, sizeof y);
    data = 0;
    memset(r, 0xff, sizeof r);
}

#define X(order, v) fipc_store32_##order(&x, v)
#define Y(order, v) fipc_store32_##order(&y, v)
#define RX(order) fipc_load32_##order(&x)
#define RY(order) fipc_load32_##order(&y)

/* SHAPE(name, weak outcome, threads...) with up to four bodies */
#define BODY(name, i, ...)                                                                         \
    static void name##_##i(void) { __VA_ARGS__; }
#define FINISH(name, outcome)                                                                      \
    static void name##_finish(void) {                                                              \
        weak = (outcome);                                                                          \
        n_weak += weak;                                                                            \
    }

/* message passing */
#define MP(name, out, in)                                                                          \
    BODY(name, 0, X(relaxed, 1); Y(out, 1))                                                        \
    BODY(name, 1, r[0] = RY(in); r[1] = RX(relaxed))                                               \
    FINISH(name, r[0] == 1 && r[1] == 0)
MP(mp_rel_acq, release, acquire)
MP(mp_rel_rlx, release, relaxed)
MP(mp_rlx_acq, relaxed, acquire)
MP(mp_rlx_rlx, relaxed, relaxed)
MP(mp_sc_sc, seqcst, seqcst)

/* what is stored sequentially consistent is not for that before what is stored relaxed after it */
BODY(mp_sc_data, 0, X(seqcst, 1); Y(relaxed, 1))
BODY(mp_sc_data, 1, r[0] = RY(relaxed); r[1] = RX(seqcst))
FINISH(mp_sc_data, r[0] == 1 && r[1] == 0)
BODY(mp_sc_data_rel, 0, X(seqcst, 1); Y(release, 1))
BODY(mp_sc_data_rel, 1, r[0] = RY(acquire); r[1] = RX(seqcst))
FINISH(mp_sc_data_rel, r[0] == 1 && r[1] == 0)

/* store buffering */
#define SB(name, out, in)                                                                          \
    BODY(name, 0, X(out, 1); r[0] = RY(in))                                                        \
    BODY(name, 1, Y(out, 1); r[1] = RX(in))                                                        \
    FINISH(name, r[0] == 0 && r[1] == 0)
SB(sb_sc, seqcst, seqcst)
SB(sb_rel_acq, release, acquire)
SB(sb_sc_acq, seqcst, acquire)
SB(sb_rel_sc, release, seqcst)
SB(sb_rlx, relaxed, relaxed)
/* one side with a read-modify-write, as a sleeper announces itself */
#define SB_RMW(name, change, in)                                                                   \
    BODY(name, 0, X(seqcst, 1); r[0] = RY(seqcst))                                                 \
    BODY(name, 1, fipc_or32_##change(&y, 1); r[1] = RX(in))                                        \
    FINISH(name, r[0] == 0 && r[1] == 0)
SB_RMW(sb_rmw_sc, seqcst, seqcst)
SB_RMW(sb_rmw_acqrel, acqrel, seqcst)
SB_RMW(sb_rmw_look_acq, seqcst, acquire)
/* both with a read-modify-write of the same word: ordered whatever the order */
BODY(sb_same, 0, X(relaxed, 1); r[0] = fipc_add32_acqrel(&y, 1); r[2] = RX(relaxed))
BODY(sb_same, 1, r[3] = fipc_add32_acqrel(&y, 1); r[1] = RX(relaxed))
FINISH(sb_same, r[3] == 1 && r[1] == 0)

/* load buffering: allowed by C11, left out by the explorer (and by RC11) */
BODY(lb, 0, r[0] = RX(relaxed); Y(relaxed, 1))
BODY(lb, 1, r[1] = RY(relaxed); X(relaxed, 1))
FINISH(lb, r[0] == 1 && r[1] == 1)

/* independent reads of independent writes */
#define IRIW(name, out, in)                                                                        \
    BODY(name, 0, X(out, 1))                                                                       \
    BODY(name, 1, Y(out, 1))                                                                       \
    BODY(name, 2, r[0] = RX(in); r[1] = RY(in))                                                    \
    BODY(name, 3, r[2] = RY(in); r[3] = RX(in))                                                    \
    FINISH(name, r[0] == 1 && r[1] == 0 && r[2] == 1 && r[3] == 0)
IRIW(iriw_sc, seqcst, seqcst)
IRIW(iriw_rel_acq, release, acquire)

/* coherence: one word's stores are seen in one order */
BODY(corr, 0, X(relaxed, 1); X(relaxed, 2))
BODY(corr, 1, r[0] = RX(relaxed); r[1] = RX(relaxed))
FINISH(corr, r[0] > r[1])
BODY(corr2, 0, X(relaxed, 1))
BODY(corr2, 1, X(relaxed, 2))
BODY(corr2, 2, r[0] = RX(relaxed); r[1] = RX(relaxed))
BODY(corr2, 3, r[2] = RX(relaxed); r[3] = RX(relaxed))
FINISH(corr2, r[0] == 1 && r[1] == 2 && r[2] == 2 && r[3] == 1)
BODY(cowr, 0, X(relaxed, 1); r[0] = RX(relaxed))
BODY(cowr, 1, X(relaxed, 2); r[1] = RX(relaxed))
FINISH(cowr, r[0] == 2 && r[1] == 1)
/* what happens before a read is not read past */
BODY(cowr_mp, 0, X(relaxed, 1); X(relaxed, 2); Y(release, 1))
BODY(cowr_mp, 1, r[0] = RY(acquire); r[1] = RX(relaxed))
FINISH(cowr_mp, r[0] == 1 && r[1] == 1)

/* two words, each stored by two threads */
#define WW(name, order)                                                                            \
    BODY(name, 0, X(order, 1); Y(order, 2))                                                        \
    BODY(name, 1, Y(order, 1); X(order, 2))                                                        \
    FINISH(name, RX(relaxed) == 1 && RY(relaxed) == 1)
WW(ww_rlx, relaxed)
WW(ww_rel, release)
WW(ww_sc, seqcst)

/* a store overtaken by a load's thread: S and R */
#define SHAPE_R(name, out, in)                                                                     \
    BODY(name, 0, X(out, 1); Y(out, 1))                                                            \
    BODY(name, 1, Y(out, 2); r[0] = RX(in))                                                        \
    FINISH(name, RY(relaxed) == 2 && r[0] == 0)
SHAPE_R(r_sc, seqcst, seqcst)
SHAPE_R(r_rel, release, acquire)
#define SHAPE_S(name, out, in)                                                                     \
    BODY(name, 0, X(relaxed, 2); Y(out, 1))                                                        \
    BODY(name, 1, r[0] = RY(in); X(relaxed, 1))                                                    \
    FINISH(name, r[0] == 1 && RX(relaxed) == 2)
SHAPE_S(s_rel_acq, release, acquire)
SHAPE_S(s_rlx, relaxed, relaxed)

/* causality through a third thread */
#define WRC(name, out, in)                                                                         \
    BODY(name, 0, X(relaxed, 1))                                                                   \
    BODY(name, 1, r[0] = RX(relaxed); Y(out, 1))                                                   \
    BODY(name, 2, r[1] = RY(in); r[2] = RX(relaxed))                                               \
    FINISH(name, r[0] == 1 && r[1] == 1 && r[2] == 0)
WRC(wrc_rel_acq, release, acquire)
WRC(wrc_rlx, relaxed, relaxed)

/* a release sequence: another thread's read-modify-write hands on, its plain store doesn't */
BODY(rs_rmw, 0, X(relaxed, 1); Y(release, 1))
BODY(rs_rmw, 1, fipc_add32_relaxed(&y, 1))
BODY(rs_rmw, 2, r[0] = RY(acquire); r[1] = RX(relaxed))
FINISH(rs_rmw, r[0] == 2 && r[1] == 0 && r[2] == 0)
BODY(rs_cas, 0, X(relaxed, 1); Y(release, 1))
BODY(rs_cas, 1, uint32_t one = 1; fipc_cas32_relaxed(&y, &one, 5))
BODY(rs_cas, 2, r[0] = RY(acquire); r[1] = RX(relaxed))
FINISH(rs_cas, r[0] == 5 && r[1] == 0)
BODY(rs_store, 0, X(relaxed, 1); Y(release, 1))
BODY(rs_store, 1, r[2] = RY(relaxed); if (r[2] == 1) { Y(relaxed, 2); })
BODY(rs_store, 2, r[0] = RY(acquire); r[1] = RX(relaxed))
FINISH(rs_store, r[0] == 2 && r[1] == 0)

/* atomicity */
BODY(rmw, 0, r[0] = fipc_add32_relaxed(&x, 1))
BODY(rmw, 1, r[1] = fipc_add32_relaxed(&x, 1))
FINISH(rmw, r[0] == r[1] || RX(relaxed) != 2)
BODY(rmw_store, 0, r[0] = fipc_swap32_relaxed(&x, 1))
BODY(rmw_store, 1, X(relaxed, 2))
FINISH(rmw_store, r[0] == 0 && RX(relaxed) == 1)

/* plain memory: a race is a failure */
#define PLAIN(name, out, in)                                                                       \
    BODY(name, 0, verify_store32(&data, 7); Y(out, 1))                                             \
    BODY(name, 1, if (RY(in) == 1) { r[0] = verify_load32(&data); })                               \
    FINISH(name, r[0] != 7 && r[0] != 0xffffffff)
void __tsan_write4(void *p);
void __tsan_read4(void *p);
static void verify_store32(uint32_t *p, uint32_t v) {
    __tsan_write4(p);
    *p = v;
}
static uint32_t verify_load32(uint32_t *p) {
    __tsan_read4(p);
    return *p;
}
PLAIN(plain_rel_acq, release, acquire)
PLAIN(plain_rel_rlx, release, relaxed)
PLAIN(plain_rlx_acq, relaxed, acquire)
/* too late: the store has been released already */
BODY(plain_late, 0, Y(release, 1); verify_store32(&data, 7))
BODY(plain_late, 1, if (RY(acquire) == 1) { r[0] = verify_load32(&data); })
FINISH(plain_late, false)
/* a load that must be over before the store that lets the other side overwrite */
#define REUSE(name, out, in)                                                                       \
    BODY(name, 0, r[0] = verify_load32(&data); Y(out, 1))                                          \
    BODY(name, 1, if (RY(in) == 1) { verify_store32(&data, 7); })                                  \
    FINISH(name, r[0] != 0)
REUSE(reuse_rel_acq, release, acquire)
REUSE(reuse_rlx_acq, relaxed, acquire)
REUSE(reuse_rel_rlx, release, relaxed)

/* sleeping: the word changes before the wake-up */
static void sleeper(void) { verify_ops.wait(NULL, &x, 0, FIPC_FOREVER); }
BODY(sleep_ok, 0, sleeper())
BODY(sleep_ok, 1, X(relaxed, 1); verify_ops.wake(NULL, &x))
FINISH(sleep_ok, RX(relaxed) != 1)
BODY(sleep_lost, 0, sleeper())
BODY(sleep_lost, 1, verify_ops.wake(NULL, &x); X(relaxed, 1))
FINISH(sleep_lost, false)

enum verdict { FORBIDDEN, ALLOWED, FAILS };

#define TWO(n, v) {{#n, "", 2, false, 0, setup, {n##_0, n##_1}, n##_finish}, v}
#define THREE(n, v) {{#n, "", 3, false, 0, setup, {n##_0, n##_1, n##_2}, n##_finish}, v}
#define FOUR(n, v) {{#n, "", 4, false, 0, setup, {n##_0, n##_1, n##_2, n##_3}, n##_finish}, v}

static const struct {
    struct verify_client client;
    enum verdict verdict;
} SHAPES[] = {
    TWO(mp_rel_acq, FORBIDDEN),
    TWO(mp_sc_sc, FORBIDDEN),
    TWO(mp_rel_rlx, ALLOWED),
    TWO(mp_rlx_acq, ALLOWED),
    TWO(mp_rlx_rlx, ALLOWED),
    TWO(mp_sc_data, ALLOWED),
    TWO(mp_sc_data_rel, FORBIDDEN),
    TWO(sb_sc, FORBIDDEN),
    TWO(sb_rel_acq, ALLOWED),
    TWO(sb_sc_acq, ALLOWED),
    TWO(sb_rel_sc, ALLOWED),
    TWO(sb_rlx, ALLOWED),
    TWO(sb_rmw_sc, FORBIDDEN),
    TWO(sb_rmw_acqrel, ALLOWED),
    TWO(sb_rmw_look_acq, ALLOWED),
    TWO(sb_same, FORBIDDEN),
    TWO(lb, FORBIDDEN),
    FOUR(iriw_sc, FORBIDDEN),
    FOUR(iriw_rel_acq, ALLOWED),
    TWO(corr, FORBIDDEN),
    FOUR(corr2, FORBIDDEN),
    TWO(cowr, FORBIDDEN),
    TWO(cowr_mp, FORBIDDEN),
    TWO(ww_rlx, ALLOWED),
    TWO(ww_rel, ALLOWED),
    TWO(ww_sc, FORBIDDEN),
    TWO(r_sc, FORBIDDEN),
    TWO(r_rel, ALLOWED),
    TWO(s_rel_acq, FORBIDDEN),
    TWO(s_rlx, ALLOWED),
    THREE(wrc_rel_acq, FORBIDDEN),
    THREE(wrc_rlx, ALLOWED),
    THREE(rs_rmw, FORBIDDEN),
    THREE(rs_cas, FORBIDDEN),
    THREE(rs_store, ALLOWED),
    TWO(rmw, FORBIDDEN),
    TWO(rmw_store, FORBIDDEN),
    TWO(plain_rel_acq, FORBIDDEN),
    TWO(plain_rel_rlx, FAILS),
    TWO(plain_rlx_acq, FAILS),
    TWO(plain_late, FAILS),
    TWO(reuse_rel_acq, FORBIDDEN),
    TWO(reuse_rlx_acq, FAILS),
    TWO(reuse_rel_rlx, FAILS),
    TWO(sleep_ok, FORBIDDEN),
    TWO(sleep_lost, FAILS),
};

const char *explore_place(const void *address) {
    return address == &x ? "x" : address == &y ? "y" : "?";
}

/* ---- the reduction, against none ------------------------------------------------------------- */

/* A program of up to three threads with up to three operations each on two words, drawn at random;
 * the set of its outcomes must be the same whether the search leaves out what it takes for
 * repetitions or not. */
#define OPERATIONS 3
static uint8_t program[3][OPERATIONS];
static uint8_t n_operations[3];
static uint64_t outcomes[4096];
static unsigned n_outcomes;

static void operate(unsigned thread) {
    uint64_t all = 0;
    for (unsigned i = 0; i < n_operations[thread]; i++) {
        fipc_a32 *p = program[thread][i] & 1 ? &x : &y;
        uint32_t got = 0;
        uint32_t v = thread * OPERATIONS + i + 1;
        uint32_t zero = 0;
        switch (program[thread][i] >> 1) {
        case 0: got = fipc_load32_relaxed(p); break;
        case 1: got = fipc_load32_acquire(p); break;
        case 2: got = fipc_load32_seqcst(p); break;
        case 3: fipc_store32_relaxed(p, v); break;
        case 4: fipc_store32_release(p, v); break;
        case 5: fipc_store32_seqcst(p, v); break;
        case 6: got = fipc_swap32_relaxed(p, v); break;
        case 7: got = fipc_swap32_acqrel(p, v); break;
        case 8: got = fipc_swap32_seqcst(p, v); break;
        case 9: got = fipc_cas32_acquire(p, &zero, v) ? 15 : zero; break;
        case 10: got = fipc_cas32_seqcst(p, &zero, v) ? 15 : zero; break;
        }
        all = all << 4 | got;
    }
    r[thread] = (uint32_t)all;
}
static void operate_0(void) { operate(0); }
static void operate_1(void) { operate(1); }
static void operate_2(void) { operate(2); }

static void record(void) {
    uint64_t key = (uint64_t)(r[0] & 0xfff) | (uint64_t)(r[1] & 0xfff) << 12 |
                   (uint64_t)(r[2] & 0xfff) << 24 | (uint64_t)RX(relaxed) << 36 |
                   (uint64_t)RY(relaxed) << 40;
    for (unsigned i = 0; i < n_outcomes; i++) {
        if (outcomes[i] == key) {
            return;
        }
    }
    if (n_outcomes == sizeof outcomes / sizeof outcomes[0]) {
        verify_fail(__FILE__, __LINE__, "more outcomes than there is room for");
    }
    outcomes[n_outcomes++] = key;
}

static int compare(unsigned programs) {
    uint32_t seed = 12345;
    uint64_t executions[2] = {0, 0};
    for (unsigned n = 0; n < programs; n++) {
        struct verify_client c = {
            "program", "", 2 + n % 2, false, 0, setup, {operate_0, operate_1, operate_2}, record};
        for (unsigned i = 0; i < 3; i++) {
            n_operations[i] = (uint8_t)(c.n == 2 ? OPERATIONS : 2);
            for (unsigned k = 0; k < OPERATIONS; k++) {
                seed = seed * 1103515245 + 12345;
                program[i][k] = (uint8_t)((seed >> 8) % 22);
            }
        }
        unsigned found[2];
        for (int plain = 0; plain < 2; plain++) {
            struct explore_options o = {.plain = plain, .most_executions = 10000000};
            struct explore_counts counts;
            n_outcomes = 0;
            if (!explore(&c, &o, &counts) || counts.cut_short) {
                printf("program %u: %s\n", n, counts.failure);
                return 1;
            }
            executions[plain] += counts.executions;
            found[plain] = n_outcomes;
        }
        /* the reduced search finds no more than the plain one does: it is a part of it */
        if (found[0] != found[1]) {
            printf("program %u: %u outcomes with the reduction, %u without\n", n, found[0],
                   found[1]);
            for (unsigned i = 0; i < c.n; i++) {
                for (unsigned k = 0; k < n_operations[i]; k++) {
                    printf("  thread %u: operation %u on %c\n", i, program[i][k] >> 1,
                           program[i][k] & 1 ? 'x' : 'y');
                }
            }
            return 1;
        }
    }
    printf("reduction: the same outcomes of %u random programs by %llu executions as by %llu\n",
           programs, (unsigned long long)executions[0], (unsigned long long)executions[1]);
    return 0;
}

int main(int argc, char **argv) {
    static const char *const VERDICTS[] = {"forbidden", "allowed", "fails"};
    int wrong = 0;
    printf("%-16s %-10s %-32s %-32s\n", "shape", "expected", "exhaustive", "random");
    for (unsigned i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++) {
        printf("%-16s %-10s", SHAPES[i].client.name, VERDICTS[SHAPES[i].verdict]);
        bool right = true;
        for (int at_random = 0; at_random < 2; at_random++) {
            struct explore_options o = {.at_random = at_random,
                                        .seed = 1,
                                        .random_executions = 5000,
                                        .most_executions = 1000000};
            struct explore_counts c;
            char text[64];
            n_weak = 0;
            bool passed = explore(&SHAPES[i].client, &o, &c);
            if (!passed) {
                snprintf(text, sizeof text, "%.31s", c.failure);
            } else {
                snprintf(text, sizeof text, "%llu of %llu", (unsigned long long)n_weak,
                         (unsigned long long)c.executions);
            }
            printf(" %-32s", text);
            enum verdict got = !passed ? FAILS : n_weak > 0 ? ALLOWED : FORBIDDEN;
            right = right && got == SHAPES[i].verdict && !c.cut_short;
        }
        printf("%s\n", right ? "" : " WRONG");
        wrong += !right;
    }
    printf("%s\n", wrong == 0 ? "litmus: all as expected" : "litmus: the explorer is wrong");
    return wrong != 0 || compare(argc > 1 ? (unsigned)atoi(argv[1]) : 2000);
}
