"""From rounds to tables: medians, paired ratios, targets."""

import os
import platform
import statistics
from importlib import metadata

from .cases import BEST_RIVAL, CASES, processors
from .rivals import RIVALS

# What is installed under another name than it is imported by.
_DISTRIBUTIONS = {"zmq": "pyzmq", "faster_fifo": "faster-fifo", "fastipc": "fastipc-core"}


def machine(rival_classes):
    """What a reader of the figures needs to know about where they come from."""
    versions = {}
    for rival in rival_classes:
        if rival is not None and rival.package:
            name = _DISTRIBUTIONS.get(rival.package, rival.package)
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                versions[name] = "not installed, imported from a folder"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": processors(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def median(result, participant, figure):
    """The median over a participant's rounds, or None."""
    values = [r[figure] for r in result["rounds"].get(participant, []) if figure in r]
    return statistics.median(values) if values else None


def paired_ratio(result, participant, figure):
    """fastipc's figure divided by the other's, pair by pair; the median of those."""
    ratios = [
        ours[figure] / theirs[figure]
        for ours, theirs in result["pairs"].get(participant, [])
        if figure in ours and theirs.get(figure)
    ]
    return statistics.median(ratios) if ratios else None


def best_rival(result, figure):
    """The quickest of the rivals (fastipc and the references are none) by that figure."""
    medians = {
        name: value
        for name in result["rounds"]
        if name in RIVALS and (value := median(result, name, figure.name)) is not None
    }
    if not medians:
        return None
    return (min if figure.lower_is_better else max)(medians, key=medians.get)


def judge(result, target):
    """One line of the table of targets, as a dict."""
    case = CASES[result["case"]]
    figure = next(f for f in case.figures if f.name == target.figure)
    against = target.against
    if against == BEST_RIVAL:
        against = best_rival(result, figure)
    ours = median(result, "fastipc", figure.name)
    line = {
        "case": case.name,
        "figure": figure.name,
        "unit": figure.unit,
        "fastipc": ours,
        "against": against or "",
        "their": median(result, against, figure.name) if against else None,
        # An absolute bound is compared with the figure itself; a missing rival with nothing.
        "ratio": paired_ratio(result, against, figure.name) if target.against else ours,
        "lower_is_better": figure.lower_is_better,
        "bound": target.bound,
        "at_the_worst": target.at_the_worst,
    }
    line["verdict"] = _verdict(line, result["state"])
    return line


def _verdict(line, state):
    if line["ratio"] is None:
        return "not run"

    def within(bound):
        return line["ratio"] <= bound if line["lower_is_better"] else line["ratio"] >= bound

    if within(line["bound"]):
        verdict = "met"
    elif line["at_the_worst"] is not None and within(line["at_the_worst"]):
        verdict = "met at the worst"
    else:
        verdict = "missed"
    return verdict if state == "steady" else f"{verdict}, {state}"


def summary(result):
    """A case without its rounds: medians, ratios, verdicts."""
    case = CASES[result["case"]]
    names = list(result["rounds"])
    # A reference may have figures of its own, such as what pickling costs.
    figures = dict.fromkeys(f.name for f in case.figures)
    for rounds in result["rounds"].values():
        figures.update(dict.fromkeys(rounds[0]))
    return {
        "case": case.name,
        "state": result["state"],
        "medians": {n: {f: median(result, n, f) for f in figures} for n in names},
        "fastipc_ratios": {
            n: {f.name: paired_ratio(result, n, f.name) for f in case.figures}
            for n in names
            if n != "fastipc"
        },
        "targets": [judge(result, target) for target in case.targets],
    }


# -- text ----------------------------------------------------------------------------------------


def number(value):
    """Three significant digits without exponents, thousands with k and M."""
    if value is None:
        return "-"
    for limit, divisor, suffix in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.3g}{suffix}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if value and abs(value) < 0.001:
        return f"{value:.1g}"
    return f"{value:.3g}"


