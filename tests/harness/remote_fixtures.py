"""What tests of object stores share: one S3 server and one proxy for the session."""

from __future__ import annotations

import pytest

from converters.remote import patience, store
from converters.remote.content import BLOCK
from harness import remote_stores
from harness.support import GOLDEN

__all__ = ["forget", "proxy", "server", "session_proxy", "uploaded"]


@pytest.fixture(scope="session")
def server():
    pytest.importorskip("moto")
    with remote_stores.s3_server() as port:
        yield port


@pytest.fixture(scope="session")
def session_proxy(server):
    with remote_stores.Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(session_proxy, monkeypatch):
    """The server as the code under test reaches it; nothing is remembered from another test, pauses are short."""
    for name, value in remote_stores.environment(session_proxy.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DISTCKPT_RETRY_FOR", "20")
    for module in (patience, store):
        monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    session_proxy.set()
    session_proxy.taken()
    forget()
    yield session_proxy
    session_proxy.set()
    forget()


def forget():
    from converters.remote import content, tree

    tree.tree_of.cache_clear()
    store.store_of.cache_clear()
    patience._patience.clear()
    content._blocks, content._whole_objects = content._Cache(256 * BLOCK), content._Cache(1 << 29)


@pytest.fixture(scope="session")
def uploaded(server):
    done = {}

    def upload(golden):
        folder = golden.partition("/")[0]
        if folder not in done:
            done[folder] = remote_stores.upload(server, GOLDEN / folder, f"golden/{folder}")
        return f"{done[folder]}{golden[len(folder) :]}"

    return upload
