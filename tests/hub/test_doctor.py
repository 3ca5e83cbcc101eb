"""The doctor says what an operator needs: each of its findings is provoked here and compared with what happens."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "torch-ext/npu_fusion"


@pytest.fixture
def doctor():
    """doctor.py alone, as an operator runs it."""
    spec = importlib.util.spec_from_file_location("doctor_alone", SOURCE / "doctor.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def kernel(build, tmp_path) -> Path:
    """A build that a test may damage."""
    return Path(shutil.copytree(build / "torch-npu", tmp_path / "kernel/build/torch-npu"))


def finding(findings, subject: str):
    return next(found for found in findings if found.subject == subject)


def test_healthy_machine_from_inside_the_kernel_and_alone_without_a_request(build, processes, offline):
    inside = f"""
from pathlib import Path
from kernels import get_local_kernel
diagnosis = get_local_kernel(Path({str(build)!r})).doctor()
assert diagnosis.ok and not diagnosis.faults
assert "Ascend" in diagnosis["NPU"].value
"""
    alone = f"""
import runpy, sys
sys.argv = ["doctor.py"]
runpy.run_path({str(build / "torch-npu/doctor.py")!r}, run_name="__main__")
"""
    tables = []
    for code in (inside, alone):
        result = processes.run(code, network=False, **offline)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.endswith("layers would be swapped here\n")
        assert "Hub" not in result.stdout
        tables.append(result.stdout)
    assert tables[0] == tables[1]


def test_an_emulated_npu_is_called_emulated(build, processes, offline):
    result = processes.run(
        f"import npu_emulator\n"
        f"from kernels import get_local_kernel; from pathlib import Path\n"
        f"device = get_local_kernel(Path({str(build)!r})).doctor()['NPU'].value\n"
        f"assert ('(emulated)' in device) == npu_emulator.is_emulated(), device",
        **offline,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_cann_the_table_is_printed_and_says_what_to_source(build, clean_environment):
    hidden = ("TORCH_DEVICE_BACKEND", "ASCEND", "LD_LIBRARY_PATH", "LD_PRELOAD")
    environment = {name: value for name, value in clean_environment.items() if not name.startswith(hidden)}
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/doctor.py"), str(build)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"FAULT +import torch +RuntimeError: Failed to load the backend extension", result.stdout)
    assert "libhccl.so: cannot open shared object file" in result.stdout
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in result.stdout
    assert "ok     files" in result.stdout, "what does not need torch is looked at all the same"
    assert "Traceback" not in result.stderr


# -- torch and torch_npu ---------------------------------------------------------------------------------------------


def test_a_cuda_build_of_torch_is_named_and_not_imported(build, clean_environment, tmp_path):
    """torch_npu beside it can end the process (2.14.0 does, by std::terminate), and then nobody reads the reason."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os; os._exit(99)")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cu126'\ncuda = '12.6'\nhip = None\n")
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/doctor.py"), str(build)],
        env={**clean_environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAULT  torch         2.13.0+cu126 is a build for cuda 12.6: kernels would choose cuda" in result.stdout
    assert "-> pip install torch==2.13.0+cpu" in result.stdout


def test_kernels_refuses_the_variant_under_a_cuda_build_with_its_own_words(build, processes, offline):
    result = processes.run(
        f"import torch; torch.version.cuda = '12.6'\n"
        f"import runpy; doctor = runpy.run_path({str(SOURCE / 'doctor.py')!r})\n"
        f"assert not doctor['doctor']({str(build)!r}).ok",
        **offline,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "backend (npu) does not match system backend (cuda)" in result.stdout


@pytest.mark.parametrize(
    ("torch_npu", "status", "words"),
    [
        (None, "FAULT", "not installed"),
        ("2.9.0.post2", "FAULT", "is for torch 2.9.0"),
        ("2.13.0.post1", "ok", "2.13.0.post1"),
    ],
)
def test_torch_npu_is_that_of_the_installed_torch(doctor, monkeypatch, torch_npu, status, words):
    monkeypatch.setattr(doctor, "version", lambda name: torch_npu)
    found = finding(doctor.torch_build(), "torch_npu")
    assert found.status == status and words in found.value


def test_every_op_that_the_kernel_calls_is_in_the_table(doctor):
    called = set()
    for path in (SOURCE / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.npu":
                called.add(node.attr)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"npu_\w+", str(node.value)):
                called.add(node.value)
    assert called == set(doctor.OPS)
    assert set(doctor.OPS.values()) <= set(doctor.RELEASES)


def test_a_missing_op_is_named_with_the_torch_npu_that_brings_it(doctor, monkeypatch):
    monkeypatch.setattr(doctor, "OPS", {**doctor.OPS, "npu_of_tomorrow": "26.1"})
    ops = finding(doctor.import_torch(), "fused ops")
    assert ops.status == "note"
    assert ops.value.splitlines()[1:] == [
        "npu_of_tomorrow: since torch_npu 2.12.0, 2.11.0, 2.10.0.post4, 2.9.0.post6 or 2.7.1.post8 (CANN 9.1.0)"
    ]


# -- CANN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "loads"),
    [("9.1.0", True), ("8.3.RC1", True), ("8.10.0", True), ("10.0.0", False), ("", False), (None, False)],
)
def test_the_cann_version_as_the_loader_parses_it(doctor, monkeypatch, tmp_path, version, loads):
    from kernels.backends import _backend
    from torch_npu.utils.collect_env import get_cann_version

    (tmp_path / "nested").mkdir()
    if version is not None:
        (tmp_path / "nested/ascend_toolkit_install.info").write_text(f"package_name=x\nversion={version}\narch=x\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert doctor.cann_version() == get_cann_version()
    found = finding(doctor.cann(SOURCE), "CANN")
    assert (found.status == "ok") == loads
    if loads:
        assert _backend().name == "cann"
        return
    with pytest.raises(Exception, match=r"Invalid version|out of range"):
        _backend()


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("no help", ""),
        ("patched", 'import torch_npu.utils.collect_env as env; env.get_cann_version = lambda: "9.1.0"'),
    ],
)
def test_the_advice_against_a_cann_version_that_stops_the_loader(way, code, build, processes, tmp_path):
    (tmp_path / "ascend_toolkit_install.info").write_text("version=10.0.0\n")
    assert not code or code in (SOURCE / "doctor.py").read_text()
    load = "from pathlib import Path; from kernels import get_local_kernel"
    result = processes.run(
        f"{code}\n{load}\nget_local_kernel(Path({str(build)!r})).ops.rms_norm", ASCEND_HOME_PATH=str(tmp_path)
    )
    assert ("InvalidVersion" in result.stderr) == (not code)
    assert (result.returncode == 0) == bool(code), result.stderr


