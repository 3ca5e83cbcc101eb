"""Write the kernel's card, CARD.md, from the code: its functions, layers and ops, and the versions it was run with.

python scripts/card.py [--check]
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch-ext/npu_fusion"
MARKERS = ("<!-- versions -->", "<!-- /versions -->")  # around the table in README.md that `make test-matrix` writes

CARD = """\
---
library_name: kernels
license: {license}
tags:
- kernels
- npu
- ascend
---

# {name}

{summary}

```python
from kernels import get_kernel

npu = get_kernel("{repository}", version={version}, trust_remote_code=["{repository}"])
model = npu.kernelize(model)
print(npu.report(model))
```

For nodes without network, fill a cache with `revision="v{version}"` instead of `version={version}`, so that it keeps
the version's name, or load from a directory with `LOCAL_KERNELS={repository}=<directory>`.

## Functions

{functions}

## Layers

{layers}

## Ops

Under `npu.ops`, each beside its definition in plain PyTorch, `<op>_reference`:

{ops}

## Versions

{versions}
"""


def sentence(node: ast.AST) -> str:
    """First paragraph of a docstring, on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def definitions(path: Path) -> dict[str, ast.AST]:
    nodes = ast.parse(path.read_text()).body
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def exported(package: Path) -> list[str]:
    """`__all__` of a package."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    sys.exit(f"{package} has no __all__")


def signature(node: ast.AST) -> str:
    """The arguments of a function, or of a class's __init__, without annotations and `self`."""
    if isinstance(node, ast.ClassDef):
        found = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        return signature(found[0]) if found else ""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    arguments.args = [argument for argument in arguments.args if argument.arg != "self"]
    return ast.unparse(arguments)


def described(package: Path) -> list[str]:
    """A line for each exported function or class of a package, found in whichever module defines it."""
    known = {}
    for path in sorted(package.glob("*.py")):
        known.update({name: node for name, node in definitions(path).items() if name not in known})
    lines = []
    for name in exported(package):
        if name in known and not name.endswith("_reference"):
            lines.append(f"- `{name}({signature(known[name])})`: {sentence(known[name])}")
    return lines


def layers() -> list[str]:
    """A line for each nn.Module of layers.py; a class without a docstring of its own is left to its base."""
    found: dict[str, ast.ClassDef] = {}
    for name, node in definitions(PACKAGE / "layers.py").items():
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in {"nn.Module", *found} for base in node.bases):
            found[name] = node
    return [f"- `{name}`: {sentence(node)}" for name, node in found.items()]


def versions(readme: str) -> str:
    _, found, rest = readme.partition(MARKERS[0])
    return rest.partition(MARKERS[1])[0].strip() if found else "See the README."


def card() -> str:
    general = tomllib.loads((ROOT / "build.toml").read_text())["general"]
    return CARD.format(
        name=general["name"],
        license=general["license"].lower(),
        version=general["version"],
        repository=general["hub"]["repo-id"],
        summary=sentence(ast.parse((PACKAGE / "__init__.py").read_text())),
        functions="\n".join(described(PACKAGE)),
        layers="\n".join(layers()),
        ops="\n".join(described(PACKAGE / "ops")),
        versions=versions((ROOT / "README.md").read_text()),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether CARD.md is in step")
    path = ROOT / "CARD.md"
    if not parser.parse_args().check:
        path.write_text(card())
    elif path.read_text() != card():
        sys.exit("CARD.md is not in step with the code: python scripts/card.py")
