"""Attacks on a run by processes that take over one of its ports, or connect to its Unix sockets."""

import psutil
import pytest

from tests.security.attacked_run import Attacked, is_open_to_others, sockets, status, variables
from tests.security.live_runs import listening


def test_the_attacker_finds_sockets_that_others_can_open(tmp_path):
    import socket

    class Here:
        processes = staticmethod(lambda: [psutil.Process()])

    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{tmp_path.name}-attacked")
        assert any(tmp_path.name in name and is_open_to_others(name) for name in sockets(Here))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_socket_file_of_a_run_with_sglang_is_open_to_others(attacked):
    assert [name for name in sockets(attacked.run) if is_open_to_others(name)] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_key_of_an_ended_server_is_invalid_for_others(attacked):
    """A later listener on its port may receive the key. This test must be the last one that uses the run."""
    (place, _), *_ = attacked.servers()
    (server,) = [one for one in attacked.run.processes() if place in listening(one)]
    told = {("Authorization", f"Bearer {key}") for key in variables(server)}
    assert any((status(*place, "GET", "/v1/loads", (one,)) or (0,))[0] == 200 for one in told)
    server.kill()
    attacked.run.wait_for(lambda: places(attacked.run) - {place})
    router, _ = attacked.router()  # its metrics need no key
    for address in (router, *places(attacked.run)):
        for path in ("/openapi.json", "/workers", "/v1/loads"):
            for one in told:
                answer = status(*address, "GET", path, (one,))
                assert answer is None or answer[0] in (401, 403, 404), (address, path)
    attacked.run.train_more()


def places(run):
    """Return the places at which servers of the run respond to a key that its user can read."""
    return {place for place, _ in Attacked(run, None).servers()}
