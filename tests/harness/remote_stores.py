"""An S3 server of moto's on the loopback, and a proxy before it that counts requests and spoils some of them."""

from __future__ import annotations

import http.client
import http.server
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

BUCKET = "models"


@contextmanager
def started(*arguments):
    """Runs one of the servers below in a process of its own; yields the port that the system gave it."""
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def s3_server():
    """Moto's server; yields its port."""
    with started("s3") as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield port


def environment(port):
    """What a person sets to reach it."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "a-secret-that-nobody-may-see",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def upload(port, folder, prefix):
    """Puts all files of a folder below a prefix; returns the address."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            put(port, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


@lru_cache
def bucket(port):
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        access_key_id="testing",
        secret_access_key="x",
        region="us-east-1",
        endpoint=f"http://127.0.0.1:{port}",
        client_options={"allow_http": True},
    )


def put(port, key, data):
    import obstore

    obstore.put(bucket(port), key, data)


def keys(port, prefix):
    """All keys below a prefix, with the bytes of each."""
    import obstore

    store = bucket(port)
    found = [entry["path"] for page in obstore.list(store, prefix) for entry in page]
    return {path[len(prefix) + 1 :]: bytes(obstore.get(store, path).bytes()) for path in found}


class Proxy:
    """Runs a proxy before a server in a process of its own: it counts requests, fails some, and cuts the bodies of others.

    `set(...)` takes `fail` (every so many-th request is answered `status`), `cut` (every so many-th body ends in the
    middle), `seconds` (each request waits so long), `rate` (bytes per second of each body), `whole` (ranges are not
    understood: a body is all of the object), and `rules`: a list of `[method, pattern of the path, status, body, times]`
    answered instead.
    """

    def __init__(self, port):
        self._running = started(port)

    def __enter__(self):
        self.port = self._running.__enter__()
        return self

    def __exit__(self, *error):
        self._running.__exit__(*error)

    def _ask(self, method, body=None):
        url = f"http://127.0.0.1:{self.port}/--proxy--"
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=200) as answer:
            return json.loads(answer.read())

    def set(self, **values):
        self._ask("PUT", json.dumps(values).encode())

    def taken(self):
        """The requests since the last time, as `[method, path, range]`."""
        return self._ask("DELETE")


DEFAULTS = {"fail": 0, "cut": 0, "status": 503, "seconds": 0.0, "rate": 0, "rules": [], "whole": False}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body waits 40 ms for the client to acknowledge the headers
    target = 0
    requests: ClassVar[list] = []
    values: ClassVar[dict] = dict(DEFAULTS)
    lock = threading.Lock()

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        if self.path == "/--proxy--":
            self.control(body)
            return
        with self.lock:
            self.requests.append([self.command, self.path, self.headers.get("Range")])
            number, instead = len(self.requests), self.instead(len(self.requests))
        time.sleep(self.values["seconds"])
        if instead is not None:
            data = instead[1].encode()
            self.reply(instead[0], [("Content-Length", str(len(data)))], data, len(data))
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=200)
        dropped = ("connection", "range") if self.values["whole"] else ("connection",)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection.request(self.command, self.path, body=body, headers=headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        kept = [(n, v) for n, v in response.getheaders() if n.lower() not in ("transfer-encoding", "connection")]
        if not any(name.lower() == "content-length" for name, _ in kept):
            kept.append(("Content-Length", str(len(data))))
        cut = self.values["cut"] and number % self.values["cut"] == 0 and self.command == "GET" and len(data) > 1
        self.reply(response.status, kept, data, len(data) // 2 if cut else len(data))

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def control(self, body):
        with self.lock:
            answer = list(self.requests)
            if self.command == "DELETE":
                self.requests.clear()
            if body:
                self.values.update(DEFAULTS | json.loads(body))
        data = json.dumps(answer).encode()
        self.reply(200, [("Content-Length", str(len(data)))], data, len(data))

    def instead(self, number):
        for rule in self.values["rules"]:
            method, pattern, status, text, times = rule
            if times and method in ("*", self.command) and re.search(pattern, self.path):
                rule[4] -= 1
                return status, text
        if self.values["fail"] and number % self.values["fail"] == 0:
            return self.values["status"], "<Error><Code>SlowDown</Code></Error>"
        return None

    def reply(self, status, headers, body, length):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for at in range(0, length, 1 << 16):
                piece = body[at : min(at + (1 << 16), length)]
                self.wfile.write(piece)
                if self.values["rate"]:
                    time.sleep(len(piece) / self.values["rate"])
        self.close_connection = self.close_connection or length < len(body)


class _Files(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder in ranges; and the folders in it as models, in the words of the Hugging Face hub."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder = Path()
    seconds, rate = 0.0, 0.0  # of each request; bytes per second of each

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        model = re.fullmatch("/api/models/org/([^/]+)(/revision/main|/tree/[0-9a-f]{40})?/?", path)
        file = re.fullmatch(r"/org/([^/]+)/resolve/[0-9a-f]{40}/(.*)", path)
        if model and model[1] == "gated":
            self.answer(403, b"{}", [("X-Error-Code", "GatedRepo"), ("Content-Type", "application/json")])
        elif model and (self.folder / model[1]).is_dir():
            listed = (model[2] or "").startswith("/tree/")
            files = [p for p in sorted((self.folder / model[1]).rglob("*")) if p.is_file()]
            names = {str(p.relative_to(self.folder / model[1])): p.stat().st_size for p in files}
            tree = [{"type": "file", "oid": "0" * 40, "size": size, "path": name} for name, size in names.items()]
            document = tree if listed else {"id": f"org/{model[1]}", "sha": "a" * 40, "siblings": [], "tags": []}
            self.answer(200, json.dumps(document).encode(), [("Content-Type", "application/json")])
        elif not model and (found := self.folder / (f"{file[1]}/{file[2]}" if file else path[1:])).is_file():
            self.send_range(found)
        else:
            self.answer(404, b"", [("X-Error-Code", "RepoNotFound")])

    do_HEAD = do_GET

    def send_range(self, path):
        time.sleep(self.seconds)
        span, size = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""), path.stat().st_size
        begin, end = (int(span[1]), min(int(span[2]) + 1, size)) if span else (0, size)
        tag = f'"{size:x}-{path.stat().st_mtime_ns:x}"'
        headers = [("ETag", tag), ("Content-Type", "application/octet-stream"), ("Content-Length", str(end - begin))]
        self.send_response(206 if span else 200)
        for name, value in [*headers, *([("Content-Range", f"bytes {begin}-{end - 1}/{size}")] if span else [])]:
            self.send_header(name, value)
        self.end_headers()
        with path.open("rb") as file:
            file.seek(begin)
            while self.command != "HEAD" and begin < end:
                piece = file.read(min(1 << 18, end - begin))
                self.wfile.write(piece)
                begin += len(piece)
                if self.rate:
                    time.sleep(len(piece) / self.rate)

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in [*headers, ("Content-Length", str(len(body)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def file_server(folder, seconds=0.0, rate=0.0):
    """A web server of the files of a folder; a context manager that gives its port.

    Each request waits `seconds`, and then comes with `rate` bytes a second; 0: as fast as it goes.
    """
    return started(folder, seconds, rate)


def serve_s3():
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    print(server.port, flush=True)
    server.serve_forever()


def serve(what, *limits):
    if what == "s3":
        serve_s3()
    handler = _Handler if what.isdigit() else _Files
    if what.isdigit():
        _Handler.target = int(what)
    else:
        _Files.folder, _Files.seconds, _Files.rate = Path(what), *map(float, limits)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(*sys.argv[1:])
