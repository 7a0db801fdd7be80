/* fipc_atomic.h: the only file that includes <stdatomic.h>.
 *
 * Every shared word is one of the two types below and every access to it goes through one of
 * these functions, so that a test can put other atomics in their place (FIPC_ATOMIC_HEADER names
 * a header that defines the same names). The order is part of the function's name: a reader of
 * the ring sees at the call which order is meant. There is no stand-alone fence, because thread
 * checkers do not model them.
 */
#ifndef FIPC_ATOMIC_H
#define FIPC_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

#ifdef FIPC_ATOMIC_HEADER
#include FIPC_ATOMIC_HEADER
#else

#include <stdatomic.h>

typedef _Atomic(uint32_t) fipc_a32;
typedef _Atomic(uint64_t) fipc_a64;

/* Words in shared memory are used by several processes: a lock-based atomic would keep its lock
 * in each process's own memory. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "32-bit atomics must be lock-free");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics must be lock-free");
_Static_assert(sizeof(fipc_a32) == 4 && sizeof(fipc_a64) == 8, "atomics must have no extra state");

static inline uint32_t fipc_load32_relaxed(const fipc_a32 *p) {
    return atomic_load_explicit(p, memory_order_relaxed);
}
static inline uint32_t fipc_load32_acquire(const fipc_a32 *p) {
    return atomic_load_explicit(p, memory_order_acquire);
}
static inline uint32_t fipc_load32_seqcst(const fipc_a32 *p) {
    return atomic_load_explicit(p, memory_order_seq_cst);
}
static inline void fipc_store32_relaxed(fipc_a32 *p, uint32_t v) {
    atomic_store_explicit(p, v, memory_order_relaxed);
}
static inline void fipc_store32_release(fipc_a32 *p, uint32_t v) {
    atomic_store_explicit(p, v, memory_order_release);
}
static inline uint32_t fipc_or32_seqcst(fipc_a32 *p, uint32_t v) {
    return atomic_fetch_or_explicit(p, v, memory_order_seq_cst);
}
static inline uint32_t fipc_add32_relaxed(fipc_a32 *p, uint32_t v) {
    return atomic_fetch_add_explicit(p, v, memory_order_relaxed);
}
static inline uint32_t fipc_add32_acqrel(fipc_a32 *p, uint32_t v) {
    return atomic_fetch_add_explicit(p, v, memory_order_acq_rel);
}
static inline uint32_t fipc_add32_release(fipc_a32 *p, uint32_t v) {
    return atomic_fetch_add_explicit(p, v, memory_order_release);
}
static inline uint32_t fipc_swap32_acquire(fipc_a32 *p, uint32_t v) {
    return atomic_exchange_explicit(p, v, memory_order_acquire);
}
static inline uint32_t fipc_swap32_release(fipc_a32 *p, uint32_t v) {
    return atomic_exchange_explicit(p, v, memory_order_release);
}
static inline bool fipc_cas32_acquire(fipc_a32 *p, uint32_t *expected, uint32_t v) {
    return atomic_compare_exchange_strong_explicit(p, expected, v, memory_order_acquire,
                                                   memory_order_relaxed);
}
static inline bool fipc_cas32_release(fipc_a32 *p, uint32_t *expected, uint32_t v) {
    return atomic_compare_exchange_strong_explicit(p, expected, v, memory_order_release,
                                                   memory_order_relaxed);
}
static inline bool fipc_cas32_relaxed(fipc_a32 *p, uint32_t *expected, uint32_t v) {
    return atomic_compare_exchange_strong_explicit(p, expected, v, memory_order_relaxed,
                                                   memory_order_relaxed);
}

static inline uint64_t fipc_load64_relaxed(const fipc_a64 *p) {
    return atomic_load_explicit(p, memory_order_relaxed);
}
static inline uint64_t fipc_load64_acquire(const fipc_a64 *p) {
    return atomic_load_explicit(p, memory_order_acquire);
}
static inline uint64_t fipc_load64_seqcst(const fipc_a64 *p) {
    return atomic_load_explicit(p, memory_order_seq_cst);
}
static inline void fipc_store64_relaxed(fipc_a64 *p, uint64_t v) {
    atomic_store_explicit(p, v, memory_order_relaxed);
}
static inline void fipc_store64_release(fipc_a64 *p, uint64_t v) {
    atomic_store_explicit(p, v, memory_order_release);
}
static inline void fipc_store64_seqcst(fipc_a64 *p, uint64_t v) {
    atomic_store_explicit(p, v, memory_order_seq_cst);
}

#endif /* FIPC_ATOMIC_HEADER */

/* Plain words of another process's, which an atomic word orders, loaded exactly once: a compiler may
 * otherwise look at the word again later, when that process has changed it. */
static inline uint32_t fipc_once32(const uint32_t *p) { return *(const volatile uint32_t *)p; }
static inline uint64_t fipc_once64(const uint64_t *p) { return *(const volatile uint64_t *)p; }

/* Tells the processor that this is a spin loop, so that the sibling thread gets the core's units
 * and leaving the loop costs no pipeline flush. */
static inline void fipc_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

#endif /* FIPC_ATOMIC_H */
