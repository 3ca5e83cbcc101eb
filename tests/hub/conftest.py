"""A Hub on loopback, the kernel as a build of this checkout, and processes of their own that load it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = "org/npu-fusion"


def sibling(name: str):
    """A module beside this file; tests are imported by path, so that there is no package to import it from."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


Hub, Processes = sibling("server").Hub, sibling("processes").Processes


@pytest.fixture(scope="session")
def build() -> Path:
    """The directory that holds `torch-npu/`, as scripts/build.py writes it."""
    return Path(os.environ["LOCAL_KERNELS"].split("=", 1)[1])


@pytest.fixture(scope="session")
def kernel_files(build) -> dict[str, bytes]:
    """What a version branch of the kernel repository holds: path -> content."""
    files = (path for path in sorted(build.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {f"build/{path.relative_to(build)}": path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """The environment without what chooses a Hub, a cache or a kernel."""
    chosen = (
        "HF_",
        "KERNELS_",
        "TRANSFORMERS_",
        "LOCAL_KERNELS",
        "XDG_CACHE",
        "DO_NOT_TRACK",
        "http_proxy",
        "HTTP_PROXY",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    return {**kept, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1,localhost"}


@pytest.fixture(scope="session")
def processes(tmp_path_factory, clean_environment):
    processes = Processes(tmp_path_factory.mktemp("processes"), clean_environment)
    yield processes
    processes.close()


@pytest.fixture
def hub(kernel_files):
    """A Hub with the kernel at version 1, from a publisher that it does not call trusted."""
    hub = Hub()
    hub.publish(REPOSITORY, "main", {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    hub.publish(REPOSITORY, "v1", kernel_files)
    yield hub
    hub.close()
    assert hub.unknown == [], "a client called an address that this Hub does not know"


@pytest.fixture
def online(hub, tmp_path) -> dict[str, str]:
    """Environment of a process that uses the Hub with an empty cache."""
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "huggingface")}


@pytest.fixture
def offline(tmp_path) -> dict[str, str]:
    """Environment of a process that must not use a Hub; the same cache as `online`."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "huggingface")}


@pytest.fixture
def mount(tmp_path):
    """Mounts a tmpfs; skips where this user may not."""
    mounted = []

    def mount(name: str, options: str) -> Path:
        target = tmp_path / name
        target.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("mounting a tmpfs needs root and the right to mount")
        mounted.append(target)
        return target

    yield mount
    for target in mounted:
        subprocess.run(["umount", "-l", str(target)], check=True)
