"""A stand-in for the hub's HTTP API on the loopback address, as far as huggingface_hub uses it to read models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants


@dataclass
class Hub:
    """Files of the hub, and the requests it received.

    Args:
        files: of each revision (a branch) of each repository.
        gated: repositories whose files are denied without ``token``.
        token: of an account that may read everything.
        cut: names of files of which half is sent.
        sizes: that are listed in place of a file's own.
        requests: method and path of each.
        tokens: that requests held.
    """

    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_of_an_account"
    cut: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def add(self, name: str, folder: Path | str, revision: str = "main", **more: bytes) -> str:
        """Publish the files of a folder, and ``more``; return the commit."""
        held = {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
        self.files[name, revision] = held | more
        return self.commit(name, revision)

    def commit(self, name: str, revision: str) -> str:
        """Return the commit of a branch; of a commit itself."""
        if len(revision) == 40:
            return revision
        digest = hashlib.sha1()
        for file, data in sorted(self.files[name, revision].items()):
            digest.update(file.encode() + data)
        return digest.hexdigest()

    def read(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Return the files at a branch or commit; None if there is no such revision."""
        for (repository, branch), files in self.files.items():
            if repository == name and revision in (branch, self.commit(name, branch)):
                return files
        return None

    def downloads(self) -> list[str]:
        """Return the names of the files that were sent, in order."""
        return [path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/resolve/" in path]


def use_hub(monkeypatch: Any, url: str) -> None:
    """Let huggingface_hub ask the hub at ``url``, although tests run offline."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(True)

        def do_HEAD(self) -> None:
            self.answer(False)

        def answer(self, body: bool) -> None:
            path = urlsplit(self.path).path
            token = self.headers.get("Authorization")
            hub.requests.append((self.command, path))
            hub.tokens.add(token)
            listing = path.startswith("/api/models/")
            parts = [unquote(part) for part in path.removeprefix("/api/models/" if listing else "/").split("/")]
            name = "/".join(parts[:2])
            revision = parts[3] if len(parts) > 3 else "main"
            if not any(repository == name for repository, _ in hub.files):
                return self.error(404, "RepoNotFound")
            if (files := hub.read(name, revision)) is None:
                return self.error(404, "RevisionNotFound")
            commit = hub.commit(name, revision)
            if listing:
                sizes = {file: hub.sizes.get(file, len(data)) for file, data in files.items()}
                siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
                return self.send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode(), commit, body)
            if name in hub.gated and token != f"Bearer {hub.token}":
                return self.error(403, "GatedRepo")
            if (file := "/".join(parts[4:])) not in files:
                return self.error(404, "EntryNotFound", commit)
            return self.send(files[file], commit, body, cut=file in hub.cut)

        def send(self, data: bytes, commit: str, body: bool, cut: bool = False) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if cut else data)

        def error(self, status: int, code: str, commit: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
