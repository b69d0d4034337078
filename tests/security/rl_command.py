"""The command `rl` and a recipe for it, for tests that score texts or ask servers."""

import sys

RL = [sys.executable, "-c", "from plasmid_cli.main import app; app()"]
RECIPE = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[trainer]
kind = "fsdp"
[rollout]
kind = "hf"
[algorithm]
kind = "grpo"
"""
