"""The pages do what they say: their code runs, both languages hold the same code, their links lead somewhere."""

import ast
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import npu_emulator.auto  # noqa: F401  this file is a program of its own, too: see run_statements
import pytest
import torch
from kernels import Mode, get_kernel, kernelize
from models.families import FAMILIES, build_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/recipes.md")
TRANSLATIONS = {page: page.replace(".md", ".zh-CN.md") for page in PAGES}
ALL_PAGES = (*PAGES, *TRANSLATIONS.values())

npu = get_kernel("org/npu-fusion", version=1)


def blocks(page: str, language: str | None = None) -> list[tuple[str, str]]:
    """(language, code) of the page's fenced blocks, or the codes of one language alone."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return found if language is None else [code for name, code in found if name == language]


def commands(page: str) -> list[str]:
    lines = [line for code in blocks(page, "sh") for line in code.replace("\\\n", " ").splitlines()]
    return [line for line in (line.partition(" # ")[0].strip() for line in lines) if line]


# ---- both languages


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_hold_the_same_code(page):
    assert blocks(page), "no block was found"
    for ours, theirs in zip(blocks(page), blocks(TRANSLATIONS[page]), strict=True):
        assert ours == theirs


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_links_and_sections(page):
    def shape(name):
        text = (ROOT / name).read_text()
        links = [link.replace(".zh-CN", "").partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
        return sorted(set(links) - {Path(page).name}), [
            len(level) for level in re.findall(r"^(#+) ", prose(name), re.M)
        ]

    assert shape(page) == shape(TRANSLATIONS[page])


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


# ---- what the pages name


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(page)) if not link.startswith("https://")]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link.partition("#")[0]).exists()]
    assert links and not missing


@pytest.mark.parametrize("page", ALL_PAGES)
def test_names_are_those_of_the_kernel(page):
    text = (ROOT / page).read_text()
    members = set(re.findall(r"\bnpu\.(\w+)", text)) - {"is_available"}
    assert members and members <= {*npu.__all__, *dir(npu)}
    operators = set(re.findall(r"`(npu_[a-z0-9_]+)`", text))
    sources = "".join(path.read_text() for path in (ROOT / "torch-ext/npu_fusion/ops").glob("*.py"))
    assert {name for name in operators if name not in sources} == set()


def test_the_table_of_layers_is_complete():
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*?\|", prose("README.md"), re.MULTILINE))))
    layers = {name for name, value in vars(npu.layers).items() if hasattr(value, "forward") and name[0].isupper()}
    assert named & layers == layers - {"SwiGLUMLPLayout"}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_shell_blocks_parse_and_make_knows_its_targets(page):
    known = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        program, *arguments = shlex.split(command)
        for argument in arguments if program == "make" else ():
            name, is_variable, _ = argument.partition("=")
            assert f"$({name})" in makefile if is_variable else name in known, command


def test_the_recipes_compile():
    """The Trainer's are run by tests/training/test_trainer.py; the others need projects that are not installed here."""
    for code in blocks("docs/recipes.md", "python"):
        compile(code, "docs/recipes.md", "exec")


# ---- the commands for a cluster without network


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """What stands for /opt/kernels, after the README's commands; they have run in a shell that found the NPU."""
    directory = tmp_path_factory.mktemp("cluster")
    build = Path(os.environ["LOCAL_KERNELS"].partition("=")[2])
    (code,) = [code for code in blocks("README.md", "sh") if "tar " in code]
    first, *rest = code.splitlines()
    assert first.split()[:2] == ["make", "bundle"], "the archive is made with the line that is left out here"
    runpy.run_path(str(ROOT / "scripts/bundle.py"))["bundle"](build, directory)
    # python3 is this Python, which starts the emulator where the cluster has an NPU
    (directory / "sitecustomize.py").write_text("import npu_emulator.auto\n")
    script = (
        "\n".join(rest).replace("/opt/kernels", str(directory / "opt")).replace("python3", shlex.quote(sys.executable))
    )
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "layers would be swapped here" in run.stdout
    return directory / "opt"


def test_the_commands_for_a_cluster_install_a_kernel_that_the_doctor_finds_healthy(installed):
    assert (installed / "npu-fusion/build/torch-npu/metadata.json").is_file()


