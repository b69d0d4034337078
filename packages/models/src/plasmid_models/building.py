"""transformers builds models under settings of the whole process; actors of the local cluster share one process."""

from __future__ import annotations

import threading

BUILDING = threading.RLock()
"""Held by whoever makes or reads a transformers model. Without it two threads that load a model at once undo each
other's default dtype, device and tying of weights: one of them then lacks `lm_head.weight`."""
