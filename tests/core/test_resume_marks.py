"""Markers of settings, also in plugins: which may change on resume, and former names."""

from typing import Annotated, Literal

import pytest
from plasmid.components import Settings
from plasmid.errors import CheckpointError, ConfigError
from plasmid.settings.resume import MAY_CHANGE, FormerName, find_changeable_settings
from plasmid.settings.validation import validate
from plasmid_runtime.checkpoint.folder import check_same_config
from pydantic import Field


class Inner(Settings):
    speed: Annotated[int, MAY_CHANGE] = 1
    seed: int = 1


class Outer(Settings):
    kind: Literal["outer"] = "outer"
    inner: Inner = Inner()
    places: Annotated[tuple[Inner, ...], MAY_CHANGE] = ()
    maybe: Inner | None = None


def test_marked_settings_and_tables_are_found_at_any_depth():
    assert list(find_changeable_settings(Outer())) == ["inner.speed", "places"]
    assert list(find_changeable_settings(Outer)) == ["inner.speed", "places", "maybe.speed"]
    assert list(find_changeable_settings(Outer(maybe=Inner()))) == ["inner.speed", "places", "maybe.speed"]


def test_a_change_of_a_setting_without_the_mark_is_refused():
    saved = Outer().model_dump(mode="json")
    check_same_config(saved, Outer(inner=Inner(speed=9), places=(Inner(seed=4),)))
    with pytest.raises(CheckpointError, match=r"inner\.seed: must not change on resume, was 1, got 2"):
        check_same_config(saved, Outer(inner=Inner(seed=2)))


def test_a_setting_that_the_checkpoint_does_not_have_is_not_called_none():
    message = (
        "inner.seed: must not change on resume, the checkpoint has no such setting, got 2; remove it or, if it is new "
        "in this version, resume with the version that saved the checkpoint, or start a new run with "
        "checkpoint.start_from=<the checkpoint>"
    )
    older = {"kind": "outer", "inner": {"speed": 1}, "places": [], "maybe": None}
    check_same_config(older, Outer())  # the default of a new setting is the behavior of the older version
    with pytest.raises(CheckpointError) as error:
        check_same_config(older, Outer(inner=Inner(seed=2)))
    assert str(error.value) == message
    with pytest.raises(CheckpointError, match=r"^maybe\.seed: .* has no such setting, got 1; remove it"):
        check_same_config(Outer().model_dump(mode="json"), Outer(maybe=Inner()))


class Renamed(Settings):
    attempts: Annotated[int, FormerName("tries")] = 3


class Tables(Settings):
    table: Renamed = Renamed()
    named: dict[str, Renamed] = Field(default_factory=dict)
    several: tuple[Renamed, ...] = ()


def test_the_error_for_a_former_setting_names_the_new_one():
    with pytest.raises(ConfigError, match=r"^table\.tries: is now 'attempts'$"):
        validate(Tables, {"table": {"tries": 4}})


def test_a_checkpoint_with_a_former_name_resumes_with_the_same_value():
    config = Tables(
        table=Renamed(attempts=4), named={"a": Renamed(attempts=5)}, several=(Renamed(), Renamed(attempts=6))
    )
    saved = {
        "table": {"tries": 4},
        "named": {"a": {"tries": 5}},
        "several": [{"tries": 3}, {"tries": 6}],
    }
    check_same_config(saved, config)
    saved["several"][1]["tries"] = 7
    with pytest.raises(CheckpointError, match=r"several\.1\.attempts: must not change on resume, was 7, got 6"):
        check_same_config(saved, config)
