/* The part of the DLPack 1.x binary interface that the codec uses, and the memory blocks behind the
 * tensors it makes.
 *
 * torch publishes a table of C functions on torch.Tensor (`__dlpack_c_exchange_api__`). Through it
 * the codec learns where a tensor's bytes are, and makes a tensor over given bytes, in one call
 * each and without a Python object in between. The structures below are DLPack's public binary
 * interface, which is frozen for major version 1.
 */
#ifndef FIPC_DLPACK_H
#define FIPC_DLPACK_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint32_t major, minor;
} fipc_dl_version;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} fipc_dl_dtype;

typedef struct {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  fipc_dl_dtype dtype;
  int64_t *shape, *strides; /* strides count elements, not bytes */
  uint64_t byte_offset;
} fipc_dl_tensor;

typedef struct fipc_dl_managed {
  fipc_dl_version version;
  void *manager_ctx;
  void (*deleter)(struct fipc_dl_managed *);
  uint64_t flags;
  fipc_dl_tensor tensor;
} fipc_dl_managed;

typedef struct {
  fipc_dl_version version;
  void *prev;
  void *allocator;
  void *managed_from_object;
  int (*object_from_managed)(fipc_dl_managed *, void **); /* steals the managed tensor */
  int (*tensor_from_object)(void *, fipc_dl_tensor *);    /* borrows; may be NULL */
  void *current_stream;
} fipc_dl_api;

/* One allocation per tensor: this header, then shape and strides, then (owned tensors only) the
 * bytes. */
typedef struct {
  fipc_dl_managed managed;
  Py_buffer view; /* what a borrowed tensor keeps alive; view.obj is NULL in an owned one */
  int64_t dims[];
} fipc_dl_block;

/* As strict as an allocator of tensors is: wide vector loads never straddle a cache line. */
#define FIPC_DL_ALIGN 64

static void fipc_dl_delete(fipc_dl_managed *managed) {
  fipc_dl_block *block = (fipc_dl_block *)managed;
  if (block->view.obj != NULL) {
    /* The last reference may be dropped by a thread that does not hold the GIL, and even after the
     * interpreter has gone: then the frame went with it. */
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyBuffer_Release(&block->view);
    PyGILState_Release(gil);
  }
  free(block);
}

/* A block for a contiguous CPU tensor of this shape; when `owned`, `bytes` of its own memory
 * follow. NULL when out of memory. Strides are row-major, in elements; those of an empty tensor are
 * what they would be with each 0 read as 1. */
static fipc_dl_block *fipc_dl_block_new(int ndim, const int64_t *shape, fipc_dl_dtype dtype,
                                        int owned, size_t bytes) {
  size_t head = sizeof(fipc_dl_block) + 2 * (size_t)ndim * sizeof(int64_t);
  size_t room = owned ? bytes + FIPC_DL_ALIGN : 0;
  if (room < (owned ? bytes : 0) || room > SIZE_MAX - head) return NULL;
  fipc_dl_block *block = malloc(head + room);
  if (block == NULL) return NULL;
  memset(block, 0, sizeof *block);
  block->managed.version.major = 1;
  block->managed.deleter = fipc_dl_delete;
  block->managed.manager_ctx = block;
  fipc_dl_tensor *tensor = &block->managed.tensor;
  tensor->device_type = 1; /* CPU */
  tensor->ndim = ndim;
  tensor->dtype = dtype;
  tensor->shape = block->dims;
  tensor->strides = block->dims + ndim;
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    tensor->shape[i] = shape[i];
    tensor->strides[i] = step;
    step *= shape[i] > 0 ? shape[i] : 1;
  }
  if (owned) {
    uintptr_t data = (uintptr_t)block + head;
    tensor->data = (void *)((data + FIPC_DL_ALIGN - 1) & ~(uintptr_t)(FIPC_DL_ALIGN - 1));
  }
  return block;
}

/* Let the tensor lie in this buffer and keep it: the caller's release of it then does nothing. */
static void fipc_dl_take(fipc_dl_block *block, Py_buffer *view) {
  block->managed.tensor.data = view->buf;
  block->view = *view;
  view->obj = NULL;
}

static int fipc_dl_is_contiguous(const fipc_dl_tensor *tensor, int64_t *count) {
  int64_t step = 1;
  int contiguous = 1;
  for (int i = tensor->ndim - 1; i >= 0; i--) {
    int64_t n = tensor->shape[i];
    if (n != 1 && tensor->strides != NULL && tensor->strides[i] != step) contiguous = 0;
    step *= n;
  }
  *count = step;
  return contiguous || step == 0;
}

#endif
