"""Which engine process serves which session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SessionRoutes:
    """Sends every new session to the engine with the fewest sessions, and keeps it there until it leaves."""

    def __init__(self, num_engines: int) -> None:
        self._loads = [0] * num_engines
        self._engines: dict[str, int] = {}

    def find(self, session_ids: Sequence[str]) -> list[int]:
        """The engine of each session, chosen now where it is new."""
        return [self._find(session) for session in session_ids]

    def _find(self, session: str) -> int:
        if session not in self._engines:
            engine = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._engines[session] = engine
            self._loads[engine] += 1
        return self._engines[session]

    def forget(self, session_ids: Iterable[str]) -> None:
        """These sessions have ended."""
        for session in session_ids:
            engine = self._engines.pop(session, None)
            if engine is not None:
                self._loads[engine] -= 1
