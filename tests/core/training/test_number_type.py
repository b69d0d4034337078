"""A trainer with dtype `auto` uses the engine's dtype."""

import logging

import pytest
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_training.driver.ranked_trainer import make_rank_config


def context(tmp_path, model, *, gpu=None, trainer=None, rollout=None):
    config = resolve(
        {
            "model": {"path": str(model)},
            "data": {"path": "none.jsonl"},
            "trainer": {"kind": "fsdp", **({} if trainer is None else {"dtype": trainer})},
            "rollout": {"kind": "hf", **({} if rollout is None else {"dtype": rollout})},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "number"}],
        }
    )
    return BuildContext(cluster=LocalCluster(), config=config, run_dir=tmp_path, bundles=(Bundle(0, gpu),))


@pytest.mark.parametrize(
    ("gpu", "trainer", "rollout", "expected"),
    [
        (None, None, None, "float32"),
        (0, None, None, "bfloat16"),
        (None, None, "bfloat16", "bfloat16"),
        (0, None, "float32", "float32"),
        (0, "float32", "float32", "float32"),
        (0, "bfloat16", None, "bfloat16"),
    ],
)
def test_both_compute_in_one_type(gpu, trainer, rollout, expected, tmp_path, tiny_model, caplog):
    found = context(tmp_path, tiny_model, gpu=gpu, trainer=trainer, rollout=rollout)
    with caplog.at_level(logging.WARNING):
        assert make_rank_config(found)["trainer"]["dtype"] == expected
    assert not caplog.records


def test_different_dtypes_are_reported(tmp_path, tiny_model, caplog):
    with caplog.at_level(logging.WARNING):
        found = make_rank_config(context(tmp_path, tiny_model, trainer="float32", rollout="bfloat16"))
    assert found["trainer"]["dtype"] == "float32"
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("trainer.dtype is float32, but the engine's dtype is bfloat16: small updates")
