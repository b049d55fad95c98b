"""Lets gloo's threads come to rest before a process of the tests ends.

They free what the last collective has moved, for which they need the interpreter. Where that ends
meanwhile, Python before 3.14 ends the thread, and C++ the process: "terminate called without an
active exception". Python imports this module at its start where ``PYTHONPATH`` has this folder.
"""

import atexit
import os
import threading
import time

REST_S = 0.1
TASKS = "/proc/self/task"


def _rest() -> None:
    """Waits a moment where there are threads that Python has not made."""
    if os.path.isdir(TASKS) and len(os.listdir(TASKS)) > threading.active_count():
        time.sleep(REST_S)


atexit.register(_rest)

if os.environ.get("FLASHMOE_TESTS_FORKED_FROM"):
    import stand_in

    stand_in.hand_over_or_fail(os.environ["FLASHMOE_TESTS_FORKED_FROM"])
