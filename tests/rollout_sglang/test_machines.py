"""Servers on several machines: the machines of each engine, and the addresses that they listen on."""

import socket
from datetime import timedelta
from threading import Thread
from urllib.parse import urlsplit

import pytest
import torch
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError
from plasmid_models.sync.rendezvous import listen
from plasmid_serving.processes.ports import reserve_ports
from plasmid_serving.processes.server import address_to_listen_on
from plasmid_serving.weights.broadcast import BroadcastGroup, BroadcastHost
from sgl_cases import make_context


def placed(tmp_path, *, gpus_per_engine=2, engine_ranks=4, pipeline=1, **placement):
    server_args = {} if pipeline == 1 else {"pp_size": pipeline}
    settings = {"gpus_per_engine": gpus_per_engine, "ranks": engine_ranks, "server_args": server_args}
    plain = make_context(tmp_path, tmp_path, **settings).config.model_dump(mode="json")
    return resolve(merge(plain, {"run": {"prompts_per_batch": 8}, "placement": placement}))


def test_an_engine_has_as_many_gpus_on_each_of_its_machines(tmp_path):
    placed(tmp_path, nodes=2, trainer_ranks=4)  # two servers on one machine
    placed(tmp_path, nodes=2, trainer_ranks=2)  # three ranks each: the first server has one on either
    with pytest.raises(ConfigError) as error:
        placed(tmp_path, nodes=2, trainer_ranks=2, gpus_per_engine=4)
    assert str(error.value) == (
        "rollout.gpus_per_engine: 4 over placement.nodes = 2 puts an engine on 1 + 3 GPUs on 2 machines; SGLang "
        "requires the same number on each; choose other numbers of ranks"
    )


def test_stages_of_a_pipeline_are_spread_over_machines_evenly(tmp_path):
    placed(tmp_path, nodes=4, trainer_ranks=12, engine_ranks=12, gpus_per_engine=12, pipeline=2)
    with pytest.raises(ConfigError, match=r"engine on 3 machines, which cannot be split into server_args.pp_size = 2"):
        placed(tmp_path, nodes=6, trainer_ranks=12, engine_ranks=12, gpus_per_engine=12, pipeline=2)


def test_arguments_about_machines_are_set_by_the_engine_only(tmp_path):
    with pytest.raises(ConfigError) as error:
        make_context(tmp_path, tmp_path, server_args={"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"})
    assert str(error.value).splitlines() == [
        "rollout.server_args: nnodes: is set by Plasmid; remove it",
        "rollout.server_args: dist_init_addr: is set by Plasmid; remove it",
    ]


def test_reserved_ports_are_held_until_opened():
    with reserve_ports("127.0.0.1", 3) as first:
        for port in range(first, first + 3):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        with socket.socket() as anybody:
            anybody.bind(("127.0.0.1", 0))
            assert anybody.getsockname()[1] not in range(first, first + 3)
        store, port = listen("127.0.0.1", first)  # as the process that starts SGLang does
        assert port == first
        store.set("met", "yes")
        assert store.get("met") == b"yes"


def test_servers_listen_where_the_machines_of_the_run_reach_each_other(monkeypatch):
    monkeypatch.delenv("PLASMID_ADDRESS", raising=False)
    assert address_to_listen_on("auto") == "127.0.0.1"
    monkeypatch.setenv("PLASMID_ADDRESS", "127.0.0.2")
    assert address_to_listen_on("auto") == "127.0.0.2"
    assert address_to_listen_on("127.0.0.3") == "127.0.0.3"


def test_a_broadcast_meets_on_the_machine_that_sends(monkeypatch):
    monkeypatch.setenv("PLASMID_ADDRESS", "127.0.0.2")
    limit = timedelta(seconds=60)
    host = BroadcastHost("gloo", size=2, timeout=limit)
    assert urlsplit(host.url).hostname == "127.0.0.2"
    got = torch.zeros(3)

    def member():
        BroadcastGroup.join("gloo", rendezvous=host.url, rank=1, size=2, timeout=limit).broadcast(got)

    thread = Thread(target=member)
    thread.start()
    host.group.broadcast(torch.arange(3.0))
    thread.join()
    assert got.tolist() == [0.0, 1.0, 2.0]
