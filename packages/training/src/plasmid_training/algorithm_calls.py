"""Calls to an algorithm's methods, with checks of the results and one-line errors that point to the author's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from plasmid.components import ActorCritic, Algorithm
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs
from plasmid.errors import AlgorithmError, locate_in_class, one_line
from torch import Tensor

from .objective.metrics import is_reserved
from .plugin import is_custom


def call_advantages(algorithm: Algorithm, inputs: AdvantageInputs) -> Tensor:
    """Call `Algorithm.advantages` and check the result [T]. Raises `AlgorithmError`."""
    values = _call(algorithm.advantages, inputs)
    return _check_per_token(algorithm.advantages, "advantages", values, inputs.sample_index.numel(), "loss token")


def call_returns(algorithm: ActorCritic, inputs: AdvantageInputs) -> Tensor:
    """Call `ActorCritic.returns` and check the result [T]. Raises `AlgorithmError`."""
    values = _call(algorithm.returns, inputs)
    return _check_per_token(algorithm.returns, "returns", values, inputs.sample_index.numel(), "loss token")


def call_loss(algorithm: Algorithm, inputs: LossInputs) -> TokenLoss:
    """Call `Algorithm.loss` and check the result for T tokens. Raises `AlgorithmError`."""
    return _check_token_loss(algorithm.loss, "the loss", _call(algorithm.loss, inputs), inputs.logprobs.numel())


def call_value_loss(algorithm: ActorCritic, inputs: ValueInputs) -> TokenLoss:
    """Call `ActorCritic.value_loss` and check the result for T tokens. Raises `AlgorithmError`."""
    result = _call(algorithm.value_loss, inputs)
    return _check_token_loss(algorithm.value_loss, "the value loss", result, inputs.values.numel())


def algorithm_error(method: Callable[..., Any], problem: str) -> AlgorithmError:
    """Return the error ``algorithm (kind): problem (file.py:12)``, with the line where the method is defined."""
    code = inspect.unwrap(method).__code__
    return AlgorithmError(f"{_full_name(method)}: {problem} ({Path(code.co_filename).name}:{code.co_firstlineno})")


def _call(method: Callable[..., Any], inputs: object) -> Any:
    """Call the method. Wraps exceptions of custom algorithms in an `AlgorithmError`, which the process logs."""
    try:
        return method(inputs)
    except (AlgorithmError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # boundary: algorithms are users' code
        if not is_custom(_owner(method)):
            raise
        where = locate_in_class(type(_owner(method)), error)
        raise AlgorithmError(f"{_full_name(method)}: {method.__name__} raised {one_line(error)}{where}") from error


def _check_per_token(method: Callable[..., Any], what: str, values: object, count: int, token: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise algorithm_error(
            method, f"{what} must be a tensor with one value per {token} ({count}), got {_type_of(values)}"
        )
    if values.shape != (count,):
        raise algorithm_error(
            method, f"{what} must have one value per {token} ({count}), got shape {tuple(values.shape)}"
        )
    if not values.is_floating_point():
        raise algorithm_error(method, f"{what} must have a floating-point dtype, got {values.dtype}")
    return values


def _check_token_loss(method: Callable[..., Any], what: str, result: object, count: int) -> TokenLoss:
    if not isinstance(result, TokenLoss):
        raise algorithm_error(method, f"{method.__name__} must return a TokenLoss, got {_type_of(result)}")
    _check_per_token(method, what, result.loss, count, "token")
    if not isinstance(result.metrics, Mapping):
        raise algorithm_error(method, f"metrics must be a dict of tensors, got {_type_of(result.metrics)}")
    for name, values in result.metrics.items():
        if not isinstance(name, str):
            raise algorithm_error(method, f"names of metrics must be strings, got {name!r:.100}")
        if is_reserved(name):
            raise algorithm_error(method, f"metric {name!r} replaces the trainer's own metric train/{name}; rename it")
        given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else _type_of(values)
        if given != f"shape {(count,)}":
            raise algorithm_error(
                method, f"metric {name!r} must be a tensor with one value per token ({count}), got {given}"
            )
    return result


def _owner(method: Callable[..., Any]) -> Algorithm:
    owner = getattr(method, "__self__", None)
    assert isinstance(owner, Algorithm), "must be a method of an algorithm"
    return owner


def _full_name(method: Callable[..., Any]) -> str:
    return f"algorithm ({type(_owner(method)).model_fields['kind'].default})"


def _type_of(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
