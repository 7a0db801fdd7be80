/* fipc_peer.h: who is attached, and who is still alive.
 *
 *   state     leaves it            by                                   a crash here leaves
 *   FREE      -> JOINING           the joiner, once it holds the byte   FREE
 *   JOINING   -> ACTIVE            the writer, on its next call         byte free: DEAD at a probe
 *   ACTIVE    -> LEFT              the reader, in close                 byte free: DEAD at a probe
 *             -> DEAD              the writer, after a probe
 *   LEFT,DEAD -> JOINING           a replacement that took the byte     LEFT, DEAD
 *
 * A participant is alive while its lock byte is held, and the kernel lets go of that however the
 * participant ends. Nothing is concluded from silence. Since the byte is taken before JOINING is
 * stored and given back after LEFT is, "no lock, and after that still JOINING or ACTIVE in the
 * same epoch" means dead.
 *
 * Only the writer lets a rank read (granted = epoch), after it has set where the rank starts. The
 * first process of each rank is granted in advance, from the first message on: so what is sent
 * before everyone has attached is kept.
 */
#ifndef FIPC_PEER_H
#define FIPC_PEER_H

#include "fipc_layout.h"
#include "fipc_mem.h"

#define FIPC_WRITER_LOCK 0u
#define FIPC_READER_LOCK(i) (1u + (i))
#define FIPC_SWEEP_LOCK FIPC_READER_LOCK(FIPC_MAX_READERS)

void fipc_peer_describe(struct fipc_peer *p, const char *host);
void fipc_peer_host(const struct fipc_peer *p, char out[FIPC_HOST_BYTES]);

/* The joiner's side: takes the byte, enters the registry. Returns the new epoch in *epoch. */
int fipc_peer_join(struct fipc_peer *p, const struct fipc_segment *s, uint32_t reader,
                   const char *host, uint32_t *epoch, struct fipc_error *err);

/* True when the participant was attached in this epoch and no longer exists. */
bool fipc_peer_dead(const struct fipc_peer *p, const struct fipc_segment *s, uint32_t reader);

#endif /* FIPC_PEER_H */
