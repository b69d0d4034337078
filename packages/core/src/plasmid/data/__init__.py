"""Prompt files, the tokenizer, and numbers of evaluation sets."""

from .evaluation import pass_at_k
from .files import Files
from .tokenizer import Tokenizer

__all__ = ["Files", "Tokenizer", "pass_at_k"]
