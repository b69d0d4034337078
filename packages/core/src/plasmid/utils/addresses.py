"""The IP address of a process of a run, and URLs of servers: what a setting may hold, and how one is shown."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
ADDRESS = "PLASMID_ADDRESS"
"""Environment variable that the cluster sets in every process of a run, unless all of them are on one machine."""


def own_address() -> str:
    """IP by which the other processes of the run reach this one: listen there, and tell it to them."""
    return os.environ.get(ADDRESS, LOOPBACK)


def web_address(url: str) -> str:
    """The address, after checking that it is one and holds no password, which would be stored with the run."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"must begin with http:// or https://, got {shown_url(url)!r}")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname and (parts.port is None or parts.port >= 0))
    except ValueError:
        has_host = False
    if not has_host or any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError(f"must be http://host:port, got {shown_url(url)!r}")
    if "@" in parts.netloc:
        raise ValueError(
            f"must hold no user and password, got {shown_url(url)!r} with them; put 'Basic <base64 of user:password>' "
            "into an environment variable, and its name into api_key_env"
        )
    return url


def shown_url(url: str) -> str:
    """The address for messages and logs: without user, password, query and fragment."""
    scheme, slashes, rest = url.partition("//")
    if not slashes:
        scheme, rest = "", url
    rest = rest.rpartition("@")[2] if "@" in rest else rest
    for mark in "?#":
        rest = rest.partition(mark)[0]
    return f"{scheme}{slashes}{rest}"
