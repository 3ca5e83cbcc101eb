"""A kernel directory that is replaced while a process runs: the process keeps the code that it has, or is told."""

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "is_new = False\n"


@pytest.fixture
def versions(tmp_path) -> dict[str, Path]:
    """Two builds that differ in one module, norm.py, which says which one it is."""
    built = {}
    for name, line in (("old", MARK), ("new", MARK.replace("False", "True"))):
        source = tmp_path / f"{name}-source"
        shutil.copytree(ROOT / "torch-ext", source / "torch-ext")
        shutil.copy(ROOT / "build.toml", source)
        with (source / "torch-ext/npu_fusion/ops/norm.py").open("a") as file:
            file.write(line)
        built[name] = runpy.run_path(str(ROOT / "scripts/build.py"))["build"](tmp_path / name, source)
    return built


SWAP = """
import runpy, shutil, sys
from pathlib import Path
from kernels import get_local_kernel
build = runpy.run_path({build!r})
place, old, new = Path({place!r}), Path({old!r}), Path({new!r})

def put(version):
    shutil.copytree(version, place.with_name("fresh"))
    build["replace"](place, place.with_name("fresh"))

def is_new(kernel):
    return sys.modules[kernel.__name__ + ".ops.norm"].is_new

put(old)
"""


@pytest.fixture
def swap(versions, tmp_path) -> str:
    (tmp_path / "kernel").mkdir()
    place = tmp_path / "kernel/torch-npu"
    return SWAP.format(
        build=str(ROOT / "scripts/build.py"), place=str(place), old=str(versions["old"]), new=str(versions["new"])
    )


def test_a_running_process_keeps_its_code_and_a_new_one_gets_the_new(swap, processes):
    code = f"""{swap}
import torch
kernel = get_local_kernel(place.parent)
put(new)
assert not is_new(kernel) and not is_new(get_local_kernel(place.parent))
model = torch.nn.Sequential(torch.nn.LayerNorm(8)).to("npu")
kernel.kernelize(model), kernel.report(model), kernel.plan(model)
ours = [name for name in sys.modules if name.startswith(kernel.__name__)]
late = [name for name in ours if getattr(sys.modules[name], "is_new", False)]
assert not late, f"imported so late that it is the new one: {{late}}"
"""
    result = processes.run(code)
    assert result.returncode == 0, result.stderr
    result = processes.run(f"{swap}\nput(new)\nassert is_new(get_local_kernel(place.parent))")
    assert result.returncode == 0, result.stderr


def test_some_of_each_is_refused(swap, processes):
    code = f"""{swap}
def when_norm_is_looked_for(event, arguments):
    if event == "import" and arguments[0].endswith(".ops.norm") and not swapped:
        swapped.append(True)
        put(new)

swapped = []
sys.addaudithook(when_norm_is_looked_for)
try:
    get_local_kernel(place.parent)
except ImportError as error:
    assert "was replaced while it was imported" in str(error), error
    assert swapped
else:
    sys.exit("some of each was loaded")
"""
    result = processes.run(code)
    assert result.returncode == 0, result.stderr


def test_loads_with_a_replacement_at_any_moment_are_whole_or_refused(swap, processes):
    """One replacement during each load, a little later each time."""
    code = f"""{swap}
import threading, time
from kernels import importer

def load(path):
    importer._loaded_kernels.clear()
    for name in [name for name in sys.modules if name.startswith("_npu_fusion_")]:
        del sys.modules[name]
    return get_local_kernel(path)

start = time.perf_counter()
known = {{load(version).__name__: version == new for version in (old, new)}}
duration = (time.perf_counter() - start) / 2
whole, refused, rounds = 0, 0, 30
for step in range(rounds):
    later = threading.Timer(duration * step / rounds, put, (new if step % 2 == 0 else old,))
    later.start()
    try:
        kernel = load(place.parent)
    except (ImportError, FileNotFoundError) as error:
        assert str(place) in str(error) or "Cannot find a build variant" in str(error), error
        refused += 1
    else:
        assert is_new(kernel) == known[kernel.__name__], "some of each"
        whole += 1
    later.join()
print(whole, refused)
assert whole
"""
    result = processes.run(code)
    assert result.returncode == 0, result.stdout + result.stderr
