"""Processes that are forked by a server which has imported what ranks need: importing it in each takes seconds."""

import multiprocessing


def forked_processes():
    """A context of `multiprocessing`. Its processes share no state with this one, as if they were spawned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    return context
