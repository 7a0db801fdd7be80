/* every_order.h: <stdatomic.h> in the words of fipc_atomic.h, with every order of every operation
 * (FIPC_ATOMIC_HEADER): so that a mutant, which is another order, compiles natively too. */
#ifndef VERIFY_EVERY_ORDER_H
#define VERIFY_EVERY_ORDER_H

#include <stdatomic.h>

typedef _Atomic(uint32_t) fipc_a32;
typedef _Atomic(uint64_t) fipc_a64;

#define ORDER_relaxed memory_order_relaxed
#define ORDER_acquire memory_order_acquire
#define ORDER_release memory_order_release
#define ORDER_acqrel memory_order_acq_rel
#define ORDER_seqcst memory_order_seq_cst

#define EVERY_LOAD(bits, order)                                                                    \
    static inline uint##bits##_t fipc_load##bits##_##order(const fipc_a##bits *p) {                \
        return atomic_load_explicit(p, ORDER_##order);                                             \
    }
#define EVERY_STORE(bits, order)                                                                   \
    static inline void fipc_store##bits##_##order(fipc_a##bits *p, uint##bits##_t v) {             \
        atomic_store_explicit(p, v, ORDER_##order);                                                \
    }
#define EVERY_RMW(bits, name, function, order)                                                     \
    static inline uint##bits##_t fipc_##name##bits##_##order(fipc_a##bits *p, uint##bits##_t v) {  \
        return function(p, v, ORDER_##order);                                                      \
    }
#define EVERY_CAS(bits, order, failing)                                                            \
    static inline bool fipc_cas##bits##_##order(fipc_a##bits *p, uint##bits##_t *expected,         \
                                                uint##bits##_t v) {                                \
        return atomic_compare_exchange_strong_explicit(p, expected, v, ORDER_##order,              \
                                                       ORDER_##failing);                           \
    }
#define EVERY_RMWS(bits, name, function)                                                           \
    EVERY_RMW(bits, name, function, relaxed)                                                       \
    EVERY_RMW(bits, name, function, acquire)                                                       \
    EVERY_RMW(bits, name, function, release)                                                       \
    EVERY_RMW(bits, name, function, acqrel)                                                        \
    EVERY_RMW(bits, name, function, seqcst)
#define EVERY_ALL(bits)                                                                            \
    EVERY_LOAD(bits, relaxed)                                                                      \
    EVERY_LOAD(bits, acquire)                                                                      \
    EVERY_LOAD(bits, seqcst)                                                                       \
    EVERY_STORE(bits, relaxed)                                                                     \
    EVERY_STORE(bits, release)                                                                     \
    EVERY_STORE(bits, seqcst)                                                                      \
    EVERY_RMWS(bits, or, atomic_fetch_or_explicit)                                                 \
    EVERY_RMWS(bits, add, atomic_fetch_add_explicit)                                               \
    EVERY_RMWS(bits, swap, atomic_exchange_explicit)                                               \
    EVERY_CAS(bits, relaxed, relaxed)                                                              \
    EVERY_CAS(bits, acquire, relaxed)                                                              \
    EVERY_CAS(bits, release, relaxed)                                                              \
    EVERY_CAS(bits, acqrel, acquire)                                                               \
    EVERY_CAS(bits, seqcst, seqcst)

EVERY_ALL(32)
EVERY_ALL(64)

#endif /* VERIFY_EVERY_ORDER_H */
