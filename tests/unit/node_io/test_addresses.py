import asyncio

import pytest

from common.node_io.addresses import Endpoint, advertised_host, bind_host, bracketed, expand


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("tcp://127.0.0.1:8001", "127.0.0.1", 8001),
        ("tcp://router.svc:1", "router.svc", 1),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_addresses_are_parsed_and_printed_alike(url: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, url)


@pytest.mark.parametrize(
    "url", ["", "tcp://", "tcp://x", "tcp://:1", "tcp://x:", "tcp://x:y", "x:1", "ipc://x:1",
            "tcp://x:0", "tcp://x:65536", "tcp://x:-1"]
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://|port"):
        Endpoint.parse(url)


def test_names_expand_to_literals_and_localhost_to_one() -> None:
    literal = Endpoint("10.1.2.3", 5)
    assert asyncio.run(expand(literal)) == {literal}
    assert asyncio.run(expand(Endpoint("localhost", 5))) == {Endpoint("127.0.0.1", 5)}
    assert asyncio.run(expand(Endpoint("no.such.host.invalid", 5))) == frozenset()
    assert asyncio.run(expand(Endpoint("x" * 100 + ".y", 5))) == frozenset()


def test_wildcards_bind_everywhere_and_advertise_what_reaches_the_router() -> None:
    assert bind_host("*") == bind_host("") == bind_host("0.0.0.0") == "0.0.0.0"
    assert bind_host("localhost") == "127.0.0.1"
    assert advertised_host("10.1.2.3", ()) == "10.1.2.3"
    assert advertised_host("0.0.0.0", (Endpoint("127.0.0.1", 9),)) == "127.0.0.1"
    assert advertised_host("0.0.0.0", ()) not in ("", "0.0.0.0")
    assert bracketed("::1") == "[::1]"
