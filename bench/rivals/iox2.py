"""iceoryx2, publish and subscribe over slices of bytes, pickle 5: one service for all readers, and
one back.

Lossless: no overflow, and a publisher that waits for room. A received sample is a view of memory
that the publisher uses again, so objects are unpickled from it and arrays copied out before it is
given back. The polling variant spins in Python until a sample is there; the event variant is told
by a notification, and sleeps. Files carry a prefix of their own, so that what a killed process
leaves is found and removed.
"""

import contextlib
import ctypes
import os
import pickle
import secrets
import struct

from . import End, Rival

_OBJECTS_IN_FLIGHT = 256
_ARRAYS_IN_FLIGHT = 4
_HEAD = struct.Struct("<QQ")  # length of the pickle, length of the one buffer behind it
_ALIGN = 64


class Iceoryx2Polling(Rival):
    name = "iceoryx2-poll"
    package = "iceoryx2"
    # It spins: with more processes than processors, or between two messages a second apart, that
    # measures the scheduler and a processor at 100 %.
    cases_left_out = frozenset({"fan2_5k", "fan4_5k", "wake2s", "rate30", "rate200", "idle"})
    events = False

    def __init__(self, setup, context):
        super().__init__(setup, context)
        self._prefix = f"fib{secrets.token_hex(4)}_"

    def shares(self):
        share = (self.folder(), self._prefix)
        return share, [share] * self.setup.readers

    def sweep(self):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir("/dev/shm"):
                if name.startswith(self._prefix):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join("/dev/shm", name))
        super().sweep()

    @classmethod
    def open_writer(cls, share, setup):
        ports = _Ports(share, setup, cls.events)
        ports.prepare()
        end = End(ports.sender("there"), close=ports.close, join=ports.connect)
        if setup.replies:
            end.recv = ports.receiver("back")
        return end

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        ports = _Ports(share, setup, cls.events)
        end = End(recv=ports.receiver("there"), close=ports.close, join=ports.connect)
        if setup.replies:
            end.send = ports.sender("back")
        return end


class Iceoryx2Event(Iceoryx2Polling):
    name = "iceoryx2-event"
    cases_left_out = frozenset()
    events = True


class _Ports:
    """One process's node, and the ports made on it."""

    def __init__(self, share, setup, events):
        import iceoryx2

        self._api = iceoryx2
        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        folder, prefix = share
        config = iceoryx2.config.default()
        config.global_cfg.root_path = iceoryx2.Path.new(folder)
        config.global_cfg.prefix = iceoryx2.FileName.new(prefix)
        self._setup = setup
        self._events = events
        self._in_flight = _ARRAYS_IN_FLIGHT if setup.arrays else _OBJECTS_IN_FLIGHT
        self._node = (
            iceoryx2.NodeBuilder.new()
            .config(config)
            .signal_handling_mode(iceoryx2.SignalHandlingMode.Disabled)
            .create(iceoryx2.ServiceType.Ipc)
        )
        self._services = {}
        self._ports = []
        self._publishers = []

    def prepare(self):
        """The writer makes every service before a reader opens it: nobody races to create it."""
        for name in ("there", "back") if self._setup.replies else ("there",):
            self._service(name)
            if self._events:
                self._event_service(name)

    def _builder(self, name):
        return self._node.service_builder(self._api.ServiceName.new(name))

    def _service(self, name):
        if name not in self._services:
            self._services[name] = (
                self._builder(name)
                .publish_subscribe(self._api.Slice[ctypes.c_uint8])
                .enable_safe_overflow(False)
                .history_size(0)
                .max_publishers(1)
                .max_subscribers(self._setup.readers)
                .subscriber_max_buffer_size(self._in_flight)
                .payload_alignment(self._api.Alignment.new(_ALIGN))
                .open_or_create()
            )
        return self._services[name]

    def _event_service(self, name):
        key = name + "-event"
        if key not in self._services:
            self._services[key] = self._builder(key).event().open_or_create()
        return self._services[key]

    def connect(self, _):
        """Both sides exist: a publisher that has not seen its subscribers sends to nobody."""
        for publisher in self._publishers:
            publisher.update_connections()

    def close(self):
        for port in self._ports:
            port.delete()
        self._ports.clear()
        self._publishers.clear()
        self._services.clear()
        self._node = None

    def sender(self, name):
        publisher = (
            self._service(name)
            .publisher_builder()
            .initial_max_slice_len(self._setup.largest + 4096)
            .allocation_strategy(self._api.AllocationStrategy.PowerOfTwo)
            .backpressure_strategy(self._api.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._ports.append(publisher)
        self._publishers.append(publisher)
        send = _array_sender(publisher) if self._setup.arrays else _object_sender(publisher)
        if not self._events:
            return send

        notifier = self._event_service(name).notifier_builder().create()
        self._ports.append(notifier)
        notify = notifier.notify

        def send_and_notify(obj):
            send(obj)
            notify()

        return send_and_notify

    def receiver(self, name):
        subscriber = self._service(name).subscriber_builder().buffer_size(self._in_flight).create()
        self._ports.append(subscriber)
        receive = subscriber.receive
        take = _take_array if self._setup.arrays else _take_object
        if not self._events:

            def poll():
                while (sample := receive()) is None:
                    pass
                return take(sample)

            return poll

        listener = self._event_service(name).listener_builder().create()
        self._ports.append(listener)
        wait = listener.blocking_wait

        def wait_and_receive():
            while (sample := receive()) is None:
                wait()
            return take(sample)

        return wait_and_receive


def _object_sender(publisher):
    dumps, move, loan = pickle.dumps, ctypes.memmove, publisher.loan_slice_uninit

    def send(obj):
        data = dumps(obj, 5)
        sample = loan(len(data))
        move(sample.payload_ptr, data, len(data))
        sample.assume_init().send()

    return send


def _take_object(sample):
    try:
        return pickle.loads(sample.payload().as_memory_view())
    finally:
        sample.delete()


def _array_sender(publisher):
    import numpy as np

    def send(obj):
        buffers = []
        data = pickle.dumps(obj, 5, buffer_callback=buffers.append)
        raw = np.frombuffer(buffers[0].raw(), np.uint8)
        begin = -(-(_HEAD.size + len(data)) // _ALIGN) * _ALIGN
        sample = publisher.loan_slice_uninit(begin + raw.nbytes)
        head = _HEAD.pack(len(data), raw.nbytes) + data
        ctypes.memmove(sample.payload_ptr, head, len(head))
        ctypes.memmove(sample.payload_ptr + begin, raw.ctypes.data, raw.nbytes)
        sample.assume_init().send()

    return send


def _take_array(sample):
    import numpy as np

    try:
        view = sample.payload().as_memory_view()
        length, size = _HEAD.unpack_from(view)
        begin = -(-(_HEAD.size + length) // _ALIGN) * _ALIGN
        owned = np.empty(size, np.uint8)
        ctypes.memmove(owned.ctypes.data, sample.payload_ptr + begin, size)
        return pickle.loads(view[_HEAD.size : _HEAD.size + length], buffers=[owned])
    finally:
        sample.delete()
