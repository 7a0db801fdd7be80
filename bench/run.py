"""The two-process runner: fastipc, its rivals and the floor, round by round.

    python -m bench.run [--cases rtt64,stream5k] [--rivals mp.Pipe,pyzmq] [--rounds N]
                        [--seconds S] [--json FILE] [--quick]

See README.md in this folder for the cases and for how to read the table.
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench import report
from bench.cases import BARE, CASES, PICKLE, SMALLER, Options, pickle_costs
from bench.floor import Bare, Floor
from bench.rivals import RIVALS, SUBJECT, Setup, load
from bench.teams import Team, TeamFailed

# Ping-pongs before and after a case that differ by more than this: the machine changed its speed.
NOISY = 1.2
# Percent of a processor used by others during a case. The kernel's own share of our work is less.
DISTURBED_PERCENT = 15


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="fastipc beside its rivals and the floor.")
    parser.add_argument(
        "--cases", type=_names(CASES), default=list(CASES), help=f"of {','.join(CASES)}"
    )
    parser.add_argument(
        "--rivals",
        type=_names(RIVALS),
        default=list(RIVALS),
        help=f"of {','.join(RIVALS)}, or 'none'; what is not installed is skipped",
    )
    parser.add_argument("--rounds", type=int, help="default: 7, or 4 where a round takes seconds")
    parser.add_argument("--seconds", type=float, help="of a round of a quick case; default 0.3")
    parser.add_argument("--floor-ms", type=int, default=100, help="for each figure of the floor")
    parser.add_argument(
        "--case-limit",
        type=float,
        default=900,
        metavar="S",
        help="seconds after which a case begins no further round; default 900",
    )
    parser.add_argument(
        "--retry-noisy",
        type=int,
        default=0,
        metavar="N",
        help="repeat a case that was not steady up to N times",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures")
    parser.add_argument(
        "--quick", action="store_true", help="does everything run? The figures mean little"
    )
    parser.add_argument("--no-subject", action="store_true", help="rivals and floor only")
    options = parser.parse_args(arguments)
    if options.seconds is not None and not options.seconds > 0:
        parser.error("--seconds must be positive")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _names(known):
    def parse_names(text):
        names = [] if text == "none" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse_names


class Runner:
    def __init__(self, options, floor):
        self.options = options
        self.floor = floor
        self.lengths = Options()
        if options.quick:
            self.lengths = Options(
                seconds=0.05, idle_seconds=1.0, rate_seconds=0.5, wake_gap_s=0.3, wakes=2
            )
        if options.seconds is not None:
            self.lengths.seconds = options.seconds
        self.rivals = {}
        self.skipped = {}
        for name in options.rivals:
            self._admit(name, RIVALS[name])
        if not options.no_subject:
            self._admit("fastipc", SUBJECT)
        self.subject = self.rivals.pop("fastipc", None)

    def _admit(self, name, place):
        rival = load(place)
        reason = rival.missing()
        if reason is None:
            self.rivals[name] = rival
        else:
            self.skipped[name] = reason

    def rounds(self, case):
        if self.options.rounds is not None:
            return self.options.rounds
        if self.options.quick:
            return 2
        return case.rounds or (4 if case.slow else 7)

    def run(self, case):
        """One case: the floor, all rounds, the floor again."""
        result = {
            "case": case.name,
            "what": case.what,
            "rounds": {},  # participant -> a list of {figure: value}
            "pairs": {},  # participant -> a list of (fastipc's figures, its figures)
            "failed": {},
            "floor": {"before": self.floor.measure(self.options.floor_ms)},
        }
        teams = {}
        others = OtherLoad()
        try:
            for name, start in self._participants(case).items():
                say(f"{case.name}: starting {name}")
                try:
                    teams[name] = start()
                except TeamFailed as error:
                    result["failed"][name] = str(error)
            self._play(case, teams, result)
        finally:
            for team in teams.values():
                team.close()
        result["others_percent"] = others.percent()
        result["floor"]["after"] = self.floor.measure(self.options.floor_ms)
        result["state"] = state(result)
        return result

    def _participants(self, case):
        """Name -> how to start it; fastipc first."""
        setup = Setup(case.readers, case.replies, case.arrays, case.largest)

        def rival(rival_class):
            return lambda: Team.of_rival(rival_class, setup, case.payload)

        starts = {}
        if self.subject is not None:
            starts["fastipc"] = rival(self.subject)
        for reference in case.references:
            if reference == BARE:
                starts[BARE] = rival(Bare)
            elif reference == PICKLE:
                starts[PICKLE] = lambda: Team.alone(PICKLE, case.payload)
            elif reference == SMALLER and self.subject is not None:
                starts[SMALLER] = self._start_smaller
        for name, rival_class in self.rivals.items():
            if case.name not in rival_class.cases_left_out:
                starts[name] = rival(rival_class)
        return starts

    def _start_smaller(self):
        case = CASES["array8m"]
        setup = Setup(case.readers, case.replies, case.arrays, case.largest)
        return Team.of_rival(self.subject, setup, case.payload, name=SMALLER)

    def _play(self, case, teams, result):
        """fastipc right beside each of the others: A B, A C, and the next round B A, C A, so that
        a drift of the machine weighs on both alike. Where a round takes seconds, fastipc plays one
        round for all."""
        total = self.rounds(case)
        until = time.monotonic() + self.options.case_limit
        for number in range(total):
            if time.monotonic() > until:
                result["failed"]["the case"] = f"cut short after {number} of {total} rounds"
                break
            others = [name for name in teams if name != "fastipc"]
            say(f"{case.name}: round {number + 1} of {total}")
            ours = None
            if case.slow or not others:
                ours = self._round(case, "fastipc", teams, result)
            for name in others:
                if case.slow:
                    theirs = self._round(case, name, teams, result)
                elif number % 2 == 0:
                    ours = self._round(case, "fastipc", teams, result)
                    theirs = self._round(case, name, teams, result)
                else:
                    theirs = self._round(case, name, teams, result)
                    ours = self._round(case, "fastipc", teams, result)
                if ours is not None and theirs is not None:
                    result["pairs"].setdefault(name, []).append((ours, theirs))

    def _round(self, case, name, teams, result):
        """One participant's round, or None: it takes no part, or no longer."""
        team = teams.get(name)
        if team is None:
            return None
        play, played = case.play, case
        if name == PICKLE:
            play = pickle_costs
        elif name == SMALLER:
            played = CASES["array8m"]
        try:
            figures = play(team, played, self.lengths)
        except TeamFailed as error:
            result["failed"][name] = str(error)
            teams.pop(name).close()
            return None
        result["rounds"].setdefault(name, []).append(figures)
        return figures


