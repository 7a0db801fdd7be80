"""fastipc's readers on other hosts beside plain pyzmq, both over TCP on the loopback interface.

    python -m bench.tcp [--cases rtt64,array8m] [--rounds N] [--seconds S] [--json FILE]

The cases are those of the two-process runner (README.md). All four participants play each round
one after the other, so that a drift of the machine weighs on all alike; shown are the medians, and
fastipc's against pyzmq's that does the same, round by round.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.cases import CASES, Options
from bench.rivals import Setup
from bench.rivals.tcp import PARTICIPANTS
from bench.teams import Team, TeamFailed

NAMES = ("rtt64", "rtt5k", "stream64", "stream5k", "fan2_5k", "array8m", "array32m", "rate200")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="fastipc and pyzmq over TCP.")
    parser.add_argument("--cases", default=",".join(NAMES), help=f"of {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a round of a quick case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    for name in options.cases:
        if name not in CASES:
            parser.error(f"{name!r} is none of {', '.join(CASES)}")
    return options


def run(case, options):
    """name -> a list of {figure: value}, of which failed ones are missing."""
    setup = Setup(case.readers, case.replies, case.arrays, case.largest)
    lengths = Options(seconds=options.seconds)
    teams, rounds = {}, {}
    try:
        for participant in PARTICIPANTS:
            if participant.missing() is None:
                teams[participant.name] = Team.of_rival(participant, setup, case.payload)
        for _ in range(options.rounds):
            for name in list(teams):
                try:
                    figures = case.play(teams[name], case, lengths)
                except TeamFailed as error:
                    print(f"{case.name}: {error}", file=sys.stderr)
                    teams.pop(name).close()
                else:
                    rounds.setdefault(name, []).append(figures)
    finally:
        for team in teams.values():
            team.close()
    return rounds


def show(case, rounds):
    print(f"\n{case.name}: {case.what}")
    for name, figures in rounds.items():
        line = f"  {name:20}"
        for figure in case.figures:
            value = statistics.median(f[figure.name] for f in figures)
            line += f"  {figure.name} {value:,.4g} {figure.unit}"
        print(line)
    first = case.figures[0]
    for ours, theirs in (
        (PARTICIPANTS[0].name, PARTICIPANTS[1].name),
        (PARTICIPANTS[2].name, PARTICIPANTS[3].name),
    ):
        pairs = list(zip(rounds.get(ours, ()), rounds.get(theirs, ()), strict=False))
        if pairs:
            ratio = statistics.median(a[first.name] / b[first.name] for a, b in pairs)
            better = "less" if first.lower_is_better else "more"
            print(f"  {ours} / {theirs}: {first.name} x {ratio:.2f} ({better} is better)")


def main(arguments=None):
    options = parse(arguments)
    document = {}
    for name in options.cases:
        document[name] = run(CASES[name], options)
        show(CASES[name], document[name])
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
