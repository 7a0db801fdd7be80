/* fastipc.h: the public face of the C core.
 *
 * A queue has one writer and up to FIPC_MAX_READERS readers, in any number of processes of one
 * machine. Every message goes to every reader, in order, once.
 *
 * Rules that hold for every function here:
 *  - The first argument is the object. The result is FIPC_OK or one of the negative codes of
 *    enum fipc_status; where the caller needs more than the code, `err` (never NULL) has it.
 *  - Times are nanoseconds. A deadline is absolute on the monotonic clock (fipc_now()); 0 polls,
 *    FIPC_FOREVER waits without end.
 *  - A writer, or a reader, may be used by several threads at once. After fork the child gets
 *    FIPC_FORKED for its parent's objects; it may only free them.
 *  - Nothing here prints, and nothing on the data path allocates, except that fipc_queue_recv
 *    allocates what it hands out.
 */
#ifndef FASTIPC_H
#define FASTIPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FIPC_FOREVER UINT64_MAX
#define FIPC_MAX_READERS 1024u
#define FIPC_ID_BYTES 16
#define FIPC_HOST_BYTES 64
#define FIPC_PATH_BYTES 512
#define FIPC_BRIEF_BYTES                                                                           \
    65536u             /* most that fipc_queue_send_inline copies: below a handover of the GIL */
#define FIPC_ALIGN 64u /* of every buffer in a frame and of every block handed out, in bytes */

enum fipc_status {
    FIPC_OK = 0,
    FIPC_TIMEOUT = -1,     /* the deadline passed; nothing was sent, nothing was taken */
    FIPC_WOULD_BLOCK = -2, /* fast path only: use the waiting call */
    FIPC_CLOSED = -3,      /* the other side has closed (a reader has drained first) */
    FIPC_SHUTDOWN = -4,    /* this object was shut down or closed */
    FIPC_INTERRUPTED = -5, /* a signal may have arrived: run handlers, call again */
    FIPC_LONG_WAIT = -6,   /* the warning interval passed: report err, call again */
    FIPC_EVICTED = -7,     /* a dead reader (err) was evicted: report it, call again */
    FIPC_PEER_DIED = -8,   /* err names rank, pid and host */
    FIPC_NO_SPACE = -9,    /* err.needed and err.available, in bytes */
    FIPC_MISMATCH = -10,   /* the segment is not the one that the address means */
    FIPC_CORRUPT = -11,    /* a frame that can't be right; it was skipped */
    FIPC_SYSTEM = -12,     /* a system call failed: err.sys_errno, err.text */
    FIPC_NO_MEMORY = -13,  /* the process is out of memory; the message is still there, unless its
                              list of buffers alone is longer than one part of a chunk */
    FIPC_INVALID = -14,    /* an argument is out of range: err.text */
    FIPC_RANK_TAKEN = -15, /* another living process (err.pid) is attached as this rank */
    FIPC_REENTRANT = -16,  /* this thread is inside a call on the same object already */
    FIPC_FORKED = -17,     /* the object belongs to the parent process */
    FIPC_GONE = -18,       /* attach: the writer, or its segment, no longer exists */
};

struct fipc_error {
    int32_t sys_errno;
    int32_t reader;     /* index of the reader meant, -1: the writer, -2: nobody */
    int64_t pid;        /* as that process sees itself */
    uint64_t needed;    /* bytes, FIPC_NO_SPACE */
    uint64_t available; /* bytes, FIPC_NO_SPACE */
    uint64_t waited_ns; /* FIPC_LONG_WAIT */
    uint64_t seq;       /* FIPC_LONG_WAIT: the sequence number that is waited for */
    char host[FIPC_HOST_BYTES];
    char text[FIPC_PATH_BYTES + 128]; /* one sentence for a person, or "" */
};

/* What a wait does to the outside world; NULL in a config means the platform's own. Tests give
 * others: a clock of their own, a wake-up that is lost. wait() returns when *word is no longer
 * `expected`, when woken, at the deadline, or for no reason at all; FIPC_INTERRUPTED after a
 * signal, else FIPC_OK. */
