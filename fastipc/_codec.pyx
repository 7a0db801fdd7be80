# cython: language_level=3, boundscheck=False, wraparound=False
"""The codec's hot path: what msgspec calls for tensors, arrays and other types it does not know.

Wire format (fixed, shared with others): a message is frames; frame 0 is msgpack, the rest raw
bytes. A tensor is `[dtype name, shape, data]`, an array `[dtype.str, shape, data]`; `data` is the
index of a frame, or extension type 3 with the bytes inline, or (tensors) a map that an out-of-band
provider understands.

msgspec's hooks get no argument that says which message they are called for. So each message is
encoded by a *context*, an object with a msgspec coder of its own whose hooks are bound to it. A
coder keeps a list of idle contexts; a call takes the first and gives it back, so calls that overlap
(threads, or a hook that encodes) never share one, and there are never more contexts than calls that
once overlapped. Taking and giving back run no Python code: the GIL makes them atomic.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

import sys

import msgspec
import numpy as np

from . import _codec_types as _types
from ._codec_types import InsecureDecodeError, UtilityResult
from .errors import DecodeError, IPCError
from .settings import settings

cnp.import_array()

cdef extern from "_dlpack.h":
    ctypedef struct fipc_dl_version:
        uint32_t major
        uint32_t minor
    ctypedef struct fipc_dl_dtype:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct fipc_dl_tensor:
        void *data
        int device_type
        int ndim
        fipc_dl_dtype dtype
        int64_t *shape
        uint64_t byte_offset
    ctypedef struct fipc_dl_managed:
        fipc_dl_tensor tensor
    ctypedef struct fipc_dl_api:
        fipc_dl_version version
        int (*object_from_managed)(fipc_dl_managed *, void **) except -1
        int (*tensor_from_object)(void *, fipc_dl_tensor *)
    ctypedef struct fipc_dl_block:
        fipc_dl_managed managed
        Py_buffer view
    fipc_dl_block *fipc_dl_block_new(
        int ndim, const int64_t *shape, fipc_dl_dtype dtype, bint owned, size_t size)
    void fipc_dl_take(fipc_dl_block *block, Py_buffer *view)
    bint fipc_dl_is_contiguous(const fipc_dl_tensor *tensor, int64_t *count)

cdef extern from *:
    """
    /* numpy's own limit, and far above what any message holds. */
    #define FIPC_MAX_NDIM 64
    /* From here on a copy takes longer (tens of microseconds) than letting other threads run. */
    #define FIPC_COPY_NOGIL (256 * 1024)
    #define FIPC_STEAL(o) ((PyObject *)(o))
    /* Takes a reference to the dtype, as PyArray_NewFromDescr does. */
    #define FIPC_NEW_ARRAY(type, ndim, shape, data, flags) \\
      PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)(type), ndim, shape, NULL, data, \\
                           flags, NULL)
    """
    enum:
        FIPC_MAX_NDIM
        FIPC_COPY_NOGIL
    object FIPC_STEAL(void *pointer)  # a new reference that C handed over
    object FIPC_NEW_ARRAY(cnp.dtype dtype, int ndim, cnp.npy_intp *shape, void *data, int flags)

cdef object _Ext = msgspec.msgpack.Ext
cdef object _Encoder = msgspec.msgpack.Encoder
cdef object _Decoder = msgspec.msgpack.Decoder
cdef object _convert = msgspec.convert
cdef object _ndarray = np.ndarray
cdef object _generic = np.generic

# about.


# -- numpy dtypes ----------------------------------------------------------------------------------

# The descriptors of the plain dtypes by type number, and how their dtype.str reads: an attribute
# look-up saved.
cdef object _numpy_names = [None] * 24
cdef object _numpy_descrs = [None] * 24
# dtype.str to dtype, checked. Names that peers make up cannot fill it: only valid ones enter, and
# up to a limit.
cdef dict _dtype_cache = {}


cdef _init_numpy():
    for char in "?bBhHiIlLqQefdgFDG":
        dtype = np.dtype(char)
        if dtype.num < 24:
            _numpy_names[dtype.num] = dtype.str
            _numpy_descrs[dtype.num] = dtype


_init_numpy()


cdef cnp.dtype _dtype_from_str(object name):
    found = _dtype_cache.get(name)
    if found is None:
        found = _types.parse_dtype(name)
        if len(_dtype_cache) < 256:
            _dtype_cache[name] = found
    return <cnp.dtype>found


# -- torch, found when somebody has imported it ----------------------------------------------------

cdef object _Tensor = None  # torch.Tensor; None until torch is there
cdef object _Parameter = None
cdef fipc_dl_api *_dl = NULL
cdef tuple _bytes = (None, None)  # torch.int8, torch.uint8
cdef list _dl_names = [None] * 256  # index: _dl_index(dtype)
cdef dict _torch_dtypes = {}  # dtype name -> _TorchDtype; filled as names are met


@cython.final
cdef class _TorchDtype:
    cdef str name
    cdef Py_ssize_t itemsize
    cdef fipc_dl_dtype dl
    cdef bint direct  # tensors of this dtype go through the DLPack functions


cdef inline int _dl_index(fipc_dl_dtype dtype) noexcept:
    cdef int bits = dtype.bits
    if dtype.lanes != 1 or dtype.code > 31 or bits < 8 or bits > 128 or bits & (bits - 1):
        return -1
    cdef int power = 0
    while 8 << power < bits:
        power += 1
    return dtype.code * 8 + power


cdef bint _find_torch() except -1:
    """Whether torch is there. Looks only: importing it takes seconds, and is the user's to do."""
    global _Tensor, _Parameter, _bytes
    if _Tensor is not None:
        return True
    torch = sys.modules.get("torch")
    # Another thread may be in the middle of importing it: then half of it is not there yet.
    spec = getattr(torch, "__spec__", None)
    tensor = getattr(torch, "Tensor", None)
    if tensor is None or getattr(spec, "_initializing", False):
        return False
    _Parameter = torch.nn.Parameter
    _bytes = (torch.int8, torch.uint8)
    _Tensor = tensor
    _set_direct(True)
    return True


