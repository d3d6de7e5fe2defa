"""What a client is told when a request cannot be answered: one exception, one body shape.

ApiError ── invalid()      400  the request itself, naming the field
         ── unauthorized() 401  no key, or none of ours
         ── forbidden()    403  a client's key on an admin's path
         ── not_found()    404  no such model, node or adapter
         ── too_busy()     429  more unfinished requests than allowed, with Retry-After
         ── unavailable()  503  nobody can do the work now
         ── internal()     500  work was tried and failed
         ── timed_out()    504  the request outlived its time
"""

from typing import Any


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's name of the error's class."""
        match self.status:
            case 401:
                return "authentication_error"
            case 403:
                return "permission_error"
            case 404:
                return "not_found_error"
            case 429:
                return "rate_limit_error"
            case status if status < 500:
                return "invalid_request_error"
            case 503:
                return "service_unavailable_error"
            case _:
                return "internal_error"

    def body(self) -> dict[str, Any]:
        """The JSON object that goes to the client."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code if self.code is not None else str(self.status),
        }
        return {"error": error}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthorized() -> ApiError:
    """The same for a missing and for a wrong key, and never what was given."""
    message = "give an API key of this server as Authorization: Bearer KEY"
    return ApiError(401, message, code="invalid_api_key")


def forbidden() -> ApiError:
    return ApiError(403, "this needs an admin key", code="admin_key_required")


def not_found(message: str, param: str | None, code: str) -> ApiError:
    return ApiError(404, message, param=param, code=code)


def no_adapter(name: str) -> ApiError:
    """Of a request; in the words for any model that is not there."""
    return not_found(f"the adapter {name[:256]!r} is not loaded", "model", "model_not_found")


def too_busy(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(429, message, code="overloaded", retry_after_s=retry_after_s)


def unavailable(message: str, code: str = "no_node") -> ApiError:
    return ApiError(503, message, code=code)


def internal(message: str, code: str) -> ApiError:
    return ApiError(500, message, code=code)


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, code="timeout")
