"""`rl doctor` finds problems of a machine and names their fixes."""

import importlib.metadata
import py_compile
import socket

import pytest
from plasmid_cli.doctor import command, host, packages
from plasmid_cli.doctor.host import Finding
from plasmid_cli.main import app


def found(checks):
    return [(one.level, one.text, one.fix) for one in checks if one.level != "ok"]


def test_the_command_reports_all_checks_and_fails_if_one_fails(monkeypatch, capsys):
    monkeypatch.setattr(packages, "probe", lambda: {"cuda": None, "gpus": 0})
    monkeypatch.setattr(host, "driver_version", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SystemExit) as stopped:
        app(["doctor"])
    printed = capsys.readouterr().out
    assert (stopped.value.code or 0) == 0, printed
    for what in (
        "python",
        "shared memory",
        "disk",
        "ports",
        "ray",
        "nccl",
        "plasmid",
        "versions",
        "libraries",
        "bytecode",
        "driver",
    ):
        assert f"\nok {what} " in f"\n{printed}" or f"\n?  {what} " in printed, what
    assert "ok plugins        rewards: " in printed
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(SystemExit) as stopped:
        app(["doctor"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 1
    assert (
        "!  ray            RAY_ADDRESS=nonsense\n                  -> set it to host:port of the cluster's head"
        in printed
    )
    assert printed.endswith("1 problem would make a run fail\n")


def test_lines_are_wrapped_between_words_in_a_terminal(monkeypatch, capsys):
    folder = "/mnt/" + "a" * 90
    monkeypatch.setattr(
        command, "_findings", lambda: [Finding("ok", "disk", f"1.0 GiB free in {folder} " + "word " * 30)]
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        app(["doctor"])
    first, path, *words = capsys.readouterr().out.splitlines()
    assert first == "ok disk           1.0 GiB free in"
    assert path.strip() == folder
    assert len(words) > 1 and all(len(line) <= 80 and line.startswith(" " * 18 + "word") for line in words)


def test_small_shared_memory_is_a_warning():
    assert found(host.check_shared_memory(64 << 20)) == [
        (
            "warning",
            "0.1 GiB in /dev/shm",
            "give the container more shared memory: docker run --shm-size=16g, or --ipc=host",
        )
    ]
    assert not found(host.check_shared_memory(16 << 30))


def test_a_full_disk_and_a_folder_of_another_user_are_reported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    usage = type("Usage", (), {"free": 1 << 30})
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)
    told = found(host.check_disk({"HF_HOME": str(tmp_path / "cache")}))
    assert [level for level, _, _ in told] == ["error"] * 3
    assert told[1][2] == "free space, or set HF_HOME to a larger disk"
    monkeypatch.setattr(host.os, "access", lambda *_: False)
    assert found(host.check_disk({}))[0][1] == f"{tmp_path} is not writable"


def test_a_host_name_that_does_not_resolve_is_reported(monkeypatch):
    monkeypatch.setattr(host.socket, "gethostname", lambda: "no-such-host.invalid")
    (told,) = found(host.check_ports())
    assert told[0] == "error" and told[1].startswith("no-such-host.invalid: ") and "/etc/hosts" in told[2]


def test_a_cluster_that_does_not_answer_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not found(host.check_ray({"RAY_ADDRESS": address}))
    assert found(host.check_ray({"RAY_ADDRESS": address}))[0][0] == "error"
    assert found(host.check_ray({"RAY_AUTH_MODE": "disabled"}))[0][0] == "warning"


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "error"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, None),
        ({"NCCL_DEBUG": "INFO"}, None),
    ],
)
def test_variables_of_nccl_are_looked_at(variables, level):
    told = found(host.check_nccl(variables, ["lo", "eth0"]))
    assert [one[0] for one in told] == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("driver", "cuda", "gpus", "level"),
    [
        (None, None, 0, None),
        (580, "13.0", 8, None),
        (550, "13.0", 8, "error"),
        (550, "12.8", 8, None),
        (580, None, 0, "error"),
        (580, "13.0", 0, "error"),
    ],
)
def test_the_driver_must_be_new_enough_for_the_cuda_of_torch(driver, cuda, gpus, level):
    told = found(host.check_driver(driver, cuda, gpus))
    assert [one[0] for one in told] == ([] if level is None else [level])
    assert all(fix for _, _, fix in told)