def _set_direct(bint wanted):
    """Use torch's C functions for tensors if it has them, or (False) its Python ones. Returns which
    it is."""
    global _dl
    cdef fipc_dl_api *api
    _dl = NULL
    _torch_dtypes.clear()
    for i in range(256):
        _dl_names[i] = None
    capsule = getattr(_Tensor, "__dlpack_c_exchange_api__", None)
    if not wanted or capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return False
    api = <fipc_dl_api *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    if api.version.major != 1 or api.tensor_from_object == NULL or api.object_from_managed == NULL:
        return False
    _dl = api
    for name in _types.TORCH_DTYPES:
        _torch_dtype(name)
    return True


cdef _TorchDtype _torch_dtype(object name):
    """The dtype of this name, from the table of those the codec knows; None if it is not one."""
    cdef _TorchDtype dtype
    found = _torch_dtypes.get(name)
    if found is not None:
        return <_TorchDtype>found
    if not _find_torch() or type(name) is not str:
        return None
    size = _types.tensor_itemsize(name)
    if not size:
        return None
    dtype = _TorchDtype()
    dtype.name = sys.intern(name)
    dtype.itemsize = size
    code = _types.TORCH_DTYPES[name]
    if code is not None and _dl != NULL:
        dtype.dl.code, dtype.dl.bits, dtype.dl.lanes = code
        dtype.direct = _try_direct(dtype)
        if dtype.direct:
            _dl_names[_dl_index(dtype.dl)] = dtype.name
    _torch_dtypes[name] = dtype
    return dtype


cdef bint _try_direct(_TorchDtype dtype):
    """Whether torch's functions make, and recognise, a tensor of just this dtype."""
    cdef fipc_dl_tensor back
    try:
        tensor = _new_tensor(dtype, 0, NULL, dtype.itemsize, NULL, NULL)
    except Exception:
        return False
    if str(tensor.dtype) != "torch." + dtype.name:
        return False
    if _dl.tensor_from_object(<void *>tensor, &back) != 0:
        PyErr_Clear()
        return False
    return _dl_index(back.dtype) == _dl_index(dtype.dl)


# -- encoding --------------------------------------------------------------------------------------

cdef char _nothing = 0  # an address for buffers of no bytes
cdef Py_ssize_t _one = 1


@cython.final
@cython.freelist(32)
cdef class _Borrowed:
    """The bytes of a tensor or array as a buffer; keeps the tensor or array alive."""

    cdef void *data
    cdef Py_ssize_t size
    cdef bint readonly
    cdef object owner

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.readonly and flags & PyBUF_WRITABLE:
            raise BufferError("these bytes are read-only")
        view.obj = self
        view.buf = self.data
        view.len = self.size
        view.itemsize = 1
        view.readonly = self.readonly
        view.ndim = 1
        view.format = NULL
        if flags & PyBUF_FORMAT:
            view.format = "B"
        view.shape = &self.size if flags & PyBUF_ND else NULL
        view.strides = &_one if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL


cdef inline object _borrow(void *data, Py_ssize_t size, bint readonly, object owner):
    cdef _Borrowed buffer = _Borrowed.__new__(_Borrowed)
    buffer.data = data if size else &_nothing
    buffer.size = size
    buffer.readonly = readonly
    buffer.owner = owner
    return PyMemoryView_FromObject(buffer)


