"""Says in the log which exchange between hosts has failed, where no call could raise it.

On a GPU the host goes on while exchanges are under way, and NCCL's watchdog ends the process if one
fails. What the watchdog knows of each is looked at here, so that the log says first what it was.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("flashmoe_megatron")

PERIOD_S = 0.02
GRACE_S = 2.0
"""By so much the watchdog has to be later than a timeout that is said here."""


@dataclass(frozen=True)
class _Expected:
    result: Any
    deadline: float
    describe: Callable[[str], str]
    is_over: Callable[[], bool]


class Lookout:
    """Looks after exchanges, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._expected: deque[_Expected] = deque()
        self._thread: threading.Thread | None = None
        self._is_said = False

    @property
    def num_expected(self) -> int:
        """Exchanges that have not been seen to end."""
        return len(self._expected)

    def expect(
        self,
        result: Any,
        timeout: float,
        describe: Callable[[str], str],
        *,
        is_over: Callable[[], bool],
    ) -> None:
        """Says it if an exchange fails or does not end in time; the first one alone.

        Args:
            result: The exchange's future, which is 0 where it has succeeded
                (``torch.distributed.Work.get_future_result``).
            timeout: Seconds from now.
            describe: Makes the sentence, from the reason.
            is_over: Whether the process groups are gone, and with them who waited for it.
        """
        if self._is_said:
            return
        self._expected.append(_Expected(result, time.monotonic() + timeout, describe, is_over))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="flashmoe-hosts", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        while not self._is_said:
            time.sleep(PERIOD_S)
            for _ in range(len(self._expected)):
                one = self._expected.popleft()
                problem = _problem(one)
                if problem is None:
                    self._expected.append(one)
                elif problem and not self._is_said and not one.is_over():
                    self._is_said = True
                    logger.error("%s", one.describe(problem))


def _problem(one: _Expected) -> str | None:
    """Returns the error of an exchange: empty if it had none, ``None`` while it is under way."""
    if one.result.done():
        kind = int(one.result.value())
        return "" if kind == 0 else f"NCCL's watchdog found an error of kind {kind}"
    return "it did not end in time" if time.monotonic() > one.deadline else None


lookout = Lookout()
"""The process's."""
