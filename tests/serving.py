"""A running ``fastipc serve``, and its clients, for several test modules."""

from __future__ import annotations

import contextlib
import http.client
import json
import re

import psutil


class Server:
    """A running ``fastipc serve`` on a free port."""

    def __init__(self, start_child, *options, timeout=110):
        self.child = start_child(
            command=["-m", "fastipc", "serve", "--port", "0", *map(str, options)], timeout=timeout
        )
        address = self.child.wait_for("listening on http://", "stderr")
        self.port = int(address.rsplit(":", 1)[1])
        line = self.child.wait_for("API server 0 is pid ", "stderr")
        found = re.findall(r"(?:serve: |, )([A-Za-z0-9 ]+) is pid (\d+)", line)
        self.pids = {name: int(pid) for name, pid in found}

    @contextlib.contextmanager
    def connection(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def get(self, path):
        with self.connection() as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def post(self, body, connection=None):
        if connection is None:
            with self.connection() as connection:
                return self.post(body, connection)
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request("POST", "/v1/completions", data)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def metric(self, name):
        status, text = self.get("/metrics")
        assert status == 200
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def everybody(self):
        """Every process of the server."""
        return [psutil.Process(pid) for pid in self.pids.values()]


class Stream:
    """A completion that is read event by event."""

    def __init__(self, server, **body):
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            self._connection.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True})
            )
            self.answer = self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise

    def __iter__(self):
        for line in self.answer:
            if line.startswith(b"data: "):
                yield line[6:].strip().decode()

    def text(self):
        """All of it, to the end."""
        events = list(self)
        assert events.pop() == "[DONE]", events[-1]
        choices = [json.loads(event)["choices"][0] for event in events]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        return "".join(choice["text"] for choice in choices), len(events)

    def close(self):
        self._connection.close()
