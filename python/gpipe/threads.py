"""Threads of stages that a deadline has given up, at the interpreter's exit."""

from __future__ import annotations

import ctypes
import sys
import time
from types import FrameType

from .layer import Layer

PATIENCE = 2.0  # seconds


class _Ended(BaseException):
    """Raised in a layer that still runs. No `except Exception` of the layer's catches it."""


def end_layers() -> None:
    """Ends layers whose Python code still runs after their step was given up.

    The interpreter ends a thread that comes back to it after its exit by unwinding the thread's
    stack. The frames of the engine do not allow that: the process would abort, and lose its exit
    code. A layer that waits outside of Python for ever (for a lock, say) does not come back.
    """
    end = time.monotonic() + PATIENCE
    told: set[int] = set()
    while (running := _running()) and time.monotonic() < end:
        for thread in running - told:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread),
                                                       ctypes.py_object(_Ended))
        told |= running
        time.sleep(0.01)


def _running() -> set[int]:
    """The threads that run a layer."""
    return {thread for thread, frame in sys._current_frames().items() if _is_in_layer(frame)}


def _is_in_layer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is Layer.__call__.__code__:
            return True
        frame = frame.f_back
    return False
