"""Choice of the layers that get an adapter, by patterns for their names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

from plasmid.errors import ModelError, abbreviate

KEY = "trainer.lora.targets"


def match_targets(
    targets: Collection[str], *, layers: Collection[str], others: Collection[str], never: Collection[str] = ()
) -> list[str]:
    """Return the names in ``layers`` that match one of the patterns, in their order.

    ``others`` are the names of all parameters that cannot have an adapter. Raises `ModelError` if a pattern matches
    only these, one of them in ``never``, or nothing.
    """
    selected: set[str] = set()
    for pattern in targets:
        found = {name for name in layers if re.search(pattern, name)}
        refused = [name for name in others if re.search(pattern, name)]
        if not found and not refused:
            raise ModelError(
                f"{KEY}: {pattern!r} matches no linear layer; a name is, for example, {next(iter(layers))}"
            )
        fused = not set(refused).isdisjoint(never)
        if not found or fused:
            kinds = "routed experts of this family with this trainer" if fused else "the head, embeddings or norms"
            raise ModelError(
                f"{KEY}: {pattern!r} matches {abbreviate(refused)}, but only linear layers of the decoder can have an "
                f"adapter, not {kinds}; narrow the pattern"
            )
        selected |= found
    return [name for name in layers if name in selected]
