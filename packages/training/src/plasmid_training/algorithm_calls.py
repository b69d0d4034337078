"""Calls of an algorithm's methods: results are checked, and a mistake is one line that names the author's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from plasmid.components import ActorCritic, Algorithm
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs
from plasmid.errors import AlgorithmError, one_line, place_in_class
from torch import Tensor

from .plugin import is_custom


def call_advantages(algorithm: Algorithm, inputs: AdvantageInputs) -> Tensor:
    """[T] `Algorithm.advantages`. Raises `AlgorithmError`."""
    values = _call(algorithm.advantages, inputs)
    return _per_token(algorithm.advantages, "advantages", values, inputs.sample_index.numel(), "loss token")


def call_returns(algorithm: ActorCritic, inputs: AdvantageInputs) -> Tensor:
    """[T] `ActorCritic.returns`. Raises `AlgorithmError`."""
    values = _call(algorithm.returns, inputs)
    return _per_token(algorithm.returns, "returns", values, inputs.sample_index.numel(), "loss token")


def call_loss(algorithm: Algorithm, inputs: LossInputs) -> TokenLoss:
    """`Algorithm.loss` of T tokens. Raises `AlgorithmError`."""
    return _token_loss(algorithm.loss, "the loss", _call(algorithm.loss, inputs), inputs.logprobs.numel())


def call_value_loss(algorithm: ActorCritic, inputs: ValueInputs) -> TokenLoss:
    """`ActorCritic.value_loss` of T tokens. Raises `AlgorithmError`."""
    result = _call(algorithm.value_loss, inputs)
    return _token_loss(algorithm.value_loss, "the value loss", result, inputs.values.numel())


def algorithm_error(method: Callable[..., Any], problem: str) -> AlgorithmError:
    """``algorithm (kind): problem (file.py:12)``, where the line is that of the method."""
    code = inspect.unwrap(method).__code__
    return AlgorithmError(f"{_named(method)}: {problem} ({Path(code.co_filename).name}:{code.co_firstlineno})")


def _call(method: Callable[..., Any], inputs: object) -> Any:
    """What the method returns. What a custom algorithm raises becomes an `AlgorithmError`, which its process logs."""
    try:
        return method(inputs)
    except (AlgorithmError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # boundary: algorithms are users' code
        if not is_custom(_owner(method)):
            raise
        where = place_in_class(type(_owner(method)), error)
        raise AlgorithmError(f"{_named(method)}: {method.__name__} raised {one_line(error)}{where}") from error


def _per_token(method: Callable[..., Any], what: str, values: object, count: int, token: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise algorithm_error(method, f"{what} must be a tensor of one per {token} ({count}), got {_type_of(values)}")
    if values.shape != (count,):
        raise algorithm_error(method, f"{what} must be one per {token} ({count}), got shape {tuple(values.shape)}")
    if not values.is_floating_point():
        raise algorithm_error(method, f"{what} must be of a floating type, got {values.dtype}")
    return values


def _token_loss(method: Callable[..., Any], what: str, result: object, count: int) -> TokenLoss:
    if not isinstance(result, TokenLoss):
        raise algorithm_error(method, f"{method.__name__} must return a TokenLoss, got {_type_of(result)}")
    _per_token(method, what, result.loss, count, "token")
    if not isinstance(result.metrics, Mapping):
        raise algorithm_error(method, f"metrics must be a dict of tensors, got {_type_of(result.metrics)}")
    for name, values in result.metrics.items():
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else _type_of(values)
        if given != f"shape {(count,)}":
            raise algorithm_error(method, f"metric {name!r} must be a tensor of one per token ({count}), got {given}")
    return result


def _owner(method: Callable[..., Any]) -> Algorithm:
    owner = getattr(method, "__self__", None)
    assert isinstance(owner, Algorithm), "a method of an algorithm"
    return owner


def _named(method: Callable[..., Any]) -> str:
    return f"algorithm ({type(_owner(method)).model_fields['kind'].default})"


def _type_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
