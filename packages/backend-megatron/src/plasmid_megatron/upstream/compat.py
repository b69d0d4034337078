"""Workarounds for bugs in released versions of Megatron-Core."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from queue import SimpleQueue
from typing import Any
from zipfile import BadZipFile

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.utils import local_multi_tensor_l2_norm
from plasmid.errors import ModelError
from plasmid_convert.distributed.files import METADATA, refuse_compressed
from plasmid_convert.distributed.safe_pickle import load_metadata
from torch import Tensor, nn


def define_router_gemm() -> None:
    """Define the name ``te_general_gemm`` in Megatron's router as None if TransformerEngine is not installed.

    Megatron-Core 0.16.0 and 0.16.1 define it in moe_utils only if TransformerEngine can be imported, and otherwise
    raise NameError in the forward pass of every mixture-of-experts layer.
    """
    if not moe_utils.HAVE_TE:
        assert vars(moe_utils).get("te_general_gemm") is None, "Megatron has changed the meaning of this name"
        moe_utils.te_general_gemm = None


def fix_latent_attention() -> None:
    """Tell Megatron's latent attention (MLA) whether TransformerEngine is installed.

    Megatron-Core 0.16.1 infers it from importing its own wrapper, which always succeeds, with mock objects in place of
    classes, and then raises TypeError (isinstance with an object) when a layer is created.
    """
    assert isinstance(mla.HAVE_TE, bool), "Megatron has changed the meaning of this name"
    mla.HAVE_TE = transformer_engine.HAVE_TE


def keep_results_in_this_process() -> None:
    """Stop Megatron from starting a process for the results of writers, which are threads of this process here.

    Megatron-Core 0.16.1 starts it when it plans the first checkpoint, even if it is not used; it would outlive a killed
    rank.
    """
    assert hasattr(filesystem_async, "_results_queue"), "Megatron has moved the queue of results"
    filesystem_async._results_queue = SimpleQueue()


@contextmanager
def refuse_pickled_code(path: Path) -> Iterator[None]:
    """Make Megatron and torch load only tensors and plain values from the files of a checkpoint.

    Megatron-Core 0.16.1 unpickles ``.metadata``, and torch all non-tensor entries: both execute code named in a pickle.
    Raises `ModelError` if ``.metadata`` names any; torch raises `UnpicklingError` for other files, and for compressed
    ones, of which a few bytes could fill the memory.
    """
    places = (load_metadata(path / METADATA).storage_data or {}).values()
    if any(getattr(place, "transform_descriptors", None) for place in places):
        raise ModelError(f"{path}: compressed checkpoints are not supported")
    with load_only_values():
        yield


@contextmanager
def load_only_values() -> Iterator[None]:
    """Make Megatron and torch load only tensors and plain values from a checkpoint with a checked ``.metadata``.

    Checking it takes seconds for a large checkpoint. Torch raises `UnpicklingError`.
    """
    force, allow = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (force, allow)}
    os.environ[force] = "1"
    load, torch.load = torch.load, _load_stored  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load
        os.environ.pop(force, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _load_stored(file: Any, *args: Any, load: Any = torch.load, **kwargs: Any) -> Any:
    """Call `torch.load` on an uncompressed file. Raises `UnpicklingError`."""
    # a copy: torch's view of a part of a file cannot seek from its end
    stream = BytesIO(Path(file).read_bytes() if isinstance(file, str | os.PathLike) else file.read())
    try:
        refuse_compressed(stream)
    except BadZipFile as error:
        raise UnpicklingError(f"the file is truncated or corrupt: {error}") from None
    return load(stream, *args, **kwargs)


@contextmanager
def build_without_gpu() -> Iterator[None]:
    """Build modules on torch's meta device, also without a GPU.

    Megatron-Core 0.16.1 queries the current GPU when it creates routers and latent attention, even with
    `use_cpu_initialization`. It would also compute initial values and split them, and set 40 attributes of every
    expert: 3 and 2 s for 48 layers with 128 experts.
    """
    asked, meta, initialize = torch.cuda.current_device, torch.device("meta"), layers._initialize_affine_weight_cpu
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment, return-value]
    layers._initialize_affine_weight_cpu = _mark_split_dimension
    mlp, experts.MLP = experts.MLP, _Copies(experts.MLP)
    try:
        with meta:
            yield
    finally:
        torch.cuda.current_device, layers._initialize_affine_weight_cpu = asked, initialize
        experts.MLP = mlp


class _Copies:
    """Replacement for a module class that copies the last module if it is called with identical arguments."""

    def __init__(self, create: Callable[..., nn.Module]) -> None:
        self._create = create
        self._given: list[Any] = []
        self._last: nn.Module | None = None

    def __call__(self, *args: Any, **options: Any) -> nn.Module:
        given = [*args, *options, *options.values()]
        same = len(given) == len(self._given) and all(map(operator.is_, given, self._given))
        if self._last is None or not same:
            self._given, self._last = given, self._create(*args, **options)
            return self._last
        return _copy_module(self._last)


def _copy_module(module: nn.Module) -> nn.Module:
    """Return a copy with its own parameters and submodules. All other attributes are shared."""
    copied = module.__new__(type(module))
    vars(copied).update(vars(module))
    own = {name: None if weight is None else _copy_parameter(weight) for name, weight in module._parameters.items()}
    modules = {name: None if part is None else _copy_module(part) for name, part in module._modules.items()}
    vars(copied).update(_parameters=own, _modules=modules)
    return copied


def _copy_parameter(weight: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(weight.data, requires_grad=weight.requires_grad)
    vars(copied).update(vars(weight))
    return copied


def _mark_split_dimension(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Any,
    stride: int = 1,
    skip_set_tensor_parallel_attributes: bool = False,
    **ignored: Any,
) -> None:
    """Replace `_initialize_affine_weight_cpu` for a weight without data."""
    if not skip_set_tensor_parallel_attributes:
        layers.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)


def fuse_gradient_norms() -> None:
    """Compute norms of gradients and clip them with few kernels if neither TransformerEngine nor apex is installed.

    Megatron-Core 0.16.1 then loops over the tensors, and waits for the GPU after the norm of each.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all
        clip_grads.multi_tensor_scale_impl = _scale_all


