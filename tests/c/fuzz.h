/* fuzz.h: what the fuzz targets share. A target is one function of some bytes that must return, and
 * may fail a CHECK; libFuzzer calls it (make fuzz), and so does fuzz_replay.c, for the corpus that
 * is kept in corpus/ (make check). */
#ifndef FIPC_TESTS_FUZZ_H
#define FIPC_TESTS_FUZZ_H

#include "test.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The input, taken from its front; zeros when there is no more. */
struct input {
    const uint8_t *at, *end;
};

static inline bool input_over(const struct input *in) { return in->at == in->end; }

static inline uint64_t input_number(struct input *in, size_t bytes) {
    uint64_t v = 0;
    size_t n = (size_t)(in->end - in->at);
    n = n < bytes ? n : bytes;
    memcpy(&v, in->at, n);
    in->at += n;
    return v;
}

static inline uint8_t input_byte(struct input *in) { return (uint8_t)input_number(in, 1); }

/* Small numbers, numbers about a limit, and any. */
static inline uint64_t input_size(struct input *in, uint64_t limit) {
    uint8_t kind = input_byte(in);
    switch (kind % 4) {
    case 0: return kind / 4;
    case 1: return limit - 32 + kind / 4;
    case 2: return input_number(in, 2);
    default: return input_number(in, 8);
    }
}

#endif /* FIPC_TESTS_FUZZ_H */