@cython.final
cdef class _EncodeContext:
    """Encodes one message at a time; see the module's docstring."""

    cdef MsgpackEncoder coder
    cdef _EncodeContext next  # in the coder's list of idle ones
    cdef list frames  # None as long as there is only the main one
    cdef uint64_t message  # counts them
    cdef object encode
    cdef object encode_into

    def __cinit__(self, MsgpackEncoder coder):
        encoder = _Encoder(enc_hook=self._hook)
        self.coder = coder
        self.encode = encoder.encode
        self.encode_into = encoder.encode_into

    @cython.binding(False)
    def _hook(self, obj):
        cls = type(obj)
        if cls is _Tensor or cls is _Parameter:
            return self._tensor(obj)
        if cls is _ndarray:
            return self._array(<cnp.ndarray>obj)
        return self._other(cls, obj)

    cdef object _data(self, void *data, Py_ssize_t size, bint inline_, bint readonly, object owner):
        if inline_:
            return _Ext(_types_EXT_RAW, PyBytes_FromStringAndSize(<char *>data, size))
        return self._append(_borrow(data, size, readonly, owner))

    cdef Py_ssize_t _append(self, object buffer) except -1:
        if self.frames is None:
            self.frames = [None]  # the main frame's place
        self.frames.append(buffer)
        return PyList_GET_SIZE(self.frames) - 1

    cdef inline void finish(self, MsgpackEncoder coder) noexcept:
        # Most messages have one frame, and most coders one context: then little is written.
        self.message += 1
        if self.frames is not None:
            self.frames = None
        if coder._idle is not None:
            self.next = coder._idle
        coder._idle = self

    cdef object _tensor(self, object obj):
        cdef fipc_dl_tensor tensor
        cdef int64_t count
        cdef int index
        cdef Py_ssize_t size
        cdef char *data
        cdef object item
        if _dl == NULL:
            return self._tensor_slow(obj)
        if _dl.tensor_from_object(<void *>obj, &tensor) != 0:
            # A tensor that DLPack has no words for. The slow way says what is wrong with it, if so.
            PyErr_Clear()
            return self._tensor_slow(obj)
        index = _dl_index(tensor.dtype)
        if (index < 0 or tensor.device_type != 1 or tensor.ndim > FIPC_MAX_NDIM
                or not fipc_dl_is_contiguous(&tensor, &count)):
            return self._tensor_slow(obj)
        name = _dl_names[index]
        # torch calls its integers of fewer than 8 bits 8-bit ones here.
        if (tensor.dtype.bits == 8 and tensor.dtype.code < 2
                and obj.dtype is not _bytes[tensor.dtype.code]):
            return self._tensor_slow(obj)
        # A tensor may stand for the negative or the conjugate of its bytes.
        if name is None or obj.is_neg() or (tensor.dtype.code == 5 and obj.is_conj()):
            return self._tensor_slow(obj)
        shape = PyTuple_New(tensor.ndim)
        for i in range(tensor.ndim):
            item = tensor.shape[i]
            Py_INCREF(item)
            PyTuple_SET_ITEM(shape, i, item)
        size = count * (tensor.dtype.bits >> 3)
        data = <char *>tensor.data + tensor.byte_offset
        if size < self.coder.size_threshold:
            return (name, shape, self._data(data, size, True, False, None))
        if self.coder.oob_tensor_consumer is not None:
            placeholder = self.coder.oob_tensor_consumer(obj)
            if placeholder is not None:
                return (name, shape, placeholder)
        return (name, shape, self._data(data, size, False, False, obj))

    cdef object _tensor_slow(self, object obj):
        cdef Py_ssize_t size
        name, shape, size = _types.describe_tensor(obj)
        if size >= self.coder.size_threshold and self.coder.oob_tensor_consumer is not None:
            # Before anything is copied: a device tensor need not come to the CPU for this.
            placeholder = self.coder.oob_tensor_consumer(obj)
            if placeholder is not None:
                return (name, shape, placeholder)
        address, owner = _types.tensor_memory(obj)
        small = size < self.coder.size_threshold
        return (name, shape, self._data(<void *><uintptr_t>address, size, small, False, owner))

    cdef object _array(self, cnp.ndarray array):
        cdef int ndim = cnp.PyArray_NDIM(array)
        cdef int number = cnp.PyArray_TYPE(array)
        cdef Py_ssize_t size
        cdef object item
        cdef object dtype = <object><void *>cnp.PyArray_DESCR(array)
        if 0 <= number < 24 and _numpy_descrs[number] is dtype:
            name = _numpy_names[number]
        else:
            name = _types.dtype_str(array)
            if name is None:
                return self.coder._refuse_array(array)
        if not cnp.PyArray_IS_C_CONTIGUOUS(array):
            array = cnp.PyArray_NewCopy(array, cnp.NPY_CORDER)
        shape = PyTuple_New(ndim)
        for i in range(ndim):
            item = cnp.PyArray_DIM(array, i)
            Py_INCREF(item)
            PyTuple_SET_ITEM(shape, i, item)
        size = cnp.PyArray_NBYTES(array)
        # A 0-dim array is always inline, whatever the threshold: so the format has it.
        small = ndim == 0 or size < self.coder.size_threshold
        readonly = not cnp.PyArray_ISWRITEABLE(array)
        return (name, shape, self._data(cnp.PyArray_DATA(array), size, small, readonly, array))

    cdef object _other(self, cls, obj):
        if _Tensor is None and _find_torch():
            return self._hook(obj)
        found = self.coder.registry._find(cls)
        if found is not None:
            return found[0](obj, _Writer.__new__(_Writer, self))
        if isinstance(obj, _ndarray):
            if _types.is_masked(obj):
                return self.coder._refuse_array(obj)
            return self._array(<cnp.ndarray>obj)
        if _Tensor is not None and isinstance(obj, _Tensor):
            return self._tensor_slow(obj)
        if cls is slice:
            return _types.slice_parts(obj)
        if isinstance(obj, _generic):
            return _types.scalar_value(obj)
        if isinstance(obj, UtilityResult):
            return (_types.type_info(obj.result, self.coder.insecure), obj.result)
        if self.coder.insecure:
            return _types.pickle_ext(obj)
        raise TypeError(
            f"cannot encode {cls.__module__}.{cls.__qualname__}: register an encode and a decode "
            f"function for it, or, to let it be pickled, {_types.INSECURE_HINT}"
        )


