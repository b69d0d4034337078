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


OPTIONS = RequestOptions(attempts=1, backoff_s=0.0, max_backoff_s=0.0)


def test_clients_share_one_context_that_verifies_certificates():
    first, second = (
        context_of(JsonClient(url, OPTIONS, headers=dict, library=lambda: httpx))
        for url in ("http://host:1", "https://host:2")
    )
    assert first is second
    assert first.verify_mode == ssl.CERT_REQUIRED and first.check_hostname


def test_a_client_trusts_the_certificates_that_are_set_when_it_opens(tmp_path, monkeypatch):
    def authorities():
        return context_of(JsonClient("https://host:1", OPTIONS, headers=dict, library=lambda: httpx)).get_ca_certs()

    everything = authorities()
    own = tmp_path / "own.pem"
    own.write_text(ssl.DER_cert_to_PEM_cert(httpx.create_ssl_context().get_ca_certs(binary_form=True)[0]))
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert len(authorities()) == 1 < len(everything)
