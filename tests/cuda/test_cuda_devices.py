"""Finding CUDA devices with a driver that gives the answers of a test, and `device=`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock import _cuda
from support.cuda.fake_driver import build

DEVICE = {
    "index": 0,
    "name": "Fake GPU",
    "compute_capability": "9.0",
    "total_memory": 80 << 30,
    "free_memory": 79 << 30,
    "uuid": "00102030-4050-6070-8090-a0b0c0d0e0f0",
    "pci_address": "0001:1A:00.0",
    "reason": None,
}
#: The level of the record that there is no device: INFO if the PCI bus has a display controller of NVIDIA.
ABSENT = "DEBUG"
for device in Path("/sys/bus/pci/devices").glob("*"):
    if [(device / name).read_text()[:length] for name, length in (("vendor", 6), ("class", 4))] == [
        "0x10de",
        "0x03",
    ]:
        ABSENT = "INFO"
OPEN = """
import sys, penstock
try:
    penstock.Engine(sys.argv[1], device=sys.argv[2], threads=1).blocking.start()
except penstock.PenstockError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver."""
    return build(tmp_path_factory.mktemp("driver") / "lib")


def run(driver: Path, *arguments: object, **variables: str) -> str:
    """The output of a Python process with this driver, whose answers the variables choose."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command: list[str] = [sys.executable, "-W", "error", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**environment, "LD_LIBRARY_PATH": str(driver), **variables},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def cuda(driver: Path, **variables: str) -> dict[str, Any]:
    """The section of CUDA in `penstock info --json`."""
    facts: dict[str, Any] = json.loads(run(driver, "-m", "penstock", "info", "--json", **variables))
    assert facts["version"] == penstock.__version__
    section: dict[str, Any] = facts["cuda"]
    return section


@pytest.mark.needs("cuda")
def test_devices_of_the_driver_are_listed(driver: Path) -> None:
    section = cuda(driver, FAKE_COUNT="2")
    assert section["driver_version"] == "13.0"
    assert section["reason"] is None
    other = {
        "index": 1,
        "pci_address": "0001:1B:00.0",
        "uuid": "01112131-4151-6171-8191-a1b1c1d1e1f1",
    }
    assert section["devices"] == [DEVICE, DEVICE | other]


@pytest.mark.needs("cuda")
def test_text_of_the_command_has_a_line_per_device(driver: Path) -> None:
    lines = run(driver, "-m", "penstock", "info", FAKE_COUNT="2", FAKE_VERSION="12080").splitlines()
    assert lines[0].split() == ["version", penstock.__version__]
    assert lines[1].split() == ["CUDA", "12.8"]
    assert lines[2] == "cuda:0         Fake GPU, compute capability 9.0, 79.0 of 80.0 GiB free"
    assert lines[3].startswith("cuda:1 ")
    assert lines[4].startswith("CUDA compiler  ")


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"FAKE_VERSION": "11040"}, "supports CUDA 11.4, and 12.0 or newer is required; update the driver"),
        ({"FAKE_VERSION": "-5"}, "supports CUDA 0.0"),
        ({"FAKE_VERSION_STATUS": "1"}, "cuDriverGetVersion failed with CUDA error 1;"),
        ({"FAKE_COUNT": "0"}, "the driver finds no device; check that nvidia-smi lists one"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 'no device is visible, because CUDA_VISIBLE_DEVICES is ""'),
        ({"FAKE_COUNT": "-1"}, "the driver finds no device"),
        ({"FAKE_COUNT_STATUS": "3"}, "cuDeviceGetCount failed with CUDA error 3; start processes"),
        ({"CUDA_VISIBLE_DEVICES": "-1", "FAKE_COUNT": "0"}, 'because CUDA_VISIBLE_DEVICES is "-1"'),
        (
            {"FAKE_INIT": "100", "CUDA_VISIBLE_DEVICES": "0"},
            'the driver finds no device, and CUDA_VISIBLE_DEVICES is "0"; check that nvidia-smi lists',
        ),
        ({"FAKE_INIT": "999"}, "cuInit failed with CUDA_ERROR_UNKNOWN; run nvidia-smi"),
        ({"FAKE_INIT": "803"}, "cuInit failed with CUDA error 803; the driver's library and its kernel"),
        ({"FAKE_INIT": "123456"}, "cuInit failed with CUDA error 123456; see the list of errors"),
        ({"FAKE_INIT": "-1"}, "cuInit failed with CUDA error -1;"),
    ],
)
def test_driver_that_cannot_be_used_has_a_reason(
    driver: Path, variables: dict[str, str], reason: str
) -> None:
    section = cuda(driver, **variables)
    assert reason in section["reason"]
    assert section["devices"] == []
    assert section["driver_version"] is None


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (
            {"FAKE_CAPABILITY": "75"},
            "the compute capability of Fake GPU is 7.5, and 8.0 or newer is required",
        ),
        ({"FAKE_RETAIN": "46"}, "CUDA_ERROR_DEVICE_UNAVAILABLE; another process has the device for itself"),
        ({"FAKE_MEMORY": "2"}, "cuMemGetInfo failed with CUDA error 2; the device has no free memory"),
    ],
)
def test_device_that_cannot_be_used_has_a_reason(
    driver: Path, variables: dict[str, str], reason: str
) -> None:
    section = cuda(driver, **variables)
    assert reason in section["reason"]
    assert section["driver_version"] == "13.0"
    (device,) = section["devices"]
    assert (device["free_memory"], device["reason"]) == (None, section["reason"])