cdef object _types_EXT_RAW = _types.EXT_RAW


@cython.final
cdef class _Writer:
    """A `FrameWriter`."""

    cdef _EncodeContext context
    cdef uint64_t message

    def __cinit__(self, _EncodeContext context):
        self.context = context
        self.message = context.message

    def append(self, buffer):
        if self.message != self.context.message:
            raise ValueError("the message that this FrameWriter belonged to has been encoded")
        view = buffer if type(buffer) is bytes else memoryview(buffer)
        if type(view) is memoryview and not view.c_contiguous:
            raise ValueError("a frame must be C-contiguous")
        return self.context._append(view)


cdef class MsgpackEncoder:
    """Turns an object into frames: msgpack first, then the bytes of each large tensor, array or
    buffer.

    Args:
        size_threshold: bytes from which a tensor or array gets a frame of its own; None: the
            setting FASTIPC_MSGPACK_ZERO_COPY_THRESHOLD (256). Smaller ones are copied into the
            first frame.
        oob_tensor_consumer: is offered each tensor of at least that size first, see
            `OOBTensorConsumer`.
        allow_insecure_serialization: pickle what nothing else can carry; None: as
            FASTIPC_ALLOW_INSECURE_SERIALIZATION says. Also makes every utility result carry all its
            types.
        registry: the user's types; None: `fastipc.codec.registry`.

    What it encodes: everything msgspec does (Structs, dataclasses, containers, numbers, strings,
    bytes, datetimes, ...), torch tensors, numpy arrays and scalars, slices, `UtilityResult`,
    registered types.

    *Frames borrow.* The auxiliary frames are memoryviews over the caller's own tensors and arrays:
    do not change, resize or free-and-reuse those before the frames are sent
    (`fastipc.sockets.send_frames` says when). What is not C-contiguous, not on the CPU, or
    conjugated or negated lazily is copied, and the frame owns the copy. A view into something
    larger sends its own bytes only.

    Threads may share an encoder, and an encode function may encode with the encoder that called it:
    every message has frames of its own. After a fork each process goes on with its copy. An encode
    that raises leaves nothing behind.
    """

    cdef readonly Py_ssize_t size_threshold
    cdef readonly object oob_tensor_consumer
    cdef readonly bint insecure
    cdef readonly object registry
    cdef object _new_message
    cdef _EncodeContext _idle

    def __init__(self, size_threshold=None, oob_tensor_consumer=None, *,
                 allow_insecure_serialization=None, registry=None):
        if size_threshold is None:
            size_threshold = settings().msgpack_zero_copy_threshold
        if size_threshold < 0:
            raise ValueError("size_threshold must not be negative")
        self.size_threshold = min(size_threshold, sys.maxsize)
        self.oob_tensor_consumer = oob_tensor_consumer
        self._new_message = getattr(oob_tensor_consumer, "new_message", None)
        if allow_insecure_serialization is None:
            allow_insecure_serialization = settings().allow_insecure_serialization
        self.insecure = allow_insecure_serialization
        self.registry = _types.registry if registry is None else registry
        self._idle = None
        _find_torch()

    # Positional only and unbound: called as cheaply as msgspec's own methods are.
    @cython.binding(False)
    def encode(self, obj, /):
        """Encode `obj` as `[main, aux...]`: bytes, then memoryviews (or what encode functions
        appended).

        Raises:
            TypeError: a type nobody can carry; the message says which.
            OverflowError: an integer outside of [-2**63, 2**64).
            RecursionError: nested too deeply, or in a cycle.
            Whatever an encode function or the out-of-band consumer raises.
        """
        cdef _EncodeContext context = self._take()
        cdef list frames
        try:
            if self._new_message is not None:
                self._new_message()
            main = context.encode(obj)
            frames = context.frames
        finally:
            context.finish(self)
        if frames is None:
            return [main]
        frames[0] = main
        return frames

    cdef inline _EncodeContext _take(self):
        cdef _EncodeContext context = self._idle
        if context is None:
            return _EncodeContext(self)
        self._idle = context.next
        if context.next is not None:
            context.next = None
        return context

    def encode_into(self, obj, bytearray buffer not None):
        """As `encode`, with the first frame written into `buffer`, which is resized to fit and is
        `frames[0]`.

        Raises:
            BufferError: `buffer` is still in use, by a memoryview or a message being sent.
            As `encode` does; `buffer` then holds no message.
        """
        cdef _EncodeContext context
        cdef list frames
        # A view or a send in flight holds an export. Appending and taking away a byte asks for it,
        # at the price of nothing else: without it, a message of the same length would overwrite
        # what is being sent.
        buffer.append(0)
        buffer.pop()
        context = self._take()
        try:
            if self._new_message is not None:
                self._new_message()
            context.encode_into(obj, buffer)
            frames = context.frames
        finally:
            context.finish(self)
        if frames is None:
            return [buffer]
        frames[0] = buffer
        return frames

    cdef object _refuse_array(self, array):
        if self.insecure:
            return _types.pickle_ext(array)
        what = f"{type(array).__qualname__} of dtype {array.dtype}"
        raise TypeError(
            f"cannot encode a numpy {what}: its bytes do not say what it is. Send its fields as "
            f"arrays of their own, or, to let it be pickled, {_types.INSECURE_HINT}"
        )


