# cython: language_level=3, boundscheck=False, wraparound=False
"""The customs desk between Python and csrc/: pins buffers, drops the GIL, calls C, turns codes
into exceptions. It decides nothing.

Where the GIL is held: the two fast paths (send_inline, peek) copy at most 64 KiB, never wait and
make no system call but a wake-up. Everything else runs without it. Nobody waits for a C lock
while holding the GIL, so a thread inside C may wait for the GIL.
"""

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() noexcept

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_STRIDED_RO, PyBuffer_FillInfo, PyBuffer_IsContiguous,
    PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from _thread import allocate_lock as _allocate_lock, get_ident as _get_ident

from .fipc cimport *

import os
import threading

from .errors import (
    Closed, DecodeError, Empty, Full, HandleMismatch, IPCError, PeerDied, SharedMemoryFull,
)

# A copy from this size on is made without the GIL: it takes longer than handing the GIL over.
DEF GIL_COPY_LIMIT = 65536
# Pieces of a message that are described on the stack.
DEF STACK_PIECES = 12
DEF MAX_NDIM = 64
# What a message is: the serializer's, or the bytes of a bytes object.
DEF TAG_FRAME = 0
DEF TAG_BYTES = 1


cdef uint64_t _deadline(object timeout) except? 0:
    """Seconds from now to an absolute time in ns. None: never; 0: at once."""
    cdef double seconds
    if timeout is None:
        return FIPC_FOREVER
    seconds = timeout
    if not seconds > 0:
        return 0
    if seconds > 1e9:
        return FIPC_FOREVER
    return fipc_now() + <uint64_t>(seconds * 1e9)


cdef unsigned long _main_thread = threading.main_thread().ident


def _forked():
    global _main_thread
    _main_thread = PyThread_get_thread_ident()


os.register_at_fork(after_in_child=_forked)


cdef bint _runs_handlers() noexcept:
    """Python runs signal handlers in the main thread only."""
    return PyThread_get_thread_ident() == _main_thread


cdef str _text(const char *s):
    return (<bytes>s).decode("utf-8", "replace")


# ---- what is received -------------------------------------------------------------------------

@cython.final
@cython.freelist(32)
cdef class Block:
    """Received bytes, owned by whoever holds this object: writable, 64-byte aligned, nobody else
    sees or changes them. Supports the buffer protocol; freed with its last view. The memory of
    large ones is kept for a short while for the next message."""

    cdef void *ptr
    cdef uint64_t nbytes

    def __cinit__(self):
        self.ptr = NULL
        self.nbytes = 0

    def __dealloc__(self):
        fipc_block_free(self.ptr, self.nbytes)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        # numpy and others want an address even for no bytes
        PyBuffer_FillInfo(view, self, self.ptr if self.ptr != NULL else <void *>_nothing,
                          <Py_ssize_t>self.nbytes, 0, flags)


cdef char[64] _nothing


cdef Block _block(fipc_block *b):
    cdef Block block = Block.__new__(Block)
    block.ptr = b.ptr
    block.nbytes = b.len
    b.ptr = NULL  # the block owns it now
    return block


# ---- what is sent -----------------------------------------------------------------------------

@cython.final
cdef class Piece:
    """Bytes to be sent from where they are: memory at an address, or the elements of a strided
    array in C order. Keeps its owner alive and, where it has one, its buffer pinned.

    As a buffer of its own it is empty and writable: pickle takes it as an out-of-band buffer, and
    only sees that it may be changed on arrival."""

    cdef fipc_piece c
    cdef object owner
    cdef Py_buffer view
    cdef bint pinned
    cdef int64_t dims[2 * MAX_NDIM]

    def __cinit__(self):
        memset(&self.c, 0, sizeof(fipc_piece))
        self.pinned = False

    def __dealloc__(self):
        if self.pinned:
            PyBuffer_Release(&self.view)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *>_nothing, 0, 0, flags)

    @property
    def nbytes(self):
        return self.c.len

    @staticmethod
    def of_array(array):
        """A C- or F-contiguous array's memory, or a strided one's elements in C order. The
        array must export its buffer (TypeError, ValueError otherwise)."""
        cdef Piece piece = Piece.__new__(Piece)
        cdef int i
        PyObject_GetBuffer(array, &piece.view, PyBUF_STRIDED_RO)
        piece.pinned = True
        piece.owner = array
        piece.c.ptr = piece.view.buf
        piece.c.len = piece.view.len
        if not PyBuffer_IsContiguous(&piece.view, b"A"):
            piece._set_strides(piece.view.ndim, piece.view.itemsize)
            for i in range(piece.view.ndim):
                piece.dims[i] = piece.view.shape[i]
                piece.dims[MAX_NDIM + i] = piece.view.strides[i]
        return piece

    @staticmethod
    def of_memory(uintptr_t address, uint64_t nbytes, owner):
        """nbytes at address; owner keeps them alive and unmoved."""
        cdef Piece piece = Piece.__new__(Piece)
        piece.owner = owner
        piece.c.ptr = <void *>address
        piece.c.len = nbytes
        return piece

    @staticmethod
    def of_strided(uintptr_t address, uint32_t itemsize, shape, strides, owner):
        """A strided array; strides in elements, as torch counts."""
        cdef Piece piece = Piece.__new__(Piece)
        cdef int i, ndim = len(shape)
        cdef uint64_t nbytes = itemsize
        piece.owner = owner
        piece.c.ptr = <void *>address
        piece._set_strides(ndim, itemsize)
        for i in range(ndim):
            piece.dims[i] = shape[i]
            piece.dims[MAX_NDIM + i] = <int64_t>strides[i] * itemsize
            nbytes *= <uint64_t>piece.dims[i]
        piece.c.len = nbytes
        return piece

    cdef int _set_strides(self, int ndim, Py_ssize_t itemsize) except -1:
        if ndim > MAX_NDIM:
            raise ValueError(
                f"an array of {ndim} dimensions can't be sent, the limit is {MAX_NDIM}")
        self.c.ndim = ndim
        self.c.itemsize = itemsize
        self.c.shape = self.dims
        self.c.strides = self.dims + MAX_NDIM
        return 0


