"""The C core's public header, fastipc.h, for Cython. Nothing else mirrors it."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "fastipc.h" nogil:
    ctypedef bint fipc_bool "bool"  # where C wants a pointer to one

    enum:
        FIPC_FOREVER
        FIPC_ID_BYTES
        FIPC_HOST_BYTES
        FIPC_PATH_BYTES
        FIPC_MAX_READERS

    enum fipc_status:
        FIPC_OK
        FIPC_TIMEOUT
        FIPC_WOULD_BLOCK
        FIPC_CLOSED
        FIPC_SHUTDOWN
        FIPC_INTERRUPTED
        FIPC_LONG_WAIT
        FIPC_EVICTED
        FIPC_PEER_DIED
        FIPC_NO_SPACE
        FIPC_MISMATCH
        FIPC_CORRUPT
        FIPC_SYSTEM
        FIPC_NO_MEMORY
        FIPC_INVALID
        FIPC_RANK_TAKEN
        FIPC_REENTRANT
        FIPC_FORKED
        FIPC_GONE

    struct fipc_error:
        int32_t sys_errno
        int32_t reader
        int64_t pid
        uint64_t needed
        uint64_t available
        uint64_t waited_ns
        uint64_t seq
        char host[64]
        char text[640]

    struct fipc_waitops:
        pass

    struct fipc_config:
        uint32_t n_readers
        uint32_t n_slots
        uint32_t inline_bytes
        uint32_t n_chunks
        uint64_t chunk_bytes
        const char *shm_dir
        uint8_t id[16]
        const char *host
        uint32_t n_cpus
        int64_t spin_ns
        uint64_t warn_ns
        bint evict
        const fipc_waitops *ops

    struct fipc_address:
        uint8_t id[16]
        int64_t pid
        uint64_t start_time
        int32_t fd
        uint32_t n_readers
        char path[512]

    struct fipc_attach_options:
        const char *host
        uint32_t n_cpus
        int64_t spin_ns
        uint64_t warn_ns
        const fipc_waitops *ops

    struct fipc_queue:
        pass

    struct fipc_call:
        uint64_t deadline
        bint signals
        bint midway
        bint spun
        uint64_t begun
        uint64_t next_check
        uint64_t next_warning
        uint64_t since

    struct fipc_piece:
        const void *ptr
        uint64_t len
        const int64_t *shape
        const int64_t *strides
        uint32_t itemsize
        uint16_t ndim
        bint joins

    struct fipc_block:
        void *ptr
        uint64_t len

    struct fipc_message:
        fipc_block *blocks
        uint64_t n
        uint32_t tag

    enum fipc_peer_state:
        FIPC_PEER_FREE
        FIPC_PEER_JOINING
        FIPC_PEER_ACTIVE
        FIPC_PEER_LEFT
        FIPC_PEER_DEAD

    struct fipc_peer_info:
        fipc_peer_state state
        uint32_t epoch
        int64_t pid
        uint64_t lag
        char host[64]

    struct fipc_stats:
        uint64_t messages
        uint64_t bytes
        uint64_t bytes_copied
        uint64_t fragments
        uint64_t waits
        uint64_t sleeps
        uint64_t wakes
        uint64_t spin_ns
        uint64_t segment_bytes
        uint64_t resident_bytes

    int fipc_queue_create(fipc_queue **out, const fipc_config *config, fipc_error *err)
    int fipc_queue_plan(const fipc_config *config, uint64_t *at_once, uint64_t *at_most,
                        fipc_error *err)
    int fipc_queue_attach(fipc_queue **out, const fipc_address *address, uint32_t reader,
                          const fipc_attach_options *options, fipc_error *err)
    void fipc_queue_address(const fipc_queue *q, fipc_address *out)
    bint fipc_queue_forked(const fipc_queue *q)
    void fipc_queue_shutdown(fipc_queue *q)
    void fipc_queue_close(fipc_queue *q)
    void fipc_queue_free(fipc_queue *q)

    int fipc_queue_send(fipc_queue *q, const fipc_piece *pieces, uint64_t n, uint32_t tag,
                        fipc_call *call, fipc_error *err)
    void fipc_queue_send_abandon(fipc_queue *q, fipc_call *call)
    int fipc_queue_send_inline(fipc_queue *q, const fipc_piece *pieces, uint64_t n, uint32_t tag,
                               fipc_error *err)
    int fipc_queue_loan(fipc_queue *q, uint64_t len, fipc_call *call, void **ptr, fipc_error *err)
    void fipc_queue_loan_commit(fipc_queue *q, uint64_t len)
    void fipc_queue_loan_abort(fipc_queue *q)
    int fipc_queue_evict(fipc_queue *q, uint32_t reader, fipc_error *err)

    int fipc_queue_wait_readable(fipc_queue *q, fipc_call *call, fipc_error *err)
    int fipc_queue_recv(fipc_queue *q, fipc_call *call, fipc_message *out, fipc_error *err)
    int fipc_queue_peek(fipc_queue *q, uint64_t limit, const void **ptr, uint64_t *len,
                        uint32_t *tag, fipc_error *err)
    int fipc_queue_peek_wait(fipc_queue *q, uint64_t limit, fipc_call *call, const void **ptr,
                             uint64_t *len, uint32_t *tag, fipc_error *err)
    void fipc_queue_peek_done(fipc_queue *q)
    void fipc_queue_peek_undo(fipc_queue *q)
    void fipc_message_clear(fipc_message *m)
    void *fipc_block_alloc(uint64_t len)
    void fipc_block_free(void *ptr, uint64_t len)

    int fipc_join_size(const fipc_piece *pieces, uint64_t n, uint64_t *size,
                       fipc_bool *bare)
    int fipc_join(const fipc_piece *pieces, uint64_t n, void *dst)
    int fipc_split(const void *src, uint64_t len, bint bare, fipc_message *out)

    int fipc_queue_wait_ready(fipc_queue *q, fipc_call *call, fipc_error *err)
    int fipc_queue_wait_any(fipc_queue **queues, uint32_t n, fipc_call *call, uint8_t *ready)
    int fipc_queue_peer(fipc_queue *q, int64_t reader, fipc_peer_info *out)
    void fipc_queue_stats(fipc_queue *q, fipc_stats *out)
    uint64_t fipc_queue_size(fipc_queue *q)
    bint fipc_queue_readable(fipc_queue *q)
    bint fipc_queue_has_room(fipc_queue *q)

    uint64_t fipc_now()
    uint64_t fipc_process_start(int64_t pid)
    const char *fipc_status_text(int status)
    int fipc_sweep(const char *dir, bint dry_run,
                   void (*seen)(void *ctx, const char *path, int sys_errno) noexcept, void *ctx)
