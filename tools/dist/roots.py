"""Tests the Linux wheels, each in a root file system with Python only: Debian for both CPUs, and musl.

Needs root, Debian's mmdebstrap, qemu-user-static, musl-tools, busybox-static, and `deb-src` sources.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from targets import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from wheel_test import DEMO, EXTRAS, NAME, PACKAGES

FOLDER = ROOT / "target" / "roots"
RELEASE = "bookworm"
MUSL = "/lib/ld-musl-x86_64.so.1"
#: musl-gcc names the platform of gcc, and Python's build gives it folders of the system's C library.
COMPILER = """\
#!/bin/sh
[ "$1" = --print-multiarch ] && echo x86_64-linux-musl && exit
for argument; do
    shift
    case $argument in -[IL]/usr/*) ;; *) set -- "$@" "$argument" ;; esac
done
exec musl-gcc "$@" -w
"""
#: Debian packages that a Python with musl is compiled from, and the commands for each.
#: Threads have a stack of a mebibyte, as in the Python of Alpine's images.
SOURCES = {
    "zlib": "./configure --prefix=$PREFIX --static && make libz.a && make install",
    "openssl": "./Configure linux-x86_64 --prefix=$PREFIX --libdir=lib no-shared no-tests no-engine no-legacy"
    " -idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu"
    " && make -j2 build_libs && make install_dev",
    "python3.11": "./configure --prefix=/usr --with-openssl=$PREFIX --disable-test-modules"
    " CPPFLAGS=-I$PREFIX/include LDFLAGS='-L$PREFIX/lib -Wl,-z,stack-size=0x100000 -Wl,--dynamic-linker="
    + MUSL
    + "'"
    " && make -j2 && make install DESTDIR=$ROOT",
}
#: The platforms of wheels of each root, for pip.
PLATFORMS = {
    "debian": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    "arm64": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
    "musl": ("musllinux_1_2_x86_64",),
}
#: The Python of the roots.
VERSION = "3.11"


def run(*command: str | Path, folder: Path | None = None, **variables: str) -> None:
    """Run a command."""
    print("+", shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True, cwd=folder, env=os.environ | variables)


def debian(root: Path, cpu: str) -> None:
    """A Debian with its Python. Packages of other CPUs are unpacked, and their programs run under QEMU."""
    packages = "--include=python3,python3-venv,libstdc++6"
    run(
        "mmdebstrap",
        "--variant=extract",
        f"--architectures={cpu}",
        packages,
        "--skip=check/qemu",
        RELEASE,
        root,
    )
    if (
        cpu == "arm64"
        and not (programs := Path("/proc/sys/fs/binfmt_misc")).joinpath("qemu-aarch64").exists()
    ):
        if not (programs / "register").exists():
            run("mount", "-t", "binfmt_misc", "none", programs)
        programs.joinpath("register").write_bytes(Path("/usr/lib/binfmt.d/qemu-aarch64.conf").read_bytes())


def musl(root: Path) -> None:
    """A root with musl, Python and busybox, and nothing of the C library of GNU."""
    work = FOLDER / "sources"
    shutil.rmtree(work, ignore_errors=True)
    prefix = work / "prefix"
    for folder in ("linux", "asm-generic", "x86_64-linux-gnu/asm"):  # headers of the kernel
        link = prefix / "include" / Path(folder).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("/usr/include", folder))
    compiler = work / "musl-cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    variables = {"CC": str(compiler), "CFLAGS": "-O1 -fPIC", "PREFIX": str(prefix), "ROOT": str(root)}
    for name, commands in SOURCES.items():
        source = work / name
        source.mkdir(parents=True)
        run("apt-get", "source", "--quiet", "--download-only", name, folder=source)
        [archive] = source.glob("*.orig.tar.*[!c]")
        run("tar", "xf", archive, "--strip-components=1", folder=source)
        run("sh", "-ec", commands, folder=source, **variables)
    (root / "lib").mkdir(exist_ok=True)
    shutil.copy(Path(MUSL).resolve(), root / MUSL[1:])
    (root / "bin").mkdir(exist_ok=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin" / "busybox")
    (root / "bin" / "sh").symlink_to("/bin/busybox")


#: The roots, and how each is made.
ROOTS: dict[str, Callable[[Path], None]] = {
    "debian": lambda root: debian(root, "amd64"),
    "arm64": lambda root: debian(root, "arm64"),
    "musl": musl,
}
#: The commands that test the wheels of a folder in a root without a network.
TEST = """
for folder in proc dev tmp penstock dist; do mkdir -p "$FOLDER/$folder"; done
mount -t proc proc "$FOLDER"/proc
mount --rbind /dev "$FOLDER"/dev
mount -t tmpfs tmpfs "$FOLDER"/tmp
mount --bind -o ro "$SOURCES" "$FOLDER"/penstock
mount --bind -o ro "$DIST" "$FOLDER"/dist
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \\
    chroot "$FOLDER" python3 /penstock/tools/wheel_test.py /dist --no-index $OPTIONS
"""
#: The tests under QEMU, which takes thirty times as long, and seconds to start a process.
FILES = (
    "api/test_request",
    "api/test_choices",
    "api/test_generation_control",
    "text/test_parsed_output",
    "text/test_stops",
)
#: Options of the tests. This Python with musl cannot load numpy; the release workflow tests in Alpine.
OPTIONS = {
    "musl": "--no-tests",
    "arm64": " ".join(["--timeout 1800", *(f"tests/{name}.py" for name in FILES)]),
}


def download(name: str, dist: Path) -> Path:
    """A folder with the wheel of `dist` for a root, its dependencies and the packages of the tests."""
    folder = FOLDER / f"{name}-wheels"
    for old in folder.glob("penstock_llm-*"):  # pip keeps a file of the same name
        old.unlink()
    command: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    command += ["--dest", folder, "--implementation", "cp", "--python-version", VERSION]
    command += [option for platform in PLATFORMS[name] for option in ("--platform", platform)]
    run(*command, "--no-index", "--no-deps", "--find-links", dist, NAME)
    [wheel] = folder.glob("penstock_llm-*")
    run(*command, f"{wheel}[{EXTRAS}]", *PACKAGES)
    run(*command, "--no-deps", "--requirement", DEMO)
    return folder


def make_root(name: str) -> Path:
    """The root of this name, which is made if it is missing; one that is not complete has another name."""
    root, part = FOLDER / name, FOLDER / f"{name}.part"
    if not root.exists():
        shutil.rmtree(part, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        ROOTS[name](part)
        part.rename(root)
    return root


def test_wheels(names: Sequence[str], dist: Path) -> None:
    """Test the wheels of a folder in these roots, and make roots that are missing."""
    for name in names:
        variables = {"FOLDER": make_root(name), "SOURCES": ROOT, "DIST": download(name, dist)}
        run(
            *("unshare", "--mount", "--net", "sh", "-ec", f"ip link set lo up\n{TEST}"),
            **{key: str(path) for key, path in variables.items()},
            OPTIONS=OPTIONS.get(name, ""),
        )
