"""`check_algorithm`: valid algorithms pass, and every mistake is one line with method, file and line number."""

import inspect
from dataclasses import replace

import pytest
import torch
from plasmid import Algorithm, Needs, Role
from plasmid.components.objective_inputs import TokenLoss
from plasmid.errors import AlgorithmError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.testing import MetadataReadError, check_algorithm

KINDS = {
    kind: cls
    for kind, cls in find_components(load_plugins())["algorithm"].items()
    if cls.__module__.startswith(GRPO.__module__.rpartition(".")[0])
}


class Custom(Algorithm):
    """Rewards minus their mean, and the log-likelihood."""

    kind: str = "custom"

    def needs(self):
        return Needs()

    def roles(self, *, steps):
        return ()

    def advantages(self, inputs):
        rewards = inputs.table.rewards
        return inputs.spread(rewards - rewards.mean())

    def loss(self, inputs):
        return TokenLoss(loss=-inputs.advantages * inputs.logprobs, metrics={"entropy": inputs.entropy})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restricted", [True, False])
def test_every_algorithm_that_comes_with_plasmid_passes(kind, restricted):
    settings = {"constant_length": 9} if kind == "dr-grpo" else {}
    check_algorithm(KINDS[kind](**settings), restricted=restricted)
    if "correction" in KINDS[kind].model_fields:
        correction = {"mode": "mask", "level": "sequence", "renormalize": True}
        check_algorithm(KINDS[kind](old_policy="decoupled", correction=correction, kl_coef=0.1, **settings))


class Everything(Custom):
    """Reads all available inputs."""

    def needs(self):
        return Needs(metadata=True, greedy_baseline=True)

    def roles(self, *, steps):
        return (Role.POLICY, Role.REFERENCE, Role.TEACHER)

    def advantages(self, inputs):
        turns = torch.tensor([float(m["turns"]) for m in inputs.metadata])
        known = inputs.table.components["number"] + inputs.table.components["number.format"]
        fresh = 0.9 ** (3 - inputs.versions)
        sizes = torch.from_numpy(inputs.kept.offsets[1:] - inputs.kept.offsets[:-1])
        scores = inputs.old_logprobs + inputs.ref_logprobs + inputs.teacher_logprobs
        rewards = inputs.spread(inputs.table.rewards - inputs.table.baselines + known + turns.numpy())
        return rewards * fresh * sizes + 0 * scores * inputs.token_ids

    def loss(self, inputs):
        weight = inputs.spread(inputs.table.components["number"]) * inputs.versions * inputs.kept.restricted()
        turns = torch.tensor([m["turns"] for m in inputs.metadata])[inputs.table_index]
        return TokenLoss(loss=-inputs.advantages * weight * turns * inputs.logprobs, metrics={})


def test_everything_that_an_algorithm_may_read_is_there():
    check_algorithm(Everything(), components=["number"], metadata=[{"turns": 1}, {"turns": 2}], restricted=True)


def test_examples_of_metadata_must_be_given_to_an_algorithm_that_reads_them():
    with pytest.raises(MetadataReadError, match=r"^pass examples with check_algorithm\(..., metadata=\[...\]\)$"):
        check_algorithm(Everything(), components=["number"], restricted=True)


class NoTensor(Custom):
    def advantages(self, inputs):
        return 1.0


class NoAdvantages(Custom):
    def advantages(self, inputs):
        inputs.spread(inputs.table.rewards)


class AdvantagesOfSamples(Custom):
    def advantages(self, inputs):
        return torch.from_numpy(inputs.table.rewards)


class IntegerAdvantages(Custom):
    def advantages(self, inputs):
        return inputs.versions


class DividesByZero(Custom):
    def advantages(self, inputs):
        return super().advantages(inputs) / inputs.per_sample_sum(torch.zeros(inputs.sample_index.shape)).sum()


class Raises(Custom):
    def advantages(self, inputs):
        return inputs.version


class WritesToTable(Custom):
    def advantages(self, inputs):
        inputs.table.rewards -= inputs.table.rewards.mean()


class WritesToComponent(Custom):
    def advantages(self, inputs):
        inputs.table.components["number"][:] = 0.0


