"""Upload to the Hugging Face hub: the model is written to a disk, uploaded file by file, and published by one commit."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from converters.errors import DestinationError
from converters.events import FileDone, Moved
from converters.execute.upload import Upload
from converters.names import printable
from converters.remote.hub_writing import HubWriter

if TYPE_CHECKING:
    from pathlib import Path

    from converters.execute.work_sharing import WorkSharing

_CARD = "README.md"
_NOT_OURS = (_CARD, ".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""What people keep beside a model; it does not make a repository full, and is not removed."""


class HubUpload(Upload):
    """As `Upload`, to a repository of the hub, which is private if this makes it.

    What was uploaded before a kill is not sent again: the hub knows it by its digest. Nobody sees any of it until the
    commit.
    """

    @cached_property
    def _hub(self) -> HubWriter:
        return HubWriter(self.destination)

    def _prepare_store(self) -> bool:
        """See `Upload`."""
        existing = self._hub.files()
        full = [name for name in existing if name not in _NOT_OURS]
        if full and not self._overwrite:
            raise DestinationError(
                f"{printable(str(self.destination))} holds a model already",
                hint="choose another name, or add --overwrite: one commit replaces it, and its history keeps it",
            )
        self._hub.create()
        return False

    def _run(self, sharing: WorkSharing) -> None:
        if not sharing.leads:
            return
        files = self._staged_files()
        self._announce(files, sharing)
        existing = self._hub.files()
        card = existing and _CARD in existing and not self._overwrite
        additions = [self._put(name, path, sharing) for name, path in files.items() if name != _CARD or not card]
        stale = [name for name in existing if name not in files and name not in _NOT_OURS]
        self._hub.commit(additions, stale, "Add the model that distckpt exported")

    def _put(self, name: str, path: Path, sharing: WorkSharing) -> object:
        sharing.check()
        addition, size = self._hub.put_file(path, name), path.stat().st_size
        sharing.report(Moved(size))
        sharing.report(FileDone(name, size))
        return addition
