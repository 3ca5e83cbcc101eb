"""Would the kernel load and swap layers on this machine, and if not, what is to be done?

    npu.doctor()                                                  # in a process that has loaded the kernel
    python <kernel directory>/doctor.py [directory] [--hub]       # alone

Alone, this file needs the standard library only, and it looks at torch's files before it imports torch: on an Ascend
machine without CANN's libraries on the path, `import torch` is what fails.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
REPOSITORY = "org/npu-fusion"
VARIANT = "torch-npu"

# Ops that the kernel calls -> the op-plugin release that first has them as they are called here.
OPS = {
    "npu_add_rms_norm": "6.0",
    "npu_geglu": "5.0",
    "npu_gelu": "6.0",
    "npu_gemma_rms_norm": "7.0",
    "npu_grouped_matmul": "7.0",
    "npu_moe_gating_top_k": "7.0",
    "npu_moe_gating_top_k_softmax": "6.0",
    "npu_moe_gating_top_k_softmax_v2": "26.0",
    "npu_moe_init_routing_v2": "7.0",
    "npu_moe_token_permute_grad_v2": "26.1",
    "npu_moe_token_unpermute": "7.1",
    "npu_rms_norm": "5.0",
    "npu_rms_norm_backward": "5.0",
    "npu_rotary_mul": "7.0",
    "npu_rotary_mul_backward": "7.0",
    "npu_swiglu": "6.0",
}
# op-plugin release -> the first torch_npu of each torch that carries it, and the CANN that belongs to it.
RELEASES = {
    "5.0": ("torch_npu 2.1.0", "7.0"),
    "6.0": ("torch_npu 2.4.0.post2", "8.0.0"),
    "7.0": ("torch_npu 2.5.1, 2.4.0.post4 or 2.3.1.post6", "8.1.RC1"),
    "7.1": ("torch_npu 2.6.0 or 2.5.1.post1", "8.2.RC1"),
    "7.2": ("torch_npu 2.8.0, 2.7.1 or 2.6.0.post3", "8.3.RC1"),
    "7.3": ("torch_npu 2.9.0, 2.8.0.post2, 2.7.1.post2 or 2.6.0.post5", "8.5.0"),
    "26.0": ("torch_npu 2.10.0, 2.9.0.post2, 2.8.0.post4 or 2.7.1.post4", "9.0.0"),
    "26.1": ("torch_npu 2.12.0, 2.11.0, 2.10.0.post4, 2.9.0.post6 or 2.7.1.post8", "9.1.0"),
}
# kernels -> the newest transformers that takes it, of the pairs in the README's table.
PAIRS = {"0.16": "5.17.0", "0.17": "5.22.2"}

LOADS_NPU = (0, 10, 5)  # kernels from here on takes a torch-npu directory; from 0.14 on without being told the package

OK, NOTE, FAULT = "ok", "note", "FAULT"


@dataclass(frozen=True)
class Finding:
    subject: str
    status: str  # OK, NOTE (works, but worth knowing) or FAULT (nothing would be swapped)
    value: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Findings in the order in which they were made; prints as a table."""

    findings: Tuple[Finding, ...]

    @property
    def faults(self) -> Tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == FAULT)

    @property
    def ok(self) -> bool:
        return not self.faults

    def __getitem__(self, subject: str) -> Finding:
        return next(finding for finding in self.findings if finding.subject == subject)

    def __str__(self) -> str:
        width = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            first, *rest = finding.value.splitlines() or [""]
            lines.append(f"{finding.status:5}  {finding.subject:{width}}  {first}".rstrip())
            lines += [f"{'':{width + 9}}{line}" for line in rest]
            lines += [f"{'':{width + 9}}-> {line}" for line in finding.advice.splitlines()]
        subjects = ", ".join(finding.subject for finding in self.faults)
        lines.append(f"layers would not be swapped here: {subjects}" if subjects else "layers would be swapped here")
        return "\n".join(lines)

    __repr__ = __str__


# -- the kernel's own directory --------------------------------------------------------------------------------------


