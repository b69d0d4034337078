"""Restarts of supervised servers."""

import asyncio

from plasmid_serving.api import HttpApi
from plasmid_serving.connection import ServerConnection, StartedServer
from plasmid_serving.supervisor import ManagedServer


class Address:
    def open(self, secret):
        return HttpApi("http://127.0.0.1:1")


def test_a_call_during_a_restart_leaves_no_session_open():
    sessions = []
    started = StartedServer(address=Address(), info=None, control=None)

    async def test():
        connection = ServerConnection(None, started, "", is_attached=False)

        class Handle:
            async def start(self, *, timeout_s):
                sessions.append(connection.api.session())  # as a call that begins while the server is down
                return started

        before = connection.api
        await ManagedServer(index=0, name="engine-0", handle=Handle(), connection=connection).restart(timeout_s=1)
        assert sessions[0].closed and connection.api is not before

    asyncio.run(test())
