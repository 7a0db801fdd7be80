/* model.h: the atomics of the explorer, in place of <stdatomic.h> (FIPC_ATOMIC_HEADER). Every
 * operation is a call of explore.c, which decides what it reads. All orders of all operations are
 * here, not only those that csrc/ uses: a mutant is another order.
 */
#ifndef VERIFY_MODEL_H
#define VERIFY_MODEL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    uint32_t raw;
} fipc_a32;
typedef struct {
    _Alignas(8) uint64_t raw;
} fipc_a64;

enum verify_order { ORDER_relaxed, ORDER_acquire, ORDER_release, ORDER_acqrel, ORDER_seqcst };
enum verify_change { CHANGE_or, CHANGE_add, CHANGE_swap };

uint64_t verify_load(const void *p, uint32_t bytes, enum verify_order order);
void verify_store(void *p, uint32_t bytes, uint64_t v, enum verify_order order);
uint64_t verify_rmw(void *p, uint32_t bytes, enum verify_change change, uint64_t v,
                    enum verify_order order);
bool verify_cas(void *p, uint32_t bytes, uint64_t *expected, uint64_t v, enum verify_order order,
                enum verify_order failing);

#define VERIFY_LOAD(bits, order)                                                                   \
    static inline uint##bits##_t fipc_load##bits##_##order(const fipc_a##bits *p) {                \
        return (uint##bits##_t)verify_load(p, bits / 8, ORDER_##order);                            \
    }
#define VERIFY_STORE(bits, order)                                                                  \
    static inline void fipc_store##bits##_##order(fipc_a##bits *p, uint##bits##_t v) {             \
        verify_store(p, bits / 8, v, ORDER_##order);                                               \
    }
#define VERIFY_RMW(bits, change, order)                                                            \
    static inline uint##bits##_t fipc_##change##bits##_##order(fipc_a##bits *p,                    \
                                                               uint##bits##_t v) {                 \
        return (uint##bits##_t)verify_rmw(p, bits / 8, CHANGE_##change, v, ORDER_##order);         \
    }
#define VERIFY_CAS(bits, order, failing)                                                           \
    static inline bool fipc_cas##bits##_##order(fipc_a##bits *p, uint##bits##_t *expected,         \
                                                uint##bits##_t v) {                                \
        uint64_t seen = *expected;                                                                 \
        bool done = verify_cas(p, bits / 8, &seen, v, ORDER_##order, ORDER_##failing);             \
        *expected = (uint##bits##_t)seen;                                                          \
        return done;                                                                               \
    }
#define VERIFY_RMWS(bits, change)                                                                  \
    VERIFY_RMW(bits, change, relaxed)                                                              \
    VERIFY_RMW(bits, change, acquire)                                                              \
    VERIFY_RMW(bits, change, release)                                                              \
    VERIFY_RMW(bits, change, acqrel)                                                               \
    VERIFY_RMW(bits, change, seqcst)
#define VERIFY_ALL(bits)                                                                           \
    VERIFY_LOAD(bits, relaxed)                                                                     \
    VERIFY_LOAD(bits, acquire)                                                                     \
    VERIFY_LOAD(bits, seqcst)                                                                      \
    VERIFY_STORE(bits, relaxed)                                                                    \
    VERIFY_STORE(bits, release)                                                                    \
    VERIFY_STORE(bits, seqcst)                                                                     \
    VERIFY_RMWS(bits, or)                                                                          \
    VERIFY_RMWS(bits, add)                                                                         \
    VERIFY_RMWS(bits, swap)                                                                        \
    VERIFY_CAS(bits, relaxed, relaxed)                                                             \
    VERIFY_CAS(bits, acquire, relaxed)                                                             \
    VERIFY_CAS(bits, release, relaxed)                                                             \
    VERIFY_CAS(bits, acqrel, acquire)                                                              \
    VERIFY_CAS(bits, seqcst, seqcst)

VERIFY_ALL(32)
VERIFY_ALL(64)

#endif /* VERIFY_MODEL_H */
