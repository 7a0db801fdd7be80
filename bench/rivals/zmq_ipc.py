"""pyzmq, PUSH to PULL over ipc, pickle 5: a socket per reader, and one back.

An object is one frame, pickled once for all readers. An array is a frame with the pickle and a
frame per buffer, sent without a copy: a caller that overwrites its array at once would send mixed
bytes, a weaker contract than fastipc's that is to this rival's advantage. Received frames are the
receiver's own memory, and writable.
"""

import pickle

from . import End, Rival, to_each

# Messages in flight: the package's default, and for arrays few, to keep memory bounded.
_OBJECTS_IN_FLIGHT = 1000
_ARRAYS_IN_FLIGHT = 4


class ZmqIpc(Rival):
    name = "pyzmq"
    package = "zmq"

    def shares(self):
        return self.folder(), [self.folder()] * self.setup.readers

    @classmethod
    def open_writer(cls, share, setup):
        context, end = _open(setup)
        there = [context.push(f"ipc://{share}/{rank}", bind=True) for rank in range(setup.readers)]
        end.send = _sender(there, setup)
        if setup.replies:
            end.recv = _receiver(context.pull(f"ipc://{share}/back", bind=True), setup)
        return end

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        context, end = _open(setup)
        end.recv = _receiver(context.pull(f"ipc://{share}/{rank}", bind=False), setup)
        if setup.replies:
            end.send = _sender([context.push(f"ipc://{share}/back", bind=False)], setup)
        return end


class _Sockets:
    def __init__(self, setup):
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._high_water = _ARRAYS_IN_FLIGHT if setup.arrays else _OBJECTS_IN_FLIGHT

    def push(self, address, bind):
        return self._open(self._zmq.PUSH, address, bind)

    def pull(self, address, bind):
        return self._open(self._zmq.PULL, address, bind)

    def _open(self, kind, address, bind):
        socket = self._context.socket(kind)
        socket.set_hwm(self._high_water)
        (socket.bind if bind else socket.connect)(address)
        return socket

    def close(self):
        self._context.destroy(linger=0)


def _open(setup):
    sockets = _Sockets(setup)
    return sockets, End(close=sockets.close)


def _sender(sockets, setup):
    dumps = pickle.dumps
    if setup.arrays:

        def send_frames(obj):
            buffers = []
            head = dumps(obj, 5, buffer_callback=buffers.append)
            for socket in sockets:
                socket.send_multipart([head, *buffers], copy=False)

        return send_frames

    send = to_each([socket.send for socket in sockets])
    return lambda obj: send(dumps(obj, 5))


def _receiver(socket, setup):
    loads = pickle.loads
    if setup.arrays:

        def recv_frames():
            head, *buffers = socket.recv_multipart(copy=False)
            return loads(head.buffer, buffers=[frame.buffer for frame in buffers])

        return recv_frames

    recv = socket.recv
    return lambda: loads(recv())
