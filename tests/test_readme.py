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


def install(directory: Path) -> Path:
    """Run the README's commands in `directory`, in a shell that finds an NPU; returns what stands for /opt/kernels."""
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


def run_blocks(installed: Path, directory: Path) -> tuple[list[dict], str]:
    """What `run_statements` printed of each statement, and everything that was printed."""
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


def test_the_blocks_do_what_they_say(tmp_path, subtests):
    """One test, so that the archive is unpacked and the blocks are run once, whatever runs the tests in parallel."""
    (tmp_path / "cluster").mkdir()
    installed = install(tmp_path / "cluster")
    states, output = run_blocks(installed, tmp_path)
    llama = FAMILIES["llama"][2]

    def after(words: str) -> dict:
        (found,) = [state for state in states if words in state["statement"]]
        return found

    with subtests.test("every model computes"):
        assert len(states) > 10 and all(state["finite"] for state in states)
    with subtests.test("the first block swaps and prints the report"):
        assert states[1]["statement"] == "model = npu.kernelize(model)"
        assert states[1]["swapped"] == llama
        assert re.search(r"^SwiGLUMLP +LlamaMLP +2 +yes$", output, re.MULTILINE)
    with subtests.test("the kernel comes from where it was installed"):
        assert Path(after("get_local_kernel(Path(")["kernel"]).is_relative_to(installed)
    with subtests.test("choosing, verifying, restoring"):
        assert after("only=")["swapped"] == {layer: llama[layer] for layer in ("RMSNorm", "SwiGLUMLP")}
        assert after("exclude=['rotary")["swapped"] == {k: v for k, v in llama.items() if k != "rotary_pos_emb"}
        assert "all within" in output
        assert after("npu.restore")["swapped"] == {}
    for words in ("kernel_config=config", "use_kernels=True", "tp_plan='auto'"):
        with subtests.test("loaded with every layer", words=words):
            assert after(words)["swapped"] == llama
    with subtests.test("merged at load"):
        assert next(state["statement"] for state in states if state["merged"]).startswith("with npu.merged_gate_up(")
        assert not after("tp_plan='auto'")["merged"]
    with subtests.test("experts by name"):
        assert after("experts_implementation=")["swapped"] == {"MoEExperts": 2}
    with subtests.test("an entry of a default map serves plain kernels"):
        assert after("import LayerRepository")["norm"] == "Qwen3MoeRMSNorm.forward"
        assert after("register_kernel_mapping")["norm"] == "RMSNorm.forward"


if __name__ == "__main__":
    run_statements(json.load(sys.stdin))
