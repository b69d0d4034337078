"""What may change on resume is said at the setting, in plugins, too."""

from typing import Annotated, Literal

import pytest
from plasmid.components import Settings
from plasmid.errors import CheckpointError
from plasmid.settings.resume import MAY_CHANGE, changeable_settings
from plasmid_runtime.checkpoint.folder import check_same_config


class Inner(Settings):
    speed: Annotated[int, MAY_CHANGE] = 1
    seed: int = 1


class Outer(Settings):
    kind: Literal["outer"] = "outer"
    inner: Inner = Inner()
    places: Annotated[tuple[Inner, ...], MAY_CHANGE] = ()
    maybe: Inner | None = None


def test_marked_settings_and_tables_are_found_at_any_depth():
    assert list(changeable_settings(Outer())) == ["inner.speed", "places"]
    assert list(changeable_settings(Outer)) == ["inner.speed", "places", "maybe.speed"]
    assert list(changeable_settings(Outer(maybe=Inner()))) == ["inner.speed", "places", "maybe.speed"]


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
    check_same_config(older, Outer())  # a default value of a new setting is what the older version did
    with pytest.raises(CheckpointError) as error:
        check_same_config(older, Outer(inner=Inner(seed=2)))
    assert str(error.value) == message
    with pytest.raises(CheckpointError, match=r"^maybe\.seed: .* has no such setting, got 1; remove it"):
        check_same_config(Outer().model_dump(mode="json"), Outer(maybe=Inner()))