def table(head, rows):
    """A markdown table whose columns also line up as plain text."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells):
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def _floor_cells(result):
    before, after = result["floor"]["before"], result["floor"]["after"]

    def both(pick):
        return f"{number(pick(before))} / {number(pick(after))}"

    return [
        both(lambda f: f["pingpong_ns"]),
        both(lambda f: f["futex_us"]),
        both(lambda f: f["memcpy_gbs"]["4194304"]),
        both(lambda f: f["memcpy_gbs"]["33554432"]),
    ]


def targets_text(results):
    rows = []
    for result in results:
        targets = CASES[result["case"]].targets
        if not targets:
            continue
        for target in targets:
            line = judge(result, target)
            sign = "<=" if line["lower_is_better"] else ">="
            bound = f"{sign} {number(line['bound'])}"
            if line["at_the_worst"] is not None:
                bound += f" ({number(line['at_the_worst'])})"
            if not target.against:
                bound += f" {line['unit']}"
            rows.append(
                [
                    line["case"],
                    f"{line['figure']}, {line['unit']}",
                    number(line["fastipc"]),
                    line["against"] or "-",
                    number(line["their"]),
                    number(line["ratio"]),
                    bound,
                    line["verdict"],
                    *_floor_cells(result),
                ]
            )
    head = ["case", "figure", "fastipc", "against", "theirs", "ratio", "target", "verdict"]
    head += ["ping-pong ns", "futex us", "memcpy 4M GB/s", "memcpy 32M GB/s"]
    return table(head, rows) if rows else ""


def _others(result):
    others = result["others_percent"]
    return "" if others is None else f"; others used {others:.0f} % of a processor"


def everyone_text(result):
    """All participants of one case: medians, and fastipc's paired ratio to each."""
    case = CASES[result["case"]]
    head = ["", *(f"{f.name}, {f.unit}" for f in case.figures)]
    first = case.figures[0]
    head.append(f"fastipc / this ({first.name})")
    rows = []
    for name in result["rounds"]:
        row = [name, *(number(median(result, name, f.name)) for f in case.figures)]
        ratio = paired_ratio(result, name, first.name)
        rows.append([*row, number(ratio)])
    before, after = result["floor"]["before"], result["floor"]["after"]
    floor = f"ping-pong {number(before['pingpong_ns'])} / {number(after['pingpong_ns'])} ns"
    if case.floor == "futex_us":
        floor += f", futex there and back {number(before['futex_us'])} /"
        floor += f" {number(after['futex_us'])} us"
    elif case.floor == "memcpy_gbs":
        size = str(4 << 20) if case.name == "array8m" else str(32 << 20)
        floor += f", memcpy {number(before['memcpy_gbs'][size])} /"
        floor += f" {number(after['memcpy_gbs'][size])} GB/s"
    lines = [f"### {case.name}: {case.what}", ""]
    if rows:
        lines += [table(head, rows), ""]
    lines.append(f"floor before / after: {floor}{_others(result)}: {result['state']}")
    for name in result["rounds"]:
        costs = result["rounds"][name][0]
        if "loads_us" in costs:
            dumps, loads = (median(result, name, k) for k in ("dumps_us", "loads_us"))
            lines.append(f"{name}: dumps {number(dumps)} us, loads {number(loads)} us")
    for name, why in result["failed"].items():
        lines += ["", f"**{name} failed**: {why.strip()}"]
    return "\n".join(lines)


def text(machine, skipped, results, seconds):
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "",
        f"Python {machine['python']}, {machine['system']}, {machine['processors']} processors; "
        f"{versions or 'standard library only'}; {seconds:.0f} s",
    ]
    lines += [f"skipped: {name} ({why})" for name, why in skipped.items()]
    for result in results:
        lines += ["", everyone_text(result)]
    against = targets_text(results)
    if against:
        lines += ["", "## Ratios and targets", "", against, ""]
        lines.append("ratio: fastipc divided by the other, pair by pair, the median of the pairs.")
        lines.append("Floor columns: before / after the case.")
    return "\n".join(lines)