struct fipc_waitops {
    uint64_t (*now)(void *ctx);
    int (*wait)(void *ctx, const void *word, uint32_t expected, uint64_t deadline);
    void (*wake)(void *ctx, const void *word);
    void *ctx;
};

struct fipc_config {
    uint32_t n_readers;
    uint32_t n_slots;          /* at least 2 */
    uint32_t inline_bytes;     /* room in a slot; at most chunk_bytes */
    uint32_t n_chunks;         /* at least 1 */
    uint64_t chunk_bytes;      /* at least 64 */
    const char *shm_dir;       /* NULL: memfd; else a directory for a named file */
    uint8_t id[FIPC_ID_BYTES]; /* random: this is also the name's secret part */
    const char *host;          /* this host's name, shown to peers in messages */
    uint32_t n_cpus;           /* CPUs this process may use; decides whether spinning is allowed */
    int64_t spin_ns;           /* longest spin; -1: the default; 0: never */
    uint64_t warn_ns;          /* FIPC_LONG_WAIT after each such interval; FIPC_FOREVER: never */
    bool evict;                /* evict dead readers instead of FIPC_PEER_DIED */
    const struct fipc_waitops *ops;
};

/* Where a segment is found. Small enough to travel in a handle. */
struct fipc_address {
    uint8_t id[FIPC_ID_BYTES];
    int64_t pid;                /* the writer's, in its own PID namespace */
    uint64_t start_time;        /* the writer's, in clock ticks since boot: tells pid reuse */
    int32_t fd;                 /* the writer's descriptor of the segment */
    uint32_t n_readers;         /* must agree with the segment */
    char path[FIPC_PATH_BYTES]; /* "" for a memfd */
};

struct fipc_attach_options {
    const char *host;
    uint32_t n_cpus;
    int64_t spin_ns;
    uint64_t warn_ns;
    const struct fipc_waitops *ops;
};

typedef struct fipc_queue fipc_queue;

/* One call of the user's that may wait. Zeroed but for the first two fields, and kept across
 * FIPC_INTERRUPTED, FIPC_LONG_WAIT and FIPC_EVICTED, which ask for the same call again. */
struct fipc_call {
    uint64_t deadline;
    bool signals; /* this thread runs signal handlers: come up after each sleep to look for some */
    bool midway;
    bool spun; /* the wait that goes on spun in vain */
    uint64_t begun, next_check, next_warning;
    uint64_t since; /* the wait that goes on began then; 0: none does */
};

/* ---- life ------------------------------------------------------------------------------- */

/* Makes the segment and becomes its writer. FIPC_NO_SPACE, FIPC_INVALID, FIPC_SYSTEM leave
 * nothing behind. */
int fipc_queue_create(fipc_queue **out, const struct fipc_config *config, struct fipc_error *err);

/* The memory that such a segment takes, in bytes: allocated when it is made, and when all its chunks
 * are in use. FIPC_INVALID as above. */
int fipc_queue_plan(const struct fipc_config *config, uint64_t *at_once, uint64_t *at_most,
                    struct fipc_error *err);

/* Becomes reader number `reader` (0 .. n_readers-1) of the segment at `address`.
 * FIPC_GONE, FIPC_MISMATCH, FIPC_RANK_TAKEN, FIPC_SYSTEM. */
int fipc_queue_attach(fipc_queue **out, const struct fipc_address *address, uint32_t reader,
                      const struct fipc_attach_options *options, struct fipc_error *err);

/* True in a child forked from the process that made q. */
bool fipc_queue_forked(const fipc_queue *q);

void fipc_queue_address(const fipc_queue *q, struct fipc_address *out);

/* Ends every wait in this process on this object with FIPC_SHUTDOWN, now and later. Any thread,
 * any number of times. The peers notice nothing. */
void fipc_queue_shutdown(fipc_queue *q);

/* Leaves: the writer's readers drain and then get FIPC_CLOSED; a reader is no longer waited for.
 * Call it when no other call on q is running (fipc_queue_shutdown ends them). Unmaps. */
void fipc_queue_close(fipc_queue *q);

/* Closes if need be, and frees. In a forked child it frees without a word to the peers. */
void fipc_queue_free(fipc_queue *q);

