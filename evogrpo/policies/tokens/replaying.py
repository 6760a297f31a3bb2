"""Work that is the same for token after token: recorded once and replayed, where launching it takes longer.

A GPU does the few hundred operations of a token faster than a program launches them one by one. As CUDA graphs they
are launched together. What is recorded knows memory by its address, and nothing of what Python does: neither may what
a token reads and writes move, nor a number that differs between tokens be anywhere but in a tensor.
"""

from collections.abc import Callable
from contextlib import suppress

import torch

from evogrpo.warnings import warn

Work = Callable[[], None]
EAGER = 2
"""How often work is done as it is before it is recorded: libraries take what they need at the first time."""


def _as_graph(work: Work, device: torch.device) -> Work:
    """Record work as a CUDA graph, without doing it, and return what does it."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may do as they like
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # which would hide why
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


RECORDERS: dict[str, Callable[[Work, torch.device], Work]] = {"cuda": _as_graph}
"""What records work, without doing it, by the kind of device; what it returns does it."""


class Replays:
    """Does work by a recording of it, once there is one.

    Args:
        device: Where it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layout: object = None
        self._times = 0
        self._again: Work | None = None

    def do(self, work: Work, layout: object) -> None:
        """Do work.

        Args:
            work: What is to be done.
            layout: Equal to the one before where the same is to be done in the same memory; None = it is not
                recorded.

        Raises:
            torch.OutOfMemoryError: If memory runs out, whether while it is recorded or done.
        """
        if layout is None or layout != self._layout:
            self._layout, self._times, self._again = layout, 0, None
        self._times += 1
        if layout is not None and self._times > EAGER and self._again is None:
            self._again = self._recorded(work)
        (self._again or work)()

    def _recorded(self, work: Work) -> Work | None:
        record = RECORDERS.get(self._device.type)
        if record is None:
            return None
        try:
            return record(work, self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            del RECORDERS[self._device.type]  # not tried again by this process
            warn(
                "tokens are launched operation by operation, which takes longer: what one of them takes could not be "
                f"recorded as a CUDA graph ({str(error).splitlines()[0]})"
            )
            return None
