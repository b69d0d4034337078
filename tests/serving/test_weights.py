"""Weights sent from a trainer's rank to the processes of servers, without a server: which process is notified of
what."""

import secrets
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from inspect import signature

import pytest
import torch
from plasmid.errors import EngineError, EngineLostError, SyncError
from plasmid.protocols import SyncPlan
from plasmid.types.receipts import merge_results
from plasmid_models.sync import checksum, make_buckets, send_share, send_weights, unpack
from plasmid_serving.weights import sources
from plasmid_serving.weights.bucket_server import BucketServer, download, view_memory
from plasmid_serving.weights.command import UpdateCommand
from plasmid_serving.weights.control import OVER, ControlChannel, ControlServer
from plasmid_serving.weights.errors import SyncAbortedError, encode_error
from plasmid_serving.weights.receiver import Receiver
from plasmid_serving.weights.sender import ServersWire

from tests.forked_processes import forked_processes

WEIGHTS = [(f"layer.{i}", torch.arange(100.0) + i) for i in range(6)]
BUCKET = 2 * 416  # two tensors in each


class Process:
    """One process of a server, which keeps what it receives."""

    def __init__(self, address, command, rank=0, fails_at=None, timeout_s=20.0):
        self.taken = {}
        self._fails_at = fails_at
        self._receiver = Receiver(
            address=address,
            command=replace(command, token="token", timeout_s=timeout_s),
            load=self._load,
            rank=rank,
            device=torch.device("cpu"),
        )

    def _load(self, bucket):
        if bucket.index == self._fails_at:
            raise SyncError("it does not fit")
        self.taken |= {name: tensor.clone() for name, tensor in unpack(bucket)}

    def run(self):
        return self._receiver.run()


def meet(barrier):
    """Wait for the other processes, which have then imported this module, too."""
    barrier.wait()


def outcome(*args):
    """Return the final state of a process, and its result or error."""
    process = Process(*args)
    try:
        return process.taken, process.run()
    except SyncError as error:
        return process.taken, error


def is_whole(taken):
    return taken.keys() == dict(WEIGHTS).keys() and all(taken[name].equal(tensor) for name, tensor in WEIGHTS)


@pytest.fixture
def servers():
    """The engine's ends of the control channels of two servers."""
    hosts = ControlServer(secrets.token_bytes(32)), ControlServer(secrets.token_bytes(32))
    yield tuple(host.address for host in hosts)
    for host in hosts:
        host.close()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def processes():
    """Separate processes, because a process can be a member of only one broadcast group."""
    context = forked_processes()
    all_ready = context.Barrier(4)  # on a busy machine, importing this module takes longer than a broadcast may
    with ProcessPoolExecutor(4, context, initializer=meet, initargs=(all_ready,)) as pool:
        list(pool.map(sum, [()] * 4))
        yield pool


def wire_to(servers, transport, tmp_path, *, ranks=1, timeout_s=20.0):
    command = UpdateCommand(
        transport=transport, token="token", ranks=ranks, timeout_s=timeout_s, folder=str(tmp_path / "weights")
    )
    if transport == "broadcast":
        command = replace(command, group=f"group-{ranks}-{tmp_path}", backend="gloo", size=1 + 2 * ranks)
    addresses = {i: server for i, server in servers.items()}
    return ServersWire(command=command, addresses=addresses, first_ranks={0: 1, 1: 1 + ranks})


def by_disk(tmp_path):
    return wire_to({}, "disk", tmp_path).command


def send(wire, rank=0):
    return send_weights(WEIGHTS, plan=SyncPlan(wire=wire, dtype="float32", bucket_bytes=BUCKET), version=1, rank=rank)


def check_all_get_all(kind, servers, pool, tmp_path):
    wire = wire_to(dict(enumerate(servers)), kind, tmp_path, ranks=2)
    running = [
        pool.submit(outcome, server, wire.command_to(i), rank) for i, server in enumerate(servers) for rank in range(2)
    ]
    sent = send(wire)
    assert len(sent.buckets) == 3
    for taken, result in (run.result() for run in running):
        assert is_whole(taken) and result["num_tensors"] == 6
        assert result["buckets"] == [(s.index, s.num_bytes, s.checksum) for s in sent.buckets]


