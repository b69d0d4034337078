"""Makes Megatron unavailable in the process that imports this module: a scheduler of SGLang.

SGLang imports it, if it is installed, only to name Megatron's ranks in dumps of tensors. The import takes over 1 CPU
second of the start of each scheduler, because it also imports trackers such as wandb.
"""

import sys

sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
