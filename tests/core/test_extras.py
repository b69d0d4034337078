"""The extra that installs each kind of component."""

from importlib.metadata import entry_points

import pytest
from plasmid.config.load import resolve
from plasmid.errors import ConfigError
from plasmid.plugins.extras import GROUP
from plasmid.plugins.registry import describe_origin, find_components, load_plugins


def test_entry_points_name_what_each_package_registers():
    named = {point.name: point.value for point in entry_points(group=GROUP)}
    extras = {f"plasmid-{extra}": extra for extra in named.values()}
    found = {}
    for slot, classes in find_components(load_plugins()).items():
        for kind, cls in classes.items():
            extra = extras.get(describe_origin(cls).split()[0])
            if extra is not None:
                found[f"{slot}.{kind}"] = extra
    assert named == found
    assert set(extras) >= {"plasmid-fsdp", "plasmid-megatron", "plasmid-sglang", "plasmid-rewards"}


def test_a_kind_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setenv("PLASMID_DISABLE_PLUGINS", "megatron,rewards")
    with pytest.raises(ConfigError) as caught:
        resolve({"trainer": {"kind": "megatron"}, "rewards": [{"kind": "math"}], "filters": [{"kind": "own"}]})
    lines = str(caught.value).splitlines()
    assert "trainer.kind: 'megatron' is not installed; pip install 'plasmid[megatron]'" in lines
    assert "rewards.0.kind: 'math' is not installed; pip install 'plasmid[rewards]'" in lines
    assert "filters.0.kind: 'own' is not installed; installed are none" in lines