@cython.final
cdef class Sink:
    """The file that a pickler writes to: collects what it is given without copying. pickle hands
    over large bytes objects as they are, so they too go straight into shared memory."""

    cdef readonly list stream
    cdef readonly list buffers

    def __cinit__(self):
        self.stream = []
        self.buffers = []

    def write(self, data):
        # Only what can't change is kept as it is: something that is pickled later in the same
        # message may change a bytearray.
        self.stream.append(data if PyBytes_CheckExact(data) else bytes(data))

    def buffer(self, data):
        """pickle's buffer_callback."""
        self.buffers.append(data)

    def take(self):
        """The message: (list of pieces, how many of them make the first buffer). Empties the
        sink."""
        cdef list pieces = self.stream
        cdef Py_ssize_t n = len(pieces)
        pieces.extend(self.buffers)
        self.stream = []
        self.buffers = []
        return pieces, n


@cython.final
cdef class PicklerPool:
    """Picklers that are used again: a fresh one costs three times a small message.

    One that is in use is not in the pool. So threads, signal handlers, and __reduce__ methods that
    send a message themselves each get their own; one that raised is dropped."""

    cdef list idle
    cdef object make

    def __cinit__(self, make):
        """make(sink) makes a pickler that writes to sink.write and gives sink.buffer its
        out-of-band buffers."""
        self.idle = []
        self.make = make

    def dump(self, obj):
        """(pieces, n): the first n pieces are the pickle stream, the others one buffer each.
        They borrow obj's memory. Raises what pickling raises."""
        cdef Sink sink
        if self.idle:
            pickler, sink = self.idle.pop()
        else:
            sink = Sink()
            pickler = self.make(sink)
        pickler.dump(obj)
        # The memo keeps what was pickled alive, and would make the next message refer to it.
        pickler.clear_memo()
        message = sink.take()
        self.idle.append((pickler, sink))
        return message


@cython.final
cdef class _Pins:
    """The pieces of one message as C sees them, pinned for the time of the call."""

    cdef fipc_piece *pieces
    cdef Py_buffer *views
    cdef Py_ssize_t n_views
    cdef fipc_piece few[STACK_PIECES]
    cdef Py_buffer few_views[STACK_PIECES]
    cdef list held

    def __cinit__(self):
        self.pieces = self.few
        self.views = self.few_views
        self.n_views = 0

    cdef int pin(self, list items, Py_ssize_t joined) except -1:
        cdef Py_ssize_t i, n = len(items)
        cdef fipc_piece *p
        cdef Py_buffer *v
        cdef object item
        if n > STACK_PIECES:
            self.pieces = <fipc_piece *>PyMem_Malloc(n * sizeof(fipc_piece))
            self.views = <Py_buffer *>PyMem_Malloc(n * sizeof(Py_buffer))
            if self.pieces == NULL or self.views == NULL:
                raise MemoryError
        self.held = items
        memset(self.pieces, 0, n * sizeof(fipc_piece))
        for i in range(n):
            item = items[i]
            p = &self.pieces[i]
            if PyBytes_CheckExact(item):
                p.ptr = PyBytes_AS_STRING(item)
                p.len = PyBytes_GET_SIZE(item)
            elif type(item) is Piece:
                p[0] = (<Piece>item).c
            else:
                v = &self.views[self.n_views]
                PyObject_GetBuffer(item, v, PyBUF_ANY_CONTIGUOUS)
                self.n_views += 1
                if type(v.obj) is Piece:  # through a PickleBuffer
                    p[0] = (<Piece>v.obj).c
                else:
                    p.ptr = v.buf
                    p.len = v.len
            p.joins = 0 < i < joined
        return 0

    cdef void unpin(self) noexcept:
        while self.n_views > 0:
            self.n_views -= 1
            PyBuffer_Release(&self.views[self.n_views])
        if self.pieces != self.few:
            PyMem_Free(self.pieces)
            self.pieces = self.few
        if self.views != self.few_views:
            PyMem_Free(self.views)
            self.views = self.few_views
        self.held = None

    def __dealloc__(self):
        self.unpin()


# ---- a message as one stretch of bytes --------------------------------------------------------

