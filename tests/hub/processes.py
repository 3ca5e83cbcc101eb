"""Fresh Python processes for tests, at the price of a fork: torch is imported once, in a process that only forks.

A test of loading needs a process of its own: HF_ENDPOINT and the cache are read when huggingface_hub is imported, a
loaded kernel stays loaded, and some tests kill it. `Processes.run(code)` is `subprocess.run([python, "-c", code])`,
without the seconds that importing torch and torch_npu takes.

Run as a script, this file is that process: it reads a request a line, forks, and answers with the child's id or exit
code.
"""

import ctypes
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Finished:
    returncode: int
    stdout: str
    stderr: str


class Running:
    """A started process: `kill`, then `wait`."""

    def __init__(self, processes: "Processes", pid: int, output: Path):
        self.processes, self.pid, self.output = processes, pid, output

    def kill(self, signal: int = 9):
        os.kill(self.pid, signal)

    def wait(self) -> Finished:
        status = self.processes.ask({"wait": self.pid})
        text = [Path(f"{self.output}.{name}").read_text() for name in ("stdout", "stderr")]
        return Finished(os.waitstatus_to_exitcode(status), *text)


class Processes:
    """Starts processes that have torch in them.

    Args:
        directory: where their output goes.
        environment: of the first process; the others get it with what a test adds.
        npu: start the emulator, where no NPU is found, and import torch_npu.
    """

    def __init__(self, directory: Path, environment: dict[str, str], npu: bool = True):
        self.directory, self.count = directory, 0
        self.server = subprocess.Popen(
            [sys.executable, "-u", __file__, *(["--npu"] if npu else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, request: dict):
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, code: str, *, network: bool = True, **environment: str) -> Running:
        """Start `code`. Without `network`, it has no interface, and every Python socket ends it with exit code 99."""
        self.count += 1
        output = self.directory / str(self.count)
        pid = self.ask({"code": code, "output": str(output), "network": network, "environment": environment})
        return Running(self, pid, output)

    def run(self, code: str, *, network: bool = True, **environment: str) -> Finished:
        return self.start(code, network=network, **environment).wait()

    def close(self):
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


def refuse_sockets(event: str, arguments: tuple):
    """An audit hook that ends the process where it opens a socket: an exception could be caught on the way up."""
    if event.startswith("socket.") and event != "socket.gethostname":
        print(f"a socket was used: {event} {arguments}", file=sys.stderr)
        traceback.print_stack()
        sys.stderr.flush()
        os._exit(99)


def leave_network():
    libc = ctypes.CDLL(None, use_errno=True)
    # root may leave the network as it is; anyone else needs a user namespace for it, which some systems forbid
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        print("no network namespace here, only Python's own sockets are watched", file=sys.stderr)
    sys.addaudithook(refuse_sockets)


def child(request: dict):
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.stdin.close()
    os.environ.update(request["environment"])
    if not request["network"]:
        leave_network()
    code = 0
    try:
        exec(compile(request["code"], "<test>", "exec"), {"__name__": "__main__"})
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitpid(request["wait"], 0)[1])
            continue
        pid = os.fork()
        if pid == 0:
            child(request)
        print(pid)


if __name__ == "__main__":
    if "--npu" in sys.argv:
        import npu_emulator

        if npu_emulator.needed():
            npu_emulator.start()
        import torch_npu  # noqa: F401
    import torch  # noqa: F401

    serve()
