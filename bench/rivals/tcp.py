"""The same channels over TCP, on the loopback interface: fastipc's readers elsewhere, and pyzmq.

Each is there plain and encrypted (CURVE), since that decides the rate of large messages. As over
ipc, pyzmq's arrays are sent without a copy, so its caller must not overwrite them.
"""

from . import End
from .ours import Fastipc
from .zmq_ipc import ZmqIpc, _receiver, _sender, _Sockets

_HOST = "127.0.0.1"


class FastipcTcp(Fastipc):
    name = "fastipc"
    secure = False

    @classmethod
    def _queue_class(cls):
        return _Remote(super()._queue_class(), cls.secure)


class FastipcCurve(FastipcTcp):
    name = "fastipc, encrypted"
    secure = True


class _Remote:
    """Makes queues whose readers are all elsewhere."""

    def __init__(self, queues, secure):
        self._queues = queues
        self._secure = secure
        self.create_from_handle = queues.create_from_handle

    def __call__(self, n_reader, _):
        return self._queues(n_reader, 0, connect_ip=_HOST, secure=self._secure)


class ZmqTcp(ZmqIpc):
    name = "pyzmq"
    curve = False

    def shares(self):
        return None, [None] * self.setup.readers

    @classmethod
    def open_writer(cls, share, setup):
        sockets = _TcpSockets(setup)
        keys = sockets.serve_with_key() if cls.curve else None
        there = [sockets.push(f"tcp://{_HOST}:*", bind=True) for _ in range(setup.readers)]
        end = End(send=_sender(there, setup), close=sockets.close)
        addresses = [s.LAST_ENDPOINT.decode() for s in there]
        back = None
        if setup.replies:
            pull = sockets.pull(f"tcp://{_HOST}:*", bind=True)
            back = pull.LAST_ENDPOINT.decode()
            end.recv = _receiver(pull, setup)
        end.offer = (addresses, back, keys)
        return end

    @classmethod
    def open_reader(cls, share, setup, rank, offer):
        addresses, back, key = offer
        sockets = _TcpSockets(setup)
        if key is not None:
            sockets.connect_with_key(key)
        pull = sockets.pull(addresses[rank], bind=False)
        end = End(recv=_receiver(pull, setup), close=sockets.close)
        if setup.replies:
            end.send = _sender([sockets.push(back, bind=False)], setup)
        return end


class ZmqCurve(ZmqTcp):
    name = "pyzmq, encrypted"
    curve = True


class _TcpSockets(_Sockets):
    def __init__(self, setup):
        super().__init__(setup)
        self._prepare = lambda socket: None

    def serve_with_key(self):
        """The public key of all sockets that are opened from now on."""
        public, secret = self._zmq.curve_keypair()

        def prepare(socket):
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = public, secret

        self._prepare = prepare
        return public

    def connect_with_key(self, key):
        def prepare(socket):
            socket.curve_serverkey = key
            socket.curve_publickey, socket.curve_secretkey = self._zmq.curve_keypair()

        self._prepare = prepare

    def _open(self, kind, address, bind):
        socket = self._context.socket(kind)
        socket.set_hwm(self._high_water)
        self._prepare(socket)
        (socket.bind if bind else socket.connect)(address)
        return socket


# in pairs that do the same
PARTICIPANTS = (FastipcTcp, ZmqTcp, FastipcCurve, ZmqCurve)