class UnknownComponent(Custom):
    def advantages(self, inputs):
        return inputs.spread(inputs.table.components["lenght"])


class UndeclaredMetadata(Custom):
    def advantages(self, inputs):
        return inputs.spread(torch.tensor([m["turns"] for m in inputs.metadata]))


class WithoutEmptyRanks(Custom):
    def advantages(self, inputs):
        values = super().advantages(inputs)
        return values - values.max()


class WhitensEachRank(Custom):
    def advantages(self, inputs):
        values = super().advantages(inputs)
        return values - values.sum() / max(len(values), 1)


class SkipsACollective(Custom):
    def advantages(self, inputs):
        values = super().advantages(inputs)
        return values - inputs.all_reduce(values.sum()) if len(values) else values


class NoTokenLoss(Custom):
    def loss(self, inputs):
        return -inputs.advantages * inputs.logprobs


class ReducedLoss(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=(-inputs.advantages * inputs.logprobs).mean(), metrics={})


class NumberAsMetric(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.logprobs, metrics={"mean": inputs.logprobs.mean().item()})


class ReducedMetric(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.logprobs, metrics={"mean": inputs.logprobs.detach().mean()})


class MetricNamedLoss(Custom):
    def loss(self, inputs):
        result = super().loss(inputs)
        return TokenLoss(loss=result.loss, metrics={"loss": result.loss.detach()})


class MetricNamedMismatch(Custom):
    def loss(self, inputs):
        result = super().loss(inputs)
        return TokenLoss(loss=result.loss, metrics={"mismatch_kl": result.loss.detach()})


class MetricNamedByNumber(Custom):
    def loss(self, inputs):
        result = super().loss(inputs)
        return TokenLoss(loss=result.loss, metrics={3: result.loss.detach()})


class MetricWithoutNumber(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.logprobs, metrics={"log": (inputs.logprobs.detach() - 9).log()})


class DetachedLoss(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.advantages * inputs.logprobs.detach(), metrics={})


class EmptyLossWithoutGradient(Custom):
    def loss(self, inputs):
        result = super().loss(inputs)
        return result if len(inputs.logprobs) else replace(result, loss=torch.zeros(0))


class SecretEntropyBonus(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.advantages * inputs.logprobs - 0.1 * inputs.entropy, metrics={})


class NormalizesMicrobatches(Custom):
    def loss(self, inputs):
        loss = -inputs.advantages * inputs.logprobs
        return TokenLoss(loss=loss / max(len(loss), 1), metrics={})


class IndexError_(Custom):
    def loss(self, inputs):
        return TokenLoss(loss=-inputs.logprobs * inputs.table.rewards[inputs.token_ids + 99], metrics={})


class BadReturns(PPO):
    kind: str = "custom"

    def returns(self, inputs):
        return super().returns(inputs)[:-1]


class BadValueLoss(PPO):
    kind: str = "custom"

    def value_loss(self, inputs):
        return TokenLoss(loss=(inputs.values.detach() - inputs.returns) ** 2, metrics={})


