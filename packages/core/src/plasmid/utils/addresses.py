"""The IP address by which the processes of a run reach each other."""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"
ADDRESS = "PLASMID_ADDRESS"
"""Environment variable that the cluster sets in every process of a run, unless all of them are on one machine."""


def own_address() -> str:
    """IP by which the other processes of the run reach this one: listen there, and tell it to them."""
    return os.environ.get(ADDRESS, LOOPBACK)
