"""Adapters in the folder format of the `peft` package, which engines and transformers load.

``adapter_config.json`` has rank, alpha and target modules; ``adapter_model.safetensors`` has A and B of every layer as
``base_model.model.<module>.lora_A.weight``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plasmid.components import AdapterSpec
from plasmid.errors import CheckpointError, ModelError, one_line
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import apply_umask

from ..folder import find_misfit
from ..text_model import BACKBONE, IN_TRANSFORMERS, FolderNames

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KEY = "trainer.lora.start_from"
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **{f"use_{kind}": (False, None) for kind in ("dora", "rslora", "qalora", "bdlora")},
    **{f"{kind}_config": (None,) for kind in ("arrow", "kasa", "monteclora", "velora")},
    "alora_invocation_tokens": (None,),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}
"""PEFT settings that change what an adapter computes, and their supported values."""
INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that do not modify the base; PiSSA, OLoRA, CorDA and LoftQ do."""


def check_adapter(path: Path, spec: AdapterSpec) -> None:
    """Raise `ModelError` unless the folder has an adapter of this rank and alpha. Imports no torch."""
    config = path / CONFIG
    try:
        found = read_json(config)
    except FileNotFoundError:
        raise ModelError(
            f"{KEY}: {path} has no {CONFIG}; it must be an adapter folder in PEFT format, or none to continue a run "
            "from its checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{KEY}: {config} cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{KEY}: {config} must contain a JSON object")
    for name, known in PLAIN.items():
        value = found.get(name, known[0])
        if value not in known:
            raise ModelError(f"{KEY}: {config} has {name} = {value!r}, but only {known[0]!r} is supported")
    init = found.get("init_lora_weights")
    if init not in INITS:
        raise ModelError(
            f"{KEY}: {config} has init_lora_weights = {init!r}, which changes the base model; convert the adapter with "
            "path_initial_model_for_weight_conversion of peft, or train from the merged model"
        )
    for name, setting, ours in (("r", "rank", spec.rank), ("lora_alpha", "alpha", spec.alpha)):
        if found.get(name) != ours:
            raise ModelError(f"trainer.lora.{setting}: the adapter in {path} has {found.get(name)!r}, got {ours!r}")
    if not (path / WEIGHTS).is_file():
        raise ModelError(f"{KEY}: {path} has no {WEIGHTS}; pickled adapters (*.bin) are not read")


@contextmanager
def read_adapter_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Mapping[str, Any]]:
    """Yield lazy slices of the folder's tensors by name in the text model. Raises `ModelError` unless they match."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / WEIGHTS, framework="pt") as opened:
            found = {_text_name(name): opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            misfit = find_misfit(dict(sorted(found.items())), dict(sorted(shapes.items())))
            if misfit:
                raise ModelError(
                    f"{KEY}: the adapter in {path} does not fit the model and trainer.lora.targets: it {misfit}"
                )
            yield found
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{KEY}: {path / WEIGHTS} cannot be read: {one_line(error)}") from None


def adapter_config(
    spec: AdapterSpec, *, base: str, adapted: Collection[str], adaptable: Collection[str]
) -> dict[str, Any]:
    """Return the ``adapter_config.json`` of an adapter of the modules ``adapted`` out of the modules ``adaptable``.

    Target modules are the last parts of names (``q_proj``), which all engines accept, if these select the same modules.
    """
    leaves = {name.rpartition(".")[2] for name in adapted}
    same = {name for name in adaptable if name.rpartition(".")[2] in leaves} == set(adapted)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(leaves if same else adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def write_adapter(
    path: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], *, names: FolderNames | None = None
) -> None:
    """Write an adapter's folder atomically; ``tensors`` are named without `PREFIX`. Raises `CheckpointError`.

    ``names`` are those of the base's folder. If it has a vision model, target modules are whole names, because the
    vision model may have modules with the same last parts.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        names = names or FolderNames()
        whole = {PREFIX + names.in_transformers(name): tensor.cpu().clone() for name, tensor in tensors}
        if names.has_vision:
            config = {
                **config,
                "target_modules": sorted({name.removeprefix(PREFIX).split(".lora_")[0] for name in whole}),
            }
        save_file(whole, temporary / WEIGHTS, metadata={"format": "pt"})
        apply_umask(temporary / WEIGHTS)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{path}: the adapter cannot be written: {one_line(error)}") from None


def _text_name(name: str) -> str:
    """Return the name in the text model of an adapter's tensor; the base may also have a vision model."""
    name = name.removeprefix(PREFIX)
    return BACKBONE + name.removeprefix(IN_TRANSFORMERS) if name.startswith(IN_TRANSFORMERS) else name
