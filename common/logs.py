"""Logging of a process: one line of text on stderr for people, one JSON line at a request's end."""

import logging
import sys
import time
from typing import Any

import msgspec

from common.modes import DisaggregationMode
from common.stats import RequestEnd

REQUESTS = "pdserve.requests"
"""Logger of the JSON lines; they carry nothing but JSON after the usual head."""

_encode = msgspec.json.Encoder().encode


class OneLine(logging.Formatter):
    """Keeps each message on one line: what a client sent cannot forge a second one."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, _datefmt: str | None = None) -> str:
        """Written out once for each second."""
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._shown = time.strftime(self.default_time_format, time.localtime(second))
        return f"{self._shown},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def setup_logging(process: str, level: str = "INFO") -> None:
    """Send all log records of this process to stderr, marked with its name.

    `level` is a name like INFO; raises ValueError for an unknown one.
    """
    handler = logging.StreamHandler(sys.stderr)
    form = f"%(asctime)s %(levelname)s {process.replace('%', '%%')} %(name)s: %(message)s"
    handler.setFormatter(OneLine(form))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # What no line shows is not looked up either: that is half of what a line costs.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def log_request_end(end: RequestEnd, role: DisaggregationMode, name: str) -> None:
    """One JSON line: who, what came of it, and its stages in seconds since it came to this node."""
    requests = logging.getLogger(REQUESTS)
    if not requests.isEnabledFor(logging.INFO):
        return
    line: dict[str, Any] = {
        "event": "request_end",
        "role": role.value,
        "node": name,
        "room": end.room,
        "rid": end.rid,
        "attempt": end.attempt,
        "adapter": end.adapter,
        "outcome": end.outcome,
        "prompt_tokens": end.prompt_tokens,
        "output_tokens": end.output_tokens,
        "stages": {stage: round(seconds, 6) for stage, seconds in end.stages.items()},
    }
    requests.info("%s", _encode(line).decode())
