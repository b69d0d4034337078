"""Prompt files, the tokenizer, and pass@k."""

from plasmid_models.tokenization.tokenizer import Tokenizer

from .evaluation import pass_at_k
from .files import Files

__all__ = ["Files", "Tokenizer", "pass_at_k"]
