/* pattern.h: what test messages are made of. Byte k of message `seq` is a function of both, so
 * that a byte of another message, or from another place, is noticed, and no two processes need to
 * tell each other what to expect. */
#ifndef FIPC_TESTS_PATTERN_H
#define FIPC_TESTS_PATTERN_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t pattern_word(uint64_t seq, uint64_t i) {
    return seq * UINT64_C(0x9e3779b97f4a7c15) + (i + 1) * UINT64_C(0xd1b54a32d192ed03);
}

static inline uint8_t pattern_byte(uint64_t seq, uint64_t at) {
    uint64_t word = pattern_word(seq, at / 8);
    uint8_t bytes[8];
    memcpy(bytes, &word, 8);
    return bytes[at % 8];
}

/* Bytes [from, from + n) of message `seq`. */
static inline void pattern_fill(void *dst, uint64_t seq, uint64_t from, uint64_t n) {
    uint8_t *p = dst;
    for (; n > 0 && from % 8 != 0; n--) {
        *p++ = pattern_byte(seq, from++);
    }
    for (; n >= 8; n -= 8, from += 8, p += 8) {
        uint64_t word = pattern_word(seq, from / 8);
        memcpy(p, &word, 8);
    }
    for (; n > 0; n--) {
        *p++ = pattern_byte(seq, from++);
    }
}

static inline bool pattern_is(const void *src, uint64_t seq, uint64_t from, uint64_t n) {
    const uint8_t *p = src;
    uint64_t wrong = 0;
    for (; n > 0 && from % 8 != 0; n--) {
        wrong |= *p++ ^ pattern_byte(seq, from++);
    }
    for (; n >= 8; n -= 8, from += 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        wrong |= word ^ pattern_word(seq, from / 8);
    }
    for (; n > 0; n--) {
        wrong |= *p++ ^ pattern_byte(seq, from++);
    }
    return wrong == 0;
}

#endif /* FIPC_TESTS_PATTERN_H */