# -- decoding --------------------------------------------------------------------------------------

cdef int _read_shape(list dims, int64_t *shape, Py_ssize_t itemsize, Py_ssize_t *size) except -1:
    """Check a shape from the wire, and compute the bytes it needs."""
    cdef Py_ssize_t ndim = PyList_GET_SIZE(dims)
    cdef int64_t limit = INT64_MAX // itemsize
    cdef int64_t product = 1
    cdef int64_t n
    cdef int overflow
    cdef bint empty = False
    if ndim > FIPC_MAX_NDIM:
        raise DecodeError(f"a shape of {ndim} dimensions")
    for i in range(ndim):
        item = dims[i]
        if type(item) is not int:
            raise DecodeError("a shape holds something other than integers")
        n = PyLong_AsLongLongAndOverflow(item, &overflow)
        if n < 0 or overflow != 0:
            raise DecodeError("a dimension of a shape is out of range")
        shape[i] = n
        if n == 0:
            empty = True
        elif product > limit // n:
            raise DecodeError("a shape is too large for any memory")
        else:
            product *= n
    size[0] = 0 if empty else product * itemsize
    return 0


cdef inline int _copy(void *target, const void *source, Py_ssize_t size) except -1:
    if size >= FIPC_COPY_NOGIL:
        with nogil:
            memcpy(target, source, size)
    elif size:
        memcpy(target, source, size)
    return 0


cdef object _new_tensor(
    _TorchDtype dtype, int ndim, const int64_t *shape, Py_ssize_t size, const void *data,
    Py_buffer *keep
):
    """A tensor over the buffer `keep`, which it takes over, or (NULL) with a copy of `data`."""
    cdef void *result
    cdef fipc_dl_block *block = fipc_dl_block_new(ndim, shape, dtype.dl, keep == NULL, size)
    if block == NULL:
        raise MemoryError(f"no memory for a tensor of {size} bytes")
    if keep != NULL:
        fipc_dl_take(block, keep)
    elif data != NULL:
        _copy(block.managed.tensor.data, data, size)
    _dl.object_from_managed(&block.managed, &result)
    return FIPC_STEAL(result)


