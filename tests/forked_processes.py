"""Processes forked from a server that has imported what ranks need, because importing it in each takes seconds."""

import multiprocessing


def forked_processes():
    """Return a `multiprocessing` context. Its processes share no state with this one, as if they were spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    return context