def join(list items, Py_ssize_t joined, Py_ssize_t prefix=0):
    """(Block, bare): the message that Endpoint.send would send, behind `prefix` zero bytes. bare:
    it is one buffer without a frame around it. split needs to be told."""
    cdef _Pins pins = _Pins.__new__(_Pins)
    cdef Block block = Block.__new__(Block)
    cdef uint64_t n = len(items), size = 0
    cdef fipc_bool bare = False
    cdef fipc_error e
    cdef int rc
    memset(&e, 0, sizeof(e))
    try:
        pins.pin(items, joined)
        rc = fipc_join_size(pins.pieces, n, &size, &bare)
        if rc == FIPC_OK:
            block.ptr = fipc_block_alloc(size + prefix)
            if block.ptr == NULL:
                raise MemoryError(f"no memory for a message of {size} bytes")
            block.nbytes = size + prefix
            memset(block.ptr, 0, prefix)
            if size > GIL_COPY_LIMIT:
                with nogil:
                    rc = fipc_join(pins.pieces, n, <char *>block.ptr + prefix)
            else:
                rc = fipc_join(pins.pieces, n, <char *>block.ptr + prefix)
        if rc != FIPC_OK:
            _raise(rc, &e)
    finally:
        pins.unpin()
    return block, bool(bare)


def frame_bytes(list items, Py_ssize_t joined):
    """How long the message is that Endpoint.send would send, with the frame around it, in
    bytes. One of at most max_chunk_bytes needs no more than a chunk."""
    cdef _Pins pins = _Pins.__new__(_Pins)
    cdef uint64_t size = 0
    cdef fipc_bool bare = False
    cdef fipc_error e
    cdef int rc
    memset(&e, 0, sizeof(e))
    try:
        pins.pin(items, joined)
        rc = fipc_join_size(pins.pieces, len(items), &size, &bare)
    finally:
        pins.unpin()
    if rc != FIPC_OK:
        _raise(rc, &e)
    return size