@pytest.mark.needs("cuda")
def test_device_that_is_lost_does_not_hide_the_others(driver: Path) -> None:
    section = cuda(driver, FAKE_COUNT="3", FAKE_LOST="1")
    assert section["reason"] is None
    first, lost, last = section["devices"]
    assert first == DEVICE
    assert (lost["index"], lost["name"], lost["total_memory"]) == (1, "", 0)
    assert lost["reason"].startswith("cuDeviceGetAttribute failed with CUDA error 719;")
    assert (last["index"], last["reason"]) == (2, None)
    lines = run(driver, "-m", "penstock", "info", FAKE_COUNT="2", FAKE_LOST="1").splitlines()
    assert lines[3].split()[:2] == ["cuda:1", "cuDeviceGetAttribute"]


@pytest.mark.needs("cuda")
def test_long_name_of_a_device_is_cut_off(driver: Path) -> None:
    (device,) = cuda(driver, FAKE_NAME="x" * 1000)["devices"]
    assert device["name"] == "x" * 255


@pytest.mark.needs("cuda")
def test_library_without_a_function_is_too_old(tmp_path: Path) -> None:
    section = cuda(build(tmp_path / "lib", "-DWITHOUT_UUID"))
    assert section["reason"] == ("libcuda.so.1 has no function cuDeviceGetUuid_v2; update the NVIDIA driver")


@pytest.mark.needs("cuda")
def test_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("text" * 100)
    reason = cuda(tmp_path)["reason"]
    assert reason.startswith("libcuda.so.1 cannot be loaded (")
    assert "invalid ELF header" in reason


def test_missing_driver_is_reported_with_the_remedy() -> None:
    info = penstock.cuda_info()
    if info.driver_version is not None:
        pytest.skip("this machine has a driver")
    assert info.reason is not None
    assert info.reason.startswith("libcuda.so.1 cannot be loaded (")
    assert "install the NVIDIA driver" in info.reason
    assert info.devices == ()
    assert penstock.cuda_info() == info


@pytest.mark.needs("cuda")
def test_compiler_newer_than_the_driver_is_not_used(driver: Path) -> None:
    path = cuda(driver)["compiler_path"]
    assert path is not None
    section = cuda(driver, PENSTOCK_NVRTC=path, FAKE_VERSION="12080")
    assert "is newer than CUDA 12.8, which the driver supports" in section["compiler_reason"]
    assert section["compiler_version"] is None
    # The search does not even load it.
    assert path not in (cuda(driver, FAKE_VERSION="12080")["compiler_reason"] or "")


@pytest.mark.needs("cuda", "proc")
def test_import_does_not_load_the_driver(driver: Path) -> None:
    statement = "import penstock; print('libcuda' in open('/proc/self/maps').read())"
    assert run(driver, "-c", statement) == "False\n"
    assert run(driver, "-c", f"{statement.replace('; ', '; penstock.cuda_info(); ')}") == "True\n"


@pytest.mark.needs("cuda", "fork")
def test_child_of_a_fork_reports_the_fork(driver: Path) -> None:
    code = """
import os, penstock
if {is_used}: assert penstock.cuda_info().reason is None
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.write(writer, str(penstock.cuda_info().reason).encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.getpid(), os.read(reader, 1000).decode(), penstock.cuda_info().reason)
"""
    process, _, rest = run(driver, "-c", code.format(is_used=True)).partition(" ")
    assert rest.startswith(f"process {process} used CUDA before it forked; start processes that use CUDA")
    assert rest.endswith(" None\n")
    assert run(driver, "-c", code.format(is_used=False)).endswith(" None None\n")


