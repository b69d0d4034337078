"""Waiting for running requests before a weight sync."""

import asyncio
from types import SimpleNamespace

import pytest
from plasmid.errors import DeadlineError
from plasmid_serving.dialect import Load
from plasmid_serving.engine import ServersEngine


def test_requests_that_do_not_end_are_an_error_that_names_the_setting():
    async def loads(timeout_s):
        return (Load(running=1.0),)

    async def call_running(action):
        await action(SimpleNamespace(connection=SimpleNamespace(loads=loads)))

    engine = object.__new__(ServersEngine)
    engine.supervisor, engine._sync_s = SimpleNamespace(call_running=call_running), 0.2
    engine._settings = SimpleNamespace(health_timeout_s=1)
    with pytest.raises(DeadlineError, match=r"requests in progress \(run.sync_timeout_s, .*\): no end within 0.2 s"):
        asyncio.run(engine._drain())
