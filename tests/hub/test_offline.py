"""Nodes without network: a mounted directory, LOCAL_KERNELS, a cache filled elsewhere.

Each process runs without a network interface, and ends where it opens a socket (`processes.refuse_sockets`).
"""

import shutil
import subprocess
from pathlib import Path

import pytest

# The whole way of a user: a layer map, a model from disk with use_kernels, a forward. HF_HUB_OFFLINE is not set, on
# purpose: nobody has to know about it.
USE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
AutoModelForCausalLM.from_config(config).save_pretrained({model!r})
npu.register()
model = AutoModelForCausalLM.from_pretrained({model!r}, use_kernels=True, device_map="npu", attn_implementation="eager")
swapped = npu.report(model).swapped
assert swapped["RMSNorm"] == 5 and swapped["SwiGLUMLP"] == 2, swapped
tokens = torch.arange(8, device="npu")[None]
assert model(tokens).logits.isfinite().all()
print(npu.__file__)
"""

LOCAL = """
from pathlib import Path
from kernels import get_local_kernel
npu = get_local_kernel(Path({path!r}))
"""


@pytest.fixture
def use(tmp_path) -> str:
    return USE.format(model=str(tmp_path / "model"))


@pytest.fixture
def no_hub(tmp_path) -> dict[str, str]:
    """An empty cache, and nothing that says offline."""
    return {"HF_HOME": str(tmp_path / "huggingface")}


def test_the_check_itself_ends_a_process_that_opens_a_socket(processes):
    for code in (
        "import socket; socket.socket()",
        "import urllib.request as r\ntry: r.urlopen('http://127.0.0.1:9')\nexcept BaseException: pass",
    ):
        assert processes.run(code, network=False).returncode == 99


def test_a_read_only_directory_on_another_file_system(build, mount, use, no_hub, processes):
    place = mount("mounted", "size=8m")
    shutil.copytree(build / "torch-npu", place / "npu-fusion/build/torch-npu")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    load = LOCAL.format(path=str(place / "npu-fusion"))
    result = processes.run(f"{load}\n{use}", network=False, **no_hub)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{place}/npu-fusion/build/torch-npu/__init__.py\n"
    doctor = processes.run(f"{load}\nnpu.doctor()", network=False, **no_hub)
    assert f"{place}/npu-fusion/build/torch-npu (tmpfs, read-only)" in doctor.stdout


def test_local_kernels(build, use, no_hub, processes):
    load = """
from kernels import get_kernel, has_kernel
assert has_kernel("org/npu-fusion", version=1)
npu = get_kernel("org/npu-fusion", version=1)
"""
    result = processes.run(f"{load}\n{use}", network=False, LOCAL_KERNELS=f"org/npu-fusion={build}", **no_hub)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{build}/torch-npu/__init__.py\n"


GET = """
from kernels import get_kernel
npu = get_kernel("org/npu-fusion", {arguments}, trust_remote_code=["org/npu-fusion"])
"""


def test_a_cache_filled_elsewhere(hub, online, use, processes, tmp_path, mount):
    """Filled by branch name, a cache knows the version; copied, even read-only, it serves every node."""
    filled = processes.run(GET.format(arguments="revision='v1'"), **online)
    assert filled.returncode == 0, filled.stderr
    hub.close()
    place = mount("shared", "size=8m")
    shutil.copytree(online["HF_HOME"], place / "huggingface", symlinks=True)
    shutil.rmtree(online["HF_HOME"])
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "huggingface")}
    result = processes.run(f"{GET.format(arguments='version=1')}\n{use}", network=False, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{place}/huggingface/hub/kernels--org--npu-fusion/snapshots/")


def test_a_cache_filled_by_version_serves_the_commit_and_the_doctor_says_which(hub, online, offline, processes):
    """kernels turns a version into a commit and keeps no name for it: upstream's way, told by doctor and README."""
    commit = hub.repositories["org/npu-fusion"].branches["v1"]
    assert processes.run(GET.format(arguments="version=1"), **online).returncode == 0
    by_version = processes.run(GET.format(arguments="version=1"), network=False, **offline)
    assert "Version 1 of 'org/npu-fusion' is not available in the local cache" in by_version.stderr
    result = processes.run(f"{GET.format(arguments=f'revision={commit!r}')}\nnpu.doctor()", network=False, **offline)
    assert result.returncode == 0, result.stderr
    assert f'revision="{commit}" is;' in result.stdout


def test_files_beside_the_build_make_a_cache_useless_offline(hub, online, offline, processes, kernel_files):
    """kernels downloads build/<variant> alone, and offline huggingface_hub misses the rest: publish.py adds none."""
    hub.publish("org/npu-fusion", "v1", {**kernel_files, "README.md": b"a card"})
    assert processes.run(GET.format(arguments="revision='v1'"), **online).returncode == 0
    result = processes.run(GET.format(arguments="version=1"), network=False, **offline)
    assert "Cannot find a local snapshot" in result.stderr and "README.md" in result.stderr


@pytest.mark.parametrize("arguments", ["version=1", "revision='v1'"])
def test_offline_with_an_empty_cache_is_a_clear_error(arguments, offline, processes):
    result = processes.run(GET.format(arguments=arguments), network=False, **offline)
    assert result.returncode == 1
    assert (
        "Hugging Face Hub is in offline mode" in result.stderr
        or "offline mode the kernel must already" in result.stderr
    )
    assert not Path(offline["HF_HOME"]).exists()
