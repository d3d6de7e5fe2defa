"""Secrets stay inside, keys are compared whole, and what is derived is the same everywhere."""

import json
import pickle
from pathlib import Path

import msgspec
import pytest

from common.credentials import (
    ClusterKeys,
    KeyRing,
    Secret,
    UnusableSecret,
    read_keys,
    read_secret,
)

TEXT = "correct-horse-battery"


def test_a_secret_shows_itself_to_nobody_who_does_not_ask() -> None:
    secret = Secret(TEXT)
    keys = ClusterKeys.derive(secret)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", repr(keys), str([keys, secret])]
    hidden = [TEXT, keys.node_key.reveal(), keys.curve_secret.decode(), keys.curve_public.decode()]
    assert not any(part in text for part in hidden for text in shown)
    for write in (json.dumps, pickle.dumps, msgspec.json.encode, msgspec.msgpack.encode):
        with pytest.raises(TypeError):
            write(secret)
    assert secret.reveal() == TEXT


def test_the_same_secret_gives_the_same_keys_and_another_gives_others() -> None:
    one, again, other = (ClusterKeys.derive(Secret(text)) for text in (TEXT, TEXT, TEXT + "!"))
    assert one == again
    fields = ("curve_public", "curve_secret", "node_key")
    assert all(getattr(one, field) != getattr(other, field) for field in fields)


@pytest.mark.parametrize("text", ["letters with spaces", "ü" * 20])
def test_what_cannot_be_sent_in_a_header_is_a_secret_but_no_key(text: str) -> None:
    assert ClusterKeys.derive(Secret(text)) == ClusterKeys.derive(Secret(text))
    with pytest.raises(UnusableSecret, match="API key in KEYS must be printable ASCII"):
        read_keys(None, {"KEYS": text}, "KEYS", "API key")


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "two\nlines of a long secret"])
def test_what_is_no_secret_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(UnusableSecret) as caught:
        Secret(text, "the cluster secret")
    assert str(caught.value).startswith("the cluster secret must ")
    assert not text or text not in str(caught.value)


def test_a_ring_admits_its_keys_and_nothing_else() -> None:
    ring = KeyRing([Secret(TEXT), Secret("another-key-of-ours")])
    assert ring.admits(f"Bearer {TEXT}")
    assert ring.admits("bearer another-key-of-ours")
    refused = (None, "", TEXT, "Bearer", "Bearer ", f"Basic {TEXT}", f"Bearer {TEXT}x")
    assert not any(ring.admits(header) for header in refused)
    assert not ring.admits(f"Bearer {TEXT[:-1]}")
    assert not ring.admits("Bearer \udcff\udcfe")
    assert (KeyRing() + ring).admits(f"Bearer {TEXT}")
    assert ring
    assert not KeyRing()
    assert not KeyRing().admits("Bearer ")


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-number-one-of-ours  # alice\n\n  key-number-two-of-ours\n")
    environ = {"KEYS": "key-number-three-of-ours, ,key-number-four-of-ours"}
    found = [key.reveal() for key in read_keys(str(file), environ, "KEYS", "API key")]
    assert sorted(found) == sorted(
        f"key-number-{number}-of-ours" for number in ("one", "two", "three", "four")
    )
    assert read_keys(None, {}, "KEYS", "API key") == ()


def test_a_file_without_keys_opens_nothing_silently(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(UnusableSecret, match="holds no API key"):
        read_keys(str(file), {}, "KEYS", "API key")


def test_a_secret_comes_from_its_file_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(TEXT + "\n")
    environ = {"VARIABLE": "some-other-long-secret"}
    assert read_secret(str(file), environ, "VARIABLE", "the cluster secret") == Secret(TEXT)
    assert read_secret(None, environ, "VARIABLE", "x") == Secret("some-other-long-secret")
    assert read_secret(None, {"VARIABLE": ""}, "VARIABLE", "x") is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableSecret, match=r"cannot read .*nothing: No such file"):
        read_secret(str(tmp_path / "nothing"), {}, "V", "the cluster secret")
    with pytest.raises(UnusableSecret, match="in V must have at least 16"):
        read_secret(None, {"V": "tiny"}, "V", "the cluster secret")