def differences(directory: Path) -> Dict[str, str]:
    """Files of a kernel directory that are not what its metadata.json says.

    Returns:
        {file: "missing" | "changed" | "not listed"}, without the bytecode that Python writes beside the files.

    Raises:
        OSError, ValueError, KeyError: If metadata.json is not there, or is not one with digests.
    """
    listed = json.loads((directory / "metadata.json").read_text())["digest"]["files"]
    found = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    del found["metadata.json"]
    result = {name: "missing" for name in listed if name not in found}
    for name, path in found.items():
        if name not in listed:
            result[name] = "not listed"
        elif base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() != listed[name]:
            result[name] = "changed"
    return result


def check_directory(name: str, directory: Path = HERE) -> None:
    """Refuse a kernel that was half there, or replaced by another, while it was imported as module `name`.

    Raises:
        ImportError: If a file of the kernel is missing, or its metadata is not that of the module.
    """
    try:
        metadata = json.loads((directory / "metadata.json").read_text())
    except FileNotFoundError:
        return  # sources that were not built
    missing = [file for file in metadata["digest"]["files"] if not (directory / file).is_file()]
    if missing:
        raise ImportError(f"{directory} is not complete, {', '.join(missing)} is missing: download or unpack it again")
    # kernels names the module by the kernel's id, which is a digest of its files
    if name.startswith("_npu_fusion_") and name != metadata["id"]:
        raise ImportError(f"{directory} was replaced while it was imported: load it again, in a new process")


def variant_directory(path: Path) -> Optional[Path]:
    """The directory with metadata.json, of a kernel repository, its build directory or that directory itself."""
    return next((d for d in (path, path / VARIANT, path / "build" / VARIANT) if (d / "metadata.json").is_file()), None)


def kernel_files(path: Path) -> Iterator[Finding]:
    directory = variant_directory(path)
    if directory is None:
        status = NOTE if (path / "doctor.py").is_file() else FAULT
        yield Finding("kernel", status, f"{path} holds no build of the kernel", "in a checkout: make build")
        return
    yield Finding("kernel", OK, f"{directory} ({file_system(directory)})")
    try:
        wrong = differences(directory)
    except (OSError, ValueError, KeyError) as error:
        yield Finding("files", FAULT, f"metadata.json: {type(error).__name__}: {error}", "download or unpack it again")
        return
    if wrong:
        lines = "\n".join(f"{name}: {what}" for name, what in wrong.items())
        yield Finding("files", FAULT, f"not what metadata.json says\n{lines}", "download or unpack it again")
    else:
        yield Finding("files", OK, "every file is what metadata.json says")


def file_system(path: Path) -> str:
    """Kind of the file system under `path`, and whether it is read-only."""
    best, kind = Path("/"), "unknown file system"
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        mounts = []
    for line in mounts:
        point, name = line.split(" ")[1:3]
        point = Path(point.replace("\\040", " "))
        if (point == path or point in path.parents) and len(point.parts) >= len(best.parts):
            best, kind = point, name
    return f"{kind}, {'writable' if os.access(path, os.W_OK) and not read_only(path) else 'read-only'}"


def read_only(path: Path) -> bool:
    return hasattr(os, "statvfs") and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


# -- torch, torch_npu and CANN ----------------------------------------------------------------------------------------


