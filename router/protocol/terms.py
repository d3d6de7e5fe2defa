"""What a request asks for beside tokens: its place in the queue and its time. Pure."""

import msgspec

from router.errors import invalid

MAX_PRIORITY = 2**31 - 1
"""Largest absolute value of `priority`."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Checked. The default is what a client gets that asks for nothing."""

    priority: int = 0
    """Lower values come first."""
    timeout_s: float | None = None
    """Since the HTTP request came; the router's maximum if None."""
    session: str = ""
    """What it belongs to: such requests go to the same nodes, while these are not overloaded."""
    whole_path: bool = False
    """Go over a prefill and a decode node where there are any, however short the prompt."""


DEFAULT_TERMS = Terms()


class TermsFields(msgspec.Struct, kw_only=True):
    """The fields of a body; every API has them."""

    priority: int | None = None
    timeout_s: float | None = None

    def terms(self, *, session: str = "", higher_first: bool = False) -> Terms:
        """Check them. `higher_first`: this API's larger priorities come first.

        Raises:
            ApiError: 400, naming the field.
        """
        priority = self.priority or 0
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            message = f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], not {priority}"
            raise invalid(message, "priority")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise invalid(f"timeout_s must be positive, not {self.timeout_s:g}", "timeout_s")
        place = -priority if higher_first else priority
        return Terms(priority=place, timeout_s=self.timeout_s, session=session)


def deadline(arrived: float, terms: Terms, maximum_s: float) -> float:
    """When a request that came at `arrived` has to be answered."""
    wish = terms.timeout_s
    return arrived + (maximum_s if wish is None else min(wish, maximum_s))
