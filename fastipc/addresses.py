"""Addresses of this host: how a user may write one, and which one readers elsewhere are told.

An address may be bare (``10.0.0.5``, ``fd00::5``), bracketed (``[fd00::5]``), link-local with its
scope (``fe80::5%eth0``), a host name, and have ``tcp://`` before it. It never has a port: ports
are chosen by the bind.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

__all__ = [
    "advertised",
    "endpoint",
    "is_foreign",
    "is_ipv6",
    "parse",
    "reachable_form",
    "split_endpoint",
]

logger = logging.getLogger("fastipc")

# Addresses that no host has (RFC 5737, RFC 3849): a datagram socket that is connected to one, and
# sends nothing, tells which of our addresses the default route would use.
_NOWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}


def is_ipv6(host: str) -> bool:
    """True for an IPv6 address as parse returns it."""
    return ":" in host


def parse(text: str, source: str) -> str:
    """The bare address that text means; `source` says in errors where text is from.

    Raises ValueError.
    """
    host = text.strip().removeprefix("tcp://").rstrip("/")
    if host.startswith("["):
        host, bracket, rest = host[1:].partition("]")
        if not bracket or rest:
            raise ValueError(
                f"{source}={text!r} is not an address: it must be like [fd00::1], without a port"
            )
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{source}={text!r} is neither an IPv4 or IPv6 address (without a port) nor the name "
            f"of a host: {error}"
        ) from None
    return str(found[0][4][0])


def _default_route(family: socket.AddressFamily) -> str | None:
    """The address that this host would send from, by the routing table alone."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NOWHERE[family], 9))
            host = str(probe.getsockname()[0])
        except OSError:
            return None
    return None if ipaddress.ip_address(host).is_unspecified else host


def advertised(connect_ip: str | None, from_environment: str) -> tuple[str, bool]:
    """(the address that readers elsewhere are told, whether to bind all addresses).

    connect_ip, else FASTIPC_HOST_IP (`from_environment`, "" when not set), else the address that
    the default route uses. One that means every address (0.0.0.0, ::) is bound as it is, but what
    is told is the default route's. Raises ValueError.
    """
    families = [socket.AF_INET, socket.AF_INET6] if socket.has_ipv6 else [socket.AF_INET]
    wildcard = False
    for text, source in ((connect_ip, "connect_ip"), (from_environment, "FASTIPC_HOST_IP")):
        if not text:
            continue
        host = parse(text, source)
        if not ipaddress.ip_address(host).is_unspecified:
            return host, False
        wildcard = True
        families = [socket.AF_INET6 if is_ipv6(host) else socket.AF_INET]
        break
    for family in families:
        found = _default_route(family)
        if found is not None:
            return found, wildcard
    loopback = "::1" if families == [socket.AF_INET6] else "127.0.0.1"
    logger.warning(
        "this host has no default route: only processes of this host can reach the queue at %s; "
        "connect_ip or FASTIPC_HOST_IP names another address",
        loopback,
    )
    return loopback, wildcard


def endpoint(host: str, port: int | str) -> str:
    """``tcp://host:port``, bracketed when it must be."""
    return f"tcp://[{host}]:{port}" if is_ipv6(host) else f"tcp://{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of what endpoint made. Raises ValueError."""
    host, colon, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not colon or not port.isdigit():
        raise ValueError(f"{text!r} is not like tcp://host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reachable_form(host: str) -> str:
    """The address as this host reaches it: the scope of a link-local one is a name of the
    writer's host, and means nothing here unless an interface is called the same.

    Raises ValueError when there are several interfaces to choose from.
    """
    address, percent, scope = host.partition("%")
    if not percent:
        return host
    names = [name for _, name in socket.if_nameindex()]
    if scope in names:
        return host
    others = [name for name in names if name != "lo" and _is_up(name)]
    if len(others) == 1:
        return f"{address}%{others[0]}"
    raise ValueError(
        f"the queue's address {host} is link-local, and this host has no interface {scope!r} to "
        f"reach it by (it has {', '.join(names)}): use another connect_ip"
    )


def _is_up(name: str) -> bool:
    try:
        with open(f"/sys/class/net/{name}/operstate") as state:
            return state.read().strip() != "down"
    except OSError:
        return True


def is_foreign(error_number: int) -> bool:
    """Whether a bind failed because the address isn't one of this host's."""
    return error_number in (errno.EADDRNOTAVAIL, errno.ENODEV)
