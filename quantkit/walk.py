"""Running one decoder block over all calibration batches, stopping before each group of linears.

Solving is sequential: when the first group of a block has its codes, the second must see what the quantized
first one makes of the data. Two ways to get there, with equal numbers:

- *suspended*: every batch's forward pass is a coroutine that halts at each group. Each pass runs once; the
  halted frames hold activations, so this is for what fits a memory limit.
- *rerun*: the pass starts from the block's input again for each group and is cut off there. Needs no memory,
  costs about twice the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from quantkit.skeleton import BlockCall, run_block


class HiddenStates:
    """Hidden states ``[sequences, tokens, hidden]`` float32, in memory or, past a limit, in a mapped file."""

    def __init__(self, shape: tuple[int, ...], scratch: Path | None) -> None:
        size = shape[0] * shape[1] * shape[2]
        self._file = scratch
        if scratch is None:
            self.data = torch.empty(shape)
        else:
            self.data = torch.from_file(str(scratch), shared=True, size=size, dtype=torch.float32).view(shape)

    def close(self) -> None:
        del self.data
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Batches:
    """Sequences in slices of ``size``; the block's recorded call for each slice's shape."""

    def __init__(self, count: int, size: int) -> None:
        self.slices = [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def shapes(self) -> list[int]:
        """Distinct numbers of sequences in a slice."""
        return sorted({s.stop - s.start for s in self.slices})


class _Cut(Exception):
    """Ends a forward pass whose remainder is not needed."""


@contextmanager
def _before(modules: Sequence[nn.Module], hook: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Calls ``hook(index, input)`` before each module runs."""
    handles = []
    try:
        for i, module in enumerate(modules):

            def pre(_module: nn.Module, args: tuple[Any, ...], index: int = i) -> None:
                hook(index, args[0])

            handles.append(module.register_forward_pre_hook(pre))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Walk:
    """One block, one stream of hidden states, visited group by group.

    heads: the first linear of each group, in forward order. ``visit(i)`` yields the input of group i for every
    batch; each group must be visited once, in order. ``finish(out)`` writes the block's output for every batch.
    The weights of a group may change after its visit.
    """

    def __init__(
        self,
        block: nn.Module,
        heads: Sequence[nn.Module],
        hidden: Tensor,
        batches: Batches,
        calls: dict[int, BlockCall],
        suspend: bool,
    ) -> None:
        self.block, self.heads, self.hidden, self.batches, self.calls = (
            block,
            list(heads),
            hidden,
            batches,
            calls,
        )
        self.suspend = suspend
        self._halted: list[greenlet.greenlet] = []

    def _run(self, at: slice) -> Tensor:
        return run_block(self.block, self.hidden[at], self.calls[at.stop - at.start])

    def visit(self, group: int) -> Iterator[Tensor]:
        """The input of this group for every batch, in order."""
        return self._resume(group) if self.suspend else self._rerun(group)

    def _rerun(self, group: int) -> Iterator[Tensor]:
        for at in self.batches.slices:
            found: list[Tensor] = []

            def cut(index: int, x: Tensor, found: list[Tensor] = found) -> None:
                if index == group:
                    found.append(x)
                    raise _Cut

            with _before(self.heads, cut):
                try:
                    self._run(at)
                except _Cut:
                    yield found.pop()

    def _resume(self, group: int) -> Iterator[Tensor]:
        main = greenlet.getcurrent()

        def halt(index: int, x: Tensor) -> None:
            if greenlet.getcurrent() is not main:
                main.switch((index, x))

        # a frame that halted in an earlier visit goes on from inside its own hook; the next group finds this one
        with _before(self.heads, halt):
            if not self._halted:
                self._halted = [greenlet.greenlet(self._run) for _ in self.batches.slices]
                steps = [lambda c=c, at=at: c.switch(at) for c, at in zip(self._halted, self.batches.slices)]
            else:
                steps = [c.switch for c in self._halted]
            for step in steps:
                index, x = step()
                assert index == group, "every group must be visited, in forward order"
                yield x

    @torch.no_grad()
    def finish(self, out: Tensor) -> None:
        """Write the block's output ``[sequences, tokens, hidden]``; may be the input's own memory."""
        for i, at in enumerate(self.batches.slices):
            # without hooks a halted frame runs to its end in one switch
            out[at] = self._halted[i].switch() if self._halted else self._run(at)