def split(data, Py_ssize_t offset, bint bare):
    """What Endpoint.recv would return for the message that begins at offset in data and goes to
    its end. DecodeError when it contradicts itself."""
    cdef Py_buffer view
    cdef fipc_message m
    cdef const char *src
    cdef uint64_t length
    cdef fipc_error e
    cdef int rc
    memset(&e, 0, sizeof(e))
    memset(&m, 0, sizeof(m))
    PyObject_GetBuffer(data, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        if not 0 <= offset <= view.len:
            raise ValueError("offset is outside of the data")
        src = <const char *>view.buf + offset
        length = view.len - offset
        if bare and length <= GIL_COPY_LIMIT:
            return PyBytes_FromStringAndSize(src, <Py_ssize_t>length)
        if length <= GIL_COPY_LIMIT:
            rc = fipc_split(src, length, bare, &m)
        else:
            with nogil:
                rc = fipc_split(src, length, bare, &m)
    finally:
        PyBuffer_Release(&view)
    if rc != FIPC_OK:
        _raise(rc, &e)
    return _blocks(&m)


# ---- whose turn it is ---------------------------------------------------------------------------

@cython.final
cdef class Turn:
    """A lock with a deadline that no signal handler's exception can lose: as a with-statement
    takes and gives it back, no Python code runs in between.

        with turn.within(seconds) as mine: ...      mine is False when the time was over first

    A thread that has it and asks again (a signal handler, a finalizer) gets IPCError."""

    cdef object lock
    cdef object owner

    def __cinit__(self):
        self.lock = _allocate_lock()
        self.owner = None

    @property
    def taken(self):
        """Whether somebody has it."""
        return self.owner is not None

    def within(self, seconds=None):
        """For a with-statement; None waits for ever."""
        cdef _Taking taking = _Taking.__new__(_Taking)
        taking.turn = self
        taking.seconds = -1 if seconds is None else min(seconds, 1e6)
        return taking


@cython.final
cdef class _Taking:
    cdef Turn turn
    cdef object seconds
    cdef bint mine

    def __enter__(self):
        me = _get_ident()
        if self.turn.owner == me:
            raise IPCError("this thread is inside a call on the same end of the queue already (a "
                           "signal handler, a finalizer, a log handler or a with-block came back)")
        # (this raises what a handler raises only when it has not got the lock)
        if self.turn.lock.acquire(self.seconds != 0, self.seconds if self.seconds else -1):
            self.turn.owner = me
            self.mine = True
        return bool(self.mine)

    def __exit__(self, *_):
        if self.mine:
            self.mine = False
            self.turn.owner = None
            self.turn.lock.release()
        return False


# ---- one end of a queue -----------------------------------------------------------------------

NOTHING = object()

_PEER_STATES = {
    FIPC_PEER_FREE: "free", FIPC_PEER_JOINING: "joining", FIPC_PEER_ACTIVE: "active",
    FIPC_PEER_LEFT: "left", FIPC_PEER_DEAD: "dead",
}


@cython.final
cdef class Endpoint:
    """The writer's or one reader's end. Several threads may use it at once. After fork it belongs
    to the parent: every call in the child raises IPCError.

    Made by create_writer and attach_reader.

    notice(endpoint, kind, rank, pid, host, seconds, seq) is called with kind "waiting" (a wait for
    this peer has lasted for `seconds`; rank None: the writer) or "evicted". No lock is held then;
    while a message is half sent it is called in a thread of its own.
    """

    cdef fipc_queue *q
    cdef readonly bint is_writer
    cdef bint closing
    cdef Py_ssize_t active  # calls that run without the GIL; guarded by the GIL
    cdef tuple ranks
    cdef object notice
    cdef object dump
    cdef object load_one
    cdef object load_many
    cdef object deferred
    cdef bint bytes_as_they_are
    cdef object __weakref__

    def __cinit__(self):
        self.q = NULL

    def __dealloc__(self):
        if self.q != NULL:
            fipc_queue_free(self.q)

    # -- codes to exceptions

    cdef object _rank(self, int32_t reader):
        return self.ranks[reader] if 0 <= reader < len(self.ranks) else None

    cdef object _died(self, fipc_error *e):
        rank = self._rank(e.reader)
        who = "the writer" if rank is None else f"reader rank {rank}"
        host = _text(e.host)
        return PeerDied(f"{who} (pid {e.pid} on {host}) died without closing the queue",
                        rank, e.pid, host)

    cdef str _culprit(self, fipc_error *e):
        rank = self._rank(e.reader)
        if rank is None:
            return ""
        if self.peer(e.reader)[0] == "free":
            return f": reader rank {rank} has not attached yet"
        return f": reader rank {rank} (pid {e.pid} on {_text(e.host)}) has not read enough of it"

    cdef int _tell(self, kind, fipc_error *e, bint apart) except -1:
        told = (self, kind, self._rank(e.reader), e.pid, _text(e.host), e.waited_ns / 1e9, e.seq)
        if apart:
            # This thread holds the writer, and what is told may run code that wants it.
            threading.Thread(target=self.notice, args=told, daemon=True).start()
        else:
            self.notice(*told)
        return 0

    cdef int _check(self, int rc, fipc_error *e, object timeout, bint midway=False) except -1:
        """Maps a code to an exception; returns for those that ask for the same call again."""
        if rc == FIPC_OK:
            return 0
        if rc == FIPC_INTERRUPTED:
            PyErr_CheckSignals()
            return 0
        if rc == FIPC_LONG_WAIT or rc == FIPC_EVICTED:
            self._tell("waiting" if rc == FIPC_LONG_WAIT else "evicted", e, midway)
            return 0
        if rc == FIPC_TIMEOUT:
            if self.is_writer:
                raise Full("no room in the queue" + _within(timeout) + self._culprit(e))
            raise Empty("no message in the queue" + _within(timeout))
        if rc == FIPC_PEER_DIED:
            raise self._died(e)
        if rc == FIPC_CLOSED:
            raise Closed("every reader has left the queue" if self.is_writer
                         else "the writer has closed the queue and all its messages are read")
        if rc == FIPC_SHUTDOWN:
            raise Closed("this end of the queue was shut down or closed")
        _raise(rc, e)

    cdef int _open(self, object timeout=None) except -1:
        """Every call begins here."""
        if self.q == NULL or self.closing:
            raise Closed("this end of the queue was shut down or closed")
        if fipc_queue_forked(self.q):
            _raise(FIPC_FORKED, NULL)
        if timeout is not None and not timeout >= 0:
            raise ValueError(
                f"timeout must be None or a number of seconds of at least 0, not {timeout!r}")
        return 0

    cdef int _writing(self, object timeout) except -1:
        self._open(timeout)
        if not self.is_writer:
            raise IPCError("only the writer sends; this end of the queue is a reader's")
        return 0

    cdef int _reading(self, object timeout) except -1:
        self._open(timeout)
        if self.is_writer:
            raise IPCError("only readers receive; this end of the queue is the writer's")
        return 0

    cdef void _done(self) noexcept:
        self.active -= 1
        if self.closing and self.active == 0:
            fipc_queue_close(self.q)

    def use_serializer(self, dump, load_one, load_many, bint bytes_as_they_are=False):
        """dump(obj) -> (pieces, n) as send takes them; load_one(bytes), or load_many(list of
        Block) when it is large or has several buffers -> obj. bytes_as_they_are: a bytes object
        may pass the serializer by, on both sides."""
        self.bytes_as_they_are = bytes_as_they_are
        self.dump = dump
        self.load_one = load_one
        self.load_many = load_many

    # -- the writer

    def put(self, obj, timeout=None):
        """Sends an object through the serializer. Small bytes objects travel as they are."""
        cdef fipc_piece one
        cdef Py_ssize_t joined
        self._writing(timeout)
        if (self.bytes_as_they_are and PyBytes_CheckExact(obj)
                and PyBytes_GET_SIZE(obj) <= GIL_COPY_LIMIT):
            memset(&one, 0, sizeof(one))
            one.ptr = PyBytes_AS_STRING(obj)
            one.len = PyBytes_GET_SIZE(obj)
            self._send(&one, 1, TAG_BYTES, timeout)
            return
        items, joined = self.dump(obj)
        self.send(items, joined, timeout)

    def send(self, list items, Py_ssize_t joined, timeout=None):
        """Sends one message: the first `joined` items make its first buffer, each other item one
        more. Items are bytes, Piece, or contiguous buffers. Raises Full, Closed, PeerDied,
        SharedMemoryFull; then nothing is delivered."""
        cdef _Pins pins
        cdef fipc_piece one
        self._writing(timeout)
        if len(items) == 1 and PyBytes_CheckExact(items[0]):
            memset(&one, 0, sizeof(one))
            one.ptr = PyBytes_AS_STRING(items[0])
            one.len = PyBytes_GET_SIZE(items[0])
            self._send(&one, 1, TAG_FRAME, timeout)
            return
        pins = _Pins.__new__(_Pins)
        try:
            pins.pin(items, joined)
            self._send(pins.pieces, len(items), TAG_FRAME, timeout)
        finally:
            pins.unpin()

    cdef int _send(self, fipc_piece *pieces, uint64_t n, uint32_t tag, object timeout) except -1:
        cdef fipc_error e
        cdef fipc_call call
        cdef int rc
        rc = fipc_queue_send_inline(self.q, pieces, n, tag, &e)
        if rc == FIPC_OK:
            return 0
        if rc != FIPC_WOULD_BLOCK:
            self._check(rc, &e, timeout)
        memset(&call, 0, sizeof(call))
        call.deadline = _deadline(timeout)
        call.signals = _runs_handlers()
        self.active += 1
        try:
            while True:
                with nogil:
                    rc = fipc_queue_send(self.q, pieces, n, tag, &call, &e)
                if rc == FIPC_OK:
                    return 0
                self._check(rc, &e, timeout, call.midway)
        finally:
            fipc_queue_send_abandon(self.q, &call)  # only if an exception ended it midway
            self._done()

    def loan(self, uint64_t nbytes, timeout=None):
        """A Loan of nbytes of shared memory, to be filled in place. This thread holds the end
        until commit or abort."""
        cdef fipc_error e
        cdef fipc_call call
        cdef void *ptr = NULL
        cdef int rc
        cdef Loan loan = Loan.__new__(Loan)  # before anything is held that it would give back
        self._writing(timeout)
        memset(&call, 0, sizeof(call))
        call.deadline = _deadline(timeout)
        call.signals = _runs_handlers()
        self.active += 1
        try:
            while True:
                with nogil:
                    rc = fipc_queue_loan(self.q, nbytes, &call, &ptr, &e)
                if rc == FIPC_OK:
                    break
                self._check(rc, &e, timeout)
        except BaseException:
            self._done()
            raise
        loan.lend(self, ptr, nbytes, False)
        return loan

    def evict(self, uint32_t reader):
        """Stops waiting for a dead reader. ValueError when it is not dead."""
        cdef fipc_error e
        cdef int rc
        while True:
            self._writing(None)
            self.active += 1
            with nogil:
                rc = fipc_queue_evict(self.q, reader, &e)
            self._done()
            if rc == FIPC_OK:
                return
            self._check(rc, &e, None)

    # -- the reader

    def poll(self):
        """get(0), but NOTHING when there is no message; so what it raises is not about that."""
        cdef uint32_t tag
        try:
            message = self._recv(0, &tag)
        except Empty:
            return NOTHING
        return self._load(message, tag)

    cdef object _load(self, message, uint32_t tag):
        if tag == TAG_BYTES and self.bytes_as_they_are:
            return message if type(message) is bytes else bytes((<list>message)[0])
        return self.load_one(message) if type(message) is bytes else self.load_many(message)

    def defer(self, error):
        """Makes the next get raise error."""
        self.deferred = error

    def get(self, timeout=None, indefinite=False):
        """Takes one object through the serializer. indefinite changes nothing."""
        cdef uint32_t tag
        if self.deferred is not None:
            error, self.deferred = self.deferred, None
            raise error
        message = self._recv(timeout, &tag)
        return self._load(message, tag)

    def recv(self, timeout=None):
        """Takes one message: bytes when it is one small buffer, else a list of Block. Raises
        Empty, Closed, PeerDied, DecodeError (that message is skipped)."""
        cdef uint32_t tag
        return self._recv(timeout, &tag)

    cdef object _recv(self, object timeout, uint32_t *tag):
        cdef const void *ptr
        cdef uint64_t length
        cdef fipc_error e
        cdef fipc_call call
        cdef fipc_message m
        cdef int rc
        cdef bint called = False, waited = False, take
        self._reading(timeout)
        while True:
            rc = fipc_queue_peek(self.q, GIL_COPY_LIMIT, &ptr, &length, tag, &e)
            if rc == FIPC_OK:
                # bytes are not tracked by the garbage collector, so no user code runs in here
                try:
                    data = PyBytes_FromStringAndSize(<const char *>ptr, <Py_ssize_t>length)
                except MemoryError:
                    fipc_queue_peek_undo(self.q)
                    raise
                fipc_queue_peek_done(self.q)
                return data
            if rc != FIPC_WOULD_BLOCK and rc != FIPC_INVALID:
                self._check(rc, &e, timeout)
            if not called:
                called = True
                memset(&call, 0, sizeof(call))
                call.deadline = _deadline(timeout)
                call.signals = _runs_handlers()
            # The brief way again after a wait; but if it fails then too, another thread is at it,
            # and recv knows how to wait for that.
            take = rc == FIPC_INVALID or waited
            waited = True
            m.blocks = NULL
            self.active += 1
            with nogil:
                rc = FIPC_WOULD_BLOCK
                if take:
                    rc = fipc_queue_recv(self.q, &call, &m, &e)
                if rc == FIPC_WOULD_BLOCK:
                    m.blocks = NULL
                    rc = fipc_queue_wait_readable(self.q, &call, &e)
            self._done()
            if rc == FIPC_OK and m.blocks != NULL:
                tag[0] = m.tag
                return _blocks(&m)
            self._check(rc, &e, timeout)
            self._open()

    def wait_readable(self, timeout=None):
        """Waits until recv has something to return or to raise; takes nothing. Raises Empty, and
        what recv would raise."""
        cdef fipc_error e
        cdef fipc_call call
        cdef int rc
        self._reading(timeout)
        if self.deferred is not None:
            return
        memset(&call, 0, sizeof(call))
        call.deadline = _deadline(timeout)
        call.signals = _runs_handlers()
        while True:
            self.active += 1
            with nogil:
                rc = fipc_queue_wait_readable(self.q, &call, &e)
            self._done()
            self._check(rc, &e, timeout)
            if rc == FIPC_OK:
                return
            self._open()

    def peek(self, timeout=None):
        """A Loan over the next message in place, read-only; commit acknowledges it. It must be
        one buffer of at most a chunk (DecodeError otherwise; the message stays)."""
        cdef const void *ptr
        cdef uint64_t length
        cdef uint32_t tag
        cdef fipc_error e
        cdef fipc_call call
        cdef int rc
        cdef Loan loan = Loan.__new__(Loan)  # before anything is held that it would give back
        self._reading(timeout)
        memset(&call, 0, sizeof(call))
        call.deadline = _deadline(timeout)
        call.signals = _runs_handlers()
        self.active += 1
        try:
            while True:
                with nogil:
                    rc = fipc_queue_peek_wait(self.q, UINT64_MAX, &call, &ptr, &length, &tag, &e)
                    if rc == FIPC_WOULD_BLOCK:
                        rc = fipc_queue_wait_readable(self.q, &call, &e)
                        if rc == FIPC_OK:
                            continue
                if rc == FIPC_OK:
                    break
                if rc == FIPC_INVALID:
                    raise DecodeError("the next message was not written by acquire_write: it is a "
                                      "frame of several buffers or fragments")
                self._check(rc, &e, timeout)
        except BaseException:
            self._done()
            raise
        loan.lend(self, <void *>ptr, length, True)
        return loan

    # -- both

    def wait_ready(self, timeout=None):
        """Waits until every rank has attached; returns False at the timeout."""
        cdef fipc_error e
        cdef fipc_call call
        cdef int rc
        self._open(timeout)
        memset(&call, 0, sizeof(call))
        call.deadline = _deadline(timeout)
        call.signals = _runs_handlers()
        while True:
            self.active += 1
            with nogil:
                rc = fipc_queue_wait_ready(self.q, &call, &e)
            self._done()
            if rc == FIPC_OK:
                return True
            if rc == FIPC_TIMEOUT:
                return False
            self._check(rc, &e, timeout)
            self._open()

    def peer(self, reader):
        """(state, pid, host, lag in messages) of a reader by index, or of the writer (None).
        State is "free", "joining", "active", "left" or "dead"."""
        cdef fipc_peer_info info
        self._open()
        if fipc_queue_peer(self.q, -1 if reader is None else reader, &info) != FIPC_OK:
            raise IndexError(f"no reader {reader}")
        return _PEER_STATES[info.state], info.pid, _text(info.host), info.lag

    def stats(self):
        """Counters since this end was made, as a dict of ints."""
        cdef fipc_stats s
        if self.q == NULL:
            raise Closed("this end of the queue was never opened")
        fipc_queue_stats(self.q, &s)
        return dict(s)

    def size(self):
        """Messages not yet read: by this reader, or by the writer's slowest."""
        self._open()
        return fipc_queue_size(self.q)

    def readable(self):
        self._open()
        return self.deferred is not None or fipc_queue_readable(self.q)

    def has_room(self):
        self._open()
        return fipc_queue_has_room(self.q)

    def address(self):
        """Where a reader finds the segment: (id, pid, start time in ticks, descriptor, path)."""
        cdef fipc_address a
        self._open()
        fipc_queue_address(self.q, &a)
        return (a.id[:FIPC_ID_BYTES], a.pid, a.start_time, a.fd, (<bytes>a.path).decode())

    def shutdown(self):
        """Ends every wait on this end, now and later, with Closed. Any thread, any time."""
        if self.q != NULL and not self.closing:
            fipc_queue_shutdown(self.q)

    def close(self):
        """Leaves the queue. Never waits: calls that are running end with Closed, and the last of
        them gives the memory back."""
        if self.q == NULL or self.closing:
            return
        self.closing = True
        fipc_queue_shutdown(self.q)
        if self.active == 0:
            fipc_queue_close(self.q)

    def missing(self):
        """The ranks that have never attached."""
        return [rank for i, rank in enumerate(self.ranks) if self.peer(i)[0] == "free"]

    @property
    def closed(self):
        return self.q == NULL or bool(self.closing)

    @property
    def busy(self):
        """Calls are running, or a Loan is out: after close() the memory is still there."""
        return self.active > 0


cdef str _within(object timeout):
    return "" if not timeout else f" within {timeout} s"


cdef list _blocks(fipc_message *m):
    cdef list out
    cdef uint64_t i
    try:
        out = [None] * <Py_ssize_t>m.n
        for i in range(m.n):
            out[i] = _block(&m.blocks[i])
        return out
    finally:
        fipc_message_clear(m)  # the array, and after a MemoryError what is still in it


cdef int _raise(int rc, fipc_error *e) except -1:
    text = "" if e == NULL else _text(e.text)
    if rc == FIPC_NO_SPACE:
        raise SharedMemoryFull(
            f"not enough room for shared memory: {e.needed} bytes are needed, {e.available} are "
            "free; make the file system or the memory limit larger, or max_chunk_bytes, max_chunks "
            "or slots smaller", e.needed, e.available)
    if rc == FIPC_MISMATCH or rc == FIPC_GONE:
        raise HandleMismatch(text, rc == FIPC_GONE)
    if rc == FIPC_RANK_TAKEN:
        raise HandleMismatch(f"the rank is taken: pid {e.pid} on {_text(e.host)} is attached as it")
    if rc == FIPC_CORRUPT:
        raise DecodeError("a message that can't be right was skipped: its frame contradicts itself")
    if rc == FIPC_NO_MEMORY:
        raise MemoryError("not enough memory for the message")
    if rc == FIPC_INVALID:
        raise ValueError(text or _text(fipc_status_text(rc)))
    if rc == FIPC_REENTRANT:
        raise IPCError("this thread is inside a call on the same end of the queue already (a "
                       "signal handler, a finalizer, a log handler or a with-block came back)")
    if rc == FIPC_FORKED:
        raise IPCError("this end of the queue belongs to the parent process: after fork, use "
                       "MessageQueue.create_from_handle(handle, rank) in the child, with what "
                       "export_handle() gave the parent")
    if rc == FIPC_SYSTEM:
        raise OSError(e.sys_errno, text)
    raise IPCError(text or _text(fipc_status_text(rc)))


# ---- memory in place --------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear  # the collector must not take `end` away before it is given its memory back
cdef class Loan:
    """Shared memory in place: a chunk or slot lent to the writer, or the next message lent to a
    reader. Exports its bytes until commit or abort."""

    cdef Endpoint end
    cdef void *ptr
    cdef readonly uint64_t nbytes
    cdef readonly bint reading
    cdef Py_ssize_t exports
    cdef Endpoint lender  # kept from unmapping while there are exports

    cdef void lend(self, Endpoint end, void *ptr, uint64_t nbytes, bint reading) noexcept:
        """Takes over what the endpoint has locked and counted (active)."""
        self.end = end
        self.lender = end
        self.ptr = ptr
        self.nbytes = nbytes
        self.reading = reading

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.end is None:
            raise BufferError("the memory has been given back")
        PyBuffer_FillInfo(view, self, self.ptr, <Py_ssize_t>self.nbytes, self.reading, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1
        self._unpin()

    cdef void _unpin(self) noexcept:
        """The endpoint may unmap when the loan is over and nobody holds a view any more."""
        cdef Endpoint lender = self.lender
        if self.end is None and lender is not None and self.exports == 0:
            self.lender = None
            lender._done()

    cdef Endpoint _end(self):
        """Gives the memory back to the endpoint, which the caller then tells what became of it."""
        cdef Endpoint end = self.end
        if end is None:
            raise Closed("the memory has been given back")
        self.end = None
        return end

    def commit(self, nbytes=None):
        """Publishes the first nbytes (default: all), or acknowledges. BufferError, and nothing
        happens, while anybody still holds a view of the memory."""
        cdef Endpoint end
        cdef uint64_t n = self.nbytes if nbytes is None else nbytes
        if n > self.nbytes:
            raise ValueError(f"{n} bytes can't be sent from a loan of {self.nbytes}")
        if self.exports:
            raise BufferError(f"{self.exports} views of the shared memory are still in use (arrays "
                              "made from it?): delete or copy them before leaving the with-block")
        end = self._end()
        if self.reading:
            fipc_queue_peek_done(end.q)
        else:
            fipc_queue_loan_commit(end.q, n)
        self._unpin()

    def abort(self):
        """Sends nothing; or leaves the message for the next call. Views that are still held stay
        readable, but what they show may change from now on."""
        cdef Endpoint end = self._end()
        if self.reading:
            fipc_queue_peek_undo(end.q)
        else:
            fipc_queue_loan_abort(end.q)
        self._unpin()

    def __dealloc__(self):
        if self.end is not None:
            self.abort()


# ---- making endpoints -------------------------------------------------------------------------

cdef int64_t _spin_ns(object spin_us) except? -2:
    if spin_us is None:
        return -1
    # a spin looks for no signals: Ctrl-C waits for its end
    if not 0 <= spin_us <= 50000:
        raise ValueError(f"spin_us must be between 0 and 50,000 microseconds, not {spin_us!r}")
    return <int64_t>(<double>spin_us * 1000)


cdef uint64_t _warn_ns(double seconds):
    return <uint64_t>(seconds * 1e9) if 0 < seconds < 1e9 else FIPC_FOREVER


cdef Endpoint _endpoint(bint is_writer, ranks, notice):
    cdef Endpoint end = Endpoint.__new__(Endpoint)
    end.is_writer = is_writer
    end.ranks = tuple(ranks)
    end.notice = notice
    return end


def create_writer(*, bytes queue_id, ranks, uint64_t max_chunk_bytes, uint32_t max_chunks,
                  uint32_t slots, uint32_t inline_bytes, shm_dir, str host, uint32_t n_cpus,
                  spin_us, double warning_interval, bint evict, notice):
    """Makes a segment for one reader per entry of ranks. SharedMemoryFull, ValueError, OSError;
    then nothing is left."""
    cdef fipc_config c
    cdef fipc_error e
    cdef int rc
    cdef Endpoint end = _endpoint(True, ranks, notice)
    cdef bytes host_bytes = host.encode()
    cdef bytes dir_bytes = b"" if shm_dir is None else shm_dir.encode()
    memset(&c, 0, sizeof(c))
    if len(queue_id) != FIPC_ID_BYTES:
        raise ValueError("queue_id must be 16 bytes")
    memcpy(c.id, <const char *>queue_id, FIPC_ID_BYTES)
    c.n_readers = len(end.ranks)
    c.n_slots = slots
    c.inline_bytes = inline_bytes
    c.n_chunks = max_chunks
    c.chunk_bytes = max_chunk_bytes
    if shm_dir is not None:
        c.shm_dir = dir_bytes
    c.host = host_bytes
    c.n_cpus = n_cpus
    c.spin_ns = _spin_ns(spin_us)
    c.warn_ns = _warn_ns(warning_interval)
    c.evict = evict
    with nogil:
        rc = fipc_queue_create(&end.q, &c, &e)
    end._check(rc, &e, None)
    return end


def segment_bytes(*, uint32_t readers, uint64_t max_chunk_bytes, uint32_t max_chunks,
                  uint32_t slots, uint32_t inline_bytes):
    """What a segment takes, in bytes: (when it is made, when all its chunks are in use)."""
    cdef fipc_config c
    cdef fipc_error e
    cdef uint64_t at_once = 0, at_most = 0
    memset(&c, 0, sizeof(c))
    c.n_readers = readers
    c.n_slots = slots
    c.inline_bytes = inline_bytes
    c.n_chunks = max_chunks
    c.chunk_bytes = max_chunk_bytes
    if fipc_queue_plan(&c, &at_once, &at_most, &e) != FIPC_OK:
        raise ValueError(e.text.decode("utf-8", "replace"))
    return at_once, at_most


def attach_reader(*, bytes queue_id, ranks, uint32_t reader, int64_t pid, int32_t fd, str path,
                  str host, uint32_t n_cpus, spin_us, double warning_interval, notice):
    """Attaches as reader number `reader` to the segment found at /proc/<pid>/fd/<fd> or path."""
    cdef fipc_address a
    cdef fipc_attach_options o
    cdef fipc_error e
    cdef int rc
    cdef Endpoint end = _endpoint(False, ranks, notice)
    cdef bytes host_bytes = host.encode()
    cdef bytes path_bytes = path.encode()
    memset(&a, 0, sizeof(a))
    if len(queue_id) != FIPC_ID_BYTES or len(path_bytes) >= FIPC_PATH_BYTES:
        raise HandleMismatch("the handle is damaged: its queue id or path has an impossible length")
    memcpy(a.id, <const char *>queue_id, FIPC_ID_BYTES)
    memcpy(a.path, <const char *>path_bytes, len(path_bytes))
    a.pid = pid
    a.fd = fd
    a.n_readers = len(end.ranks)
    o.host = host_bytes
    o.n_cpus = n_cpus
    o.spin_ns = _spin_ns(spin_us)
    o.warn_ns = _warn_ns(warning_interval)
    o.ops = NULL
    with nogil:
        rc = fipc_queue_attach(&end.q, &a, reader, &o, &e)
    end._check(rc, &e, None)
    return end


def wait_any(list ends, timeout=None):
    """The indices of those reading Endpoints of which recv would return or raise at once; waits
    for the first of them. [] at the timeout."""
    cdef Py_ssize_t i, n = len(ends)
    cdef fipc_queue **queues
    cdef uint8_t *ready
    cdef fipc_call call
    cdef int rc
    cdef fipc_error e
    if timeout is not None and not timeout >= 0:
        raise ValueError(
            f"timeout must be None or a number of seconds of at least 0, not {timeout!r}")
    memset(&call, 0, sizeof(call))
    call.deadline = _deadline(timeout)
    call.signals = _runs_handlers()
    for i in range(n):
        if (<Endpoint?>ends[i]).is_writer:
            raise IPCError("only readers are waited for; this end of the queue is the writer's")
    at_once = [i for i in range(n) if (<Endpoint>ends[i]).q == NULL
               or (<Endpoint>ends[i]).closing or (<Endpoint>ends[i]).deferred is not None]
    if at_once or n == 0:
        return at_once
    queues = <fipc_queue **>PyMem_Malloc(n * sizeof(void *))
    ready = <uint8_t *>PyMem_Malloc(n)
    try:
        if queues == NULL or ready == NULL:
            raise MemoryError
        for i in range(n):
            (<Endpoint>ends[i])._open()
            queues[i] = (<Endpoint>ends[i]).q
        while True:
            for i in range(n):
                (<Endpoint>ends[i]).active += 1
            with nogil:
                rc = fipc_queue_wait_any(queues, <uint32_t>n, &call, ready)
            for i in range(n):
                (<Endpoint>ends[i])._done()
            if rc == FIPC_OK:
                return [i for i in range(n) if ready[i]]
            if rc == FIPC_TIMEOUT:
                return []
            if rc == FIPC_INTERRUPTED:
                PyErr_CheckSignals()
            else:
                memset(&e, 0, sizeof(e))
                _raise(rc, &e)
            closed = [i for i in range(n) if (<Endpoint>ends[i]).closing]
            if closed:
                return closed
    finally:
        PyMem_Free(queues)
        PyMem_Free(ready)


def process_start(int64_t pid):
    """When the process started, in clock ticks since boot; 0 when that can't be known."""
    return fipc_process_start(pid)


cdef void _swept(void *ctx, const char *path, int sys_errno) noexcept with gil:
    (<list>ctx).append((os.fsdecode(<bytes>path), sys_errno))


def sweep(directory, bint dry_run):
    """Removes this user's named segments whose writers are gone: [(path, errno or 0)]. dry_run
    only tells which."""
    cdef list found = []
    cdef bytes encoded = os.fsencode(directory)
    cdef const char *path = encoded
    cdef void *ctx = <void *>found
    with nogil:
        fipc_sweep(path, dry_run, _swept, ctx)
    return found
