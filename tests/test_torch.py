"""Tensors arrive bit for bit, writable and owned; what takes torch's own way is in a table here."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
from support import ends, pair

from fastipc import MessageQueue, pickling

torch = pytest.importorskip("torch")


@pytest.fixture
def send():
    with pair(max_chunk_bytes=1 << 20, max_chunks=4) as (writer, reader):

        def through(obj):
            writer.enqueue(obj, timeout=0)
            return reader.dequeue(timeout=0)

        yield through
        assert reader.empty()


@pytest.fixture
def forget_warnings():
    """Each kind warns once in a process: let it be this test's once."""
    before = set(pickling._slow_kinds_warned)
    pickling._slow_kinds_warned.clear()
    yield
    pickling._slow_kinds_warned.update(before)


def _dtypes() -> list[torch.dtype]:
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    # Parts of a byte, and types that only quantized tensors have, are not for plain tensors.
    return sorted((d for d in found if not _is_quantized(d) and not _is_shell(d)), key=str)


def _is_quantized(dtype) -> bool:
    return str(dtype).startswith(("torch.qint", "torch.quint"))


def _is_shell(dtype) -> bool:
    """uint1 to uint7 and so on: they name a width, and have no tensors of their own."""
    name = str(dtype)[6:]
    digits = name.removeprefix("uint").removeprefix("int").removeprefix("bits")
    return (digits.isdigit() and int(digits) < 8) or name.startswith("bits")


DTYPES = _dtypes()


