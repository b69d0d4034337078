"""Does the text follow its instructions (three paragraphs, no commas, ...)?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from plasmid import Prompt, Score
from plasmid.errors import RewardError, one_line

from ..extras import import_extra
from ..pooled import PooledReward

ORDINARY = "This is a plain text. It has some words.\n\nIt has two paragraphs, too."
"""A text on which no checker raises that has what it needs."""


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
    batched: ClassVar[bool] = True

    @property
    @abstractmethod
    def _name(self) -> str: ...

    def packages(self) -> Mapping[str, str]:
        return dict.fromkeys(("langdetect", "if_verifiable"), "plasmid-rewards[ifeval]")

    def warm(self) -> None:
        import_extra(
            "langdetect", extra="ifeval", kind=self._name
        ).DetectorFactory.seed = 0  # it guesses at random otherwise
        self._checkers()

    def judge(self, prompt: Prompt, text: str) -> Score:
        common = import_extra("if_verifiable.common", extra="ifeval", kind=self._name)
        checks = self._checks(prompt)
        text = common.strip_thinking(text)
        if not text.strip():
            return Score(value=self.failure(), error="an empty text")
        variants = [text] if self.strict else [v for v in common.get_loose_transformations(text) if v.strip()]
        followed = []
        for name, check in checks:
            try:
                followed.append(any(check(variant) for variant in variants))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  boundary: checkers raise on texts that they do not expect
                self._check_row(prompt, name, check, error)
                return Score(value=self.failure(), error=f"the checker {name} raised {one_line(error)}")
        fraction = sum(followed) / len(followed)
        value = fraction if self.score == "fraction" else float(all(followed))
        return Score(value=value, components={"followed": fraction})

    def _checks(self, prompt: Prompt) -> list[tuple[str, Callable[[str], object]]]:
        """Name and checker of each instruction of the row. Raises `RewardError` if the row is wrong."""
        checks = []
        for name, arguments in zip(*self._instructions(prompt), strict=True):
            checker = self._checkers()[name](name)
            try:
                checker.build_description(**{key: value for key, value in arguments.items() if value is not None})
                if "prompt" in (checker.get_instruction_args() or ()):
                    checker.build_description(prompt=prompt.text)
            except Exception as error:  # noqa: BLE001  boundary: checkers raise on arguments that they do not expect
                raise self._wrong_row(prompt, name, error) from None
            checks.append((name, checker.check_following))
        return checks

    def _check_row(self, prompt: Prompt, name: str, check: Callable[[str], object], error: Exception) -> None:
        """Raises `RewardError` if the checker raises on an ordinary text, too: then the row is wrong, not the text."""
        try:
            check(ORDINARY)
        except Exception:  # noqa: BLE001  boundary: as above
            raise self._wrong_row(prompt, name, error) from None

    def _wrong_row(self, prompt: Prompt, name: str, error: Exception) -> RewardError:
        where = f"{self._name}: prompt {prompt.id}"
        if type(error) is not LookupError or "nltk" not in str(error).lower():
            return RewardError(
                f"{where}: the checker of {name!r} cannot use its table in 'kwargs': {one_line(error)}; mend the row, "
                "or leave it out"
            )
        resource = str(error).partition("'")[2].partition("'")[0] or "punkt"
        return RewardError(
            f"{where} needs the NLTK data {resource!r}, which are not on this machine; "
            f"python -m nltk.downloader {resource}, or leave the row out"
        )

    def _checkers(self) -> Mapping[str, Any]:
        checkers: Mapping[str, Any] = import_extra(self.package, extra="ifeval", kind=self._name).INSTRUCTION_DICT
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
