"""The end of a run: everything is closed, and nothing that fails to close hides why the run ends."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Closing(contextlib.AsyncExitStack):
    """Closes what was opened, last first. What fails to close is logged, and the others are closed all the same."""

    def later(self, what: str, close: Callable[[], Any]) -> None:
        """Call ``close``, a function or coroutine function, at the end."""

        async def guarded() -> None:
            try:
                result = close()
                if inspect.isawaitable(result):
                    await result
            except Exception:  # boundary: trackers and data sources are users' code
                log.exception("%s did not close", what)

        self.push_async_callback(guarded)