SHARES = [{"layer.0": 0, "layer.1": 1, "layer.2": 0}, {"layer.3": 1, "layer.4": 0, "layer.5": 1}]
"""Two ranks, each with two buckets."""


def send_share_of(rank, wire, fails=False):
    """Run trainer rank 0 or 1 in a sync; return its result or error."""
    weights = dict(WEIGHTS)

    def tensors():
        for number, owners in enumerate(SHARES):
            if fails and number == 1:
                raise ConnectionError("the rank is lost")
            yield [(name, weights[name]) for name, owner in owners.items() if owner == rank]

    try:
        plan = SyncPlan(wire=wire, dtype="float32")
        return send_share(tensors(), SHARES, plan=plan, version=1, rank=rank)
    except Exception as error:  # noqa: BLE001  returned from its process
        return error


def divided_wire(servers, transport, tmp_path, **options):
    wire = wire_to(servers, transport, tmp_path, **options)
    return replace(wire, command=replace(wire.command, senders=2), senders="divided")


def check_two_ranks_send(kind, servers, pool, tmp_path):
    wire = divided_wire(dict(enumerate(servers)), kind, tmp_path)
    sending = [pool.submit(send_share_of, rank, wire) for rank in (1, 0)]
    running = [pool.submit(outcome, server, wire.command_to(i)) for i, server in enumerate(servers)]
    shares = [send.result() for send in sending]
    assert [len(share.buckets) for share in shares] == [2, 2]
    sent = merge_results(shares)
    for taken, result in (run.result() for run in running):
        assert is_whole(taken) and result["num_tensors"] == 6
        assert result["buckets"] == [(s.index, s.num_bytes, s.checksum) for s in sent.buckets]


def check_one_of_two_ranks_fails(kind, servers, pool, tmp_path):
    """The engine forwards the error of the servers to the other rank, which would otherwise wait for them."""
    wire = divided_wire(dict(enumerate(servers)), kind, tmp_path)
    sending = [pool.submit(send_share_of, rank, wire, rank == 0) for rank in (0, 1)]
    running = [pool.submit(outcome, server, wire.command_to(i)) for i, server in enumerate(servers)]
    for server, run in zip(servers, running, strict=True):
        _, error = run.result(timeout=60)
        assert isinstance(error, SyncAbortedError)
        server.end_update("token", 1, encode_error(error), senders=2)  # as the engine does
    errors = [send.result(timeout=60) for send in sending]
    assert str(errors[0]) == "the rank is lost" and isinstance(errors[1], SyncError)


def check_one_of_two_servers_fails(kind, servers, pool, tmp_path):
    wire = divided_wire(dict(enumerate(servers)), kind, tmp_path)
    sending = [pool.submit(send_share_of, rank, wire) for rank in (0, 1)]
    bad = pool.submit(outcome, servers[0], wire.command_to(0), 0, 1)
    good = pool.submit(outcome, servers[1], wire.command_to(1))
    _, error = bad.result(timeout=60)
    assert str(error) == "it does not fit"
    servers[0].end_update("token", 1, encode_error(error), senders=2)
    taken, result = good.result(timeout=60)
    assert is_whole(taken) and result["num_tensors"] == 6
    assert [len(send.result(timeout=60).buckets) for send in sending] == [2, 2]


DIVIDED = [check_two_ranks_send, check_one_of_two_servers_fails, check_one_of_two_ranks_fails]


@pytest.mark.parametrize("check", DIVIDED)
@pytest.mark.parametrize("kind", ["http", "disk"])
def test_two_ranks_divide_the_buckets(check, kind, servers, threads, tmp_path):
    check(kind, servers, threads, tmp_path)


@pytest.mark.parametrize("check", DIVIDED)
def test_two_ranks_broadcast_in_turn(check, servers, processes, tmp_path):
    check("broadcast", servers, processes, tmp_path)


