"""Does the text follow its instructions (three paragraphs, no commas, ...)?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from plasmid import Prompt, Score
from plasmid.errors import RewardError

from .extras import needed
from .pooled import PooledReward


class Instructions(PooledReward):
    """Asks the checkers of the package if-verifiable about each instruction of the row.

    The row has ``instruction_id_list`` and ``kwargs``, one table for each instruction, as in the data sets. Checkers
    run in workers without network, so that nothing is downloaded: NLTK data that some of them need must be there.
    """

    strict: bool = True
    """Judge the text as it is; otherwise also without its first and last line and its asterisks."""
    score: Literal["all", "fraction"] = "all"
    """Whether all instructions must be followed, or each one that is counts its part."""
    package: ClassVar[str]

    @property
    @abstractmethod
    def _name(self) -> str: ...

    def warm(self) -> None:
        needed("langdetect", extra="ifeval", kind=self._name).DetectorFactory.seed = 0  # it guesses at random otherwise
        self._checkers()

    def judge(self, prompt: Prompt, text: str) -> Score:
        ids, arguments = self._instructions(prompt)
        evaluate = needed("if_verifiable.common", extra="ifeval", kind=self._name).evaluate_instructions
        try:
            results, _ = evaluate(text, ids, arguments, prompt.text, self._checkers())
        except LookupError as error:
            if "nltk" not in str(error).lower():
                raise
            resource = str(error).partition("'")[2].partition("'")[0] or "punkt"
            raise RewardError(
                f"{self._name}: prompt {prompt.id} needs the NLTK data {resource!r}, which are not on this machine; "
                f"python -m nltk.downloader {resource}, or leave the row out"
            ) from None
        if not results:
            return Score(value=0.0, error="an empty text")
        followed = [r.strict_pass if self.strict else r.loose_pass for r in results]
        fraction = sum(followed) / len(followed)
        value = fraction if self.score == "fraction" else float(all(followed))
        return Score(value=value, components={"followed": fraction})

    def _checkers(self) -> Mapping[str, Any]:
        checkers: Mapping[str, Any] = needed(self.package, extra="ifeval", kind=self._name).INSTRUCTION_DICT
        return checkers

    def _instructions(self, prompt: Prompt) -> tuple[list[str], list[dict[str, Any]]]:
        ids, arguments = prompt.metadata.get("instruction_id_list"), prompt.metadata.get("kwargs")
        for name, value in (("instruction_id_list", ids), ("kwargs", arguments)):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise RewardError(f"{self._name}: prompt {prompt.id} has no list {name!r}, which says what to check")
        assert ids is not None and arguments is not None
        if len(ids) != len(arguments):
            raise RewardError(
                f"{self._name}: prompt {prompt.id} has {len(ids)} instructions, but {len(arguments)} tables in 'kwargs'"
            )
        unknown = [id_ for id_ in ids if id_ not in self._checkers()]
        if unknown:
            raise RewardError(f"{self._name}: prompt {prompt.id} has an instruction without a checker: {unknown[0]!r}")
        return list(ids), [dict(table or {}) for table in arguments]


class IFEval(Instructions):
    """1.0 if all instructions of IFEval in the row are followed, else 0.0, also for an empty text.

    Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Needs the extra ``ifeval``.
    """

    kind: Literal["ifeval"] = "ifeval"
    package: ClassVar[str] = "if_verifiable.ifeval"

    @property
    def _name(self) -> str:
        return self.kind


class IFBench(Instructions):
    """1.0 if all instructions of IFBench in the row are followed, else 0.0, also for an empty text.

    Pyatkin et al. 2025, https://arxiv.org/abs/2507.02833. Needs the extra ``ifeval``, and NLTK data for some rows.
    """

    kind: Literal["ifbench"] = "ifbench"
    package: ClassVar[str] = "if_verifiable.ifbench"

    @property
    def _name(self) -> str:
        return self.kind
