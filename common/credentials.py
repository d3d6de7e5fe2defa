"""Secrets: how they are held, read, compared, and what is derived from the cluster's one.

    cluster secret ── scrypt ──▶ CURVE key pair   every ZMQ socket between our processes
                            └──▶ node key         bearer token of the nodes' own HTTP
    API keys ── sha256 ──▶ KeyRing                bearer tokens of the router's HTTP

Configuration holds paths, never what is in them. A `Secret` shows itself only to who asks for it by
name, so that no log line, repr, traceback or JSON carries one by accident.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

SHORTEST = 16
"""Characters that a cluster secret or a key must have."""
_SALT = b"pdserve cluster secret, 2"
_MASK = "***"


class UnusableSecret(ValueError):
    """A secret is too short, of strange characters, or its file cannot be read; never quotes it."""


class Secret:
    """A text that nothing prints."""

    __slots__ = ("_text",)

    def __init__(self, text: str, what: str = "a secret") -> None:
        """Raises UnusableSecret. `what` names it in the message."""
        if len(text) < SHORTEST:
            raise UnusableSecret(f"{what} must have at least {SHORTEST} characters")
        if not text.isprintable():
            raise UnusableSecret(f"{what} must be printable, and one line")
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({_MASK})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(), other._text.encode()
        )

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not written anywhere")


class KeyRing:
    """The bearer tokens that open a door; holds their digests only."""

    def __init__(self, keys: Iterable[Secret] = ()) -> None:
        self._digests = tuple(_digest(key.reveal()) for key in keys)

    def __bool__(self) -> bool:
        """Whether there is any key."""
        return bool(self._digests)

    def __add__(self, other: "KeyRing") -> "KeyRing":
        both = KeyRing()
        both._digests = self._digests + other._digests
        return both

    def admits(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries one of the keys.

        Every key is compared, in constant time, whichever fits.
        """
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        fits = False
        for digest in self._digests:
            fits |= hmac.compare_digest(digest, given)
        return fits and scheme.lower() == "bearer"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, repr=False)
class ClusterKeys:
    """What every process of a cluster derives from its secret."""

    curve_public: bytes
    """Z85. Never sent in clear: who knows it knows the secret."""
    curve_secret: bytes
    """Z85."""
    node_key: Secret
    """Bearer token of the nodes' HTTP."""

    @classmethod
    def derive(cls, secret: Secret) -> "ClusterKeys":
        """The same keys in every process; slow on purpose (about 50 ms)."""
        raw = hashlib.scrypt(
            secret.reveal().encode(), salt=_SALT, n=1 << 14, r=8, p=1, maxmem=1 << 26, dklen=64
        )
        curve_secret = z85.encode(raw[:32])
        node_key = hashlib.blake2b(raw[32:], digest_size=24, person=b"node http").hexdigest()
        return cls(zmq.curve_public(curve_secret), curve_secret, Secret(node_key))

    def __repr__(self) -> str:
        return f"ClusterKeys({_MASK})"


# ---------------------------------------------------------------- where they come from


def read_secret(
    path: str | None, environ: Mapping[str, str], variable: str, what: str
) -> Secret | None:
    """One secret from a file, or else from an environment variable; None if there is neither.

    Raises:
        UnusableSecret: the file cannot be read, or what it holds is no secret.
    """
    if path is not None:
        return Secret(_read(path, what).strip(), f"{what} in {path}")
    text = environ.get(variable, "").strip()
    return Secret(text, f"{what} in {variable}") if text else None


def read_keys(
    path: str | None, environ: Mapping[str, str], variable: str, what: str
) -> tuple[Secret, ...]:
    """Keys from a file (one a line, `#` begins a comment) and from a variable (comma separated).

    Raises:
        UnusableSecret: the file cannot be read or holds no key, or a key cannot be one.
    """
    given = [key.strip() for key in environ.get(variable, "").split(",")]
    found = [_bearer(key, f"{what} in {variable}") for key in given if key]
    if path is not None:
        lines = [line.partition("#")[0].strip() for line in _read(path, what).splitlines()]
        in_file = [_bearer(line, f"{what} in {path}") for line in lines if line]
        if not in_file:
            raise UnusableSecret(f"{path} holds no {what}")
        found += in_file
    return tuple(found)


def _bearer(text: str, what: str) -> Secret:
    """A secret that can be sent in a header as it is."""
    if not text.isascii() or " " in text:
        raise UnusableSecret(f"{what} must be printable ASCII without spaces")
    return Secret(text, what)


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UnusableSecret(f"{what}: cannot read {path}: {reason}") from None
