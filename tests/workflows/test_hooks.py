"""Plugins that change samples and batches: permitted changes reach training, and changes of facts are refused."""

from dataclasses import replace

import numpy as np
import pytest
from plasmid import hookimpl
from plasmid.errors import PluginError
from plasmid.plugins.registry import load_plugins
from plasmid.testing.rewards import make_group, make_prompt, make_sample
from plasmid.types.shared_groups import store_group
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.loop.batch_hooks import BatchHooks
from plasmid_runtime.rollout.scored.scoring import SampleHooks


def hooks_of(kind, **functions):
    plugins = [type("Changing", (), {name: staticmethod(hookimpl(f)) for name, f in functions.items()})()]
    return kind(load_plugins(*plugins, installed=False))


def samples(change):
    sample = make_sample("four")
    masked = replace(sample, loss_mask=np.arange(len(sample.loss_mask)) > 0)
    return hooks_of(SampleHooks, sample_generated=change).apply(masked, make_prompt())


def test_text_metadata_and_mask_of_a_sample_may_change():
    def change(sample, prompt):
        mask = sample.loss_mask.copy()
        mask[-1] = False
        return replace(sample, text=sample.text.upper(), loss_mask=mask, metadata={"of": prompt.id})

    changed = samples(change)
    assert (changed.text, changed.metadata, changed.loss_mask[-1]) == ("FOUR", {"of": make_prompt().id}, False)


def test_a_hook_that_returns_none_leaves_the_sample_unchanged():
    seen = []
    assert samples(lambda sample: seen.append(sample)) is seen[0]


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (lambda sample: "text", "must return a Sample or None, got 'text' for sample 0/0"),
        (lambda sample: replace(sample, id="x"), "changed id of sample 0/0; it may change loss_mask, text, metadata"),
        (lambda sample: replace(sample, token_ids=sample.token_ids + 1), "changed token_ids of sample 0/0"),
        (lambda sample: replace(sample, rollout_logprobs=sample.rollout_logprobs - 1), "changed rollout_logprobs"),
        (
            lambda sample: replace(sample, loss_mask=~sample.loss_mask),
            "added tokens of sample 0/0 to the loss",
        ),
        (
            lambda sample: replace(sample, text=4),
            "must return a valid sample: text of sample 0/0 must be a string, got 4",
        ),
        (lambda sample: 1 / 0, "raised on sample 0/0: ZeroDivisionError"),
    ],
)
def test_facts_of_a_sample_may_not_change(change, mistake):
    with pytest.raises(PluginError, match=r"plugin 'Changing': sample_generated ") as error:
        samples(change)
    assert mistake in str(error.value)


@pytest.fixture
def groups():
    store = LocalCluster().store
    return tuple(store_group(replace(make_group(0.0, 1.0), id=i), store) for i in range(2))


def test_rewards_of_a_batch_may_change(groups):
    def change(batch, groups):
        return [replace(group, rewards=group.rewards * 2 + batch) for group in groups]

    changed = hooks_of(BatchHooks, batch_ready=change).apply(3, groups)
    assert [group.rewards.tolist() for group in changed] == [[3.0, 5.0]] * 2
    assert hooks_of(BatchHooks, batch_ready=lambda groups: None).apply(3, groups) is groups


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (lambda groups: groups[:1], "must return the same groups in the same order; to drop some, write a Filter"),
        (lambda groups: 5, "must return the groups or None, got 5"),
        (lambda groups: [replace(g, lengths=g.lengths + 1) for g in groups], "changed lengths of group 0"),
        (lambda groups: [replace(g, rewards=g.rewards * np.nan) for g in groups], "a finite reward"),
        (lambda groups: 1 / 0, "raised on batch 3: ZeroDivisionError"),
    ],
)
def test_nothing_else_of_a_batch_may_change(groups, change, mistake):
    with pytest.raises(PluginError, match=r"plugin 'Changing': batch_ready ") as error:
        hooks_of(BatchHooks, batch_ready=change).apply(3, groups)
    assert mistake in str(error.value)