/* ---- the writer ------------------------------------------------------------------------- */

/* A piece of a message: `len` bytes at `ptr`; or, when ndim > 0, a strided array of which the
 * elements (itemsize bytes each) are sent in C order, `len` being their total. `joins` says that
 * this piece continues the buffer of the piece before it. */
struct fipc_piece {
    const void *ptr;
    uint64_t len;
    const int64_t *shape;   /* ndim entries */
    const int64_t *strides; /* ndim entries, in bytes, any sign */
    uint32_t itemsize;
    uint16_t ndim;
    bool joins;
};

/* Sends one message made of n pieces; `tag` is a number of the caller's that arrives with it.
 * The pieces may be overwritten as soon as this returns. On any result but FIPC_OK nothing of
 * the message will be delivered. FIPC_INTERRUPTED, FIPC_LONG_WAIT and FIPC_EVICTED ask for
 * another call with the same pieces and the same `call`: a message that is half on its way
 * (call->midway; this thread then still holds the writer) is continued, not begun again. If the
 * caller won't call again it calls fipc_queue_send_abandon. */
int fipc_queue_send(fipc_queue *q, const struct fipc_piece *pieces, uint64_t n, uint32_t tag,
                    struct fipc_call *call, struct fipc_error *err);
void fipc_queue_send_abandon(fipc_queue *q, struct fipc_call *call);

/* The same for what fits into a slot (and FIPC_BRIEF_BYTES), without waiting or making a system call other than a
 * wake-up; FIPC_WOULD_BLOCK when that can't be. For callers that hold the GIL. */
int fipc_queue_send_inline(fipc_queue *q, const struct fipc_piece *pieces, uint64_t n, uint32_t tag,
                           struct fipc_error *err);

/* Lends the memory for a message of up to one chunk, to be filled in place. The object stays
 * locked to this thread until commit or abort. commit sends the first `len` bytes. */
int fipc_queue_loan(fipc_queue *q, uint64_t len, struct fipc_call *call, void **ptr,
                    struct fipc_error *err);
void fipc_queue_loan_commit(fipc_queue *q, uint64_t len);
void fipc_queue_loan_abort(fipc_queue *q);

/* Stops waiting for a dead reader. FIPC_INVALID when it is alive. */
int fipc_queue_evict(fipc_queue *q, uint32_t reader, struct fipc_error *err);

/* ---- the reader ------------------------------------------------------------------------- */

struct fipc_block {
    void *ptr; /* FIPC_ALIGN-aligned, from fipc_block_alloc; NULL when len is 0 */
    uint64_t len;
};

struct fipc_message {
    struct fipc_block *blocks; /* one per buffer */
    uint64_t n;
    uint32_t tag;
};

/* Waits until a message, or a reason why none will come, is there. Takes nothing. */
int fipc_queue_wait_readable(fipc_queue *q, struct fipc_call *call, struct fipc_error *err);

/* Takes the next message without waiting for one: FIPC_WOULD_BLOCK when none is (completely)
 * there yet; call->deadline bounds the wait for another thread that is at it. What has arrived of
 * a large one is kept for the next call. The message is acknowledged before
 * this returns. The caller owns the blocks: fipc_message_clear, or fipc_block_free of each and
 * free() of the array. */
int fipc_queue_recv(fipc_queue *q, struct fipc_call *call, struct fipc_message *out,
                    struct fipc_error *err);

/* Shows the next message in place if it is one buffer in one slot or chunk, of at most `limit`
 * bytes; the object stays locked to this thread until done or undo. For callers that hold the
 * GIL. FIPC_WOULD_BLOCK: none, or another thread is at it. FIPC_INVALID: it is of another kind,
 * use fipc_queue_recv. */
int fipc_queue_peek(fipc_queue *q, uint64_t limit, const void **ptr, uint64_t *len, uint32_t *tag,
                    struct fipc_error *err);
/* The same, but it waits for another thread that is at it, until call->deadline. */
int fipc_queue_peek_wait(fipc_queue *q, uint64_t limit, struct fipc_call *call, const void **ptr,
                         uint64_t *len, uint32_t *tag, struct fipc_error *err);
