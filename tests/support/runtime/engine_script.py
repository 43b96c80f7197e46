"""A small engine for the tests of the runtime's supervisor: `engine_script.py FOLDER MODEL --port=N ...`.

It writes its arguments and requests to a file in the folder. While the folder has a file `not-ready`, it is
not ready. If the folder has a file `child`, it has a child process, and with `deaf` it ignores SIGTERM. Its
metrics are those of the file `metrics`, if there is one.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])
ARGUMENTS = sys.argv[2:]
PORT = next(int(item.partition("=")[2]) for item in ARGUMENTS if item.startswith("--port="))
NAME = ARGUMENTS[ARGUMENTS.index("--served-model-name") + 1]
IS_SGLANG = "--model-path" in ARGUMENTS
SGLANG_METRICS = f"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{model_name="{NAME}"}} 4
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{model_name="{NAME}"}} 5
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{model_name="{NAME}"}} 6
"""
METRICS = f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{NAME}"}} 2
vllm:num_requests_running{{model_name="other"}} 7
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{NAME}"}} 3
# TYPE vllm:request_success_total counter
vllm:request_success_total{{finished_reason="stop",model_name="{NAME}"}} 4
vllm:request_success_total{{finished_reason="length",model_name="{NAME}"}} 5
"""


def write(fact: object) -> None:
    """Add a line to the file."""
    with (FOLDER / "engine.jsonl").open("a") as file:
        file.write(json.dumps(fact) + "\n")


class Handler(BaseHTTPRequestHandler):
    """Answers all requests with 200."""

    def do_GET(self) -> None:
        """Whether it is ready; its metrics."""
        is_ready = not (FOLDER / "not-ready").exists()
        own = FOLDER / "metrics"
        metrics = own.read_text() if own.exists() else SGLANG_METRICS if IS_SGLANG else METRICS
        self.answer(200 if is_ready else 503, metrics if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        """A change."""
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        write({"path": self.path, "key": self.headers.get("Authorization", "")})
        self.answer(404 if (FOLDER / "no-sleep").exists() else 200, "")

    def answer(self, status: int, text: str) -> None:
        """Send a response."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log nothing."""


SECRETS = ("PENSTOCK_RUNTIME_", "PENSTOCK_ENGINE_")
secrets = [name for name in os.environ if name.startswith(SECRETS)]
variables = {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "KVCACHED_"))}
if (FOLDER / "deaf").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = None
if (FOLDER / "child").exists():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid
facts = {
    "arguments": ARGUMENTS,
    "pid": os.getpid(),
    "child": child,
    "secrets": secrets,
    "variables": variables,
}
with ThreadingHTTPServer(("127.0.0.1", PORT), Handler) as server:
    write(facts)
    server.serve_forever()
