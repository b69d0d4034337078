"""The IP address of a process, and validation and display of URLs."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
"""Address of all processes of a run on one machine."""
ADDRESS = "PLASMID_ADDRESS"
"""Environment variable that the cluster sets in every process of a run, unless all of them are on one machine."""

USER_INFO = re.compile(r"(?<=:/)(/?)[^\s/?#'\"]*@", re.ASCII)
"""User and password of a URL, also of one that was read as a path, which has one slash."""


def find_own_address() -> str:
    """Return the IP address at which other processes of the run can reach this one; servers listen there."""
    return os.environ.get(ADDRESS, LOOPBACK)


def validate_web_address(url: str) -> str:
    """Check that a URL is valid and has no password, which would be stored with the run. Returns it."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"must start with http:// or https://, got {redact_url(url)!r}")
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname and (parts.port is None or parts.port >= 0))
    except ValueError:
        has_host = False
    if not has_host or any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError(f"must be http://host:port, got {redact_url(url)!r}")
    if "@" in parts.netloc:
        raise ValueError(
            f"must not contain user or password, got {redact_url(url)!r} with them; put 'Basic <base64 of "
            "user:password>' into an environment variable, and its name into api_key_env"
        )
    return url


def redact_url(url: str) -> str:
    """Strip user, password, query and fragment from a URL for messages and logs."""
    scheme, slashes, rest = url.partition("//")
    if not slashes:
        scheme, rest = "", url
    rest = rest.rpartition("@")[2] if "@" in rest else rest
    for mark in "?#":
        rest = rest.partition(mark)[0]
    return f"{scheme}{slashes}{rest}"


def hide_user_info(text: str) -> str:
    """Strip user and password from all URLs in a text, for example from a URL that was given in place of a folder."""
    return USER_INFO.sub(r"\1", text)
