"""Downloads from a server on this machine: Penstock beside boto3 and huggingface_hub, in turns.

    python benches/downloads.py [--gigabytes 2] [--files 2000] [--rounds 3] [--folder /dev/shm]

One large file and many small ones, in the protocols of S3 and of the hub. The server is a process that sends
files with `sendfile`. Each program runs in a process of its own with 16 threads; times include its imports,
memory is the largest resident set. Penstock verifies SHA-256 for the hub; huggingface_hub verifies sizes, as
all do for this S3. With `--folder /dev/shm` the disk is not measured.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

PR_SET_PDEATHSIG = 1
COMMIT = "c0ffee" + "0" * 34
PROGRAMS = {
    "penstock (S3)": """
from penstock.runtime.downloader import download_model
download_model("s3://bench/MODEL/", OUT, "m", {"endpoint": URL, "ak": "a", "sk": "s", "num_threads": 16})
""",
    "boto3": """
import boto3, os
from concurrent.futures import ThreadPoolExecutor
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
client = boto3.client("s3", endpoint_url=URL, aws_access_key_id="a", aws_secret_access_key="s",
                      region_name="us-east-1", config=Config(max_pool_connections=16))
pages = client.get_paginator("list_objects_v2").paginate(Bucket="bench", Prefix="MODEL/")
keys = [item["Key"] for page in pages for item in page["Contents"]]
config = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20, max_concurrency=16)
os.makedirs(f"{OUT}/m")
def fetch(key):
    client.download_file("bench", key, f"{OUT}/m/" + key.rpartition("/")[2], Config=config)
with ThreadPoolExecutor(16 if len(keys) > 1 else 1) as pool:
    list(pool.map(fetch, keys))
""",
    "penstock (hub)": """
from penstock.runtime.downloader import download_model
download_model("bench/MODEL", OUT, "m", {"hf_endpoint": URL, "num_threads": 16})
""",
    "huggingface_hub": """
import os
os.environ |= {"HF_ENDPOINT": URL, "HF_HOME": OUT}
os.environ |= {name: "1" for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS")}
from huggingface_hub import snapshot_download
snapshot_download("bench/MODEL", local_dir=f"{OUT}/m", max_workers=16)
""",
}


class Handler(BaseHTTPRequestHandler):
    """Lists of both protocols, and files or ranges of them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    facts: dict[str, list[dict[str, object]]]

    def do_GET(self) -> None:
        """Send a list or a file."""
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if found := re.fullmatch(r"/api/models/bench/(\w+)/(revision|tree)/.*", path):
            is_tree = found[2] == "tree"
            siblings = [{"rfilename": item["path"]} for item in self.facts[found[1]]]
            facts = {"id": "bench/m", "sha": COMMIT, "private": False, "siblings": siblings}
            self._send(json.dumps(self.facts[found[1]] if is_tree else facts).encode())
        elif parts.path in ("/bench", "/bench/"):
            self._send(self._objects(parse_qs(parts.query)["prefix"][0].strip("/")))
        elif found := re.fullmatch(r"/bench/(\w+)/(?:resolve/\w+/)?(.+)", path):
            self._send_file(found[1], found[2])
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815 - the base class names it

    def _objects(self, model: str) -> bytes:
        items = "".join(
            f"<Contents><Key>{model}/{quote(str(item['path']))}</Key><Size>{item['size']}</Size>"
            f"<ETag>&quot;{item['oid']}-2&quot;</ETag></Contents>"
            for item in self.facts[model]
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, model: str, name: str) -> None:
        with (self.root / model / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, stop = (int(found[1]), int(found[2] or size - 1) + 1) if found else (0, size)
            self.send_response(206 if found else 200)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", f'"{hashlib.sha256(name.encode()).hexdigest()}-2"')
            self.send_header("X-Repo-Commit", COMMIT)
            if found:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            while self.command != "HEAD" and start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Log nothing."""


def describe(root: Path) -> dict[str, list[dict[str, object]]]:
    """The files of each model, as the hub describes them."""
    facts: dict[str, list[dict[str, object]]] = {}
    for path in sorted(root.glob("*/*")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name, size = path.name, path.stat().st_size
        oid = hashlib.sha256(name.encode()).hexdigest()
        lfs = {"oid": digest, "size": size, "pointerSize": 134}
        facts.setdefault(path.parent.name, []).append(
            {"type": "file", "path": name, "size": size, "oid": oid, "lfs": lfs}
        )
    return facts


def write_models(root: Path, num_bytes: int, num_files: int) -> None:
    """One file of `num_bytes`, and `num_files` files of 1 to 64 KiB."""
    for name in ("large", "small"):
        (root / name).mkdir(parents=True)
    block = os.urandom(1 << 24)
    with (root / "large" / "model.safetensors").open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
    for number in range(num_files):
        (root / "small" / f"{number:05}.json").write_bytes(block[: 1024 + number * 31 % 64512])


def run(code: str, model: str, url: str, out: Path) -> tuple[float, float, float]:
    """The seconds, the seconds of CPU time and the megabytes of memory of a program."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    text = f"URL, OUT = {url!r}, {str(out)!r}\n" + code.replace("MODEL", model)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", text])  # noqa: S603 - fixed code
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"a program failed:\n{text}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Print a table of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="for the files; a temporary one by default")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder) / "models"
        num_bytes = int(options.gigabytes * (1 << 30))
        write_models(root, num_bytes, options.files)
        Handler.root, Handler.facts = root, describe(root)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        child = os.fork()
        if child == 0:
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            server.serve_forever()
        url = f"http://127.0.0.1:{server.server_port}"
        server.server_close()
        times: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        try:
            for _ in range(options.rounds):
                for model in ("large", "small"):
                    for name, code in PROGRAMS.items():
                        found = run(code, model, url, Path(folder) / "out")
                        times.setdefault((model, name), []).append(found)
                        print(f"{model} {name} {found[0]:.2f} s", file=sys.stderr)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    print("model  program            time   CPU time  throughput    memory")
    for (model, name), found in times.items():
        seconds, cpu, memory = (statistics.median(values) for values in zip(*found, strict=True))
        rate = num_bytes / seconds / 1e6 if model == "large" else options.files / seconds
        unit = "MB/s" if model == "large" else "files/s"
        print(f"{model:6} {name:16} {seconds:5.2f} s  {cpu:5.2f} s  {rate:5.0f} {unit:7}  {memory:3.0f} MB")


if __name__ == "__main__":
    main()