void fipc_queue_peek_done(fipc_queue *q); /* acknowledges */
void fipc_queue_peek_undo(fipc_queue *q); /* leaves it there */

void fipc_message_clear(struct fipc_message *m);
void *fipc_block_alloc(uint64_t len);
void fipc_block_free(void *ptr, uint64_t len);

/* ---- a message as one stretch of bytes -------------------------------------------------- */

/* How long the pieces of a message are when joined, and whether that is one buffer's bytes alone
 * (bare) or a frame. FIPC_INVALID, FIPC_NO_MEMORY. */
int fipc_join_size(const struct fipc_piece *pieces, uint64_t n, uint64_t *size, bool *bare);
/* Joins them at dst, which has room for that many bytes. */
int fipc_join(const struct fipc_piece *pieces, uint64_t n, void *dst);
/* The buffers that were joined into the len bytes at src, copied into blocks. Nothing in src is
 * trusted: FIPC_CORRUPT. FIPC_NO_MEMORY. */
int fipc_split(const void *src, uint64_t len, bool bare, struct fipc_message *out);

/* ---- both ------------------------------------------------------------------------------- */

/* Waits until every rank has attached. FIPC_TIMEOUT: fipc_queue_peer tells who is missing. */
int fipc_queue_wait_ready(fipc_queue *q, struct fipc_call *call, struct fipc_error *err);

/* Waits until one of the queues (readers' ends) is readable; ready[i] is set for each that is, or
 * whose next call would not wait for another reason. */
int fipc_queue_wait_any(fipc_queue *const *queues, uint32_t n, struct fipc_call *call,
                        uint8_t *ready);

/* FREE: never attached. JOINING: attached, the writer has not noticed yet. */
enum fipc_peer_state {
    FIPC_PEER_FREE,
    FIPC_PEER_JOINING,
    FIPC_PEER_ACTIVE,
    FIPC_PEER_LEFT,
    FIPC_PEER_DEAD,
};

struct fipc_peer_info {
    enum fipc_peer_state state;
    uint32_t epoch;
    int64_t pid;
    uint64_t lag; /* messages published and not yet read by this reader */
    char host[FIPC_HOST_BYTES];
};
/* reader: an index, or -1 for the writer. */
int fipc_queue_peer(fipc_queue *q, int64_t reader, struct fipc_peer_info *out);

struct fipc_stats {
    uint64_t messages;       /* sent, or taken */
    uint64_t bytes;          /* of frames sent, or taken */
    uint64_t bytes_copied;   /* by this object, into or out of shared memory */
    uint64_t fragments;      /* sent, or taken */
    uint64_t waits;          /* times that a call had to wait */
    uint64_t sleeps;         /* times that a wait went to the kernel */
    uint64_t wakes;          /* times that this side woke the other */
    uint64_t spin_ns;        /* the spin budget now */
    uint64_t segment_bytes;  /* address space */
    uint64_t resident_bytes; /* of that, allocated by this writer */
};
/* Without the lock: beside a thread that sends or receives, a figure may be a message old. */
void fipc_queue_stats(fipc_queue *q, struct fipc_stats *out);

/* Writer: messages that the slowest reader has not read. Reader: messages it has not read. */
uint64_t fipc_queue_size(fipc_queue *q);
bool fipc_queue_readable(fipc_queue *q);
bool fipc_queue_has_room(fipc_queue *q);
uint32_t fipc_queue_n_readers(const fipc_queue *q);
uint64_t fipc_queue_chunk_bytes(const fipc_queue *q);

uint64_t fipc_now(void);                  /* monotonic, ns */
uint64_t fipc_process_start(int64_t pid); /* clock ticks since boot, 0 when unknown */
const char *fipc_status_text(int status);

/* Removes this user's named segments in `dir` whose writer is gone, which the kernel's lock tells;
 * returns how many. `dry_run` changes nothing and only counts. `seen` (may be NULL) is called with
 * each such path; sys_errno is 0, or why it could not be removed. */
int fipc_sweep(const char *dir, bool dry_run,
               void (*seen)(void *ctx, const char *path, int sys_errno), void *ctx);

#ifdef __cplusplus
}
#endif

#endif /* FASTIPC_H */