MISTAKES = [
    (NoTensor, "advantages", "advantages must be a tensor with one value per loss token (20), got a float"),
    (NoAdvantages, "advantages", "advantages must be a tensor with one value per loss token (20), got None"),
    (AdvantagesOfSamples, "advantages", "advantages must have one value per loss token (20), got shape (8,)"),
    (IntegerAdvantages, "advantages", "advantages must have a floating-point dtype, got torch.int64"),
    (DividesByZero, "advantages", "advantages must be finite, got {inf} for token 0 of 20"),
    (WhitensEachRank, "advantages", "advantages must not depend on how samples are assigned to ranks; {sum}"),
    (
        SkipsACollective,
        "advantages",
        "all ranks must call inputs.all_reduce equally often, including ranks without tokens",
    ),
    (NoTokenLoss, "loss", "loss must return a TokenLoss, got a Tensor"),
    (ReducedLoss, "loss", "the loss must have one value per token (20), got shape ()"),
    (NumberAsMetric, "loss", "metric 'mean' must be a tensor with one value per token (20), got a float"),
    (ReducedMetric, "loss", "metric 'mean' must be a tensor with one value per token (20), got shape ()"),
    (MetricNamedLoss, "loss", "metric 'loss' replaces the trainer's own metric train/loss; rename it"),
    (
        MetricNamedMismatch,
        "loss",
        "metric 'mismatch_kl' replaces the trainer's own metric train/mismatch_kl; rename it",
    ),
    (MetricNamedByNumber, "loss", "names of metrics must be strings, got 3"),
    (MetricWithoutNumber, "loss", "metric 'log' must be finite, got nan for token 0 of 20"),
    (DetachedLoss, "loss", "the loss of 20 tokens must depend on inputs.logprobs, to have a gradient"),
    (
        EmptyLossWithoutGradient,
        "loss",
        "the loss of a microbatch without tokens must depend on inputs.logprobs, to have a gradient",
    ),
    (
        SecretEntropyBonus,
        "loss",
        "the loss has a gradient through inputs.entropy, so weights_need_entropy() must return True",
    ),
    (NormalizesMicrobatches, "loss", "loss must not depend on how samples are split into microbatches, {whole}"),
    (BadReturns, "returns", "returns must have one value per loss token (20), got shape (19,)"),
    (
        BadValueLoss,
        "value_loss",
        "the loss of 20 tokens must depend on inputs.values, to have a gradient",
    ),
]
OPEN = {
    "{inf}": "",
    "{sum}": "sum over ranks with inputs.all_reduce: the value of a token changed from ",
    "{whole}": "which hold whole samples: the value of a token changed from ",
}
"""Text that replaces a mark in a message, up to its first number."""


@pytest.mark.parametrize(("cls", "method", "problem"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_is_one_line_with_method_file_and_line(cls, method, problem):
    with pytest.raises(AlgorithmError) as caught:
        check_algorithm(cls())
    said = str(caught.value)
    line = inspect.getsourcelines(getattr(cls, method))[1]
    start, _, _ = problem.partition("{")
    for mark, text in OPEN.items():
        start += text if mark in problem else ""
    assert said.startswith(f"algorithm (custom): {start}")
    assert said.endswith(f" (test_check_algorithm.py:{line})")
    assert "\n" not in said and (
        "{" in problem or said == f"algorithm (custom): {problem} (test_check_algorithm.py:{line})"
    )


RAISED = [
    (Raises, "advantages", "AttributeError: 'AdvantageInputs' object has no attribute 'version'"),
    (WritesToTable, "advantages", "ValueError: output array is read-only"),
    (WritesToComponent, "advantages", "ValueError: assignment destination is read-only"),
    (UnknownComponent, "advantages", "KeyError: 'lenght; reward components are number, format'"),
    (
        UndeclaredMetadata,
        "advantages",
        "ValueError: sample metadata is only sent to algorithms whose needs() returns Needs(metadata=True)",
    ),
    (WithoutEmptyRanks, "advantages", "RuntimeError: max(): Expected reduction dim to be specified"),
    (IndexError_, "loss", "IndexError: index"),
]


@pytest.mark.parametrize(("cls", "method", "error"), RAISED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_exception_is_reported_with_the_line_that_raised_it(cls, method, error):
    with pytest.raises(AlgorithmError) as caught:
        check_algorithm(cls(), components=["number", "format"])
    said = str(caught.value)
    source, first = inspect.getsourcelines(getattr(cls, method))
    assert said.startswith(f"algorithm (custom): {method} raised {error}")
    assert said.endswith(f" (test_check_algorithm.py:{first + len(source) - 1})") and "\n" not in said
    assert caught.value.__cause__ is not None, "--traceback shows it"


@pytest.mark.parametrize("cls", [WhitensEachRank, NormalizesMicrobatches])
def test_invariances_are_left_out_where_only_what_ends_a_run_is_looked_for(cls):
    check_algorithm(cls(), invariances=False)


def test_an_entropy_bonus_that_is_declared_passes():
    class Declared(SecretEntropyBonus):
        def weights_need_entropy(self):
            return True

    check_algorithm(Declared())


def test_an_internal_error_keeps_the_traceback():
    algorithm = GRPO()
    object.__setattr__(algorithm, "policy_loss", None)
    with pytest.raises(TypeError):
        check_algorithm(algorithm)
