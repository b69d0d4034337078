"""What released versions of Megatron-Core get wrong, put right from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.moe import moe_utils
from plasmid_convert.distributed_files import METADATA
from plasmid_convert.safe_pickle import load_metadata


def define_router_gemm() -> None:
    """Give Megatron's router the name that it compares with None where TransformerEngine is not installed.

    Megatron-Core 0.16.0 and 0.16.1 define ``te_general_gemm`` in moe_utils only if TransformerEngine imports, and then
    raise NameError in the forward pass of every mixture-of-experts layer.
    """
    if not moe_utils.HAVE_TE:
        assert vars(moe_utils).get("te_general_gemm") is None, "upstream has another use of the name now"
        moe_utils.te_general_gemm = None


def tell_latent_attention_what_is_installed() -> None:
    """Let Megatron's latent attention (MLA) know that TransformerEngine is missing where it is.

    Megatron-Core 0.16.1 takes the import of its own wrapper for proof of it, which succeeds with mock objects for
    classes, and then raises TypeError (isinstance with an object) when a layer is made.
    """
    assert isinstance(mla.HAVE_TE, bool), "upstream has another use of the name now"
    mla.HAVE_TE = transformer_engine.HAVE_TE


def keep_results_in_this_process() -> None:
    """Keep Megatron from starting a process for the results of what it writes, where threads write and give them back.

    Megatron-Core 0.16.1 starts it with the first checkpoint that is planned, even if nothing will use it; it would
    outlive a rank that is killed.
    """
    assert hasattr(filesystem_async, "_results_queue"), "upstream has another place for results now"
    filesystem_async._results_queue = SimpleQueue()


@contextmanager
def plain_values_only(path: Path) -> Iterator[None]:
    """Have Megatron and torch make nothing but tensors and plain values out of the files of a checkpoint.

    Megatron-Core 0.16.1 unpickles ``.metadata`` as it is, and torch whatever is no tensor: both run the code that a
    pickle names. Raises `ModelError` if ``.metadata`` names any; torch raises `UnpicklingError` for the other files.
    """
    load_metadata(path / METADATA)
    force, allow = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (force, allow)}
    os.environ[force] = "1"
    try:
        yield
    finally:
        os.environ.pop(force, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def without_gpu() -> Iterator[None]:
    """Have modules made on torch's meta device, without memory, also where there is no GPU.

    Megatron-Core 0.16.1 asks for the number of the GPU where it makes the routers and latent attentions of a model,
    even with `use_cpu_initialization`.
    """
    asked, meta = torch.cuda.current_device, torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment, return-value]
    try:
        with meta:
            yield
    finally:
        torch.cuda.current_device = asked


def let_sgd_be_loaded(optimizer: Any) -> None:
    """Give the parts of a chained optimizer the function that Megatron-Core 0.16.1 calls, but does not have, for SGD.

    It is to make the state that a checkpoint fills, which `MegatronOptimizer` has made already.
    """
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is None:
            part.init_state_fn = _no_state


def let_ranks_without_experts_be_saved(optimizer: Any) -> None:
    """Have a rank without experts tell the state of the optimizer that Megatron gives it for those of other ranks.

    Megatron-Core 0.16.1 takes the number of steps from the state of torch's Adam, and fails with AssertionError where
    there are no weights. It is the same as for all other weights.
    """
    first, *others = optimizer.chained_optimizers
    for part in others:
        if isinstance(part, DistributedOptimizer) and not any(g["params"] for g in part.optimizer.param_groups):
            part.state_dict = partial(_groups_alone, first, part)


def _groups_alone(first: Any, part: Any) -> dict[str, Any]:
    step = first.state_dict()["optimizer"]["param_groups"][0]["step"]
    groups = [{k: v for k, v in g.items() if k != "params"} | {"step": step} for g in part.optimizer.param_groups]
    return {"optimizer": {"param_groups": groups}}


def _no_state(optimizer: Any, config: Any = None) -> None:
    pass


def load_distributed_optimizer(optimizer: Any, state: Any) -> None:
    """Load what `sharded_state_dict` of a chained optimizer gave.

    Megatron-Core 0.16.1 fails for torch's Adam with KeyError 'step': where it fills the state of a distributed
    optimizer it looks for a tensor of every entry, and the step is none (it is kept with the groups). So the steps are
    set aside while it does that. Before, it gave all weights one tensor as their step, which every weight would then
    count up: each gets one of its own. With TransformerEngine's Adam, which has no such entry, nothing is set aside.
    """
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, own in zip(parts, states, strict=True):
        if not isinstance(part, DistributedOptimizer):
            part.load_state_dict(own)
            continue
        own = dict(own)
        assert own.pop("param_state_sharding_type") == "fully_reshardable"
        tensors = own.pop("param_state")
        part.load_state_dict(own)
        steps = {key: entry.pop("step") for key, entry in part.optimizer.state.items() if "step" in entry}
        try:
            part.load_parameter_state_from_fully_reshardable(tensors)
        finally:
            for key, step in steps.items():
                part.optimizer.state[key]["step"] = step.clone()