def test_import_by_path_needs_no_loader(build, processes, tmp_path):
    path = str(build / "torch-npu")
    code = f"import sys; sys.path.insert(0, {path!r}); import npu_fusion; assert npu_fusion.doctor().ok"
    result = processes.run(code, ASCEND_HOME_PATH=str(tmp_path), HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert 'note   CANN          "not known"' in result.stdout


# -- kernels and transformers ----------------------------------------------------------------------------------------


NEWEST = 'pip install "transformers=={}", or pip install "kernels{}"'


@pytest.mark.parametrize(
    ("kernels", "transformers", "wants", "advice"),
    [
        ("0.17.2", "5.22.2", "<0.18,>=0.17.2", None),
        ("0.17.2", "5.24.0", "<0.19,>=0.18.2", NEWEST.format("5.22.2", "<0.19,>=0.18.2")),
        ("0.16.2", "5.22.2", "<0.18,>=0.17.2", NEWEST.format("5.17.0", "<0.18,>=0.17.2")),
        ("0.12.3", "5.22.2", "<0.18,>=0.17.2", 'pip install "kernels<0.18,>=0.17.2"'),
    ],
)
def test_a_pair_that_does_not_go_together(doctor, monkeypatch, kernels, transformers, wants, advice):
    monkeypatch.setattr(doctor, "version", {"kernels": kernels, "transformers": transformers}.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch", f'kernels{wants}; extra == "kernels"'])
    found = finding(doctor.pair(SOURCE), "transformers")
    assert (found.status, found.advice) == (("ok", "") if advice is None else ("note", advice))
    assert transformers in found.value and (advice is None or kernels in found.value)


@pytest.mark.parametrize(("kernels", "words"), [(None, "not installed"), ("0.9.0", "has no npu")])
def test_without_a_loader_the_way_is_an_import(doctor, monkeypatch, kernels, words):
    monkeypatch.setattr(doctor, "version", {"kernels": kernels, "transformers": "4.57.6"}.get)
    first, second = doctor.pair(SOURCE)
    assert words in first.value and f"PYTHONPATH={SOURCE} and `import npu_fusion`" in first.advice
    assert "npu.kernelize(model) works" in second.value


def test_register_says_in_one_sentence_what_to_install(build, processes, offline):
    code = f"""
import sys, warnings
from pathlib import Path
from kernels import get_local_kernel
npu = get_local_kernel(Path({str(build)!r}))
doctor = sys.modules[npu.__name__ + ".doctor"]
doctor.version = {{"kernels": "0.17.2", "transformers": "5.24.0"}}.get
doctor.wanted_kernels = lambda: "<0.19,>=0.18.2"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    npu.register()
    npu.register()
assert [str(warning.message) for warning in caught] == [": ".join(doctor.refusal())], caught
"""
    result = processes.run(code, **offline)
    assert result.returncode == 0, result.stderr


def test_register_refuses_a_kernels_that_is_too_old(build, processes, offline):
    code = f"""
import kernels
from pathlib import Path
npu = kernels.get_local_kernel(Path({str(build)!r}))
del kernels.use_kernelized_func
npu.register()
"""
    result = processes.run(code, **offline)
    assert result.returncode == 1
    assert "ImportError: this kernels is too old to be joined; npu.kernelize(model) works without it." in result.stderr


def test_telemetry_switched_off_stops_kernels_requests_and_the_doctor_says_so(hub, online, processes):
    code = """
from kernels import get_kernel
get_kernel("org/npu-fusion", version=1, trust_remote_code=["org/npu-fusion"])
"""
    ask = f"""
import runpy
from pathlib import Path
print(list(runpy.run_path({str(SOURCE / "doctor.py")!r})["pair"](Path())))
"""
    result = processes.run(code, HF_HUB_DISABLE_TELEMETRY="1", **online)
    said = processes.run(ask, HF_HUB_DISABLE_TELEMETRY="1")
    # if this fails because the load succeeds, kernels was mended: narrow `hub_refuses_requests` to older versions
    assert "Illegal header value" in result.stderr
    assert "unset HF_HUB_DISABLE_TELEMETRY" in said.stdout


# -- the kernel's files ----------------------------------------------------------------------------------------------


def test_each_file_that_differs_is_named(doctor, kernel):
    (kernel / "ops/norm.py").write_text((kernel / "ops/norm.py").read_text() + "\n")
    (kernel / "layers.py").unlink()
    (kernel / "more.py").touch()
    (kernel / "__pycache__").mkdir(exist_ok=True)
    (kernel / "__pycache__/layers.cpython-311.pyc").touch()
    expected = {"layers.py": "missing", "ops/norm.py": "changed", "more.py": "not listed"}
    assert doctor.differences(kernel) == expected
    for path in (kernel, kernel.parent, kernel.parents[1]):
        files = finding(doctor.kernel_files(path), "files")
        assert files.status == "FAULT"
        assert sorted(files.value.splitlines()[1:]) == sorted(f"{name}: {what}" for name, what in expected.items())


@pytest.mark.parametrize("content", ["", "{}", '{"digest": {}}'])
def test_metadata_that_is_damaged(doctor, kernel, content):
    (kernel / "metadata.json").write_text(content)
    assert finding(doctor.kernel_files(kernel), "files").status == "FAULT"


def test_no_build(doctor, tmp_path):
    assert finding(doctor.kernel_files(tmp_path), "kernel").status == "FAULT"
    assert finding(doctor.kernel_files(SOURCE), "kernel").status == "note"


# -- places and the Hub ----------------------------------------------------------------------------------------------


def test_places(doctor, monkeypatch, tmp_path, kernel):
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCAL_KERNELS", f"org/npu-fusion={kernel}:else/where={tmp_path}/nothing")
    cache, ours, other = doctor.places()
    assert cache.value == f"{tmp_path}: no kernel of ours in it"
    assert (ours.status, other.status) == ("ok", "note")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/npu-fusion={tmp_path}/nothing")
    assert list(doctor.places())[1].status == "FAULT"

    (tmp_path / "kernels--org--npu-fusion/snapshots/abc").mkdir(parents=True)
    cache = next(doctor.places())
    assert cache.status == "note" and 'revision="abc"' in cache.advice
    (tmp_path / "kernels--org--npu-fusion/refs").mkdir()
    (tmp_path / "kernels--org--npu-fusion/refs/v1").write_text("abc")
    assert next(doctor.places()).status == "ok"


def test_the_hub_is_asked_only_when_wanted(doctor, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not asked" in finding(doctor.hub_reachable(), "Hub").value
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert finding(doctor.hub_reachable(), "Hub").status == "ok"
    hub.repositories.clear()
    assert "answers 401" in finding(doctor.hub_reachable(), "Hub").value
    hub.close()
    assert "does not answer" in finding(doctor.hub_reachable(), "Hub").value


# -- the verdict -----------------------------------------------------------------------------------------------------


def test_the_exit_code_is_that_of_the_trial(doctor, monkeypatch, build, capsys):
    monkeypatch.setattr(doctor, "cann", lambda path: [])  # whatever else this test session has set
    assert doctor.main([str(build)]) == 0, capsys.readouterr().out
    broken = [doctor.Finding("trial", doctor.FAULT, "RuntimeError: boom")]
    monkeypatch.setattr(doctor, "trial", lambda path: broken)
    assert doctor.main([str(build)]) == 1
    assert "layers would not be swapped here: trial" in capsys.readouterr().out


def test_no_npu_is_a_fault(doctor, monkeypatch):
    import torch

    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    npu = finding(doctor.import_torch(), "NPU")
    assert npu.status == "FAULT" and "npu-smi info" in npu.advice


def test_file_system_of_a_mount(doctor):
    assert doctor.file_system(Path("/proc")).startswith("proc, ")
    assert os.access("/dev/shm", os.W_OK) == doctor.file_system(Path("/dev/shm")).endswith("writable")
