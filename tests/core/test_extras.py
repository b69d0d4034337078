"""The extra that installs each kind of component."""

import pytest
from plasmid.config.load import resolve
from plasmid.errors import ConfigError
from plasmid.plugins.extras import EXTRAS
from plasmid.plugins.registry import describe_origin, find_components, load_plugins

PACKAGES = {f"plasmid-{extra}": extra for extra in EXTRAS}


def test_the_table_names_what_each_package_registers():
    found = {extra: {} for extra in EXTRAS}
    for slot, classes in find_components(load_plugins()).items():
        for kind, cls in classes.items():
            extra = PACKAGES.get(describe_origin(cls).split()[0])
            if extra is not None:
                found[extra].setdefault(slot, set()).add(kind)
    assert {extra: {slot: set(kinds) for slot, kinds in slots.items()} for extra, slots in EXTRAS.items()} == found


def test_a_kind_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setenv("PLASMID_DISABLE_PLUGINS", "megatron,rewards")
    with pytest.raises(ConfigError) as caught:
        resolve({"trainer": {"kind": "megatron"}, "rewards": [{"kind": "math"}], "filters": [{"kind": "own"}]})
    lines = str(caught.value).splitlines()
    assert "trainer.kind: 'megatron' is not installed; pip install 'plasmid[megatron]'" in lines
    assert "rewards.0.kind: 'math' is not installed; pip install 'plasmid[rewards]'" in lines
    assert "filters.0.kind: 'own' is not installed; installed are none" in lines
