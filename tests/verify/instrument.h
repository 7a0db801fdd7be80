/* instrument.h: included before everything else in what the explorer is to see: memory comes from
 * its heap, and what the C library does to memory is an access like any other. */
#ifndef VERIFY_INSTRUMENT_H
#define VERIFY_INSTRUMENT_H

#include <stdlib.h>
#include <string.h>

void *verify_memcpy(void *to, const void *from, size_t n);
void *verify_memset(void *to, int c, size_t n);
int verify_memcmp(const void *a, const void *b, size_t n);
void *verify_malloc(size_t n);
void *verify_calloc(size_t n, size_t size);
int verify_memalign(void **out, size_t align, size_t n);
void verify_free(void *p);

#define memcpy verify_memcpy
#define memset verify_memset
#define memcmp verify_memcmp
#define malloc verify_malloc
#define calloc verify_calloc
#define posix_memalign verify_memalign
#define free verify_free
/* fipc_thread_id's variable, of which each coroutine has its own */
#define _Thread_local __attribute__((section("verify_tls")))

#endif /* VERIFY_INSTRUMENT_H */