def version(distribution: str) -> Optional[str]:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> Iterator[Finding]:
    """What is installed, from torch's files alone."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        yield Finding("torch", FAULT, "not installed", "pip install torch torch_npu")
        return
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    torch, torch_npu = build["__version__"], version("torch_npu")
    for kind in ("cuda", "hip", "xpu"):
        if build.get(kind):
            yield Finding(
                "torch",
                FAULT,
                f"{torch} is a build for {kind} {build[kind]}: kernels would choose {kind} and refuse {VARIANT}",
                f"pip install torch=={base(torch)}+cpu --index-url https://download.pytorch.org/whl/cpu",
            )
            break
    else:
        yield Finding("torch", OK, torch)
    if torch_npu is None:
        yield Finding("torch_npu", FAULT, "not installed", f"pip install torch_npu=={base(torch)}")
    elif base(torch) != base(torch_npu):
        advice = f"pip install torch_npu=={base(torch)}, or torch=={base(torch_npu)}"
        yield Finding("torch_npu", FAULT, f"{torch_npu} is for torch {base(torch_npu)}, not for {torch}", advice)
    else:
        yield Finding("torch_npu", OK, torch_npu)


def release(version: str) -> Tuple[int, ...]:
    """0.17.2.dev0 -> (0, 17, 2)"""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def base(version: str) -> str:
    """2.9.0.post2 and 2.9.0+cpu -> 2.9.0"""
    return ".".join(version.split("+")[0].split(".")[:3])


def import_torch() -> Iterator[Finding]:
    try:
        import torch

        importlib.import_module("torch_npu")
    except Exception as error:
        chain, cause = [], error
        while cause is not None:
            chain.append(f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}")
            cause = cause.__cause__ or cause.__context__
        advice = "look at the last line above"
        if any(".so" in line for line in chain):
            advice = "CANN's libraries are not on the path: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
        yield Finding("import torch", FAULT, "\n".join(chain), advice)
        return
    if not torch.npu.is_available():
        yield Finding("NPU", FAULT, "none is available", "npu-smi info; in a container, pass /dev/davinci* on")
        return
    names = [torch.npu.get_device_name(index) for index in range(torch.npu.device_count())]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield Finding("NPU", OK, kinds)
    missing = [name for name in OPS if not hasattr(torch.ops.npu, name)]
    lines = [f"{name}: since {RELEASES[OPS[name]][0]} (CANN {RELEASES[OPS[name]][1]})" for name in missing]
    if missing:
        advice = "their layers take other ops or plain PyTorch, with the same results; a newer torch_npu brings them"
        yield Finding("fused ops", NOTE, "\n".join(["this torch_npu lacks", *lines]), advice)
    else:
        yield Finding("fused ops", OK, f"all {len(OPS)} are there")


def cann_version() -> str:
    """What torch_npu.utils.collect_env.get_cann_version() returns, which kernels' loader asks."""
    found = "not known"
    home = os.environ.get("ASCEND_HOME_PATH")
    for directory, _, files in os.walk(os.path.realpath(home)) if home else ():
        names = [name for name in files if name.startswith("ascend_") and name.endswith("_install.info")]
        if names:
            lines = Path(directory, names[0]).read_text(errors="replace").splitlines()
            found = next((line.strip().split("=")[-1] for line in lines if "version" in line), found)
    return found


def cann(path: Path) -> Iterator[Finding]:
    found = cann_version()
    major, minor = found[:1], found[2:3]  # so does the loader
    if major.isdigit() and minor.isdigit():
        exact = found.startswith(f"{major}.{minor}.") or found == f"{major}.{minor}"
        value = found if exact else f"{found}, which kernels reads as {major}.{minor}; this kernel is the same for both"
        yield Finding("CANN", OK, value)
        return
    # the kernel is loaded already where it is asked from inside; its layers are found without the loader
    status = NOTE if __package__ else FAULT
    advice = [
        "before get_kernel, as this kernel is the same for every CANN version:",
        '  import torch_npu.utils.collect_env as env; env.get_cann_version = lambda: "9.1.0"',
        f"or without kernels' loader: PYTHONPATH={variant_directory(path) or path} and `import npu_fusion`",
    ]
    if not os.environ.get("ASCEND_HOME_PATH"):
        advice.insert(0, "source /usr/local/Ascend/ascend-toolkit/set_env.sh, which sets ASCEND_HOME_PATH; or,")
    value = f'"{found}": kernels reads characters 1 and 3 as the version, and stops with InvalidVersion'
    yield Finding("CANN", status, value, "\n".join(advice))


# -- kernels and transformers -----------------------------------------------------------------------------------------


def wanted_kernels() -> Optional[str]:
    """The versions of kernels that the installed transformers takes, as it declares them: "<0.18,>=0.17.2"."""
    try:
        requirements = importlib.metadata.requires("transformers") or []
        from packaging.requirements import Requirement
    except ImportError:  # PackageNotFoundError is one
        return None
    parsed = (Requirement(requirement) for requirement in requirements)
    return next((str(requirement.specifier) for requirement in parsed if requirement.name == "kernels"), None)


