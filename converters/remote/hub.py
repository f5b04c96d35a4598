"""Models on the Hugging Face hub, read by ranges at one commit: `hf://org/name`, `hf://org/name@revision`.

Token, endpoint and proxies are those of `huggingface_hub`: `HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`.
"""

from __future__ import annotations

import errno
from importlib import import_module
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.remote.failures import CutError, StatedError
from converters.remote.store import Properties, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.remote.address import Root


def hub_modules() -> tuple[Any, Any, Any]:
    """`huggingface_hub`, its `utils` and its `errors`, which only addresses of the hub need.

    Raises:
        RequestError: It is not installed.
    """
    try:
        hub, utils, errors = (import_module(f"huggingface_hub{part}") for part in ("", ".utils", ".errors"))
    except ImportError:
        raise RequestError(
            "addresses of the hub need the package huggingface_hub, which is not installed",
            hint="pip install 'distckpt[remote]'",
        ) from None
    return hub, utils, errors


class HubStore(Store):
    """A repository at one commit: its branch is looked up once, so that nothing changes while it is read."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._name, _, self._revision = root.name.partition("@")
        self._hub, self._utils, self._errors = hub_modules()
        self._files: dict[str, Properties] | None = None
        self._commit = ""

    def list(self, prefix: str, *, deep: bool) -> Iterator[tuple[str, Properties | None]]:
        """See `Store`; all of a repository is listed at once."""
        within, folders = f"{prefix}/" if prefix else "", set[str]()
        for path, properties in self._listed().items():
            inner, slash, _ = path[len(within) :].partition("/")
            if not path.startswith(within):
                continue
            if deep or not slash:
                yield path, properties
            elif inner not in folders:
                folders.add(inner)
                yield f"{within}{inner}", None

    def head(self, key: str) -> Properties:
        """See `Store`."""
        try:
            return self._listed()[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", f"{self.root}/{key}") from None

    def get(self, key: str, start: int, end: int) -> tuple[bytes, Properties]:
        """See `Store`."""
        properties = self.head(key)
        if end <= start:
            return b"", properties
        url = self._hub.hf_hub_url(self._name, key, revision=self._commit)
        headers = {
            **self._utils.build_hf_headers(),
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        answer = self._hub.get_session().get(url, headers=headers, follow_redirects=True, timeout=120)
        if answer.status_code == 200 and len(answer.content) == properties.size:  # a small file, all of it
            return answer.content[start:end], properties
        if answer.status_code != 206:
            raise self._refusal(answer.status_code)
        if len(answer.content) != end - start:
            raise CutError(f"{len(answer.content):,} bytes instead of {end - start:,}")
        return answer.content, properties

    def _listed(self) -> dict[str, Properties]:
        if self._files is None:
            api, errors = self._hub.HfApi(), self._errors
            try:
                info = api.model_info(self._name, revision=self._revision or None)
                entries = list(api.list_repo_tree(self._name, recursive=True, revision=info.sha))
            except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
                raise StatedError(errno.EACCES, self._words(type(error).__name__), str(self.root)) from None
            self._commit = info.sha
            self._files = {
                entry.path: Properties(entry.size, 0.0, entry.lfs.sha256 if entry.lfs else entry.blob_id)
                for entry in entries
                if hasattr(entry, "size")
            }
        return self._files

    def _refusal(self, status: int) -> Exception:
        if status in (401, 403):
            return StatedError(errno.EACCES, self._words("GatedRepoError"), str(self.root))
        return ConnectionError(f"status {status}")

    def _words(self, kind: str) -> str:
        if kind == "GatedRepoError":
            return (
                f"{self._name} is gated or private: accept its terms on the hub's page, then log in "
                "(hf auth login) or set HF_TOKEN"
            )
        if kind == "RevisionNotFoundError":
            return f"{self._name} has no revision {self._revision}"
        return f"there is no model {self._name} on the hub, or it is private and no token for it is set (HF_TOKEN)"