@cython.final
cdef class _DecodeContext:
    """Decodes one message at a time; see the module's docstring."""

    cdef MsgpackDecoder coder
    cdef _DecodeContext next  # in the coder's list of idle ones
    cdef list frames  # None if there is only the main one; each becomes None when it is used
    cdef uint64_t message  # counts them
    cdef object decode

    def __cinit__(self, MsgpackDecoder coder, args):
        self.coder = coder
        self.decode = _Decoder(*args, dec_hook=self._hook, ext_hook=self._ext_hook).decode

    cdef inline void finish(self, MsgpackDecoder coder) noexcept:
        # Most messages have one frame, and most coders one context: then little is written.
        self.message += 1
        if self.frames is not None:
            self.frames = None
        if coder._idle is not None:
            self.next = coder._idle
        coder._idle = self

    @cython.binding(False)
    def _ext_hook(self, code, data):
        if code == 3:
            # A copy, so that a small array does not keep the whole frame alive, nor an in-place
            # ring chunk.
            return bytes(data)
        if code == 1 or code == 2:
            if not self.coder.insecure:
                raise InsecureDecodeError(
                    f"the message holds a pickle; to load it, {_types.INSECURE_HINT}"
                )
            return _types.unpickle_ext(code, data)
        raise DecodeError(f"the message holds an extension of unknown type {code}")

    def _hook(self, cls, obj):
        if cls is _Tensor:
            return self._tensor(obj)
        if cls is _ndarray:
            return self._array(obj)
        return self._other(cls, obj)

    cdef list _triple(self, obj):
        if type(obj) is not list:
            if type(obj) is not tuple:
                raise DecodeError(f"a {type(obj).__name__} where a tensor or an array should be")
            obj = list(obj)
        if PyList_GET_SIZE(obj) != 3:
            raise DecodeError("a tensor or an array is described by three items")
        shape = (<list>obj)[1]
        if type(shape) is not list:
            if type(shape) is not tuple:
                raise DecodeError("the shape of a tensor or an array is not a list")
            obj = [obj[0], list(shape), obj[2]]
        return <list>obj

    cdef object _frame(self, data):
        """The bytes that `data` stands for: a frame is handed out once, so that nothing aliases."""
        cdef Py_ssize_t index
        if type(data) is bytes:
            return data
        if type(data) is not int:
            raise DecodeError(f"a {type(data).__name__} where a frame index or bytes should be")
        if self.frames is None or not 0 < data < PyList_GET_SIZE(self.frames):
            raise DecodeError("a frame index is out of range")
        index = data
        frame = self.frames[index]
        if frame is None:
            raise DecodeError(f"frame {index} is referred to twice")
        self.frames[index] = None
        return frame

    cdef object _tensor(self, obj):
        cdef int64_t shape[FIPC_MAX_NDIM]
        cdef Py_ssize_t size
        cdef Py_buffer view
        cdef list parts
        cdef bint share
        cdef int ndim
        cdef _TorchDtype dtype
        if type(obj) is not list and isinstance(obj, _Tensor):
            return obj  # came as a pickle
        parts = self._triple(obj)
        name, dims, data = parts
        dtype = _torch_dtype(name) if type(name) is str else None
        if dtype is None:
            raise DecodeError(f"not the name of a tensor's dtype: {str(name)[:40]!r}")
        _read_shape(<list>dims, shape, dtype.itemsize, &size)
        ndim = <int>PyList_GET_SIZE(dims)
        if type(data) is dict:
            if self.coder.oob_tensor_provider is None:
                raise DecodeError(
                    "a tensor was sent out of band, and this decoder has no oob_tensor_provider"
                )
            return self.coder.oob_tensor_provider(name, tuple(<list>dims), data)
        frame = self._frame(data)
        if type(frame) is bytes:
            # Immutable, and torch has no read-only tensors: always copied.
            if PyBytes_GET_SIZE(frame) != size:
                raise DecodeError(f"{PyBytes_GET_SIZE(frame)} bytes for a tensor of {size}")
            if dtype.direct:
                return _new_tensor(dtype, ndim, shape, size, PyBytes_AS_STRING(frame), NULL)
            return _types.tensor_from_buffer(name, dims, frame, False)
        _get_buffer(frame, &view)
        try:
            if view.len != size:
                raise DecodeError(f"{view.len} bytes for a tensor of {size}")
            share = (self.coder.share_mem and not view.readonly and size > 0
                     and (<uintptr_t>view.buf) % _alignment(dtype.itemsize) == 0)
            if dtype.direct:
                return _new_tensor(dtype, ndim, shape, size, view.buf, &view if share else NULL)
            return _types.tensor_from_buffer(name, dims, frame, share)
        finally:
            PyBuffer_Release(&view)

    cdef object _array(self, obj):
        cdef int64_t shape[FIPC_MAX_NDIM]
        cdef Py_ssize_t size
        cdef int flags, ndim
        cdef Py_buffer view
        cdef cnp.dtype dtype
        cdef cnp.ndarray array
        cdef list parts
        if isinstance(obj, _ndarray):
            return obj  # came as a pickle
        parts = self._triple(obj)
        name, dims, data = parts
        if type(name) is not str:
            raise DecodeError("the dtype of an array is not a string")
        dtype = _dtype_from_str(name)
        _read_shape(<list>dims, shape, dtype.itemsize, &size)
        ndim = <int>PyList_GET_SIZE(dims)
        frame = self._frame(data)
        _get_buffer(frame, &view)
        try:
            if view.len != size:
                raise DecodeError(f"{view.len} bytes for an array of {size}")
            Py_INCREF(dtype)  # the call below takes a reference
            if (frame is not data and self.coder.share_mem and size > 0
                    and (<uintptr_t>view.buf) % dtype.alignment == 0):
                flags = cnp.NPY_ARRAY_CARRAY_RO if view.readonly else cnp.NPY_ARRAY_CARRAY
                array = FIPC_NEW_ARRAY(dtype, ndim, <cnp.npy_intp *>shape, view.buf, flags)
                base = frame if type(frame) is bytes else PyMemoryView_FromObject(frame)
                cnp.set_array_base(array, base)
            else:
                array = FIPC_NEW_ARRAY(dtype, ndim, <cnp.npy_intp *>shape, NULL, 0)
                _copy(cnp.PyArray_DATA(array), view.buf, size)
        finally:
            PyBuffer_Release(&view)
        if dtype.kind == c"U":
            _check_unicode(array)
        return array

    cdef object _other(self, cls, obj):
        if not isinstance(cls, type):
            origin = getattr(cls, "__origin__", None)  # ndarray[...] of numpy.typing, and the like
            if not isinstance(origin, type):
                raise DecodeError(f"cannot decode {cls}")
            return self._hook(origin, obj)
        if _Tensor is None and _find_torch():
            return self._hook(cls, obj)
        if self.coder.insecure and isinstance(obj, cls):
            return obj  # came as a pickle
        found = self.coder.registry._find(cls)
        if found is not None:
            try:
                return found[1](obj, _Reader.__new__(_Reader, self))
            except IPCError:
                raise
            except Exception as error:
                raise DecodeError(f"not a {cls.__qualname__}: {error!r}") from error
        if cls is slice:
            return _types.slice_from_parts(obj)
        if cls is UtilityResult:
            if type(obj) is not list or len(obj) != 2:
                raise DecodeError("a utility result is two items")
            info, value = obj
            return UtilityResult(
                _types.from_type_info(info, value, self._resolve, self._convert)
            )
        if issubclass(cls, _generic):
            if type(obj) is list:
                value = self._array(obj)[()]
                if type(value) is cls or cls is _generic:
                    return value
                raise DecodeError(f"a {type(value).__name__} where a {cls.__name__} should be")
            return _types.scalar_from_value(cls, obj)
        if _Tensor is not None and issubclass(cls, _Tensor):
            return self._tensor(obj).as_subclass(cls)
        if issubclass(cls, _ndarray):
            return self._array(obj).view(cls)
        raise DecodeError(
            f"no decode function is registered for {cls.__module__}.{cls.__qualname__}"
        )

    def _resolve(self, module, name):
        return _types.resolve_type(module, name, self.coder.registry, self.coder.insecure)

    def _convert(self, value, cls):
        return _convert(value, cls, dec_hook=self._hook)