def _norm_of_all(chunk_size: int, flag: Any, lists: Any, per_tensor: bool) -> tuple[Tensor, None]:
    (tensors,) = lists
    return torch.stack(torch._foreach_norm(tensors)).norm()[None], None


def _scale_all(chunk_size: int, flag: Any, lists: Any, factor: float) -> None:
    source, target = lists
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(source, target, strict=True)), (
        "gradients are scaled in place"
    )
    torch._foreach_mul_(target, factor)


def fix_saving_of_padded_buckets(chunk: DistributedDataParallel) -> None:
    """Make the distributed optimizer save the state of every parameter from its own place.

    Megatron-Core 0.16.1 gathers the state for a checkpoint without the padding between buckets, but looks parameters up
    by their places with it: after the first padded bucket it saves shifted values, without an error. So the state is
    gathered with the padding, which belongs to no parameter.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def fix_sgd_loading(optimizer: Any) -> None:
    """Set the missing ``init_state_fn`` that Megatron-Core 0.16.1 calls on the parts of a chained optimizer for SGD.

    It would allocate the state that a checkpoint is loaded into, which `MegatronOptimizer` has already done.
    """
    for part in optimizer.chained_optimizers:
        if part.init_state_fn is None:
            part.init_state_fn = _no_state


def fix_saving_without_experts(optimizer: Any) -> None:
    """Fix ``state_dict`` of the expert optimizer on ranks without experts.

    Megatron-Core 0.16.1 reads the number of steps from the state of torch's Adam, and fails with AssertionError if the
    optimizer has no weights. The number is the same as for all other weights.
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
    """Load the `sharded_state_dict` of a chained optimizer.

    Megatron-Core 0.16.1 fails for torch's Adam with KeyError 'step': when it loads the state of a distributed
    optimizer, it expects a saved tensor for every entry, but the step is saved with the parameter groups. So the steps
    are removed while it loads. It also gives all weights the same step tensor, which every weight would then increment:
    each weight gets a copy. TransformerEngine's Adam has no such entry.
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
