"""A hub on this machine, for the real client: repositories are folders, of one commit."""

import hashlib
import http.server
import json
import re

COMMIT = "0" * 40


class Hub(http.server.ThreadingHTTPServer):
    """Serves folders by their ids, and notes which bytes of which files were asked for."""

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories, self.fetched = repositories, set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = self.path.partition("?")[0]
        listed = re.fullmatch(r"/api/models/(\w+/[\w-]+)(/revision/\w+|(/tree)/\w+)?", path)
        if listed and (folder := self.server.repositories.get(listed[1])):
            files = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())]
            tree = [{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in files]
            about = {"id": listed[1], "sha": COMMIT}
            about["siblings"] = [{"rfilename": name, "size": size} for name, size in files]
            content = json.dumps(tree if listed[3] else about).encode()
            return self._send(200, content, {"Content-Type": "application/json"})
        wanted = re.fullmatch(r"/(\w+/[\w-]+)/resolve/\w+/([\w.-]+)", path)
        folder = self.server.repositories.get(wanted[1]) if wanted else None
        if folder is None or not (folder / wanted[2]).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, span = (folder / wanted[2]).read_bytes(), self.headers.get("Range")
        about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            self.server.fetched.add((f"{wanted[1]}/{wanted[2]}", span))
        if span is None:
            return self._send(200, content, about)
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        last = min(last, len(content) - 1)
        about["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._send(206, content[first : last + 1], about)

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