def test_the_version_of_the_driver_is_read(tmp_path):
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: gcc 13.3.0\n"
    )
    (tmp_path / "version").write_text(text)
    assert host.driver_version(tmp_path / "version") == 580
    assert host.driver_version(tmp_path / "none") is None


def test_incompatible_versions_are_reported(monkeypatch):
    asked = {"sglang": ["torch==2.14.1", "transformers==5.19.0 ; extra == 'x'"], "torch": []}
    monkeypatch.setattr(importlib.metadata, "requires", asked.__getitem__)
    told = found(packages.conflicts({"sglang": "0.5.23", "torch": "2.13.0+cpu"}))
    assert told[0][1] == "sglang 0.5.23 requires torch==2.14.1, but 2.13.0+cpu is installed"
    assert told[0][2].startswith("pip install 'torch==2.14.1', or "), "a complete command"
    assert not found(packages.conflicts({"sglang": "0.5.23", "torch": "2.14.1+cu130"}))


def test_a_library_that_does_not_load_is_reported(monkeypatch):
    monkeypatch.setattr(packages, "PROBE", "import os; os.abort()")
    (told,) = found(packages.check_libraries(packages.probe()))
    assert told[1] == "torch: its process ended with code -6" and "another torch" in told[2]


def test_packages_that_every_process_would_compile_are_reported(monkeypatch, tmp_path):
    package = tmp_path / "large_package" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "LARGE", ("large_package", "not_installed"))
    monkeypatch.setattr(packages.sys, "pycache_prefix", None)
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", False)
    assert not found(packages.check_bytecode()), "the first import writes it"
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", True)
    ((level, text, fix),) = found(packages.check_bytecode())
    assert level == "warning" and text.startswith("missing for large_package: ")
    assert fix == f"run python -m compileall -q {tmp_path}; unset PYTHONDONTWRITEBYTECODE"
    monkeypatch.setattr(packages.sys, "dont_write_bytecode", False)
    monkeypatch.setattr(packages.os, "access", lambda *_: False)
    ((_, _, fix),) = found(packages.check_bytecode())
    assert fix.endswith(f"{tmp_path} as the owner, or set PYTHONPYCACHEPREFIX to a writable folder")
    py_compile.compile(str(package))
    assert not found(packages.check_bytecode())


def test_a_plugin_that_breaks_its_contract_is_reported(monkeypatch, tmp_path):
    (tmp_path / "bad_plugin.py").write_text(
        "from typing import Literal\nfrom plasmid import Reward, hookimpl\n"
        "class Bad(Reward):\n    kind: Literal['bad'] = 'bad'\n"
        "    def __call__(self, prompt, sample):\n        return 1.0\n"
        "@hookimpl\ndef register_components():\n    return [Bad]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry_points = [
        importlib.metadata.EntryPoint("bad", "bad_plugin", "plasmid"),
        importlib.metadata.EntryPoint("gone", "no_such_module_here", "plasmid"),
    ]
    monkeypatch.setattr(packages.importlib.metadata, "entry_points", lambda group: entry_points)
    told = found(packages.check_plugins())
    assert "bad: plugin" in told[0][1] and "__call__ must be async" in told[0][1]
    assert told[1][1].startswith("gone: ModuleNotFoundError") and "PLASMID_DISABLE_PLUGINS=gone" in told[1][2]


def test_a_host_name_with_a_label_that_is_too_long_is_reported(monkeypatch):
    monkeypatch.setattr(host.socket, "gethostname", lambda: "a" * 64 + ".example")
    assert found(host.check_ports())[0][0] == "error"
    assert found(host.check_ray({"RAY_ADDRESS": "a" * 64 + ".example:6379"}))[0][0] == "error"


def test_a_malformed_requirement_of_a_package_is_skipped(monkeypatch):
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda _: ["torch (>=1.0,<=,", "torch>=99"])
    (told,) = found(packages.conflicts({"torch": "2.0"}))
    assert "torch>=99" in told[1]


def test_the_driver_is_not_checked_if_torch_does_not_load(monkeypatch, capsys):
    monkeypatch.setattr(packages, "probe", lambda: {"error": "torch: ImportError: no such library"})
    monkeypatch.setattr(host, "driver_version", lambda: 580)
    with pytest.raises(SystemExit) as stopped:
        app(["doctor"])
    printed = capsys.readouterr().out
    assert stopped.value.code == 1 and "torch: ImportError: no such library" in printed
    assert "torch without CUDA" not in printed
