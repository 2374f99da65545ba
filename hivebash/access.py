"""Who may: the names under which the daemon lets itself be addressed.

Rank 4, pure.

A page in a browser can send requests to a loopback port, under its own name when it rebinds that name to the loopback
address. Its browser cannot help but say so, in Host (RFC 9110 section 7.2) or in Origin (RFC 6454); programs that are
not browsers send no Origin, and a Host that is where they connected to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

import attrs


@attrs.frozen
class Denial:
    """Why a request is not let in."""

    code: int
    """The HTTP status."""
    sentence: str


@attrs.frozen
class Access:
    """The hosts that are accepted besides the loopback names, at any port."""

    allowed_hosts: Collection[str] = ()
    """Names and addresses in lower case; an IPv6 address without brackets."""

    def check(self, hosts: Sequence[str], origins: Sequence[str]) -> Denial | None:
        """None for a request that may come in, by the values of its Host and Origin headers."""
        if len(hosts) != 1:
            return Denial(421, "Exactly one Host header is needed.")
        host = host_name(f"//{hosts[0]}")
        if host is None or not self._known(host):
            return Denial(421, f"Host {hosts[0]!a} is not served here; --allow-host makes it so.")
        for origin in origins:
            name = host_name(origin) if origin.startswith(("http://", "https://")) else None
            if name is None or not self._known(name):
                return Denial(403, f"Origin {origin!a} may not come here; --allow-host with its host lets it.")
        return None

    def _known(self, host: str) -> bool:
        return host in self.allowed_hosts or _is_loopback(host)


def host_name(url: str) -> str | None:
    """The host of a URL in lower case, None if it has none or is no URL that names only a host and a port."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises when it is none
    except ValueError:
        return None
    bare = not (parts.path or parts.query or parts.fragment) and "@" not in parts.netloc
    return parts.hostname if bare and parts.hostname else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
