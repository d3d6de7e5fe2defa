"""What a cell of the table came to, as it travels from the process that measured it. Pure.

Every figure is a list of repetitions of one quantity. Where there is a bound (the card's own rate,
or the time that the bytes alone take) the ratio to it is what a target speaks of.
"""

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

Direction = Literal["at least", "at most"]


class Target(msgspec.Struct, frozen=True):
    """What the ratio to the bound should be."""

    direction: Direction
    ratio: float

    def met(self, ratio: float) -> bool:
        return ratio >= self.ratio if self.direction == "at least" else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'>=' if self.direction == 'at least' else '<='} {self.ratio:.2f}"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A measured cell. `values` has every repetition, in `unit`; never empty."""

    unit: str
    values: list[float]
    bound: float | None = None
    """In the same unit."""
    bound_name: str = ""
    target: Target | None = None
    note: str = ""

    @property
    def middle(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        return self.middle / self.bound if self.bound else None

    @property
    def ratios(self) -> list[float] | None:
        return [value / self.bound for value in self.values] if self.bound else None


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    cell: str
    figure: Figure


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """`error` is one line, `detail` what may help to find out why."""

    cell: str
    error: str
    detail: str = ""


class NotRun(msgspec.Struct, frozen=True, tag="not_run"):
    """Nothing is wrong as far as anybody knows: it was not tried."""

    cell: str
    reason: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A worker is about to measure this; if nothing follows, that ended it."""

    cell: str


Outcome = Measured | Failed | NotRun
Line = Outcome | Begun


def read_lines(raw: bytes) -> list[Line]:
    """Lines of JSON as workers write them; a last one that was cut off does not count."""
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    for text in raw.splitlines():
        try:
            lines.append(decoder.decode(text))
        except msgspec.DecodeError:
            break
    return lines


# ---------------------------------------------------------------- the table

HEAD = ("what", "measured", "bound", "ratio", "target", "", "n")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """One row a cell; a failure or what was not run says so where the figures would be."""
    rows = [_row(outcome) for outcome in outcomes]
    lines = [_line(HEAD), _line(("---",) * len(HEAD)), *(_line(row) for row in rows)]
    notes = [
        f"{outcome.cell}: {outcome.figure.note}"
        for outcome in outcomes
        if isinstance(outcome, Measured) and outcome.figure.note
    ]
    failures = [
        f"{outcome.cell}: {outcome.error}\n\n{_quoted(outcome.detail)}"
        for outcome in outcomes
        if isinstance(outcome, Failed) and outcome.detail
    ]
    parts = ["\n".join(lines)]
    parts += ["\n".join(f"* {note}" for note in notes)] if notes else []
    parts += ["### Failures\n\n" + "\n\n".join(failures)] if failures else []
    return "\n\n".join(parts) + "\n"


def verdict(figure: Figure) -> str:
    """Empty where nothing is asked."""
    if figure.target is None or figure.ratio is None:
        return ""
    return "met" if figure.target.met(figure.ratio) else "MISSED"


def number(value: float) -> str:
    """Three significant digits, thousands apart, no exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def spread(values: Sequence[float], *, fixed: bool = False) -> str:
    """The median, and in brackets the range; `fixed` for ratios, with two decimals."""
    shown = [
        f"{value:.2f}" if fixed else number(value)
        for value in (statistics.median(values), min(values), max(values))
    ]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]}-{shown[2]})"


def _row(outcome: Outcome) -> tuple[str, ...]:
    match outcome:
        case NotRun(cell, reason):
            return (cell, f"not run: {reason}", "", "", "", "", "")
        case Failed(cell, error):
            return (cell, f"FAILED: {error}", "", "", "", "", "")
        case Measured(cell, figure):
            bound = f"{number(figure.bound)} {figure.unit}" if figure.bound else ""
            if figure.bound_name and bound:
                bound += f" ({figure.bound_name})"
            ratios = figure.ratios
            return (
                cell,
                f"{spread(figure.values)} {figure.unit}",
                bound,
                spread(ratios, fixed=True) if ratios else "",
                str(figure.target) if figure.target else "",
                verdict(figure),
                str(len(figure.values)),
            )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