@pytest.mark.needs("cuda")
def test_each_call_queries_the_driver_again(driver: Path) -> None:
    code = """
import os, penstock
for init in ("999", "0", "999"):
    os.environ["FAKE_INIT"] = init
    print(penstock.cuda_info().reason is None)
"""
    assert run(driver, "-c", code).split() == ["False", "True", "False"]


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(
    ("device", "variables", "message"),
    [
        ("cuda:1", {}, "device='cuda:1' cannot be used: device 1 does not exist; the driver has 1"),
        ("cuda", {"FAKE_CAPABILITY": "75"}, "the compute capability of Fake GPU is 7.5"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "no device is visible"),
    ],
)
def test_engine_on_a_cuda_device_is_refused_with_the_reason(
    driver: Path, device: str, variables: dict[str, str], message: str
) -> None:
    output = run(driver, "-c", OPEN, "/no/such/model", device, **variables)
    assert output.startswith("DeviceUnavailableError: ")
    assert message in output


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize(
    ("capability", "limit"),
    [
        ("80", "sm_80"),
        ("89", "sm_89 or sm_80"),
        ("90", "sm_90a or sm_90"),
        ("121", "sm_121a or sm_121 or sm_120"),
    ],
)
def test_architecture_that_a_device_does_not_have_is_refused(
    driver: Path, device: str, capability: str, limit: str
) -> None:
    variables = {"FAKE_CAPABILITY": capability, "PENSTOCK_CUDA_ARCH": "sm_75"}
    output = run(driver, "-c", OPEN, "/no/such/model", device, **variables)
    expected = f"PENSTOCK_CUDA_ARCH=sm_75 is not allowed: it must be an architecture of Fake GPU: {limit}\n"
    assert output == f"ConfigError: {expected}"


@pytest.mark.needs("cuda")
def test_driver_without_the_functions_of_a_backend_is_refused(driver: Path, tiny_model: Path) -> None:
    output = run(driver, "-c", OPEN, tiny_model, "cuda")
    assert output.startswith("DeviceUnavailableError: device='cuda:0' cannot be used: ")
    assert "libcuda.so.1 has no function" in output


@pytest.mark.needs("cuda", "proc")
def test_engine_on_the_cpu_does_not_load_the_driver(driver: Path, tiny_model: Path) -> None:
    code = f"{OPEN}\nprint('libcuda' in open('/proc/self/maps').read())"
    assert run(driver, "-c", code, tiny_model, "cpu") == "False\n"
    old = {"FAKE_CAPABILITY": "75"}
    assert run(driver, "-c", code, tiny_model, "auto", **old) == "True\n", "auto looks for a device"


def test_auto_says_once_that_it_is_the_cpu(tiny_model: Path) -> None:
    code = """
import logging, sys, penstock
logging.basicConfig(level=logging.DEBUG)
for device in ("cpu", "auto", "auto"):
    with penstock.Engine(sys.argv[1], device=device, threads=1):
        logging.info("opened on %s", device)
"""
    command = [sys.executable, "-c", code, str(tiny_model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    before, _, after = done.stderr.partition("opened on cpu")
    assert "device='auto'" not in before
    assert after.count(f"{ABSENT}:penstock:device='auto' is the CPU: ") == 1


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"FAKE_CAPABILITY": "75"}, "WARNING"),
        ({"FAKE_INIT": "999"}, "WARNING"),
        ({"FAKE_COUNT": "0"}, ABSENT),
    ],
)
def test_auto_warns_if_there_is_a_device(
    driver: Path, tiny_model: Path, variables: dict[str, str], level: str
) -> None:
    code = """
import logging, sys, penstock
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(levelname)s %(message)s")
with penstock.Engine(sys.argv[1], device="auto", threads=1): pass
"""
    output = run(driver, "-c", code, tiny_model, **variables)
    assert f"{level} device='auto' is the CPU: " in output


@pytest.mark.anyio
async def test_cuda_engine_is_refused_before_its_model_is_looked_for() -> None:
    engine = penstock.Engine("/no/such/model", device="cuda")
    with pytest.raises(penstock.DeviceUnavailableError, match="device='cuda:0'"):
        await engine.start()
    assert not engine.is_running


def test_device_of_a_configuration_is_its_full_name() -> None:
    names = {None: "auto", "auto": "auto", "cpu": "cpu", "cuda": "cuda:0", "cuda:7": "cuda:7"}
    assert {name: penstock.EngineConfig(device=name).device for name in names} == names


def install(folder: Path, package: str, library: str) -> None:
    """Install a package with one library."""
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).write_text("text")
    information = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "RECORD").write_text(f"{library},,\n{library}.alt,,\nnvidia/include/nvrtc.h,,\n")


def test_folders_of_libraries_are_those_of_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {
        "nvidia-cuda-nvrtc": "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia-cuda-nvrtc-cu12": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia-cublas": "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia-cublas-cu12": "nvidia/cublas/lib/libcublasLt.so.12",
    }
    for package, library in folders.items():
        install(tmp_path, package, library)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib")
    assert _cuda.cuda_folders() == [tmp_path / name for name in names]


def test_compiler_in_the_current_directory_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tmp_path, "nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13")
    monkeypatch.chdir(tmp_path)
    for entry in ("", str(tmp_path / "nvidia")):
        monkeypatch.syspath_prepend(entry)
    assert not any(folder.is_relative_to(tmp_path) for folder in _cuda.cuda_folders())
    assert all(folder.is_absolute() for folder in _cuda.cuda_folders())


def test_module_nvidia_without_a_spec_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    assert penstock.cuda_info().compiler_reason is None
