"""Writes docs/algorithms.md out of the algorithms' docstrings: python scripts/algorithms_page.py"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plasmid.components import Algorithm
from plasmid_training.algorithms.parts.policy_gradient import PolicyGradient
from plasmid_training.plugin import register_components

PAGE = Path(__file__).parent.parent / "docs" / "algorithms.md"
SECTIONS = ("Formula", "Paper", "Use")
HEAD = """\
# Algorithms

<!-- Written by `python scripts/algorithms_page.py`; the table comes from the docstrings in the code, edit those. -->

`[algorithm] kind = "..."` chooses the advantage and the loss. Both are pure functions of tensors, computed on the
trainer's ranks from what each of them holds, and the same for every split over ranks and microbatches.
`rl options grpo` prints every setting of one (`rl options algorithm/dapo` where another component has the same name);
[configuration](configuration.md#algorithm) has those of all. A method of your own is
[one file](plugins/algorithms.md).

| kind | formula | paper | when to use | options of its own, with their defaults |
|---|---|---|---|---|
"""
SHARED = """
All of them have `reduction`. All but `sft` also have, with the same meaning:

| option | what it does |
|---|---|
"""
TAIL = """
## Choices that implementations make differently

- **Standard deviation of GRPO**: divisor n - 1, `std_eps` 1e-6 added to it (TRL adds 1e-4, OpenRLHF 1e-9: set
  `std_eps`). `std_form = "population"` has the divisor n; `"leave-one-out"` takes mean and deviation of the prompt's
  other rollouts, as NeMo-RL does: far larger advantages where the others nearly agree. A group whose rewards are all
  equal has advantage 0; a group of one rollout, too.
- **Several samples of one rollout** (fan-out) count once in a group's statistics, with their mean reward, and once in
  `reduction = "per-rollout"`.
- **KL in the reward** is taken off before anything else is computed: in group methods off the sample's reward (the sum
  over its tokens), in `ppo` and `reinforce-plus-plus` off each token's. It is that of the policy before the first step.
- **KL in the loss**: with d the log-probability of the policy less that of the reference, `k1` and `k2` are exact for
  every d. `k3` takes d below -20 as -20: such a token, likelier under the reference by e^20 and more, has gradient 0.
  `low_var_kl` is k3 within -10..10, with gradient 0 beyond (d below -2.6 or above 11). verl clamps d at 20 on both
  sides and its k3 always to 10. `unbiased_kl` multiplies the estimate with the ratio to the old policy; with
  `old_policy = "decoupled"` that is the trainer's, not what drew the tokens.
- **Clips bite from the second step on a batch on**: before the first one the ratio is 1, unless the old policy is
  `rollout`. With `run.steps_per_batch = 1` the clips of ratio and value change nothing.
- **Whitening** is over all loss tokens of the batch on all ranks, in two passes in fp64, with the divisor n - 1. `ppo`
  whitens advantages, never the returns that its critic learns.
- **The critic's loss** has no factor 1/2. Its returns include the KL in the reward, as the policy's advantages do.
- **Tool replies** and other tokens that the loss does not see are no steps for discounts.
- **`opsm`** compares with the engine's log-probabilities, as the paper does.

## Old policy and correction

`train/mismatch_...` reports in every run how far trainer and engine are apart on the drawn tokens, before the first
step: `kl`, `chi2`, `ess` (effective sample size, 1 is best), and percentiles of the ratio.

| `old_policy` | the ratio divides by | the loss is weighted by |
|---|---|---|
| `trainer` | the trainer's probability before the first step | nothing: the mismatch is ignored |
| `rollout` | the engine's probability | nothing: the ratio itself corrects, and the clip bounds it |
| `decoupled` | the trainer's probability before the first step | trainer over engine, as `correction` says |

| `correction` | known as |
|---|---|
| `mode = "none"` | decoupled PPO |
| `mode = "truncate"` | truncated importance sampling (TIS) |
| `mode = "mask", low = 0.5, high = 5.0` | IcePop |
| `mode = "mask", level = "sequence"` or `"geometric"` | masked importance sampling |
| `mode = "reject", level = "geometric"` | rejection of sequences |

`veto` drops a sample with one catastrophic token; `renormalize` keeps the mean weight of a batch at 1.

## Top-p, top-k and min-p

```toml
sampling = { temperature = 0.9, top_p = 0.9 }
algorithm = { kind = "grpo", old_policy = "decoupled", correction = { mode = "truncate" } }
```

A token that was drawn from a part of the vocabulary was likelier than the whole softmax says. So the engine returns
what was left to draw from at each position, the *kept set*, and the trainer takes every log-probability among these
tokens: of the policy now and before the first step, of the reference and the teacher, and of the engine. Tokens outside
of the set get no gradient (DeepSeek-V3.2, arXiv 2512.02556, keeps the sampling mask likewise). The entropy stays that
of the whole distribution. Nothing has to be switched on; samples drawn without restriction and greedy ones have no kept
sets.

Only `hf` gives kept sets so far. With another engine `rollout`, `decoupled` and `opsm` refuse restricted sampling,
because ratios to its log-probabilities, which are taken before the restriction, would be wrong; `trainer` takes it and
the gradient is that of the whole softmax. A kept token costs 4 bytes in memory and, before compression, in the sample
store: 200 MB for a million drawn tokens with sets of 50. What is decided and why:
[kept sets](design/kept-sets.md).

## Supervised fine-tuning

```toml
algorithm.kind = "sft"
data = { kind = "demonstrations", path = "chats.jsonl" }
```

needs no `[rollout]` and no rewards. What the assistant wrote is told from what the chat template makes of the messages
before and after each of its turns, and both are tokenised apart, as an engine gets its prompt and answers with tokens
of its own. A template that renders earlier turns otherwise once there are later ones is an error that names the row;
`data.train_on = "last"` then learns the last turn.
"""


def page() -> str:
    """The text of the page."""
    kinds = sorted(register_components(), key=_kind)
    lines = [f"| {' | '.join(map(_cell, _row(cls)))} |\n" for cls in kinds]
    names = [name for name in PolicyGradient.model_fields if name not in Algorithm.model_fields]
    shared = [f"| `{name}` | {_cell(PolicyGradient.model_fields[name].description or '')} |\n" for name in names]
    return HEAD + "".join(lines) + SHARED + "".join(shared) + TAIL


def _kind(cls: type[Algorithm]) -> str:
    return str(cls.model_fields["kind"].default)


def _row(cls: type[Algorithm]) -> Iterator[str]:
    """Kind, formula, paper, use, options. Raises ValueError if the docstring lacks one."""
    told = sections(cls)
    missing = [name for name in SECTIONS if name not in told]
    if missing:
        raise ValueError(f"the docstring of {cls.__name__} has no section {missing[0]}:")
    yield f"`{_kind(cls)}`"
    yield from (told[name] for name in SECTIONS)
    yield ", ".join(_options(cls))


def sections(cls: type[Algorithm]) -> dict[str, str]:
    """``Formula: ...`` and so on of a docstring; each ends where the next one begins."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}): ", inspect.cleandoc(cls.__doc__ or ""), flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _options(cls: type[Algorithm]) -> Iterator[str]:
    """Settings that not all others have, or whose default is another."""
    shared = PolicyGradient.model_fields if issubclass(cls, PolicyGradient) else Algorithm.model_fields
    for name, field in cls.model_fields.items():
        if name != "kind" and (name not in shared or shared[name].default != field.default):
            yield f"`{name}`" if field.is_required() else f"`{name} = {_toml(field.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