def refusal() -> Optional[Tuple[str, str]]:
    """(what, what to install) where the installed transformers does not take the installed kernels."""
    kernels, transformers, wanted = version("kernels"), version("transformers"), wanted_kernels()
    if kernels is None or transformers is None or wanted is None or release(transformers) < (5,):
        return None
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(kernels, prereleases=True):
        return None
    newest = PAIRS.get(".".join(kernels.split(".")[:2]))
    install = [f'pip install "transformers=={newest}"'] if newest else []
    install.append(f'pip install "kernels{wanted}"')
    what = f"transformers {transformers} refuses kernels {kernels} for use_kernels=True; npu.kernelize(model) works"
    return what, ", or ".join(install)


def pair(path: Path) -> Iterator[Finding]:
    kernels, transformers = version("kernels"), version("transformers")
    by_import = f"PYTHONPATH={variant_directory(path) or path} and `import npu_fusion`"
    if kernels is None:
        yield Finding("kernels", NOTE, "not installed: there is no get_kernel", f"pip install kernels, or {by_import}")
    elif release(kernels) < LOADS_NPU:
        yield Finding("kernels", NOTE, f"{kernels} has no npu: its get_kernel does not load this kernel", by_import)
    elif hub_refuses_requests():
        yield Finding(
            "kernels",
            NOTE,
            f"{kernels}: with telemetry off, huggingface_hub {version('huggingface_hub')} refuses its user agent",
            "to load from the Hub, unset HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY and DO_NOT_TRACK for that one run",
        )
    else:
        yield Finding("kernels", OK, kernels)
    if transformers is None:
        yield Finding("transformers", NOTE, "not installed: plain modules are swapped all the same")
    elif release(transformers) < (5,):
        value = f"{transformers} has no npu for use_kernels=True; npu.kernelize(model) works"
        yield Finding("transformers", NOTE, value)
    elif refused := refusal():
        yield Finding("transformers", NOTE, *refused)
    else:
        yield Finding("transformers", OK, transformers)


def hub_refuses_requests() -> bool:
    """Without telemetry, kernels' user agent is empty, and the HTTP client refuses a header that ends with a blank."""
    off = any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")
    )
    return off and (version("huggingface_hub") or "0").split(".")[0] != "0"


def variant(path: Path) -> Iterator[Finding]:
    """Which variant kernels' own code would choose, or its reasons to choose none."""
    directory = variant_directory(path)
    if directory is None:
        return
    if release(version("kernels") or "0") < (0, 14):
        return  # without the functions asked below
    try:
        from kernels.variants import get_variants_local, resolve_variants, variants_trace_str

        chosen, trace = resolve_variants(get_variants_local(directory.parent))
    except Exception as error:
        yield Finding("variant", NOTE, f"kernels does not say: {type(error).__name__}: {error}")
        return
    if chosen:
        yield Finding("variant", OK, f"{chosen[0].variant_str} would load")
    else:
        advice = f"the directory itself loads anywhere: get_local_kernel({str(directory)!r})" if not trace else ""
        yield Finding("variant", FAULT, variants_trace_str(trace) or f"{directory.name} is no variant's name", advice)


# -- places and the Hub -----------------------------------------------------------------------------------------------


def places() -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("KERNELS_CACHE") or os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    held = cache / f"kernels--{REPOSITORY.replace('/', '--')}"
    names = sorted(path.name for path in (held / "refs").glob("*"))
    commits = sorted(path.name for path in (held / "snapshots").glob("*"))
    value = f"{cache}: " + (f"holds {', '.join(names) or 'no version name'}" if commits else "no kernel of ours in it")
    if commits and not any(name.startswith("v") for name in names):
        advice = f'offline, version=1 is not found there, revision="{commits[-1]}" is; revision="v1" keeps the name'
        yield Finding("cache", NOTE, value, advice)
    else:
        yield Finding("cache", OK, value)
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        name, _, path = entry.partition("=")
        there = bool(path) and variant_directory(Path(path)) is not None
        advice = "" if there else f"LOCAL_KERNELS={name}=<directory with build/{VARIANT}>"
        status = OK if there else FAULT if name == REPOSITORY else NOTE
        yield Finding("LOCAL_KERNELS", status, entry if there else f"{entry}: no kernel there", advice)


