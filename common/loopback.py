"""Whether an address to bind is reached from this machine only."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and names that stand for nothing else.

    A name that does not resolve cannot be bound either, and whoever binds it says so.
    """
    if host in ("", "*"):
        return False
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)
