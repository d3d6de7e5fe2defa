"""Time that is shared out: repetitions are dropped where it gets short. Pure.

A run is some parts, each with a share of the total. A part may use what earlier ones left over. It
is made of cells; each gets an equal part of what is left, and out of that as many repetitions as
fit, one at the least. Only where nothing is left is a cell not run at all.
"""

from collections.abc import Mapping

TESTS = "tests"
SHARES: Mapping[str, float] = {
    "card": 15.0, TESTS: 170.0, "attention": 55.0, "steps": 90.0, "transfers": 30.0,
    "serving": 105.0,
}  # fmt: skip
"""Of the time; what a part leaves over is the next ones'."""
SECONDS = 450.0


def part_deadlines(total_s: float, shares: Mapping[str, float]) -> dict[str, float]:
    """When each part must have ended, in seconds from the begin of the run, in order."""
    whole = sum(shares.values())
    deadlines, before = {}, 0.0
    for name, share in shares.items():
        before += share
        deadlines[name] = total_s * before / whole
    return deadlines


def cell_allowance(left_s: float, cells_left: int) -> float:
    """Seconds that the next cell may take; 0 where there are none."""
    return max(0.0, left_s) / max(1, cells_left)


def repetitions(allowance_s: float, one_s: float, wanted: int) -> int:
    """As many as fit into `allowance_s`, where one takes `one_s`; at least 1, at most `wanted`."""
    if one_s <= 0.0:
        return wanted
    return max(1, int(min(wanted, allowance_s / one_s)))
