"""A small server that speaks the hub's protocol: repositories of models, their files by revision, uploads by commits.

    HF_ENDPOINT=http://127.0.0.1:PORT     has the hub's client and transformers talk to it

Each push is a commit with all files of the one before it. Every file is sent within the commit, none by LFS. What is
private is seen with the token alone.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
OWNER = "me"


class Repository:
    """Commits by their names, each the content of files by path, and branches."""

    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {f"{0:040x}": {}}
        self.refs = {"main": f"{0:040x}"}

    def commit(self, branch: str, files: dict[str, bytes], removed: set[str]) -> str:
        kept = {path: held for path, held in self.commits[self.refs[branch]].items() if path not in removed}
        name = f"{len(self.commits):040x}"
        self.commits[name] = kept | files
        self.refs[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        name = self.refs.get(revision, revision)
        return name if name in self.commits else None


class Hub(ThreadingHTTPServer):
    """The server. ``asked`` are the methods and paths of all requests, in their order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers as long as the context lasts."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a header and a body are two writes: the second would wait for an answer

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "refused"}', X_Error_Code=code, X_Error_Message=code)

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        """The repository, or a refusal that is sent: as on the hub what is private and what is not there look alike."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._known()):
            self._refuse(404 if self._known() else 401, "RepoNotFound")
            return None
        return found

    def _commit(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit of a revision, or a refusal that is sent."""
        repository = self._repository(name)
        if repository is None:
            return None
        commit = repository.find(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return None
        return repository, commit

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        if path == "/api/whoami-v2":
            return self._json({"name": OWNER, "type": "user"}) if self._known() else self._refuse(401, "")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(*match.groups())
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._info(match[1], match[2] or "main")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._tree(match[1], match[2], match[3] or "")
        return self._refuse(404, "NotFound")

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        repository, commit = found
        held = repository.commits[commit].get(path)
        if held is None:
            return self._refuse(404, "EntryNotFound")
        tag = hashlib.sha256(held).hexdigest()
        self._send(200, held, X_Repo_Commit=commit, ETag=f'"{tag}"', Accept_Ranges="none")

    def _info(self, name: str, revision: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        repository, commit = found
        files = [{"rfilename": path} for path in sorted(repository.commits[commit])]
        self._json({"id": name, "sha": commit, "siblings": files, "private": repository.private, "tags": []})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        found = self._commit(name, revision)
        if found is None:
            return
        repository, commit = found
        held = repository.commits[commit]
        inside = [path for path in sorted(held) if not folder or path.startswith(f"{folder}/")]
        if folder and not inside:
            return self._refuse(404, "EntryNotFound")
        entries = [
            {"type": "file", "path": path, "size": len(held[path]), "oid": hashlib.sha1(held[path]).hexdigest()}
            for path in inside
        ]
        self._json(entries)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"POST {path}")
        body = self._read()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if not self._known():
            return self._refuse(401, "")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", path)
        repository = None if match is None else self._repository(match[1])
        if match is None:
            return self._refuse(404, "NotFound")
        if repository is None:
            return None
        if repository.find(match[3]) is None:
            return self._refuse(404, "RevisionNotFound")
        if match[2] == "preupload":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        lines = [json.loads(line) for line in body.splitlines()]
        new = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        removed = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        commit = repository.commit(match[3], new, removed)
        address = f"{self.server.endpoint}/{match[1]}/commit/{commit}"
        return self._json({"success": True, "commitOid": commit, "commitUrl": address})

    def _create(self, asked: dict[str, object]) -> None:
        name = f"{asked.get('organization') or OWNER}/{asked['name']}"
        if name in self.server.repositories:
            return self._json({"url": f"{self.server.endpoint}/{name}"}, 409)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private)
        return self._json({"url": f"{self.server.endpoint}/{name}", "id": name})