cdef int _get_buffer(frame, Py_buffer *view) except -1:
    try:
        PyObject_GetBuffer(frame, view, PyBUF_SIMPLE)
    except (BufferError, TypeError, ValueError) as error:
        raise DecodeError(f"a frame is not a contiguous buffer: {error}") from error
    return 0


cdef inline Py_ssize_t _alignment(Py_ssize_t itemsize) noexcept:
    # Complex numbers are pairs: no processor needs more than half their size, and no number more
    # than 8 bytes.
    return itemsize if itemsize < 8 else 8


cdef int _check_unicode(cnp.ndarray array) except -1:
    """Refuse what is not Unicode text: numpy fails in odd places on such an array, long after it
    was received."""
    flat = array.reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    if flat.size and flat.max() > 0x10FFFF:
        raise DecodeError("an array of text holds what is not a character")
    return 0


@cython.final
cdef class _Reader:
    """A `FrameReader`."""

    cdef _DecodeContext context
    cdef uint64_t message

    def __cinit__(self, _DecodeContext context):
        self.context = context
        self.message = context.message

    def buffer(self, index):
        self._check()
        if type(index) is not int:
            raise DecodeError("a frame index is not an integer")
        view = memoryview(self.context._frame(index)).cast("B")
        return view if self.context.coder.share_mem else memoryview(bytearray(view))

    def convert(self, value, type):
        self._check()
        return _convert(value, type, dec_hook=self.context._hook)

    cdef _check(self):
        if self.message != self.context.message:
            raise ValueError("the message that this FrameReader belonged to has been decoded")


