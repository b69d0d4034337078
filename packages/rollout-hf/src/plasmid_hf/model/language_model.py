"""The Hugging Face model of one engine process: loading, prefill and decoding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plasmid.components import AdapterSpec
from plasmid.errors import ModelError, one_line
from plasmid.types import Ints
from plasmid_models.building import BUILD_LOCK, choose_expert_products, text_model_config
from plasmid_models.folder import folder_names, is_torch_dist, open_weights, read_config, read_format, tensor_names
from plasmid_models.kernels.invariant import Spans
from plasmid_models.kernels.invariant_modules import make_invariant
from plasmid_models.linear_attention import LINEAR
from plasmid_models.lora.insertion import adapter_pieces, folder_layers, insert_adapter
from plasmid_models.pieces import Pieces, pieces_of, present_pieces
from plasmid_models.quantized.slices import QuantizedSlice
from plasmid_models.text_model import FolderNames, has_vision
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..layers import check_layers
from .attention import NAME, Decode, Plan, Prefill, Prompts
from .cache import SlotCache, round_up
from .expert_recorder import ExpertRecorder
from .recurrent import StateCache

ALIGNMENT = 16
"""Attention reads a multiple of this many tokens, because GPU kernels require masks of aligned size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts from the model's config."""

    vocab_size: int
    num_layers: int
    max_positions: int
    """Maximum number of tokens that the model supports."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""


class LanguageModel:
    """Computes next-token logits with a slot cache, for whole prompts and for single tokens."""

    def __init__(
        self,
        hf: PreTrainedModel,
        device: torch.device,
        *,
        pieces: Pieces | None = None,
        whole: Collection[str] = (),
        names: FolderNames | None = None,
        adapted: Collection[str] = (),
        invariant: bool = False,
    ) -> None:
        """Wrap a model. ``adapted`` lists the layers with an adapter; ``invariant`` makes it batch-invariant.

        Trainers send unfused tensors: ``pieces`` maps each to its place in a fused parameter. The folder stores the
        parameters ``whole`` fused; trainers send them as pieces or in one tensor. ``names`` maps tensors of the text
        model to tensors of the model folder.
        """
        self.hf = hf
        self._is_invariant = invariant
        if invariant:
            make_invariant(hf)
        self._pieces, self._names = pieces or {}, names or FolderNames()
        self._whole = frozenset(whole)
        matrices = (f"{layer}.{matrix}" for layer in adapted for matrix in ("lora_A", "lora_B"))
        self._adapter = {self._names.in_folder(name) for name in matrices}
        self.recorder = ExpertRecorder(hf)
        self.device = device
        self.facts = _facts(hf)
        kinds: Sequence[str] = getattr(hf.config.get_text_config(), "layer_types", None) or ()
        self._recurrent = kinds if LINEAR in kinds else None
        """Kind of each layer if some have linear attention, else None."""

    def prefill(self, cache: SlotCache, sequences: Sequence[Ints], *, first_slot: int) -> Tensor:
        """Return logits [n, V] after each of n sequences; sequence i goes into slot ``first_slot + i``.

        Equal sequences (the samples of one prompt) are computed once.
        """
        slots: dict[bytes, list[int]] = {}
        for i, sequence in enumerate(sequences):
            slots.setdefault(sequence.tobytes(), []).append(i)
        distinct = sorted(slots.values(), key=lambda rows: len(sequences[rows[0]]))  # stable: in admission order
        lengths = [len(sequences[rows[0]]) for rows in distinct]
        cache.reserve(first_slot + len(sequences), max(lengths) + 1)
        spans = Spans.packed(lengths, self.device) if self._is_invariant else None
        plan = Prefill(cache=cache, prompts=self._groups(distinct, lengths, first_slot), spans=spans)
        tokens = torch.cat([torch.from_numpy(sequences[rows[0]]).long() for rows in distinct])
        if self._recurrent is not None:
            logits = self._prefill_states(plan, tokens, self._recurrent)
        else:
            ends = torch.tensor(lengths).cumsum(0) - 1
            positions = torch.cat([torch.arange(length) for length in lengths])
            logits = self._forward(tokens[None], positions[None], plan, last=ends.to(self.device))[0]
        source = torch.empty(len(sequences), dtype=torch.long)
        for i, rows in enumerate(distinct):
            source[rows] = i
        self.recorder.deliver(lengths, source.tolist())
        return logits[source.to(self.device)]

    def _prefill_states(self, plan: Prefill, tokens: Tensor, kinds: Sequence[str]) -> Tensor:
        """Run one forward pass per group (prompts of equal length): linear attention would mix packed prompts."""
        logits = []
        for group in plan.prompts:
            count = len(group.slots)
            ids = tokens[group.start : group.start + count * group.length].view(count, group.length)
            states, alone = StateCache(kinds), replace(plan, prompts=[replace(group, start=0)])
            positions = torch.arange(group.length).expand(count, -1)
            logits.append(self._forward(ids, positions, alone, last=1, states=states)[:, 0])
            states.store(plan.cache.states, group.slots, num_slots=plan.cache.num_slots)
        return torch.cat(logits)

    def _groups(self, distinct: list[list[int]], lengths: list[int], first_slot: int) -> list[Prompts]:
        groups: list[Prompts] = []
        start = 0
        for length in sorted(set(lengths)):
            members = [rows for rows, other in zip(distinct, lengths, strict=True) if other == length]
            slots = tuple(torch.tensor(rows, device=self.device) + first_slot for rows in members)
            groups.append(Prompts(start=start, length=length, slots=slots))
            start += length * len(members)
        return groups

    def decode(self, cache: SlotCache, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return logits [n, V] after one more token, at the given positions, for the rows in slots ``0:n``."""
        cache.reserve(len(token_ids), max(positions) + 1)
        where = torch.tensor(positions)
        length = round_up(max(positions) + 1, ALIGNMENT)
        hidden = torch.arange(length)[None, :] > where[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        plan = Decode(
            cache=cache,
            rows=torch.arange(len(token_ids), device=self.device),
            positions=where.to(self.device),
            mask=mask.to(self.device, self.hf.dtype),
            spans=Spans.last_tokens(where.to(self.device) + 1) if self._is_invariant else None,
        )
        states = None
        if self._recurrent is not None:
            states = StateCache(self._recurrent, cache.states, rows=len(token_ids))
        logits = self._forward(torch.tensor(token_ids)[:, None], where[:, None], plan, last=1, states=states)[:, 0]
        self.recorder.deliver([1] * len(token_ids), range(len(token_ids)))
        return logits

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: Plan,
        *,
        last: Tensor | int,
        states: StateCache | None = None,
    ) -> Tensor:
        output = self.hf(
            input_ids=token_ids.to(self.device),
            position_ids=positions.to(self.device),
            logits_to_keep=last,
            use_cache=False,  # the plan contains the cache
            past_key_values=states,
            plan=plan,
        )
        logits: Tensor = output.logits
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the model folder by name, as views of the model's memory; tied tensors share it."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.hf.state_dict(keep_vars=False).items():
            pieces = None if name in self._whole else self._pieces.get(name)
            found |= {name: tensor} if pieces is None else {piece.name: piece.of(tensor) for piece in pieces}
        return {self._names.in_folder(name): tensor for name, tensor in found.items()}

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the pieces of each fused tensor of the folder, as views by name, by the name of the fused tensor."""
        state, rename = self.hf.state_dict(keep_vars=False), self._names.in_folder
        return {
            rename(name): {rename(piece.name): piece.of(state[name]) for piece in self._pieces[name]}
            for name in sorted(self._whole)
        }

    def base_names(self) -> frozenset[str]:
        """Return the names of the frozen base model's weights; empty without an adapter."""
        return frozenset(self.tensors().keys() - self._adapter) if self._adapter else frozenset()

    def move(self, device: torch.device) -> None:
        """Move the weights and all further computation to a device."""
        self.hf.to(device)  # type: ignore[arg-type]


