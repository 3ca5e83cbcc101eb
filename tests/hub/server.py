"""A Hub for kernel repositories on 127.0.0.1: what kernels and huggingface_hub call to list, download and publish one.

    hub = Hub()
    commit = hub.publish("org/npu-fusion", "v1", {"build/torch-npu/metadata.json": b"{...}"})
    environment["HF_ENDPOINT"] = hub.endpoint

Addresses, headers and error codes are those that huggingface_hub reads (`file_download.py`, `hf_api.py`,
`_commit_api.py`). A request for anything else is answered 501 and kept in `hub.unknown`, so that a test notices a
client that has learned a new one.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

WRITE_TOKEN = "hf_write"


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(content: bytes) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()


@dataclass
class Repository:
    """Branches and tags name commits; a commit is the whole tree: path -> content."""

    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False

    def resolve(self, revision: str) -> str | None:
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        commit = self.branches.get(name) or self.tags.get(name) or revision
        return commit if commit in self.commits else None

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        identity = json.dumps([branch, len(self.commits), {path: git_blob(files[path]) for path in sorted(files)}])
        commit = hashlib.sha1(identity.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit


@dataclass
class Hub:
    """The server, its repositories, and what shall go wrong.

    `faults` maps a pattern of request paths to what happens to a GET of it:
        an int       this HTTP status
        "truncate"   half of it is sent as if it were all, as a proxy does that caches a broken download
        "cut"        the first time, the connection closes after half of it
        "stall"      half of it is sent, then nothing until `release` is set
        "die"        half of it is sent, then the server is gone
    """

    trusted: set[str] = field(default_factory=set)
    delay: float = 0.0  # seconds before each answer
    lfs_above: int = 10 << 20  # bytes; larger files are kept as LFS objects, behind a redirect
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: dict[str, int | str] = field(default_factory=dict)
    requests: deque[tuple[str, str]] = field(default_factory=deque)
    unknown: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    reached: threading.Event = field(default_factory=threading.Event)  # a download is half done
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    dead: bool = False

    def __post_init__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        # another host, as the Hub's storage is: huggingface_hub follows a redirect only within one host
        self.storage = f"http://localhost:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def publish(self, repo_id: str, branch: str, files: dict[str, bytes]) -> str:
        """Commit `files` as the whole tree of `branch`, as an upload would, and return the commit."""
        with self.lock:
            return self.repositories.setdefault(repo_id, Repository()).commit(branch, files)

    def is_lfs(self, content: bytes) -> bool:
        return len(content) > self.lfs_above

    def paths(self, method: str = "GET") -> list[str]:
        return [path for verb, path in self.requests if verb == method]


class _Handler(BaseHTTPRequestHandler):
    """Routes are (method, pattern, function); groups of the pattern are the function's arguments."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.route()

    do_HEAD = do_POST = do_GET

    def route(self):
        if self.hub.dead:  # a connection that was kept alive
            self.close_connection = True
            return None
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, unquote(url.path)))
        time.sleep(self.hub.delay)
        pattern = next((pattern for pattern in self.hub.faults if re.search(pattern, unquote(url.path))), None)
        self.fault = self.hub.faults.get(pattern) if self.command == "GET" else None
        if isinstance(self.fault, int):
            return self.error(self.fault, "", "the server is told to fail")
        if self.fault == "cut":
            del self.hub.faults[pattern]
        if self.command == "POST" and not self.authorized():
            return self.error(401, "", "Invalid username or password.")
        for method, pattern, function in ROUTES:
            found = re.fullmatch(pattern, url.path)
            if found and self.command in method.split():
                arguments = [unquote(group) for group in found.groups(default="")]
                with self.hub.lock:
                    answer = function(self, *arguments)
                return answer()
        self.hub.unknown.append(f"{self.command} {self.path}")
        return self.error(501, "", "this Hub does not know the address")

    # -- answers -------------------------------------------------------------------------------------------------

    def send(self, status: int, content: bytes = b"", **headers):
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and status == 200:
            start = int(wanted[1])
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        if self.fault == "truncate":
            self.fault, content = None, content[: len(content) // 2]
        self.send_response(status)
        for name, value in {"Content_Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is None:
            self.wfile.write(content)
            return
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.hub.reached.set()
        if self.fault == "stall":
            self.hub.release.wait(timeout=60)
        elif self.fault == "die":
            self.hub.dead = True
            self.hub.server.shutdown()
            self.hub.server.server_close()
        self.close_connection = True
        self.connection.close()

    def json(self, value, status: int = 200):
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")

    def error(self, status: int, code: str, message: str):
        self.fault = None
        self.send(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message)

    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {WRITE_TOKEN}"

    def tree(self, repo_id: str, revision: str):
        """The commit and its files, or the error to answer with."""
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not self.authorized()):
            # the Hub does not tell an anonymous client whether a repository exists
            status = 404 if self.authorized() else 401
            return None, None, lambda: self.error(status, "RepoNotFound", "Repository not found")
        commit = repository.resolve(revision)
        if commit is None:
            return None, None, lambda: self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit], None

    # -- reading -------------------------------------------------------------------------------------------------

    def organization(self, name: str):
        known = any(repo_id.startswith(f"{name}/") for repo_id in self.hub.repositories)
        if not known:
            return lambda: self.error(404, "", "Organization not found")
        overview = {"avatarUrl": "", "name": name, "fullname": name}
        return lambda: self.json({**overview, "trustedKernelPublisher": name in self.hub.trusted})

    def info(self, repo_id: str, revision: str):
        commit, _, failure = self.tree(repo_id, revision or "main")
        return failure or (lambda: self.json({"id": repo_id, "sha": commit, "private": False}))

    def refs(self, repo_id: str):
        _, _, failure = self.tree(repo_id, "main")
        repository = self.hub.repositories.get(repo_id)
        if failure and (repository is None or repository.private):
            return failure
        kinds = (("branches", "heads", repository.branches), ("tags", "tags", repository.tags))
        value = {
            kind: [{"name": n, "ref": f"refs/{where}/{n}", "targetCommit": c} for n, c in sorted(names.items())]
            for kind, where, names in kinds
        }
        return lambda: self.json({**value, "converts": []})

    def listing(self, repo_id: str, revision: str, folder: str):
        _, files, failure = self.tree(repo_id, revision)
        if failure:
            return failure
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if folder and not inside:
            return lambda: self.error(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        recursive = self.query.get("recursive", [""])[0].lower() == "true"
        entries = {}
        for path, content in sorted(inside.items()):
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = prefix + "/".join(parts[:depth])
                entries[name] = {"type": "directory", "path": name, "oid": git_blob(name.encode()), "size": 0}
            if recursive or len(parts) == 1:
                entries[path] = {"type": "file", "path": path, "oid": git_blob(content), "size": len(content)}
                if self.hub.is_lfs(content):
                    pointer = lfs_pointer(content)
                    digest = hashlib.sha256(content).hexdigest()
                    entries[path]["oid"] = git_blob(pointer)
                    entries[path]["lfs"] = {"oid": digest, "size": len(content), "pointerSize": len(pointer)}
        return lambda: self.json(list(entries.values()))

    def resolve(self, repo_id: str, revision: str, path: str):
        commit, files, failure = self.tree(repo_id, revision)
        if failure:
            return failure
        if path not in files:
            return lambda: self.error(404, "EntryNotFound", f"{path} does not exist on {revision}")
        content = files[path]
        if not self.hub.is_lfs(content):
            return lambda: self.send(200, content, ETag=f'"{git_blob(content)}"', X_Repo_Commit=commit)
        digest = hashlib.sha256(content).hexdigest()
        self.hub.objects[digest] = content
        self.fault = None  # the redirect itself is whole
        return lambda: self.send(
            302,
            Location=f"{self.hub.storage}/lfs/{digest}",
            X_Linked_ETag=f'"{digest}"',
            X_Linked_Size=len(content),
            X_Repo_Commit=commit,
        )

    def object(self, digest: str):
        content = self.hub.objects.get(digest)
        if content is None:
            return lambda: self.error(404, "EntryNotFound", "no such object")
        return lambda: self.send(200, content, ETag=f'"{digest}"')

    # -- writing -------------------------------------------------------------------------------------------------

    def create(self):
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.hub.endpoint}/kernels/{repo_id}"
        if repo_id in self.hub.repositories:
            return lambda: self.json({"error": "You already created this kernel repo", "url": url}, 409)
        # a new repository on the Hub is not empty: its first commit holds a .gitattributes
        self.hub.repositories[repo_id] = repository = Repository()
        repository.commit("main", {".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"})
        return lambda: self.json({"url": url})

    def validate_yaml(self):
        content = json.loads(self.body)["content"]
        if content.startswith("---\n") and "\n---\n" in content[4:]:
            return lambda: self.json({"errors": [], "warnings": []})
        return lambda: self.json({"errors": [{"message": "no metadata"}], "warnings": []}, 400)

    def branch(self, repo_id: str, branch: str):
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        commit, _, failure = self.tree(repo_id, start)
        if failure:
            return failure
        branches = self.hub.repositories[repo_id].branches
        if branch in branches:
            return lambda: self.error(409, "", "Reference already exists")
        branches[branch] = commit
        return lambda: self.json({}, 201)

    def tag(self, repo_id: str, revision: str):
        commit, _, failure = self.tree(repo_id, revision)
        if failure:
            return failure
        tag = json.loads(self.body)["tag"]
        tags = self.hub.repositories[repo_id].tags
        if tag in tags:
            return lambda: self.error(409, "", f"Tag reference exists already: {tag}")
        tags[tag] = commit
        return lambda: self.json({}, 201)

    def preupload(self, repo_id: str, revision: str):
        _, files, failure = self.tree(repo_id, revision)
        if failure:
            return failure
        answer = []
        for wanted in json.loads(self.body)["files"]:
            # nothing of a kernel in Python is large enough to be uploaded as an LFS object
            entry = {"path": wanted["path"], "uploadMode": "regular", "shouldIgnore": False}
            if wanted["path"] in files:
                entry["oid"] = git_blob(files[wanted["path"]])
            answer.append(entry)
        return lambda: self.json({"files": answer})

    def commit(self, repo_id: str, branch: str):
        _, files, failure = self.tree(repo_id, branch)
        if failure:
            return failure
        files = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                del files[value["path"]]
            elif kind == "deletedFolder":
                files = {path: content for path, content in files.items() if not path.startswith(value["path"])}
        commit = self.hub.repositories[repo_id].commit(branch, files)
        url = f"{self.hub.endpoint}/kernels/{repo_id}/commit/{commit}"
        return lambda: self.json({"commitUrl": url, "commitOid": commit})


REPO = "([^/]+/[^/]+)"
ROUTES = [
    ("GET", "/api/agent-harnesses", lambda self: lambda: self.json({"standardEnvVars": [], "harnesses": {}})),
    ("GET", "/api/organizations/([^/]+)/overview", _Handler.organization),
    ("GET", f"/api/kernels/{REPO}/refs", _Handler.refs),
    ("GET", f"/api/kernels/{REPO}/tree/([^/]+)(?:/(.+))?", _Handler.listing),
    ("GET", f"/api/kernels/{REPO}(?:/revision/([^/]+))?", _Handler.info),
    ("GET HEAD", f"/kernels/{REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
    ("GET HEAD", "/lfs/([0-9a-f]{64})", _Handler.object),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", f"/api/kernels/{REPO}/branch/([^/]+)", _Handler.branch),
    ("POST", f"/api/kernels/{REPO}/tag/([^/]+)", _Handler.tag),
    ("POST", f"/api/kernels/{REPO}/preupload/([^/]+)", _Handler.preupload),
    ("POST", f"/api/kernels/{REPO}/commit/([^/]+)", _Handler.commit),
]
