"""Weights on their way from a trainer's rank to the processes of servers, without SGLang: who is told of what."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from plasmid.errors import EngineError, EngineLostError, SyncError
from plasmid.protocols import SyncPlan
from plasmid.sync import checksum, make_buckets, send_weights, unpack
from plasmid_sglang import sources
from plasmid_sglang.lost import CutOffError, told
from plasmid_sglang.mail import Channel, Mail, MailHost
from plasmid_sglang.shelf import Shelf, bytes_of, read
from plasmid_sglang.stream import OVER, Stream
from plasmid_sglang.wire import Meeting, Order, SGLangWire

WEIGHTS = [(f"layer.{i}", torch.arange(100.0) + i) for i in range(6)]
BUCKET = 2 * 416  # two tensors in each


class Process:
    """One process of a server, which keeps what it is given."""

    def __init__(self, address, rank=0, fails_at=None, timeout_s=20.0):
        self.taken = {}
        self._fails_at = fails_at
        self._stream = Stream(
            channel=Channel.of(address, "token", rank),
            load=self._load,
            rank=rank,
            device=torch.device("cpu"),
            timeout_s=timeout_s,
        )

    def _load(self, bucket):
        if bucket.index == self._fails_at:
            raise SyncError("it does not fit")
        self.taken |= {name: tensor.clone() for name, tensor in unpack(bucket)}

    def run(self):
        return self._stream.run()


def outcome(*args):
    """What a process has at the end, and its receipt or error."""
    process = Process(*args)
    try:
        return process.taken, process.run()
    except SyncError as error:
        return process.taken, error


def is_whole(taken):
    return taken.keys() == dict(WEIGHTS).keys() and all(taken[name].equal(tensor) for name, tensor in WEIGHTS)


@pytest.fixture
def mails():
    hosts = MailHost(), MailHost()
    yield tuple(Mail(host.address) for host in hosts)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def processes():
    """A process is a member of a broadcast once."""
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(sum, [()] * 4))
        yield pool


def wire_to(mails, kind, tmp_path, *, ranks=1, timeout_s=20.0, meeting=None):
    order = Order(token="token", ranks=ranks, timeout_s=timeout_s, folder=tmp_path / "weights")
    return SGLangWire(kind=kind, order=order, addresses={i: mail.address for i, mail in mails.items()}, meeting=meeting)


def meet(ranks):
    return Meeting(name=f"meeting-{ranks}", backend="gloo", first_ranks={0: 1, 1: 1 + ranks}, size=1 + 2 * ranks)


def send(wire, rank=0):
    return send_weights(WEIGHTS, plan=SyncPlan(wire=wire, dtype="float32", bucket_bytes=BUCKET), version=1, rank=rank)


def check_all_get_all(kind, mails, pool, tmp_path):
    wire = wire_to(dict(enumerate(mails)), kind, tmp_path, ranks=2, meeting=meet(2) if kind == "broadcast" else None)
    running = [pool.submit(outcome, mail.address, rank) for mail in mails for rank in range(2)]
    sent = send(wire)
    assert len(sent.buckets) == 3
    for taken, receipt in (run.result() for run in running):
        assert is_whole(taken) and receipt["num_tensors"] == 6
        assert receipt["buckets"] == [(s.index, s.num_bytes, s.checksum) for s in sent.buckets]


def check_one_fails(kind, mails, pool, tmp_path):
    wire = wire_to(dict(enumerate(mails)), kind, tmp_path, meeting=meet(1) if kind == "broadcast" else None)
    bad = pool.submit(outcome, mails[0].address, 0, 1)
    good = pool.submit(outcome, mails[1].address)
    assert len(send(wire).buckets) == 3
    taken, error = bad.result()
    assert len(taken) == 2 and str(error) == "it does not fit"  # nothing after the bucket that did not fit
    taken, receipt = good.result()
    assert is_whole(taken) and receipt["num_tensors"] == 6


@pytest.mark.parametrize("kind", ["http", "disk"])
def test_every_process_of_every_server_gets_all(kind, mails, threads, tmp_path):
    check_all_get_all(kind, mails, threads, tmp_path)


@pytest.mark.parametrize("kind", ["http", "disk"])
def test_a_server_that_fails_does_not_keep_the_weights_from_the_other(kind, mails, threads, tmp_path):
    check_one_fails(kind, mails, threads, tmp_path)


def test_a_broadcast_reaches_every_process(mails, processes, tmp_path):
    check_all_get_all("broadcast", mails, processes, tmp_path)


def test_a_server_that_fails_in_a_broadcast_stays_in_it(mails, processes, tmp_path):
    check_one_fails("broadcast", mails, processes, tmp_path)


def test_sending_fails_when_no_server_is_left(mails, threads, tmp_path):
    running = [threads.submit(Process(mail.address, fails_at=0).run) for mail in mails]
    with pytest.raises(SyncError, match="it does not fit"):
        send(wire_to(dict(enumerate(mails)), "http", tmp_path))
    for run in running:
        with pytest.raises(SyncError, match="it does not fit"):
            run.result()


def test_what_the_actor_says_of_a_server_ends_the_waiting_for_it(mails, threads, tmp_path):
    sending = threads.submit(send, wire_to({0: mails[0]}, "disk", tmp_path))
    mails[0].tell_all("token", 1, orders=OVER, answers=told(EngineError("the server is not running")))
    with pytest.raises(EngineLostError, match="EngineError: the server is not running"):
        sending.result()
    late = Process(mails[0].address)
    with pytest.raises(CutOffError):
        while True:
            late.run()  # some buckets were announced before


def test_a_sender_that_fails_tells_the_servers(mails, threads, tmp_path):
    running = threads.submit(Process(mails[0].address).run)
    sender = wire_to({0: mails[0]}, "disk", tmp_path).open(rank=0, version=1)
    sender.send(next(make_buckets(WEIGHTS, bucket_bytes=BUCKET)))
    sender.close(ok=False)
    with pytest.raises(CutOffError, match="the sender gave up"):
        running.result()


def test_whoever_says_nothing_is_not_waited_for_longer_than_agreed(mails, tmp_path):
    with pytest.raises(CutOffError, match=r"the sender said nothing for 0\.2 s"):
        Process(mails[0].address, timeout_s=0.2).run()
    with pytest.raises(EngineLostError, match=r"no answer within 0\.2 s"):
        send(wire_to({0: mails[0]}, "disk", tmp_path, timeout_s=0.2))


def test_a_process_that_waits_shows_that_it_lives(mails, threads):
    waiting = threads.submit(Process(mails[0].address, timeout_s=2.5).run)
    with pytest.raises(CutOffError):
        waiting.result()
    assert mails[0].pulse("token") >= 3  # at the beginning, and once a second
    assert mails[0].pulse("other") == 0


def test_a_rank_whose_server_was_left_out_sends_nothing(mails, threads, tmp_path):
    """Ranks lie on the GPUs of their servers: that of a server that is gone must not send to another one."""
    wire = wire_to({1: mails[1]}, "ipc", tmp_path)
    assert len(send(wire, rank=0).buckets) == 3
    mails[1].tell_all("token", 1, orders=OVER, answers={"index": 0})
    with pytest.raises(CutOffError):
        Process(mails[1].address).run()  # it was told of no bucket


def test_mail_of_long_ago_is_thrown_away(mails):
    mail, _ = mails
    store = mail.address.store()
    before = None
    for i in range(30):
        mail.open(f"token-{i}", 2)
        mail.tell_all(f"token-{i}", 2, orders=OVER, answers=OVER)
        if i == 9:
            before = store.num_keys()
    assert Channel.to(mail.address, "token-29", 1).get(1) == OVER
    assert store.queue_len("token-0/0/orders") == 0
    assert store.num_keys() <= before


def test_buckets_are_served_to_those_who_know_the_token(threads):
    bucket = next(make_buckets(WEIGHTS, bucket_bytes=BUCKET))
    shelf = Shelf("secret")
    try:
        url = shelf.put(bucket)
        got = torch.empty_like(bucket.data)
        read(url, bytes_of(got))
        assert checksum(got) == bucket.checksum
        with pytest.raises(OSError, match="answered 404"):
            read(url.replace("secret", "guess"), bytes_of(got))
        with pytest.raises(OSError, match=f"with {got.numel()} bytes, not 200 with 8"):
            read(url, memoryview(bytearray(8)))
        shelf.take_off(bucket)
        with pytest.raises(OSError, match="answered 404"):
            read(url, bytes_of(got))
    finally:
        shelf.close()
    place = sources.Place(header={"num_bytes": got.numel()}, rank=0, device=torch.device("cpu"))
    with pytest.raises(CutOffError, match="Connection refused"):
        sources.fetch({"kind": "http", "url": url}, place)
