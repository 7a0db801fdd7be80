"""A plain server of the same shape as fastipc's engine: pyzmq, msgspec and multiprocessing.

Written as one would without fastipc, and as well as one would: an asyncio front end with ROUTER and
PULL, an engine with an input thread (DEALER), a busy loop, and an output thread (PUSH). Messages
are msgpack, with arrays pickled into extension types. (Its workers, fed and answering over
`multiprocessing.Queue`, are in bench/executor.py.) Who dies is not told to anybody.

``python -m bench.engine`` measures it beside fastipc's.
"""
