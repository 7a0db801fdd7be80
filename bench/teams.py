"""The processes of one participant in one case, and the watchdog over them.

A `Team` is a rival's writer and readers, or one process alone. Whatever it does, the runner waits
for it only until a deadline; then, or when one of its processes ends unasked, the team is killed,
process by process, and `TeamFailed` says why.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import wait

from . import peers

START_LIMIT_S = 60  # imports, attaching; a heavy package on a busy machine needs some of it
CLOSE_LIMIT_S = 10


class TeamFailed(Exception):
    """A participant hung, died or raised; the case goes on without it."""


class Team:
    def __init__(self, name, payload):
        self.name = name
        self._payload = payload
        self._context = multiprocessing.get_context("spawn")
        self._members = []  # (process, control), the writer first
        self._rival = None

    # -- starting and ending --

    @classmethod
    def of_rival(cls, rival_class, setup, payload, name=None):
        team = cls(name or rival_class.name, payload)
        try:
            team._rival = rival = rival_class(setup, team._context)
            writer, readers = rival.shares()
            team._start("writer", rival_class, writer, setup, payload)
            for rank, share in enumerate(readers):
                team._start("reader", rival_class, share, setup, payload, rank)
            rival.release()
            team._introduce()
        except BaseException as error:
            team.kill()
            if isinstance(error, Exception) and not isinstance(error, TeamFailed):
                raise TeamFailed(f"{team.name}: {error!r}") from error
            raise
        return team

    @classmethod
    def alone(cls, name, payload):
        team = cls(name, payload)
        try:
            team._start("alone", payload)
            team._expect(0, "ready", time.monotonic() + START_LIMIT_S)
        except BaseException:
            team.kill()
            raise
        return team

    def _start(self, role, *arguments):
        control, theirs = self._context.Pipe()
        process = self._context.Process(
            target=peers.main,
            args=(theirs, os.getpid(), role, *arguments),
            name=f"{self.name} {role}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._members.append((process, control))

    def _introduce(self):
        """The writer's offer goes to the readers, theirs to the writer (see rivals)."""
        deadline = time.monotonic() + START_LIMIT_S
        readers = range(1, len(self._members))
        offer = self._expect(0, "offer", deadline)
        for i in readers:
            self._tell(i, offer)
        self._tell(0, [self._expect(i, "offer", deadline) for i in readers])
        for i in range(len(self._members)):
            self._expect(i, "ready", deadline)

    def close(self):
        """Asks everyone to leave; kills whoever has not after a while."""
        for i in range(len(self._members)):
            try:
                self._tell(i, None)
            except TeamFailed:
                return
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self):
        for process, control in self._members:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
            control.close()
        self._members.clear()
        if self._rival is not None:
            self._rival.sweep()
            self._rival = None

    # -- talking --

    def _tell(self, i, message):
        try:
            self._members[i][1].send(message)
        except OSError as error:
            raise self._gone(f"{self._members[i][0].name}: {error!r}") from error

    def _expect(self, i, word, deadline):
        process, control = self._members[i]
        left = deadline - time.monotonic()
        # Nobody ends unasked: whoever does leaves the others waiting.
        sentinels = {p.sentinel: p for p, _ in self._members}
        ready = wait([control, *sentinels], max(0.0, left))
        if control in ready:
            try:
                got, value = control.recv()
            except (EOFError, OSError):
                ready = [process.sentinel]
            else:
                if got == "failed":
                    raise self._gone(f"{process.name} raised\n{value}")
                assert got == word, (got, word)
                return value
        if ready:
            ended = sentinels[ready[0]]
            ended.join(1)
            raise self._gone(f"{ended.name} ended with exit code {ended.exitcode}")
        raise self._gone(f"{process.name} did not say {word!r} in time")

    def _gone(self, why):
        """Kills the team, and returns the error to raise: another member's own, if it reported
        one, because a writer's error leaves its readers waiting."""
        for process, control in self._members:
            try:
                while control.poll(0):
                    got, value = control.recv()
                    if got == "failed":
                        why = f"{process.name} raised\n{value}"
            except (EOFError, OSError):
                pass
        self.kill()
        return TeamFailed(why)

    # -- a round --

    def round(self, reader_job, writer_job, limit, arguments, reader_arguments=None, pause=None):
        """One round: readers first, so that nobody is timed while the others get ready. Returns
        the writer's result and a list of the readers'. `pause` is called with the readers' process
        ids while they wait and the writer is silent."""
        deadline = time.monotonic() + limit
        readers = range(1, len(self._members))
        if reader_arguments is None:
            reader_arguments = arguments
        for i in readers:
            self._tell(i, (reader_job, reader_arguments))
        for i in readers:
            self._expect(i, "armed", deadline)
        paused = pause([self._members[i][0].pid for i in readers]) if pause else None
        self._tell(0, (writer_job, arguments))
        # Readers first: they end last, and a writer that waits for a dead one would only time out.
        read = [self._expect(i, "done", deadline) for i in readers]
        written = self._expect(0, "done", deadline)
        return written, read, paused

    def round_alone(self, job, limit, arguments):
        self._tell(0, (job, arguments))
        return self._expect(0, "done", time.monotonic() + limit)
