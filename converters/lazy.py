"""Sequences whose items are made when they are taken: a hundred thousand tasks, a million paths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

_T = TypeVar("_T")


class LazySequence(Sequence[_T]):
    """A sequence whose items are made when they are taken."""

    @abstractmethod
    def _item(self, position: int) -> _T:
        """The item at a position, counted from 0."""

    @overload
    def __getitem__(self, position: int) -> _T: ...
    @overload
    def __getitem__(self, position: slice) -> list[_T]: ...
    def __getitem__(self, position: int | slice) -> _T | list[_T]:
        positions = range(len(self))[position]
        return self._item(positions) if isinstance(positions, int) else [self._item(number) for number in positions]
