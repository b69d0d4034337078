"""The rendezvous of the processes of a run, and the addresses that it listens on."""

import os

import psutil
import pytest
from plasmid_models.sync.rendezvous import Rendezvous, connect, listen

from tests.forked_processes import forked_processes


def answer(url, host):
    store = connect(url, host, timeout_s=30)
    store.set("answer", store.get("question").decode() + "!")


def listening():
    return {
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process().net_connections()
        if found.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_processes_meet_and_no_other_address_is_listened_on(host):
    before = listening()
    rendezvous = Rendezvous(host, timeout_s=30)
    new = listening() - before
    assert [ip for ip, _ in new] == ([] if host == "127.0.0.1" else [host])
    rendezvous.store.set("question", "here")
    process = forked_processes().Process(target=answer, args=(rendezvous.url, host))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert rendezvous.store.get("answer") == b"here!"


def test_memory_of_the_rendezvous_is_the_users_alone():
    rendezvous = Rendezvous("127.0.0.1")
    owner = os.stat(rendezvous.url.removeprefix("file://"))
    folder = os.stat(os.path.dirname(rendezvous.url.removeprefix("file://")))
    assert owner.st_uid == folder.st_uid == os.getuid()
    assert folder.st_mode & 0o077 == 0  # others cannot list its contents


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("tcp://127.0.0.1:1", "127.0.0.1"),  # a run on one machine opens no port
        ("file:///tmp/store", "127.0.0.1"),
        ("file:///proc/1/fd/../../../tmp/store", "127.0.0.1"),
        ("file:///proc/1/fd/3", "127.0.0.2"),
        ("tcp://127.0.0.2", "127.0.0.2"),
        ("http://127.0.0.2:80", "127.0.0.2"),
    ],
)
def test_a_rendezvous_that_no_process_of_the_run_would_name_is_refused(url, host):
    with pytest.raises(ValueError, match="is not a rendezvous of this run"):
        connect(url, host)


def test_a_rendezvous_whose_process_has_ended_is_refused(tmp_path):
    with (tmp_path / "other").open("w") as other, pytest.raises(RuntimeError, match="its process has ended"):
        connect(f"file:///proc/{os.getpid()}/fd/{other.fileno()}", "127.0.0.1")
    with pytest.raises(RuntimeError, match="No such file"):
        connect("file:///proc/99999999/fd/3", "127.0.0.1")


def test_a_port_that_is_taken_is_an_error():
    store, port = listen("127.0.0.2")
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.2", port)
    assert store.num_keys() >= 0
