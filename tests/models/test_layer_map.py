"""The layer map: which kernel its entries stand for, with and without the Hub."""

import logging
import tomllib
from pathlib import Path

import kernels
import pytest
from kernels import Mode, get_kernel
from models.families import build_model

npu = get_kernel("org/npu-fusion", version=1)


@pytest.fixture(autouse=True)
def forget_what_the_hub_gave():
    npu.mapping.hub_layers.cache_clear()


def test_names_repository_and_version_as_build_toml_does():
    general = tomllib.loads((Path(__file__).parents[2] / "build.toml").read_text())["general"]
    assert (general["hub"]["repo-id"], general["version"]) == (npu.mapping.HUB_REPOSITORY, npu.mapping.HUB_VERSION)


def test_entries_are_the_kernel_that_was_loaded():
    for entry in npu.layer_map().values():
        assert entry["npu"].load() is getattr(npu.layers, entry["npu"].layer_name)
        assert str(Path(npu.__file__).parent) in str(entry["npu"])


def test_a_map_that_names_the_hub_loads_what_kernels_loads(caplog):
    with caplog.at_level(logging.WARNING):
        loaded = [entry["npu"].load() for entry in npu.layer_map(hub=True).values()]
    assert loaded[0] is npu.layers.RMSNorm, "LOCAL_KERNELS answers for the Hub here"
    (record,) = [record for record in caplog.records if "npu-fusion uses" in record.message]
    assert record.message == "npu-fusion uses the layers of org/npu-fusion, version 1"


@pytest.mark.parametrize("rank, lines", [("0", 1), ("1", 0)])
def test_without_the_hub_the_local_kernel_takes_its_place_and_says_so_once(monkeypatch, caplog, rank, lines):
    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(kernels, "get_kernel", unreachable)
    monkeypatch.setenv("RANK", rank)
    model = build_model("llama")
    with caplog.at_level(logging.WARNING), kernels.use_kernel_mapping(npu.layer_map(hub=True), inherit_mapping=False):
        kernels.kernelize(model, mode=Mode.INFERENCE, device="npu")
    assert npu.report(model).swapped == {"RMSNorm": 5, "rotary_pos_emb": 2}
    said = [record.message for record in caplog.records if "npu-fusion uses" in record.message]
    assert len(said) == lines
    assert all("OSError: no route to host" in message and str(npu.mapping.HERE) in message for message in said)
    npu.restore(model)


def test_the_hub_is_not_trusted_without_the_users_word(monkeypatch):
    given = {}
    monkeypatch.setattr(kernels, "get_kernel", lambda repo_id, **options: given.update(options) or npu)
    npu.layer_map(hub=True)["RMSNorm"]["npu"].load()
    assert given["trust_remote_code"] is False
    npu.layer_map(hub=True, trust_remote_code=["org/npu-fusion"])["RMSNorm"]["npu"].load()
    assert given["trust_remote_code"] == ["org/npu-fusion"]
