"""A plain server of the same shape as fastipc's engine: pyzmq, msgspec and multiprocessing.

Written as one would without fastipc, and as well as one would: an asyncio front end with ROUTER and
PULL, an engine with an input thread (DEALER), a busy loop, and an output thread (PUSH), workers fed
and answering over `multiprocessing.Queue`. Messages are msgpack, with arrays pickled into extension
types; what goes to the workers is pickled by the queues. Who dies is not told to anybody.

``python -m bench.engine`` measures it beside fastipc's.
"""