class OtherLoad:
    """How much processor time everybody but this run uses, from here to `percent()`. The ping-pong
    before and after a case does not see who came and went in between."""

    def __init__(self):
        self._begin = self._read()

    @staticmethod
    def _read():
        try:
            with open("/proc/stat") as file:
                fields = [int(field) for field in file.readline().split()[1:]]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy - sum(u.ru_utime + u.ru_stime for u in used), time.monotonic()

    def percent(self):
        """In percent of one processor, or None where the kernel does not tell. Call it when the
        processes have ended: only then is their time counted as this run's."""
        now = self._read()
        if now is None or self._begin is None:
            return None
        return max(0.0, 100 * (now[0] - self._begin[0]) / (now[1] - self._begin[1]))


def state(result):
    """Whether a case's figures can be judged: "steady", or why not."""
    before, after = (result["floor"][when]["pingpong_ns"] for when in ("before", "after"))
    if before < 0 or after < 0:
        return "one processor"
    if max(before, after) > NOISY * min(before, after):
        return "noisy"
    others = result["others_percent"]
    if others is not None and others > DISTURBED_PERCENT:
        return "disturbed"
    return "steady"


def say(text):
    """Progress, where somebody may be watching; the table is for standard output."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main(arguments=None):
    options = parse(arguments)
    # A plain `kill` ends the run like Ctrl-C: processes and folders are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    with Floor() as floor:
        Bare.library = floor.library
        runner = Runner(options, floor)
        machine = report.machine([*runner.rivals.values(), runner.subject])
        begin = time.monotonic()
        try:
            for name in options.cases:
                result = runner.run(CASES[name])
                for _ in range(options.retry_noisy):
                    if result["state"] == "steady":
                        break
                    result = runner.run(CASES[name])
                results.append(result)
                if options.json is not None:
                    # After each case: a run that is interrupted keeps what it has.
                    write_json(options.json, machine, runner.skipped, results)
        except KeyboardInterrupt:
            print("interrupted; what has been measured so far:", file=sys.stderr)
            options.interrupted = True
        say("")
    print(report.text(machine, runner.skipped, results, time.monotonic() - begin))
    if getattr(options, "interrupted", False):
        return 130
    return 1 if any(result["failed"] for result in results) else 0


def write_json(path, machine, skipped, results):
    summary = [report.summary(result) for result in results]
    document = {"machine": machine, "skipped": skipped, "summary": summary, "cases": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