def _bits(tensor) -> bytes:
    """The elements in C order, as they are in memory once resolved."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _elements(dtype, n: int):
    noise = np.random.default_rng(dtype.itemsize).integers(0, 256, n * dtype.itemsize, np.uint8)
    if dtype is torch.bool:
        noise &= 1
    return torch.from_numpy(noise).view(dtype)


def _layouts(flat) -> dict[str, torch.Tensor]:
    c = flat[:60].view(5, 12)
    cube = flat[:120].view(4, 5, 6)
    image = flat[:120].view(2, 3, 4, 5)
    return {
        "0-dim": flat[3],
        "one": flat[:1],
        "empty": flat[:0],
        "empty (3, 0, 2)": flat[:0].view(3, 0, 2),
        "empty (0, 0)": flat[:0].view(0, 0),
        "flat": flat,
        "strided": flat[::3],
        "rows": c[::2],
        "block": c[1:4, 3:9],
        "columns": c[:, ::5],
        "C": c,
        "transposed": c.t(),
        "axes moved": cube.permute(1, 2, 0),
        "axes moved, block": cube.permute(2, 0, 1)[1:, 1:3],
        "channels last": flat[:120].as_strided((2, 3, 4, 5), (60, 1, 15, 3)),
        "axis of length 1": image[:, 1:2],
        "expanded": flat[:4].expand(3, 4),
        "expanded element": flat[7].expand(2, 3),
        "unfolded": flat[:20].unfold(0, 5, 1),
        "offset": flat[11:],
    }


def _same(got, sent, name) -> None:
    assert type(got) is torch.Tensor, name
    assert got.dtype is sent.dtype, name
    assert got.shape == sent.shape, name
    assert got.device.type == "cpu", name
    assert got.requires_grad == sent.requires_grad, name
    assert _bits(got) == _bits(sent), name
    if sent.is_contiguous():
        assert got.is_contiguous(), name


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_layout(dtype, send):
    for name, tensor in _layouts(_elements(dtype, 120)).items():
        got = send(tensor)
        _same(got, tensor, name)
        _check_writable(got)


def _check_writable(tensor) -> None:
    """Writing to it changes it, and hits memory of its own."""
    if tensor.numel():
        memory = tensor.as_strided((1,), (1,)).view(torch.uint8)
        value = int(memory[0])
        memory[0] = value ^ 1
        assert int(memory[0]) == value ^ 1


def test_no_dtype_is_forgotten():
    names = {str(d) for d in DTYPES}
    expected = {"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
                "complex64", "complex128", "bool", "uint8", "uint16", "uint32", "uint64", "int8",
                "int16", "int32", "int64"}  # fmt: skip
    assert {f"torch.{name}" for name in expected} <= names


def test_channels_last_stays_channels_last(send):
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    got = send(image)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, image)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_bits(dtype, send):
    numbers = torch.randn(6, 4, dtype=dtype)
    for tensor in (numbers.conj(), numbers.conj().t(), numbers.conj()[::2]):
        assert tensor.is_conj()
        assert torch.equal(send(tensor), tensor)
    negative = numbers.conj().imag
    assert negative.is_neg()
    assert torch.equal(send(negative), negative)


def test_large_tensors_in_fragments():
    tensor = torch.arange(100_000, dtype=torch.int32)
    options = {"max_chunk_bytes": 64 << 10, "max_chunks": 2}
    with pair(**options) as (writer, reader):
        for variant in (
            tensor,
            tensor.view(1000, 100).t(),
            tensor[::3],
            tensor.view(-1, 8)[:, 2:5],
        ):
            thread = threading.Thread(target=writer.enqueue, args=(variant,))
            thread.start()
            assert torch.equal(reader.dequeue(), variant)
            thread.join()


def test_each_byte_is_copied_once_in_and_once_out():
    tensor = torch.zeros(1 << 20, dtype=torch.bfloat16)
    with pair() as (writer, reader):
        writer.enqueue(tensor)
        reader.dequeue()
        for end in (writer, reader):
            assert tensor.nbytes < end.stats()["bytes_copied"] < tensor.nbytes + 1024


def test_received_tensors_are_owned():
    with ends(2, max_chunk_bytes=64 << 10, max_chunks=2, slots=4) as (writer, readers):
        kept = []
        for i in range(50):
            writer.enqueue(torch.full((5000,), i, dtype=torch.int16), timeout=0)
            kept.append([reader.dequeue(timeout=0) for reader in readers])
        for _ in range(500):
            writer.enqueue(torch.full((5000,), -1, dtype=torch.int16), timeout=0)
            for reader in readers:
                reader.dequeue(timeout=0).fill_(-2)
        for i, tensors in enumerate(kept):
            for tensor in tensors:
                assert bool((tensor == i).all())


def test_the_caller_may_overwrite_its_tensor_at_once():
    with pair() as (writer, reader):
        tensor = torch.arange(500_000)
        expected = tensor.clone()
        writer.enqueue([tensor, tensor[::2]])
        tensor.zero_()
        whole, half = reader.dequeue()
        assert torch.equal(whole, expected)
        assert torch.equal(half, expected[::2])


# ---- what is more than numbers -----------------------------------------------------------------


def test_requires_grad_is_kept_and_the_graph_is_not(send):
    leaf = torch.rand(3, requires_grad=True)
    got = send(leaf)
    assert got.requires_grad
    assert got.is_leaf
    assert torch.equal(got, leaf)
    computed = leaf * 2
    got = send(computed)
    assert got.requires_grad
    assert got.is_leaf
    assert torch.equal(got.detach(), computed.detach())
    with torch.no_grad():
        got += 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters(requires_grad, send):
    parameter = torch.nn.Parameter(torch.rand(4, 5).t(), requires_grad)
    got = send(parameter)
    assert type(got) is torch.nn.Parameter
    assert got.requires_grad is requires_grad
    assert torch.equal(got, parameter)


def test_a_module_and_its_state(send):
    module = torch.nn.Linear(3, 2)
    got = send(module)
    assert torch.equal(got.weight, module.weight)
    state = send(module.state_dict())
    assert torch.equal(state["bias"], module.bias)


class Marked(torch.Tensor):
    pass


def _attributed():
    tensor = torch.arange(3)
    tensor.note = "kept"
    return tensor


SLOW = {
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "subclass": lambda: torch.arange(3).as_subclass(Marked),
    "attributes": _attributed,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("name", SLOW)
def test_what_takes_torchs_own_way_warns_once_and_arrives(name, send, forget_warnings):
    tensor = SLOW[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [send(tensor), send(tensor)]
    ours = [w for w in caught if "torch's own pickling" in str(w.message)]
    assert len(ours) == 1
    # It points at the caller of enqueue, not into the package.
    assert ours[0].filename == __file__
    for tensor_ in got:
        assert type(tensor_) is type(tensor)
        assert tensor_.is_nested or tensor_.shape == tensor.shape
        assert tensor_.dtype is tensor.dtype
        assert tensor_.layout is tensor.layout
        if tensor.device.type == "cpu":
            assert torch.equal(_dense(tensor_), _dense(tensor))
        if name == "attributes":
            assert tensor_.note == "kept"


def _dense(tensor):
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.is_nested:
        return torch.nested.to_padded_tensor(tensor, -1.0)
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def test_a_plain_tensor_warns_of_nothing(send, forget_warnings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tensor in (torch.rand(3), torch.rand(3, requires_grad=True), torch.rand(0)):
            send(tensor)


def test_a_reader_that_has_not_imported_torch_does_so_then(start_child):
    with MessageQueue(1, 1) as writer:
        child = start_child(
            """
            import sys
            from fastipc import Handle, MessageQueue

            with MessageQueue.create_from_handle(Handle.from_str(sys.argv[1]), 0) as reader:
                print(reader.dequeue(), "torch" in sys.modules)
                print(reader.dequeue().tolist(), "torch" in sys.modules)
            """,
            writer.export_handle().to_str(),
        )
        writer.enqueue("no tensor")
        writer.enqueue(torch.arange(3))
        assert child.check().splitlines() == ["no tensor False", "[0, 1, 2] True"]