# ---- the Python blocks


def run_statements(code: list[str]) -> None:
    """Run the blocks in one namespace; a line of JSON after each statement says which one it was and what `model` is."""
    dense, mixture = (Path(os.environ["README_MODELS"], family) for family in ("llama", "qwen3_moe"))
    ids = torch.arange(2, 12)[None].to("npu")
    names = {"path": dense, "moe_path": mixture, "model": build_model("llama").to("npu"), "inputs": {"input_ids": ids}}
    for block in code:
        for statement in ast.parse(block).body:
            exec(compile(ast.Module([statement], []), "<README>", "exec"), names)
            if "npu" not in names:
                continue
            model = names["model"].to("npu")
            if "register_kernel_mapping" in ast.unparse(statement):  # the entry is there to be found by plain kernels
                kernelize(model, mode=Mode.INFERENCE, device="npu")
            with torch.no_grad():
                finite = bool(model(**names["inputs"]).logits.isfinite().all())
            state = {
                "statement": ast.unparse(statement),
                "finite": finite,
                "swapped": names["npu"].report(model).swapped,
                "merged": hasattr(getattr(model.model.layers[0], "mlp", None), "gate_up_proj"),
                "kernel": names["npu"].__file__,
                "norm": model.model.norm.forward.__qualname__,
            }
            print("@", json.dumps(state), flush=True)


@pytest.fixture(scope="module")
def states(installed, tmp_path_factory):
    """What `run_statements` printed, with the README's directory in the place where it was installed."""
    directory = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_moe"):
        build_model(family).save_pretrained(directory / family)
    code = [code.replace("/opt/kernels", str(installed)) for code in blocks("README.md", "python")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "README_MODELS": str(directory),
        "HF_HUB_OFFLINE": "1",
        # what torchrun sets
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }
    run = subprocess.run(
        [sys.executable, __file__], input=json.dumps(code), env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line[2:]) for line in run.stdout.splitlines() if line.startswith("@ ")], run.stdout


def after(states, words: str) -> dict:
    (found,) = [state for state in states[0] if words in state["statement"]]
    return found


def test_every_model_of_the_readme_computes(states):
    assert len(states[0]) > 10 and all(state["finite"] for state in states[0])


def test_the_first_block_swaps_and_prints_the_report(states):
    first = states[0][1]
    assert first["statement"] == "model = npu.kernelize(model)"
    assert first["swapped"] == FAMILIES["llama"][2]
    assert re.search(r"^SwiGLUMLP +LlamaMLP +2 +yes$", states[1], re.MULTILINE)


def test_the_kernel_comes_from_where_it_was_installed(states, installed):
    assert Path(after(states, "get_local_kernel(Path(")["kernel"]).is_relative_to(installed)


def test_choosing_verifying_and_restoring(states):
    llama = FAMILIES["llama"][2]
    assert after(states, "only=")["swapped"] == {layer: llama[layer] for layer in ("RMSNorm", "SwiGLUMLP")}
    assert after(states, "exclude=['rotary")["swapped"] == {k: v for k, v in llama.items() if k != "rotary_pos_emb"}
    assert "all within" in states[1]
    assert after(states, "npu.restore")["swapped"] == {}


@pytest.mark.parametrize("words", ["kernel_config=config", "use_kernels=True", "tp_plan='auto'"])
def test_loaded_with_every_layer(words, states):
    assert after(states, words)["swapped"] == FAMILIES["llama"][2]


def test_merged_at_load(states):
    assert after(states, "merged_gate_up")["merged"]
    assert not any(
        state["merged"] for state in states[0] if "path" in state["statement"] and "merged" not in state["statement"]
    )


def test_experts_by_name(states):
    assert after(states, "experts_implementation=")["swapped"] == {"MoEExperts": 2}


def test_an_entry_of_the_default_map_serves_plain_kernels(states):
    assert after(states, "import LayerRepository")["norm"] == "Qwen3MoeRMSNorm.forward"
    assert after(states, "register_kernel_mapping")["norm"] == "RMSNorm.forward"


if __name__ == "__main__":
    run_statements(json.load(sys.stdin))
