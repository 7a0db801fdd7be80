/* clients.c: all of them. */
#include "verify.h"

#define CLIENTS(x)                                                                                 \
    x(ring_pass) x(ring_park) x(ring_chunk) x(ring_chunks) x(ring_pass_2) x(ring_park_2)           \
        x(ring_chunk_2) x(queue_pass) x(queue_pass_2) x(attach) x(look) x(attach_2) x(leave)       \
            x(leave_2) x(close) x(writer_dies) x(evict) x(evict_2) x(ask) x(replace) x(succeed)    \
                x(succeed_on) x(share_writer) x(share_reader) x(shutdown) x(shutdown_full)         \
                    x(block)

#define DECLARE(name) extern const struct verify_client verify_##name;
#define ADDRESS(name) &verify_##name,

CLIENTS(DECLARE)
const struct verify_client *const verify_clients[] = {CLIENTS(ADDRESS) NULL};
