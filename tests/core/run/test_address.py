"""The Ray cluster selected by a recipe and the environment."""

import pytest
from plasmid.config.placement import PlacementConfig
from plasmid.errors import ConfigError
from plasmid_runtime.cluster.opening import cluster_address
from plasmid_runtime.lifecycle.validation import check


@pytest.fixture
def in_environment(monkeypatch):
    def put(address):
        if address is None:
            monkeypatch.delenv("RAY_ADDRESS", raising=False)
        else:
            monkeypatch.setenv("RAY_ADDRESS", address)

    return put


@pytest.mark.parametrize(
    ("setting", "variable", "found"),
    [
        ("auto", None, None),
        ("auto", "", None),
        ("auto", "local", None),
        ("auto", "head:6379", "head:6379"),
        ("auto", "auto", "auto"),
        ("local", "head:6379", None),
        ("10.0.0.1:6379", "head:6379", "10.0.0.1:6379"),
        ("[fd00::1]:6379", None, "[fd00::1]:6379"),
    ],
)
def test_the_recipe_comes_before_the_environment(in_environment, setting, variable, found):
    in_environment(variable)
    assert cluster_address(PlacementConfig(address=setting)) == found


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001", "head", "head:port"])
def test_invalid_cluster_addresses_are_refused_in_recipe_and_environment(in_environment, address):
    with pytest.raises(ValueError, match=r"host:port|Ray Client address"):
        PlacementConfig(address=address)
    in_environment(address)
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: "):
        cluster_address(PlacementConfig())


def test_several_machines_need_a_cluster(in_environment, runner):
    in_environment(None)
    config = runner.config({"placement": {"nodes": 2}})
    with pytest.raises(ConfigError, match=r"^placement.nodes: 2 machines need a Ray cluster, but neither"):
        check(config)
    in_environment("head:6379")
    check(config)


def test_gpus_of_a_cluster_need_not_be_on_this_machine(in_environment, runner):
    in_environment("head:6379")
    check(runner.config({"placement": {"device": "cuda"}}))


def test_a_run_folder_inside_a_ray_package_is_refused(runner, tmp_path, monkeypatch):
    unpacked = tmp_path / "working_dir_files/_ray_pkg_0123456789abcdef"
    unpacked.mkdir(parents=True)
    monkeypatch.chdir(unpacked)
    with pytest.raises(ConfigError, match=r"^run.dir: .*_ray_pkg_0123456789abcdef/runs/x is in Ray's copy of the job"):
        check(runner.config({"run": {"dir": "runs/x"}}))
    check(runner.config({"run": {"dir": str(tmp_path / "runs")}}))
