"""What goes wrong between here and the Hub: a clear error, and nothing that the next start would load."""

import subprocess
from pathlib import Path

import pytest

GET = """
from kernels import get_kernel
print(get_kernel("org/npu-fusion", {arguments}, trust_remote_code=["org/npu-fusion", "org/other"]).__file__)
"""
GET_1 = GET.format(arguments="version=1")
A_FILE = r"/resolve/\w+/build/torch-npu/ops/norm\.py"


@pytest.fixture
def assert_nothing_loads(hub, offline, processes):
    """Neither name of the kernel loads from what a failed download left in the cache."""

    def check():
        commit = hub.repositories["org/npu-fusion"].branches["v1"]
        for arguments in ("version=1", f"revision='{commit}'"):
            result = processes.run(GET.format(arguments=arguments), network=False, **offline)
            assert result.returncode == 1, result.stdout
            assert (
                "not available in the local cache" in result.stderr or "Cannot find a local snapshot" in result.stderr
            )

    return check


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (GET.format(arguments="version=7"), "Version 7 not found, available versions: 1"),
        (GET.format(arguments="revision='v7'"), "Revision Not Found"),
        (GET_1.replace('get_kernel("org/npu-fusion"', 'get_kernel("org/other"'), "Repository Not Found"),
        (GET_1.replace('trust_remote_code=["org/npu-fusion", "org/other"]', ""), "is not from a trusted publisher"),
        (GET_1.replace('"org/npu-fusion", "org/other"]', '"org/other"]'), "is not from a trusted publisher"),
    ],
    ids=["missing version", "missing revision", "missing repository", "untrusted", "another one trusted"],
)
def test_what_is_not_there_or_not_trusted(code, message, online, processes, assert_nothing_loads):
    result = processes.run(code, **online)
    assert result.returncode == 1
    assert message in result.stderr
    assert_nothing_loads()


def test_untrusted_code_is_not_even_downloaded(hub, online, processes):
    processes.run('from kernels import get_kernel; get_kernel("org/npu-fusion", version=1)', **online)
    assert hub.paths() and not [path for path in hub.paths() if "/resolve/" in path]


def test_a_private_repository_needs_the_token(hub, online, processes, assert_nothing_loads):
    hub.repositories["org/npu-fusion"].private = True
    result = processes.run(GET_1, **online)
    assert result.returncode == 1
    assert "401" in result.stderr and "make sure you are authenticated" in result.stderr
    assert_nothing_loads()
    assert processes.run(GET_1, HF_TOKEN="hf_write", **online).returncode == 0


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_file_that_the_hub_refuses(status, hub, online, processes, assert_nothing_loads):
    hub.faults[A_FILE] = status
    result = processes.run(GET_1, **online)
    assert result.returncode == 1
    assert str(status) in result.stderr and "ops/norm.py" in result.stderr
    assert_nothing_loads()


def test_a_truncated_file_is_refused_by_its_size(hub, online, processes, assert_nothing_loads):
    hub.faults[A_FILE] = "truncate"
    result = processes.run(GET_1, **online)
    assert result.returncode == 1
    assert "Consistency check failed" in result.stderr and "norm.py" in result.stderr
    assert_nothing_loads()
    hub.faults.clear()
    assert processes.run(GET_1, **online).returncode == 0


def test_a_connection_cut_once_is_resumed(hub, online, processes, kernel_files):
    hub.faults[A_FILE] = "cut"
    result = processes.run(GET_1, **online)
    assert result.returncode == 0, result.stderr
    loaded = Path(result.stdout.strip()).parent / "ops/norm.py"
    assert loaded.read_bytes() == kernel_files["build/torch-npu/ops/norm.py"]


def test_a_server_that_dies_midway(hub, online, processes, assert_nothing_loads):
    hub.faults[A_FILE] = "die"
    # huggingface_hub tries each file again several times; this test does not wait in between
    result = processes.run(f"import time; time.sleep = lambda seconds: None\n{GET_1}", **online)
    assert result.returncode == 1
    assert "Connection refused" in result.stderr
    assert_nothing_loads()


def test_kill_during_download(hub, online, processes, assert_nothing_loads):
    hub.faults[A_FILE] = "stall"
    process = processes.start(GET_1, **online)
    assert hub.reached.wait(timeout=60)
    process.kill()
    assert process.wait().returncode == -9
    assert_nothing_loads()
    hub.faults.clear()
    hub.release.set()
    result = processes.run(GET_1, **online)
    assert result.returncode == 0, result.stderr


def test_two_processes_load_at_once_the_first_time(hub, online, processes):
    hub.delay = 0.05  # each request takes long enough for the other process to be in the middle of its own
    running = [processes.start(GET_1, **online) for _ in range(2)]
    finished = [process.wait() for process in running]
    assert [result.returncode for result in finished] == [0, 0], finished
    assert finished[0].stdout == finished[1].stdout
    assert not list(Path(online["HF_HOME"]).rglob("*.incomplete"))


def test_a_full_disk(hub, online, processes, mount, assert_nothing_loads, kernel_files):
    size = sum(len(content) for content in kernel_files.values())
    cache = mount("huggingface", f"size={size // 2}")
    result = processes.run(GET_1, **online)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert_nothing_loads()
    subprocess.run(["mount", "-o", f"remount,size={4 * size + (1 << 20)}", str(cache)], check=True)
    result = processes.run(GET_1, **online)
    assert result.returncode == 0, result.stderr


def test_a_kernel_with_any_one_file_missing_does_not_load(build, processes, tmp_path):
    """What a download cut short could leave where nobody checks: a copy by hand, an older huggingface_hub."""
    code = f"""
import shutil, sys
from pathlib import Path
from kernels import get_local_kernel
for number, file in enumerate({sorted(str(p.relative_to(build / "torch-npu")) for p in build.rglob("*.py"))!r}):
    copy = Path({str(tmp_path)!r}) / str(number)
    shutil.copytree({str(build)!r}, copy)
    (copy / "torch-npu" / file).unlink()
    try:
        get_local_kernel(copy)
    except (ImportError, FileNotFoundError) as error:
        name = Path(file).stem if Path(file).name != "__init__.py" else Path(file).parent.name
        assert name in str(error) or str(copy) in str(error), (file, error)
    else:
        sys.exit(f"loaded without {{file}}")
    for name in [name for name in sys.modules if name.startswith("_npu_fusion")]:
        del sys.modules[name]
"""
    result = processes.run(code)
    assert result.returncode == 0, result.stderr
