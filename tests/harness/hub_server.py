"""A hub of the tests' own: what `huggingface_hub` asks of huggingface.co to make a model and to read it, on the loopback.

It keeps files that nobody can see until a commit names them (LFS objects, by their SHA-256), branches, and who may write.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_a_token_that_nobody_may_see"
READ_ONLY = "hf_reads"


class Hub:
    """Its state.

    Attributes:
        repositories: Branches by the names of repositories; a branch is its commits, a commit the files by their paths.
        private: Which of them are.
        objects: What was uploaded, by digest.
        requests: `METHOD path` of all.
        fail: `[pattern, status, times]`: requests that are answered so instead.
    """

    def __init__(self):
        self.repositories, self.private, self.objects, self.requests, self.fail = {}, {}, {}, [], []
        self.messages, self.unknown = [], []

    def files(self, name, branch="main"):
        return self.repositories[name][branch][-1]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the client to acknowledge the headers
    hub: Hub
    url = ""

    def log_message(self, *_):
        pass

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.hub.requests.append(line)
        for rule in self.hub.fail:
            if rule[2] and re.search(rule[0], line):
                rule[2] -= 1
                self.answer(rule[1], {"error": "as the test wants it"})
                return
        for pattern, handle in ROUTES:
            match = re.fullmatch(pattern, line)
            if match:
                handle(self, body, **match.groupdict())
                return
        self.hub.unknown.append(line)
        self.answer(404, {"error": "no such page"})

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def answer(self, status, document, headers=()):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in [("Content-Length", str(len(body))), ("Content-Type", "application/json"), *headers]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def may_write(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token != TOKEN:
            self.answer(403 if token == READ_ONLY else 401, {"error": "no"})
        return token == TOKEN

    def whoami(self, body):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token in (TOKEN, READ_ONLY):
            self.answer(200, {"name": "somebody", "orgs": [{"name": "org"}], "type": "user", "auth": {}})
        else:
            self.answer(401, {"error": "Invalid username or password."})

    def validate(self, body):
        header = yaml.safe_load(json.loads(body)["content"].split("---")[1])
        self.answer(200, {"errors": [] if isinstance(header, dict) else [{"message": "no header"}], "warnings": []})

    def create(self, body):
        if not self.may_write():
            return
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
            return
        self.hub.repositories[name] = {"main": [{".gitattributes": b""}]}
        self.hub.private[name] = asked.get("visibility") == "private" or asked.get("private", False)
        self.answer(200, {"url": f"{self.url}/{name}"})

    def branch(self, body, name, revision):
        if self.may_write():
            branches = self.hub.repositories[name]
            if revision in branches:
                self.answer(409, {"error": "exists"})
                return
            branches[revision] = list(branches["main"])
            self.answer(200, {})

    def info(self, body, name, revision="main"):
        branch = self.hub.repositories.get(name, {}).get(self._branch(name, revision))
        if branch is None:
            kind = "RevisionNotFound" if name in self.hub.repositories else "RepoNotFound"
            self.answer(404, {"error": "not found"}, [("X-Error-Code", kind)])
            return
        siblings = [{"rfilename": path} for path in branch[-1]]
        sha = hashlib.sha1(f"{name} {self._branch(name, revision)} {len(branch)}".encode()).hexdigest()
        self.answer(200, {"id": name, "sha": sha, "siblings": siblings, "tags": [], "private": self.hub.private[name]})

    def _branch(self, name, revision):
        """Branches go by a commit, too, here."""
        for branch, commits in self.hub.repositories.get(name, {}).items():
            if revision in (branch, hashlib.sha1(f"{name} {branch} {len(commits)}".encode()).hexdigest()):
                return branch
        return None

    def tree(self, body, name, revision):
        branch = self._branch(name, revision)
        if branch is None:
            self.info(body, name, revision)
            return
        files = self.hub.files(name, branch)
        listed = [
            {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}
            for path, data in files.items()
        ]
        self.answer(200, listed)

    def preupload(self, body, name, revision):
        if self.may_write():
            asked = json.loads(body)["files"]
            modes = ["lfs" if f["path"].endswith((".safetensors", ".bin")) else "regular" for f in asked]
            self.answer(200, {"files": [{"path": f["path"], "uploadMode": mode, "shouldIgnore": False}
                                        for f, mode in zip(asked, modes, strict=True)]})  # fmt: skip

    def batch(self, body, name):
        if not self.may_write():
            return
        objects = []
        for asked in json.loads(body)["objects"]:
            upload = {"href": f"{self.url}/objects/{asked['oid']}"}
            missing = {} if asked["oid"] in self.hub.objects else {"actions": {"upload": upload}}
            objects.append({"oid": asked["oid"], "size": asked["size"], **missing})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body, digest):
        if hashlib.sha256(body).hexdigest() != digest:
            self.answer(400, {"error": "not what was promised"})
            return
        self.hub.objects[digest] = body
        self.answer(200, {})

    def commit(self, body, name, revision):
        if not self.may_write():
            return
        branch = self.hub.repositories[name][revision]
        files = dict(branch[-1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        branch.append(files)
        self.answer(200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "c" * 40})

    def resolve(self, body, name, revision, path):
        data = self.hub.files(name, self._branch(name, revision)).get(path)
        if data is None:
            self.answer(404, {"error": "no file"}, [("X-Error-Code", "EntryNotFound")])
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if span:
            begin, end = int(span[1]), int(span[2]) + 1
            self.answer(206, data[begin:end], [("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")])
        else:
            self.answer(200, data)


_NAME = "(?P<name>[^/]+/[^/]+)"
_REVISION = "(?P<revision>[^/]+)"
ROUTES = [
    ("GET /api/whoami-v2", _Handler.whoami),
    ("POST /api/validate-yaml", _Handler.validate),
    ("POST /api/repos/create", _Handler.create),
    (f"POST /api/models/{_NAME}/branch/{_REVISION}", _Handler.branch),
    (f"GET /api/models/{_NAME}", _Handler.info),
    (f"GET /api/models/{_NAME}/revision/{_REVISION}", _Handler.info),
    (f"GET /api/models/{_NAME}/tree/{_REVISION}/?", _Handler.tree),
    (f"POST /api/models/{_NAME}/preupload/{_REVISION}", _Handler.preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT /objects/(?P<digest>[0-9a-f]{64})", _Handler.put),
    (f"POST /api/models/{_NAME}/commit/{_REVISION}", _Handler.commit),
    (f"(?:GET|HEAD) /{_NAME}/resolve/{_REVISION}/(?P<path>.+)", _Handler.resolve),
]


@contextmanager
def hub_server():
    """Runs a hub in a thread; yields its state and its address."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub, handler.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
