"""How much of the target's words does the text have?"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Annotated, ClassVar, Literal

from plasmid import Prompt, Reward, Sample, Score
from plasmid.settings.trust import INERT

from ..targets import accepted_targets

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CLOSED = {"yes", "no", "noanswer"}


class F1(Reward):
    """Harmonic mean of precision and recall of words, the best over a list of targets; 0.0 if no word is shared.

    The measure of SQuAD (Rajpurkar et al. 2016): case, punctuation, articles and spacing do not count. Where text or
    target is ``yes``, ``no`` or ``noanswer``, only equality counts.
    """

    kind: Literal["f1"] = "f1"
    reads_target: ClassVar[bool] = True
    after: Annotated[str, INERT] = ""
    """Look only behind the last occurrence of this text, for example ``</think>``; a text without it gets 0.0."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        targets = [normalize(str(target)) for target in accepted_targets(prompt, self.kind)]
        text = sample.text
        if self.after:
            _, found, text = text.rpartition(self.after)
            if not found:
                return Score(value=0.0, error=f"no {self.after!r} in the text")
        words = normalize(text)
        best = max((_f1(words, target) for target in targets), key=lambda parts: parts[0])
        return Score(value=best[0], components={"precision": best[1], "recall": best[2]})


def normalize(text: str) -> str:
    """Lower case words without punctuation and articles, one space apart."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1(text: str, target: str) -> tuple[float, float, float]:
    if text == target:
        return 1.0, 1.0, 1.0
    words, wanted = text.split(), target.split()
    shared = (Counter(words) & Counter(wanted)).total()
    if shared == 0 or text in CLOSED or target in CLOSED:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(words), shared / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall
