"""Prompt files, the tokenizer, and numbers of evaluation sets."""

from .evaluation import mean_pass_at_k, pass_at_k
from .files import Files
from .tokenizer import Tokenizer

__all__ = ["Files", "Tokenizer", "mean_pass_at_k", "pass_at_k"]
