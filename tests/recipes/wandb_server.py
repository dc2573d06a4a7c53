"""As much of the W&B server's protocol as its client needs to register a run and stream history to it, on the loopback."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """`runs`: run id -> {step: what was logged}. `status`: what every request is answered with, 200 for the real thing."""

    def __init__(self, status: int = 200):
        self.status = status
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.lines: dict[str, int] = {}  # history lines of each run, as the client counts them
        self.resumed: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def answer(self, content: Any) -> None:
                body = json.dumps(content).encode()
                self.send_response(outer.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def read(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

            def do_GET(self) -> None:
                self.answer({})

            def do_PUT(self) -> None:
                self.read()
                self.answer({})

            def do_POST(self) -> None:
                body = self.read()
                if outer.status != 200:
                    self.answer({"errors": [{"message": "refused"}]})
                elif self.path.endswith("/graphql"):
                    asked = json.loads(body)
                    self.answer({"data": outer.data(asked["query"], asked.get("variables") or {})})
                else:
                    if stream := re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                        outer.take(stream[1], json.loads(body))
                    self.answer({"limits": {}})

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """The client hangs up when it is done."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def take(self, run: str, message: dict[str, Any]) -> None:
        history = (message.get("files") or {}).get("wandb-history.jsonl", {"content": []})
        for line in history["content"]:
            record = json.loads(line)
            self.runs.setdefault(run, {})[record["_step"]] = record
            self.lines[run] = self.lines.get(run, 0) + 1

    def data(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        def bucket(run: str) -> dict[str, Any]:
            tail = [json.dumps(self.runs[run][max(self.runs[run])])] if self.runs.get(run) else []
            owner = {"id": "cA==", "name": "k3", "entity": {"id": "ZQ==", "name": "me"}}
            known = {
                "id": base64.b64encode(run.encode()).decode(),
                "name": run,
                "displayName": run,
                "project": owner,
                "config": "{}",
            }
            counts = {"logLineCount": 0, "historyLineCount": self.lines.get(run, 0), "eventsLineCount": 0}
            tails = {
                "historyTail": json.dumps(tail),
                "eventsTail": "[]",
                "summaryMetrics": "{}",
                "tags": [],
                "wandbConfig": '{"t": 1}',
            }
            return known | counts | tails

        name = (re.search(r"(?:query|mutation)\s+(\w+)", query) or [""] * 2)[1]
        if name == "UpsertBucket":
            run = variables["name"]
            new = run not in self.runs
            self.runs.setdefault(run, {})
            return {"upsertBucket": {"bucket": bucket(run), "inserted": new}}
        if name == "RunResumeStatus":
            run = variables["name"]
            if run in self.runs:
                self.resumed.append(run)
            return {"model": {"id": "cA==", "name": "k3", "bucket": bucket(run) if run in self.runs else None}}
        if "viewer" in query:
            me = {
                "id": "VQ==",
                "entity": "me",
                "username": "me",
                "email": "me@example.org",
                "flags": "{}",
                "teams": {"edges": []},
            }
            version = {"cliVersionInfo": {"max_cli_version": "99"}, "latestLocalVersionInfo": None, "features": []}
            return {"viewer": me, "serverInfo": version}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/storage/{f}"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "cg==", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}} if name == "ServerFeaturesQuery" else {}