cdef class MsgpackDecoder:
    """Turns frames back into an object of `type`.

    Args:
        type: what a message is: any type msgspec decodes, with tensors, arrays and registered types
            as fields at any depth. None: anything; tensors and arrays then stay the lists they
            travel as, because nothing in a message says that a list is one.
        share_mem: whether tensors and arrays may lie in the received frames instead of in memory of
            their own.
        oob_tensor_provider: `provider(dtype name, shape, placeholder)` fetches tensors sent out of
            band.
        allow_insecure_serialization: load pickles, and import the types that utility results name;
            None: as FASTIPC_ALLOW_INSECURE_SERIALIZATION says. Whoever can send to such a decoder
            can run code in it.
        registry: the user's types; None: `fastipc.codec.registry`.

    What a decoded tensor or array lies in, and whether it may be written to:

    ===================================  ==================  =========================
    its bytes came                       tensor              array
    ===================================  ==================  =========================
    inline (under the size threshold)    owned, writable     owned, writable
    in a writable frame (zmq.Frame,      in the frame,       in the frame,
    bytearray, memoryview of one)        writable            writable
    in a read-only frame (bytes)         owned, writable     in the frame, read-only
    in a frame misaligned for its dtype  owned, writable     owned, writable
    any way, `share_mem=False`           owned, writable     owned, writable
    out of band                          as the provider     (arrays never are)
                                         says
    ===================================  ==================  =========================

    What lies in a frame keeps that frame alive, and no other. A frame is used for one object only:
    a message that refers to one twice is refused. A frame that `encode` returned and that never
    travelled still *is* the caller's tensor: decoding it gives a second view of that.

    Threads may share a decoder; decode functions may use the decoder that called them.
    """

    cdef readonly bint share_mem
    cdef readonly object oob_tensor_provider
    cdef readonly bint insecure
    cdef readonly object registry
    cdef tuple _args
    cdef _DecodeContext _idle

    def __init__(self, type=None, share_mem=True, oob_tensor_provider=None, *,
                 allow_insecure_serialization=None, registry=None):
        self.share_mem = share_mem
        self.oob_tensor_provider = oob_tensor_provider
        if allow_insecure_serialization is None:
            allow_insecure_serialization = settings().allow_insecure_serialization
        self.insecure = allow_insecure_serialization
        self.registry = _types.registry if registry is None else registry
        self._args = () if type is None else (type,)
        _find_torch()
        self._idle = _DecodeContext(self, self._args)

    @cython.binding(False)
    def decode(self, frames, /):
        """The object in `frames`: the buffers that `encode` made, or a single one.

        Args:
            frames: a list or tuple of bytes, bytearrays, memoryviews or zmq.Frames; or one of
                these.

        Raises:
            DecodeError: the frames are not a message of this type. Never anything else, whatever a
                peer sends.
            Whatever the out-of-band provider raises when a tensor does not come, and a
            ``__post_init__`` of the type's own, but for a ValueError or TypeError.
        """
        cdef _DecodeContext context
        cdef Py_ssize_t count = 1
        cdef list parts = None
        main = frames
        if type(frames) is list or type(frames) is tuple or not PyObject_CheckBuffer(frames):
            count = len(frames)
            if count == 0:
                raise DecodeError("a message has at least one frame")
            main = frames[0]
            if count > 1:
                parts = list(frames)
            if not PyObject_CheckBuffer(main):
                raise TypeError(f"a frame must be a buffer, not a {type(main).__name__}")
        context = self._idle
        if context is None:
            context = _DecodeContext(self, self._args)
        else:
            self._idle = context.next
            context.next = None
        context.frames = parts
        try:
            return context.decode(main)
        # msgspec's own errors are ValueErrors.
        except (ValueError, TypeError, OverflowError, RecursionError, BufferError) as error:
            _raise_decode_error(error)
        finally:
            context.finish(self)


cdef _raise_decode_error(error):
    if type(error) is DecodeError or isinstance(error, IPCError):
        raise error
    cause = error.__cause__
    if isinstance(cause, InsecureDecodeError):
        raise InsecureDecodeError(str(error)) from error
    raise DecodeError(str(error)) from error
