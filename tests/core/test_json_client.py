"""Clients of JSON servers share what is expensive to create."""

import asyncio
import ssl

import httpx
from plasmid.utils.json_client import JsonClient, RequestOptions


def context_of(client):
    """Return the TLS context of the connections that a client opens."""

    async def work():
        http = client._open_connections()
        try:
            return http._transport._pool._ssl_context
        finally:
            await client.close()

    return asyncio.run(work())


def test_clients_share_one_context_that_verifies_certificates():
    options = RequestOptions(attempts=1, backoff_s=0.0, max_backoff_s=0.0)
    first, second = (
        context_of(JsonClient(url, options, headers=dict, library=lambda: httpx))
        for url in ("http://host:1", "https://host:2")
    )
    assert first is second
    assert first.verify_mode == ssl.CERT_REQUIRED and first.check_hostname
