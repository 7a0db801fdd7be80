"""The engine's process: input thread, busy loop, output thread."""

import queue
import threading

import zmq

from .messages import decoder, encoder

ADD, ABORT = b"\x00", b"\x01"


def main(core_class, config, input_path, output_path, identity):
    """Runs until the front end sends an empty message. The class is asked for what
    `fastipc.EngineCore` is: request_type, add_request, abort, has_work, step."""
    context = zmq.Context()
    core = core_class(config, index=0)
    requests, outputs = queue.Queue(), queue.Queue()
    threads = [
        threading.Thread(
            target=_receive, args=(context, input_path, identity, core.request_type, requests)
        ),
        threading.Thread(target=_send, args=(context, output_path, outputs)),
    ]
    for thread in threads:
        thread.start()
    while _take(core, requests):
        produced = list(core.step()) if core.has_work() else None
        if produced:
            outputs.put(produced)
    outputs.put(None)
    for thread in threads:
        thread.join()
    core.close()
    context.term()


def _take(core, requests):
    """Gives the core what has come; waits for something while it has no work."""
    while not requests.empty() or not core.has_work():
        kind, value = requests.get()
        if kind == ADD:
            core.add_request(value)
        elif kind == ABORT:
            core.abort(value)
        else:
            return False
    return True


def _receive(context, path, identity, request_type, requests):
    decode_request = decoder(request_type).decode
    decode_ids = decoder(list[str]).decode
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(path)
        socket.send(b"")
        while True:
            kind, *payload = socket.recv_multipart()
            if kind == ADD:
                requests.put((ADD, decode_request(payload[0])))
            elif kind == ABORT:
                requests.put((ABORT, decode_ids(payload[0])))
            else:
                requests.put((kind, None))
                return


def _send(context, path, outputs):
    encode = encoder().encode
    with context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(path)
        while (produced := outputs.get()) is not None:
            socket.send(encode(produced))