def hub_reachable(timeout: float = 3.0) -> Iterator[Finding]:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        yield Finding("Hub", NOTE, "not asked: HF_HUB_OFFLINE is set")
        return
    try:
        urllib.request.urlopen(f"{endpoint}/api/kernels/{REPOSITORY}/refs", timeout=timeout).close()
    except urllib.error.HTTPError as error:
        yield Finding("Hub", NOTE, f"{endpoint} answers {error.code} for {REPOSITORY}")
    except OSError as error:
        advice = "load from a directory: get_local_kernel, or LOCAL_KERNELS"
        yield Finding("Hub", NOTE, f"{endpoint} does not answer: {getattr(error, 'reason', error)}", advice)
    else:
        yield Finding("Hub", OK, f"{endpoint} has {REPOSITORY}")


# -- the proof --------------------------------------------------------------------------------------------------------


def trial(path: Path) -> Iterator[Finding]:
    """Load the kernel, swap a norm, and compare what it computes on the NPU with the CPU."""
    try:
        import torch

        if __package__:
            kernel = sys.modules[__package__]
        elif release(version("kernels") or "0") >= (0, 14):
            kernel = importlib.import_module("kernels").get_local_kernel(variant_directory(path))
        else:
            sys.path.insert(0, str(variant_directory(path)))
            kernel = importlib.import_module("npu_fusion")

        class RMSNorm(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))
                self.variance_epsilon = 1e-6

            def forward(self, hidden_states):
                variance = hidden_states.pow(2).mean(-1, keepdim=True)
                return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

        model, x = torch.nn.Sequential(RMSNorm()), torch.linspace(-1, 1, 256).view(4, 64)
        expected = model(x)
        model = kernel.kernelize(model.to("npu"))
        torch.testing.assert_close(model(x.to("npu")).cpu(), expected)
        swapped = kernel.report(model).swapped
    except Exception as error:
        yield Finding("trial", FAULT, f"{type(error).__name__}: {error}", "the values above are what to report")
        return
    if swapped:
        yield Finding("trial", OK, "a norm was swapped, and computes on the NPU what it computes on the CPU")
    else:
        yield Finding("trial", FAULT, "a norm was not swapped", "print(npu.report(model)) says why not")


def doctor(path: Optional[os.PathLike] = None, hub: bool = False) -> Diagnosis:
    """Print what an operator needs to know about this machine, and return it.

    Args:
        path: the kernel to look at: its repository, build or variant directory. The one that this file belongs to by
            default.
        hub: ask the Hub whether it is there; no request is made otherwise.

    Returns:
        `Diagnosis`: its `ok` is True only where a layer was really swapped, here and now.
    """
    path = Path(path).resolve() if path is not None else HERE
    findings: List[Finding] = [Finding("python", OK, f"{platform.python_version()} on {platform.machine()}")]
    findings += torch_build()
    # beside a wrong build of torch, the import of torch_npu may end the process, and this table with it
    importable = "torch_npu" in sys.modules or not any(finding.status == FAULT for finding in findings)
    if importable:
        imported = list(import_torch())
        findings += imported
        importable = imported[0].subject != "import torch"
    findings += [*cann(path), *pair(path), *kernel_files(path)]
    if importable:  # kernels imports torch for it
        findings += variant(path)
    findings += places()
    if hub:
        findings += hub_reachable()
    if not any(finding.status == FAULT for finding in findings):
        findings += trial(path)
    diagnosis = Diagnosis(tuple(findings))
    print(diagnosis)
    return diagnosis


def main(arguments: Optional[List[str]] = None, default: Path = HERE) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=default, help="the kernel's directory")
    parser.add_argument("--hub", action="store_true", help="ask the Hub whether it is there")
    options = parser.parse_args(arguments)
    return 0 if doctor(options.path, hub=options.hub).ok else 1


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != HERE]  # our files shall shadow no module
    sys.exit(main())