def _facts(hf: PreTrainedModel) -> ModelFacts:
    config = hf.config.get_text_config()
    return ModelFacts(
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        max_positions=int(config.max_position_embeddings),
        stop_ids=_stop_ids(hf),
    )


def _stop_ids(hf: PreTrainedModel) -> frozenset[int]:
    """Read the stop ids from the generation config, or else from the config."""
    ids = hf.generation_config.eos_token_id if hf.generation_config is not None else None
    ids = hf.config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    adapter: AdapterSpec | None = None,
    invariant: bool = False,
) -> LanguageModel:
    """Load a Hugging Face folder. Raises `ModelError` if it is incomplete or its attention is not supported.

    With ``adapter``, the model computes with its base and an adapter of zeros, until a trainer sends one. For weights
    in Megatron's distributed format only the config is read: the trainer sends the weights before any sampling.
    """
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": trust_remote_code}
    options |= {"output_loading_info": True, "local_files_only": True}
    options["ignore_mismatched_sizes"] = True  # reported below by name; transformers raises without one
    loaded: Any
    if not path.is_dir():
        raise ModelError(f"model.path: no such folder: {path}")
    try:
        with BUILD_LOCK:
            if is_torch_dist(path):
                loaded = _without_weights(path, dtype, trust_remote_code), {"missing_keys": [], "mismatched_keys": []}
            elif read_format("model", config := read_config("model", path)) is not None or has_vision(config):
                loaded = _from_slices(path, options)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model.path: {path} cannot be loaded: {one_line(error)}") from error
    hf, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelError(f"model.path: {path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if info["mismatched_keys"]:
        name, saved, expected = min(info["mismatched_keys"])
        raise ModelError(
            f"model.path: {path}: tensor {name} has shape {list(saved)}, config.json requires {list(expected)}"
        )
    check_layers(path, hf.config.to_dict())
    choose_expert_products(hf, dtype)
    pieces = pieces_of(hf)
    whole = _whole(pieces, path)
    layers = {} if adapter is None else insert_adapter(hf, adapter, dtype=dtype)
    hf.eval().requires_grad_(False)
    hf.to(device)
    return LanguageModel(
        hf,
        device,
        pieces={**pieces, **adapter_pieces(layers)},
        whole=whole,
        names=folder_names("model", path),
        adapted=folder_layers(layers),
        invariant=invariant,
    )


def _whole(pieces: Pieces, path: Path) -> frozenset[str]:
    """Return the parameters that the folder stores fused."""
    if not pieces or is_torch_dist(path):
        return frozenset()
    return frozenset(pieces.keys() - present_pieces(pieces, tensor_names("model", path)))


def _from_slices(path: Path, options: dict[str, Any]) -> Any:
    """Load the weights that a trainer would read from the folder: dequantized, and of the text model only."""
    config = text_model_config(path, trust_remote_code=options["trust_remote_code"])
    with open_weights("model", path) as found:
        dtypes = {name: options["dtype"] if isinstance(part, QuantizedSlice) else None for name, part in found.items()}
        weights = {name: found[name][...].to(dtype) for name, dtype in dtypes.items()}
    trust = options["trust_remote_code"]
    with torch.device("meta"):
        cls = type(AutoModelForCausalLM.from_config(config, attn_implementation=NAME, trust_remote_code=trust))  # type: ignore[no-untyped-call]
    loaded: Any = cls.from_pretrained(None, config=config, state_dict=weights, **options)
    if (path / "generation_config.json").is_file():
        loaded[0].generation_config = GenerationConfig.from_pretrained(path)
    return loaded


def _without_weights(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    config = text_model_config(path, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME, "trust_remote_code": trust_remote_code}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    return model


def cache_bytes(model: LanguageModel) -> tuple[int, int]:
    """Measure the cache with one token: bytes per token, and bytes per request whatever its length.

    Raises `ModelError` if the family needs another kind of attention or state.
    """
    cache = SlotCache(num_layers=model.facts.num_layers, block=ALIGNMENT, max_rows=1)
    family = model.hf.config.model_type
    try:
        with torch.inference_mode():
            model.prefill(cache, [torch.zeros(1, dtype=torch.int32).numpy()], first_slot=0)
            model.decode(cache, [0], [1])
    except (NotImplementedError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"model.path: engine 'hf' cannot run models of type {family!r}: {error}") from error
    used = cache.states.layers()
    idle = [index for index, keys in enumerate(cache.keys) if not keys.numel() and index not in used]
    if idle or not cache.keys:
        raise ModelError(
            f"model.path: engine 'hf' cannot run models of type {family!r}: layer {min(idle, default=0)} does not use "
            "the KV cache"
        )
    return cache.num_bytes // ALIGNMENT, cache.states.num_bytes
