"""Distillation from a teacher that the trainer holds, from the recipe on."""

import numpy as np
import pytest
from plasmid_models.testing import make_tiny_model


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_comes_closer_to_a_teacher_of_another_architecture(job, tmp_path, seed):
    teacher = make_tiny_model(tmp_path / "teacher", family="qwen3", num_layers=1, seed=11, initializer_range=0.2)
    job.run(
        {
            "run": {"seed": seed, "batches": 60, "prompts_per_batch": 8, "samples_per_prompt": 4},
            "sampling": {"max_new_tokens": 8},
            "trainer": {"lr": 5e-3},
            "algorithm": {"kind": "opd"},
            "teacher": {"path": str(teacher)},
            "rewards": [],
            "eval": [],
        }
    )
    divergence = [-m["train/advantage_mean"] for m in job.metrics()]  # reverse KL of each token, estimated
    assert np.mean(divergence[-10:]) < 0.75 * np.mean(divergence[:3])
