"""Metric labels from names that users choose: a bounded number of them, and each stays its own."""

from collections.abc import Collection

OTHER = "other"
"""The label of all names that got no place, and of one that is called so."""


class LabelBudget:
    """The first names seen are labels of their own; the rest share `OTHER` until a place is free.

    Every label is a time series in each scrape and in the database behind it, for weeks.
    """

    def __init__(self, places: int = 32) -> None:
        self._places = places
        self._own: set[str] = set()

    def label(self, name: str) -> str:
        """The label under which to show `name`; the same each time while it is kept."""
        if name not in self._own and len(self._own) < self._places:
            self._own.add(name)
        return name if name in self._own else OTHER

    def keep(self, names: Collection[str]) -> None:
        """Give the places of all other names back."""
        self._own.intersection_update(names)