def check_one_fails(kind, servers, pool, tmp_path):
    wire = wire_to(dict(enumerate(servers)), kind, tmp_path)
    bad = pool.submit(outcome, servers[0], wire.command_to(0), 0, 1)
    good = pool.submit(outcome, servers[1], wire.command_to(1))
    assert len(send(wire).buckets) == 3
    taken, error = bad.result()
    assert len(taken) == 2 and str(error) == "it does not fit"  # nothing after the bucket that did not fit
    taken, result = good.result()
    assert is_whole(taken) and result["num_tensors"] == 6


@pytest.mark.parametrize("kind", ["http", "disk"])
def test_every_process_of_every_server_gets_all(kind, servers, threads, tmp_path):
    check_all_get_all(kind, servers, threads, tmp_path)


@pytest.mark.parametrize("kind", ["http", "disk"])
def test_a_server_that_fails_does_not_keep_the_weights_from_the_other(kind, servers, threads, tmp_path):
    check_one_fails(kind, servers, threads, tmp_path)


def test_a_broadcast_reaches_every_process(servers, processes, tmp_path):
    check_all_get_all("broadcast", servers, processes, tmp_path)


def test_a_server_that_fails_does_not_leave_the_broadcast(servers, processes, tmp_path):
    check_one_fails("broadcast", servers, processes, tmp_path)


def test_sending_fails_when_no_server_is_left(servers, threads, tmp_path):
    wire = wire_to(dict(enumerate(servers)), "http", tmp_path)
    running = [threads.submit(Process(server, wire.command_to(i), fails_at=0).run) for i, server in enumerate(servers)]
    with pytest.raises(SyncError, match="it does not fit"):
        send(wire)
    for run in running:
        with pytest.raises(SyncError, match="it does not fit"):
            run.result()


def test_a_failure_reported_by_the_actor_ends_the_wait_for_its_server(servers, threads, tmp_path):
    sending = threads.submit(send, wire_to({0: servers[0]}, "disk", tmp_path))
    servers[0].end_update("token", 1, encode_error(EngineError("the server is not running")))
    with pytest.raises(EngineLostError, match="EngineError: the server is not running"):
        sending.result()
    late = Process(servers[0], by_disk(tmp_path))
    with pytest.raises(SyncAbortedError):
        while True:
            late.run()  # some buckets were announced before


def test_a_sender_that_fails_notifies_the_servers(servers, threads, tmp_path):
    running = threads.submit(Process(servers[0], by_disk(tmp_path)).run)
    sender = wire_to({0: servers[0]}, "disk", tmp_path).open(rank=0, version=1)
    sender.send(next(make_buckets(WEIGHTS, bucket_bytes=BUCKET)))
    sender.close(ok=False)
    with pytest.raises(SyncAbortedError, match="aborted by the sender"):
        running.result()


def test_a_silent_server_is_not_waited_for_longer_than_the_timeout(servers, tmp_path):
    with pytest.raises(SyncAbortedError, match=r"no message from the sender for 0\.2 s"):
        Process(servers[0], by_disk(tmp_path), timeout_s=0.2).run()
    with pytest.raises(EngineLostError, match=r"no answer within 0\.2 s"):
        send(wire_to({0: servers[0]}, "disk", tmp_path, timeout_s=0.2))


def test_a_waiting_process_sends_heartbeats(servers, threads, tmp_path):
    waiting = threads.submit(Process(servers[0], by_disk(tmp_path), timeout_s=2.5).run)
    with pytest.raises(SyncAbortedError):
        waiting.result()
    assert servers[0].heartbeats("token") >= 3  # at the beginning, and once a second
    assert servers[0].heartbeats("other") == 0


def test_a_rank_whose_server_was_left_out_sends_nothing(servers, threads, tmp_path):
    """Ranks share GPUs with their servers: the rank of a lost server must not send to another one."""
    wire = wire_to({1: servers[1]}, "ipc", tmp_path)
    assert len(send(wire, rank=0).buckets) == 3
    servers[1].end_update("token", 1, {"index": 0})
    with pytest.raises(SyncAbortedError):
        Process(servers[1], by_disk(tmp_path)).run()  # it was notified of no bucket


