"""Rewards for following verifiable instructions (three paragraphs, no commas, ...)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from plasmid import Prompt, Score
from plasmid.components import kind_of
from plasmid.errors import RewardError, one_line

from ..extras import import_extra
from ..pooled import PooledReward

ORDINARY = "This is a plain text. It has some words.\n\nIt has two paragraphs, too."
"""A text on which no checker raises if its arguments are valid."""


class Instructions(PooledReward):
    """Checks each instruction of the row with the package if-verifiable.

    The row has ``instruction_id_list`` and ``kwargs``, one table per instruction, as in the published datasets.
    Checkers run in workers without network access, so the NLTK data that some of them need must already be installed.
    """

    strict: bool = True
    """Judge the text as is. If false, variants without the first line, the last line and asterisks are tried as
    well."""
    score: Literal["all", "fraction"] = "all"
    """``all`` gives 1.0 only if all instructions are followed; ``fraction`` gives the fraction that are."""
    package: ClassVar[str]
    batched: ClassVar[bool] = True

    def packages(self) -> Mapping[str, str]:
        return dict.fromkeys(("langdetect", "if_verifiable"), "plasmid-rewards[ifeval]")

    def warm(self) -> None:
        langdetect = import_extra("langdetect", extra="ifeval", kind=kind_of(self))
        langdetect.DetectorFactory.seed = 0  # language detection is random otherwise
        langdetect.detect(ORDINARY)  # reads its profiles, which takes longer than to judge a text
        self._checkers()

    def judge(self, prompt: Prompt, text: str) -> Score:
        common = import_extra("if_verifiable.common", extra="ifeval", kind=kind_of(self))
        checks = self._checks(prompt)
        text = common.strip_thinking(text)
        if not text.strip():
            return Score(value=self.failure(), error="the text is empty")
        variants = [text] if self.strict else [v for v in common.get_loose_transformations(text) if v.strip()]
        followed = []
        for name, check in checks:
            try:
                followed.append(any(check(variant) for variant in variants))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  boundary: checkers may raise on unexpected texts
                self._check_row(prompt, name, check, error)
                return Score(value=self.failure(), error=f"the checker {name} raised {one_line(error)}")
        fraction = sum(followed) / len(followed)
        value = fraction if self.score == "fraction" else float(all(followed))
        return Score(value=value, components={"followed": fraction})

    def _checks(self, prompt: Prompt) -> list[tuple[str, Callable[[str], object]]]:
        """Return the name and the checker of each instruction of the row. Raises `RewardError` for an invalid row."""
        checks = []
        for name, arguments in zip(*self._instructions(prompt), strict=True):
            checker = self._checkers()[name](name)
            try:
                checker.build_description(**{key: value for key, value in arguments.items() if value is not None})
                if "prompt" in (checker.get_instruction_args() or ()):
                    checker.build_description(prompt=prompt.text)
            except Exception as error:  # noqa: BLE001  boundary: checkers may raise on unexpected arguments
                raise self._wrong_row(prompt, name, error) from None
            checks.append((name, checker.check_following))
        return checks

    def _check_row(self, prompt: Prompt, name: str, check: Callable[[str], object], error: Exception) -> None:
        """Raise `RewardError` if the checker raises on an ordinary text, too: then the row is wrong, not the text."""
        try:
            check(ORDINARY)
        except Exception:  # noqa: BLE001  boundary: as above
            raise self._wrong_row(prompt, name, error) from None

    def _wrong_row(self, prompt: Prompt, name: str, error: Exception) -> RewardError:
        where = f"{kind_of(self)}: prompt {prompt.id}"
        if type(error) is not LookupError or "nltk" not in str(error).lower():
            return RewardError(
                f"{where}: the checker of {name!r} cannot use its table in 'kwargs': {one_line(error)}; fix or "
                "remove the row"
            )
        resource = str(error).partition("'")[2].partition("'")[0] or "punkt"
        return RewardError(
            f"{where} needs the NLTK data {resource!r}, which is not installed; "
            f"python -m nltk.downloader {resource}, or remove the row"
        )

    def _checkers(self) -> Mapping[str, Any]:
        checkers: Mapping[str, Any] = import_extra(self.package, extra="ifeval", kind=kind_of(self)).INSTRUCTION_DICT
        return checkers

    def _instructions(self, prompt: Prompt) -> tuple[list[str], list[dict[str, Any]]]:
        ids, arguments = prompt.metadata.get("instruction_id_list"), prompt.metadata.get("kwargs")
        kind = kind_of(self)
        for name, value in (("instruction_id_list", ids), ("kwargs", arguments)):
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise RewardError(f"{kind}: prompt {prompt.id} has no list {name!r} of checks")
        assert ids is not None and arguments is not None
        if len(ids) != len(arguments):
            raise RewardError(
                f"{kind}: prompt {prompt.id} has {len(ids)} instructions, but {len(arguments)} tables in 'kwargs'"
            )
        unknown = [id_ for id_ in ids if id_ not in self._checkers()]
        if unknown:
            raise RewardError(f"{kind}: prompt {prompt.id} has an instruction without a checker: {unknown[0]!r}")
        return list(ids), [dict(table or {}) for table in arguments]


class IFEval(Instructions):
    """1.0 if all IFEval instructions of the row are followed, else 0.0; also 0.0 if the text is empty.

    Zhou et al. 2023, https://arxiv.org/abs/2311.07911. Needs the extra ``ifeval``.
    """

    kind: Literal["ifeval"] = "ifeval"
    package: ClassVar[str] = "if_verifiable.ifeval"


class IFBench(Instructions):
    """1.0 if all IFBench instructions of the row are followed, else 0.0; also 0.0 if the text is empty.

    Pyatkin et al. 2025, https://arxiv.org/abs/2507.02833. Needs the extra ``ifeval``, and NLTK data for some rows.
    """

    kind: Literal["ifbench"] = "ifbench"
    package: ClassVar[str] = "if_verifiable.ifbench"
