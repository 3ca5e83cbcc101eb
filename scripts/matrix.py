"""Run the kernel with each supported pair of versions, and write what came of it into README.md.

    python scripts/matrix.py [pair ...]      # pairs as "5.15.1/0.16.2"; all of them without

Each pair gets a virtual environment under .cache/matrix, made once: transformers and kernels with what they need of
PyPI, and torch, torch_npu and the emulator of the environment that runs this. tests/matrix/check.py is what runs in it.
Exits with 1 if a pair does not do what its row in PAIRS expects.
"""

import json
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache/matrix"
MARKERS = ("<!-- versions -->", "<!-- /versions -->")


@dataclass(frozen=True)
class Pair:
    """What is expected: `use_kernels` at model load, beside npu.kernelize, which works everywhere."""

    transformers: str
    kernels: str
    loaded: str = "get_kernel"
    use_kernels: bool = True

    @property
    def name(self) -> str:
        return f"{self.transformers}/{self.kernels}"


PAIRS = (
    # transformers 4 wants kernels <= 0.9, which knows no npu: the kernel is imported by path there
    Pair("4.57.6", "0.9.0", loaded="import npu_fusion", use_kernels=False),
    Pair("4.57.6", "0.12.3", loaded="get_local_kernel", use_kernels=False),
    Pair("5.15.1", "0.16.2"),
    Pair("5.17.0", "0.16.2"),
    Pair("5.18.0", "0.17.2"),
    Pair("5.20.2", "0.17.2"),
    Pair("5.22.2", "0.17.2"),
    # wants kernels >= 0.18.2, which PyPI does not have
    Pair("5.24.0", "0.17.2", use_kernels=False),
)


def environment(pair: Pair) -> Path:
    """The Python of the pair's virtual environment."""
    directory = CACHE / pair.name.replace("/", "-")
    python, stamp = directory / "bin/python", directory / ".installed"
    if not stamp.exists():
        print(f"setting up {directory}", file=sys.stderr)
        venv.create(directory, clear=True)
        requirements = [f"transformers=={pair.transformers}", f"kernels=={pair.kernels}"]
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *requirements]
        if subprocess.run(command).returncode:
            sys.exit(f"{pair.name}: pip does not install them together")
        stamp.touch()
    # after the pair's own packages on the path, so that these win
    shared = [sysconfig.get_path("purelib"), str(ROOT / "emulator")]
    site = sysconfig.get_path("purelib", vars={"base": str(directory)})
    Path(site, "zz_shared.pth").write_text("\n".join(shared) + "\n")
    return python


def run(pair: Pair, build: Path) -> dict:
    python = environment(pair)
    variables = {name: value for name, value in os.environ.items() if name not in ("LOCAL_KERNELS", "PYTHONPATH")}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(CACHE / "huggingface")}
    command = [str(python), str(ROOT / "tests/matrix/check.py"), str(build)]
    finished = subprocess.run(command, env=variables, capture_output=True, text=True)
    (CACHE / f"{pair.name.replace('/', '-')}.log").write_text(finished.stdout + finished.stderr)
    if finished.returncode:
        return {"transformers": pair.transformers, "kernels": pair.kernels, "error": finished.stderr.strip()}
    return json.loads(finished.stdout.splitlines()[-1])


def unexpected(pair: Pair, result: dict) -> list[str]:
    """What differs from the pair's row."""
    if "error" in result:
        return [f"{pair.name}: {result['error']}"]
    found = []
    for name in ("transformers", "kernels", "loaded"):
        if result[name] != getattr(pair, name):
            found.append(f"{pair.name}: {name} is {result[name]}, not {getattr(pair, name)}")
    if not isinstance(result["kernelize"], dict):
        found.append(f"{pair.name}: npu.kernelize: {result['kernelize']}")
    for name in ("use_kernels", "kernel_config"):
        if isinstance(result[name], dict) != pair.use_kernels:
            found.append(f"{pair.name}: {name}: {result[name]}")
    if not (isinstance(result["doctor"], dict) and result["doctor"]["ok"]):
        found.append(f"{pair.name}: doctor: {result['doctor']}")
    return found


def table(results: list[dict]) -> str:
    lines = [
        "| transformers | kernels | torch | torch_npu | loaded with | `npu.kernelize` | `use_kernels=True` at load |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        if "error" in result:
            lines.append(f"| {result['transformers']} | {result['kernels']} | | | | does not run | |")
            continue
        kernelize = "yes" if isinstance(result["kernelize"], dict) else "no"
        if isinstance(result["use_kernels"], dict):
            at_load = "yes" + ("" if isinstance(result["kernel_config"], dict) else ", without `KernelConfig`")
        else:
            at_load = "no" + (f": {result['doctor']['advice']}" if result["doctor"]["advice"] else "")
        versions = [result[name].split("+")[0] for name in ("transformers", "kernels", "torch", "torch_npu")]
        lines.append("| " + " | ".join([*versions, f"`{result['loaded']}`", kernelize, at_load]) + " |")
    return "\n".join(lines)


def write(readme: Path, text: str) -> None:
    """Replace what stands between the markers of README.md."""
    before, found, rest = readme.read_text().partition(MARKERS[0])
    if not found:
        sys.exit(f"{readme} has no {MARKERS[0]} ... {MARKERS[1]} to write the table into")
    readme.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")


def main() -> None:
    wanted = sys.argv[1:]
    pairs = [pair for pair in PAIRS if not wanted or pair.name in wanted]
    if missing := set(wanted) - {pair.name for pair in pairs}:
        sys.exit(f"no such pair: {', '.join(missing)}; there are {', '.join(pair.name for pair in PAIRS)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    results, wrong = [], []
    with tempfile.TemporaryDirectory() as directory:
        runpy.run_path(str(ROOT / "scripts/build.py"))["build"](Path(directory))
        for pair in pairs:
            results.append(run(pair, Path(directory)))
            wrong += unexpected(pair, results[-1])
            print(table(results[-1:]).splitlines()[-1], flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    if not wanted:
        write(ROOT / "README.md", table(results))


if __name__ == "__main__":
    main()