def test_messages_of_long_ago_are_dropped(servers):
    address, _ = servers
    for i in range(30):
        address.end_update(f"token-{i}", 2, OVER)
    assert ControlChannel.of_sender(address, "token-29", 1).get(1) == OVER
    assert address.get("token-0/0/buckets") is None
    assert address.get("token-22/0/buckets") == OVER


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ({"kind": "disk"}, "announced over 'disk', expected 'http'"),
        ({"kind": "ipc", "handle": "gASVAAAA"}, "announced over 'ipc'"),
        ({}, "announced over None"),
        ({"kind": "http", "host": "127.0.0.1", "port": "80"}, "port = '80'"),
    ],
)
def test_a_bucket_by_another_way_than_planned_is_refused(servers, threads, tmp_path, source, error):
    process = Process(servers[0], wire_to({}, "http", tmp_path).command)
    running = threads.submit(process.run)
    header = {"index": 0, "names": [], "shapes": [], "dtypes": [], "checksum": 0, "num_bytes": 8, "is_last": True}
    sender = ControlChannel.of_sender(servers[0], "token", 0)
    sender.put({"bucket": header, "source": source, "sender": 0})
    with pytest.raises(SyncError, match=error):
        running.result()
    assert error in sender.get(5)["error"]


HANDLE = {
    "offset": 4,
    "handle": "AAAA",
    "storage_bytes": 12,
    "storage_offset": 0,
    "counter": "AAAA",
    "counter_offset": 0,
    "event": "AAAA",
    "is_recorded": True,
}
"""Plain fields of a CUDA IPC handle; how a driver interprets them is not tested here."""


def test_a_handle_has_plain_fields_of_the_right_kinds():
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = sources.ipc_arguments(HANDLE, num_bytes=8, device=1)
    named = dict(zip(signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
    assert (named["tensor_size"], named["tensor_offset"], named["storage_device"]) == ((8,), 4, 1)
    assert named["storage_handle"] == named["ref_counter_handle"] == named["event_handle"] == b"\0\0\0"
    assert (named["storage_size_bytes"], named["storage_offset_bytes"], named["ref_counter_offset"]) == (12, 0, 0)
    assert (named["event_sync_required"], named["requires_grad"], named["dtype"]) == (True, False, torch.uint8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 5},
        {"offset": -1},
        {"offset": True},
        {"offset": "4"},
        {"storage_bytes": 1 << 62},
        {"handle": ""},
        {"handle": "A" * 8192},
        {"handle": ["AAAA"]},
        {"event": "not base64"},
        {"counter": None},
        {"is_recorded": 1},
    ],
)
def test_a_handle_with_other_fields_is_refused(wrong):
    with pytest.raises(SyncError, match="invalid bucket announcement"):
        sources.ipc_arguments(HANDLE | wrong, num_bytes=8, device=0)


def test_buckets_are_served_to_those_who_know_the_token(threads):
    bucket = next(make_buckets(WEIGHTS, bucket_bytes=BUCKET))
    server = BucketServer("secret")
    host, port = server.address
    try:
        server.put(bucket)
        got = torch.empty_like(bucket.data)
        download(host, port, "/secret/0", view_memory(got))
        assert checksum(got) == bucket.checksum
        for path in ("/guess/0", "/0", "/", "/secret/", "/secret/1"):
            with pytest.raises(OSError, match="answered 404"):
                download(host, port, path, view_memory(got))
        with pytest.raises(OSError, match=f"with {got.numel()} bytes, expected 200 with 8"):
            download(host, port, "/secret/0", memoryview(bytearray(8)))
        server.remove(bucket)
        with pytest.raises(OSError, match="answered 404"):
            download(host, port, "/secret/0", view_memory(got))
    finally:
        server.close()
    header = {"num_bytes": got.numel(), "index": 0}
    command = UpdateCommand(transport="http", token="secret", ranks=1, timeout_s=1.0)
    with pytest.raises(SyncAbortedError, match="Connection refused"):
        sources.fetch({"kind": "http", "host": host, "port": port}, header, command, rank=0, device=torch.device("cpu"))
