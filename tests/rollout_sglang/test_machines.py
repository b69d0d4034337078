"""Servers on several machines: which machine holds which engine, and where they listen."""

from datetime import timedelta
from threading import Thread

import pytest
import torch
from plasmid.errors import ConfigError
from plasmid.recipe import merge, resolve
from plasmid_sglang.group import Group, Host
from plasmid_sglang.process import address_to_listen_on
from sgl_cases import make_context


def placed(tmp_path, **placement):
    plain = make_context(tmp_path, tmp_path, gpus_per_engine=2, ranks=4).config.model_dump(mode="json")
    return resolve(merge(plain, {"run": {"prompts_per_batch": 8}, "placement": placement}))


def test_an_engine_that_would_lie_on_two_machines_is_refused(tmp_path):
    placed(tmp_path, nodes=2, trainer_ranks=4)
    with pytest.raises(ConfigError, match="gpus_per_engine: 2 GPUs of an engine must be on one machine, and over"):
        placed(tmp_path, nodes=2, trainer_ranks=2)  # three ranks each: the first engine has one on either


def test_servers_listen_where_the_machines_of_the_run_reach_each_other(monkeypatch):
    monkeypatch.delenv("PLASMID_ADDRESS", raising=False)
    assert address_to_listen_on("auto") == "127.0.0.1"
    monkeypatch.setenv("PLASMID_ADDRESS", "127.0.0.2")
    assert address_to_listen_on("auto") == "127.0.0.2"
    assert address_to_listen_on("127.0.0.3") == "127.0.0.3"


def test_a_broadcast_meets_on_the_machine_that_sends(monkeypatch):
    monkeypatch.setenv("PLASMID_ADDRESS", "127.0.0.2")
    limit = timedelta(seconds=60)
    host = Host("gloo", size=2, timeout=limit)
    assert host.address == "127.0.0.2"
    got = torch.zeros(3)

    def member():
        where = {"host": host.address, "port": host.port}
        Group.join("gloo", **where, rank=1, size=2, timeout=limit).broadcast(got)

    thread = Thread(target=member)
    thread.start()
    host.group.broadcast(torch.arange(3.0))
    thread.join()
    assert got.tolist() == [0.0, 1.0, 2.0]
