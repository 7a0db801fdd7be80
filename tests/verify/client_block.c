/* client_block.c: the blocks that are kept (fipc_block.c), which all threads of a process share. */
#include "fipc_block.c"

#include "verify.h"

static void *held[2];
static bool clash;

static void setup(void) {
    for (int i = 0; i < KEEP_SLOTS; i++) {
        if (kept[i].ptr != NULL) {
            unmap_slot(i);
        }
    }
    memset(&busy, 0, sizeof busy);
    clash = false;
    fipc_block_free(fipc_block_alloc(LARGE), LARGE); /* one is kept */
}

static void use(int i) {
    held[i] = fipc_block_alloc(LARGE);
    REQUIRE(held[i] != NULL);
    fipc_block_free(held[i], LARGE);
}
static void use_0(void) { use(0); }
static void use_1(void) { use(1); }

static void finish(void) { REQUIRE(fipc_load32_relaxed(&busy) == 0 && kept_bytes <= 2 * LARGE); }

const struct verify_client verify_block = {
    "block", "two threads take and give back large blocks", 2, false, 0, setup, {use_0, use_1},
    finish};
