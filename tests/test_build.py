"""The build is what kernels' own code accepts, and it loads from wherever a user may point at it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import npu_emulator
import pytest
from build import build
from kernels import get_local_kernel
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def repository(tmp_path):
    build(tmp_path / "build")
    return tmp_path


def in_fresh_process(code, **environment):
    code = f"import npu_emulator\nif npu_emulator.needed(): npu_emulator.start()\n{code}"
    environment = {**os.environ, **environment, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_build_toml_is_valid_for_upstream():
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == ["cann"]


def test_metadata_and_digest_are_valid_for_upstream(repository):
    variant = repository / "build" / "torch-npu"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("npu-fusion", 1, "Apache-2.0")
    assert metadata.python_depends == [] and str(metadata.backend.backend_type) == "cann"
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("place", ["", "build", "build/torch-npu"])
def test_loads_from_a_directory(repository, place):
    assert callable(get_local_kernel(repository / place).kernelize)


@pytest.mark.parametrize("arguments", ["version=1", "revision='v1'"])
def test_loads_through_local_kernels(repository, arguments):
    code = f"from kernels import get_kernel; print(get_kernel('org/npu-fusion', {arguments}).__file__)"
    result = in_fresh_process(code, LOCAL_KERNELS=f"org/npu-fusion={repository}")
    assert result.stdout.strip() == str(repository / "build" / "torch-npu" / "__init__.py"), result.stderr


@pytest.mark.skipif(
    not npu_emulator.needed(), reason="on an Ascend host a CUDA build of torch is for doctor to explain"
)
def test_the_emulator_hides_that_torch_is_a_cuda_build(repository):
    code = f"""
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
torch.version.cuda = "13.0"
import npu_emulator.auto
from pathlib import Path
from kernels import get_local_kernel
print(get_local_kernel(Path("{repository}")).__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("_npu_fusion_cann_"), result.stderr


def test_old_loaders_find_the_package_in_a_directory_of_its_name(repository):
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", "{repository}/build/torch-npu/npu_fusion/__init__.py")
module = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(sys.modules["kernel"].layers.RMSNorm.__name__)
"""
    result = in_fresh_process(code)
    assert result.stdout.strip() == "RMSNorm", result.stderr


def test_import_needs_nothing_but_torch(repository):
    """Hub kernels may import the standard library, torch and themselves at import time."""
    code = f"""
import sys
from kernels import get_local_kernel
before = set(sys.modules)
get_local_kernel(__import__("pathlib").Path("{repository}"))
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(n for n in new if n not in sys.stdlib_module_names and not n.startswith(("_npu_fusion", "torch", "_sysconfigdata"))))
"""
    result = in_fresh_process(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_builds_of_the_same_sources_are_the_same(tmp_path):
    first, second = (build(tmp_path / name) / "metadata.json" for name in "ab")
    assert first.read_text() == second.read_text()


def test_a_directory_without_a_build_for_this_system_is_named(tmp_path):
    (tmp_path / "build" / "torch-cuda").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"Cannot find a build variant for this system in .*"):
        get_local_kernel(tmp_path)


def test_corrupt_metadata_is_named(repository):
    variant = repository / "build" / "torch-npu"
    (variant / "metadata.json").write_text("{")
    with pytest.raises(ValueError, match=r"(?i)json|metadata|EOF"):
        get_local_kernel(repository)


def test_a_changed_file_breaks_the_digest(repository):
    variant = repository / "build" / "torch-npu"
    with (variant / "layers.py").open("a") as file:
        file.write("\n")
    metadata = Metadata.read_from_file(variant / "metadata.json")
    with pytest.raises(Exception, match=r"layers\.py"):
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


def test_rebuilding_replaces_the_variant_whole(repository):
    stray = repository / "build" / "torch-npu" / "stray.py"
    stray.write_text("")
    build(repository / "build")
    assert not stray.exists() and [p.name for p in (repository / "build").iterdir()] == ["torch-npu"]


def test_metadata_needs_the_keys_that_upstream_needs(repository):
    file = repository / "build" / "torch-npu" / "metadata.json"
    metadata = json.loads(file.read_text())
    for key in ("id", "name", "backend"):
        file.write_text(json.dumps({k: v for k, v in metadata.items() if k != key}))
        with pytest.raises(ValueError, match=key):
            Metadata.read_from_file(file)
