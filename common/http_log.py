"""What an HTTP server of ours says of bytes that are not HTTP: one line and a count."""

import logging
from collections.abc import Callable
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class HTTPLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's server logger. Malformed requests are the sender's fault and carry no traceback."""

    def __init__(self, on_garbage: Callable[[str], None]) -> None:
        """`on_garbage` hears the first line of what was wrong; it counts, and says so."""
        super().__init__(logging.getLogger("aiohttp.server"))
        self._on_garbage = on_garbage

    def debug(self, msg: object, *args: Any, exc_info: Any = None, **kwargs: Any) -> None:
        """aiohttp says here what bytes of other protocols on a fresh connection were."""
        if not self._is_garbage(exc_info):
            super().debug(msg, *args, exc_info=exc_info, **kwargs)

    def exception(self, msg: object, *args: Any, exc_info: Any = True, **kwargs: Any) -> None:
        if not self._is_garbage(exc_info):
            super().exception(msg, *args, exc_info=exc_info, **kwargs)

    def _is_garbage(self, error: object) -> bool:
        if not isinstance(error, HttpProcessingError):
            return False
        lines = error.message.strip().splitlines() or [type(error).__name__]
        self._on_garbage(lines[0][:200])
        return True
