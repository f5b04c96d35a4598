"""Models written to the Hugging Face hub: files first, each where it cannot be seen yet, then one commit that shows all.

Token, endpoint and proxies are those of `huggingface_hub`: `HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, TypeVar

from converters.remote.failures import StatedError
from converters.remote.hub import hub_modules
from converters.remote.patience import patiently

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from converters.remote.address import RemotePath

_T = TypeVar("_T")


class HubWriter:
    """Writes a model repository, at a branch.

    Args:
        destination: The repository, `hf://org/name` or `hf://org/name@branch`.

    Raises:
        RequestError: `huggingface_hub` is not installed.
    """

    def __init__(self, destination: RemotePath) -> None:
        self.root = destination.root_and_key[0]
        self.name, _, branch = self.root.name.partition("@")
        self._branch = branch or "main"
        self._hub, self._utils, self._errors = hub_modules()
        self._utils.disable_progress_bars()  # they would be drawn over ours
        self._utils.logging.set_verbosity_error()  # its warnings show addresses that were signed
        self._api: Any = self._hub.HfApi()

    def files(self) -> list[str]:
        """Names of what the branch holds; nothing where there is no such repository or branch, or none that may be seen.

        Raises:
            OSError: The hub cannot be asked.
        """
        errors = self._errors

        def ask() -> list[str]:
            try:
                return list(self._api.list_repo_files(self.name, revision=self._branch))
            except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
                return []

        return self._ask(ask)

    def create(self) -> None:
        """Makes the repository, a private one, and the branch, where they are missing.

        Raises:
            OSError: No token, or none that may do so, or the hub cannot be asked.
        """
        self._ask(self._api.whoami)
        self._ask(lambda: self._api.create_repo(self.name, private=True, exist_ok=True))
        if self._branch != "main":
            self._ask(lambda: self._api.create_branch(self.name, branch=self._branch, exist_ok=True))

    def put_file(self, path: Path, name: str) -> Any:
        """Uploads what a file holds, if the hub does not have it yet; nobody sees it before `commit`.

        Raises:
            OSError: The hub cannot be asked any more.
        """

        def put() -> Any:
            addition = self._hub.CommitOperationAdd(name, str(path))
            self._api.preupload_lfs_files(self.name, [addition], revision=self._branch)
            return addition

        return self._ask(put)

    def commit(self, additions: Sequence[Any], removed: Iterable[str], message: str) -> None:
        """Shows what was uploaded, and removes files, in one commit.

        Raises:
            OSError: The hub refuses, or cannot be asked any more.
        """
        operations = [*additions, *(self._hub.CommitOperationDelete(name, is_folder=False) for name in removed)]
        self._ask(lambda: self._api.create_commit(self.name, operations, commit_message=message, revision=self._branch))

    def _ask(self, request: Callable[[], _T]) -> _T:
        """The hub's answer to a request, repeated while its failure may be temporary. The hub's own texts are not shown."""
        errors = self._errors

        def once() -> _T:
            try:
                try:
                    return request()
                except RuntimeError as error:  # around what went wrong while a file was sent
                    raise error.__cause__ or error from None
            except errors.LocalTokenNotFoundError:
                raise self._refused("there is no token for the hub") from None
            except errors.HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                if status == 401:
                    raise self._refused("the hub does not accept the token (401)") from None
                if status in (402, 403):
                    raise self._refused(f"the token may not write to {self.name} ({status})") from None
                raise

        return patiently(self.root, "", once)

    def _refused(self, label: str) -> StatedError:
        way = "set HF_TOKEN, or log in with hf auth login, with a token that may write"
        return StatedError(errno.EACCES, f"{label}: {way}", str(self.root))
