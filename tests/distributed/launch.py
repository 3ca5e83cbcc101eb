"""Runs a function in several processes, one NPU each, joined by torch.distributed over HCCL.

    def sum_of_ranks(start):
        total = torch.tensor(start + dist.get_rank(), device="npu")
        dist.all_reduce(total)
        return total.item()

    assert launch.run(sum_of_ranks, 2, 10) == [21, 21]

Processes are forked from a server that has imported torch, torch_npu and transformers once, so a launch takes a second.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import npu_emulator
import pytest

GRACE = 5  # seconds that the other ranks have to end by themselves once one has failed
MAX_RANKS = 4

# What takes seconds to import. The plugin starts the emulator where there is no NPU; pytest is this process's main
# module, which children import again.
PRELOADED = (
    "npu_emulator.pytest_plugin",
    "pytest",
    "kernels",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


@dataclass
class Outcome:
    """How one rank ended. `error` is None, or its traceback; `output` is what it wrote to stdout and stderr."""

    rank: int
    value: Any = None
    error: str | None = "no result: the process died or was stopped"
    exitcode: int | None = None
    seconds: float = 0.0
    output: str = ""


class RanksFailed(AssertionError):
    """At least one rank raised, died or ran out of time; the message has every rank's traceback."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        super().__init__(
            "\n".join(
                f"---- rank {o.rank}, exit code {o.exitcode}, {o.seconds:.1f} s\n{o.error}\n{o.output[-4000:]}"
                for o in failed
            )
        )


def run(
    function: Callable, world_size: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list:
    """Call `function(*args)` in `world_size` processes.

    Args:
        function: A function at the top level of a module. torch.distributed is initialised when it is called, and the
            rank's NPU is the current device.
        args, and what the function returns: anything that pickle takes; tensors on the CPU.
        timeout: Seconds until ranks are stopped. Where each of them was waiting is then part of the error.
        env: Environment variables for the ranks.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: With every rank's traceback.
    """
    outcomes = run_to_outcomes(function, world_size, *args, timeout=timeout, env=env)
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def run_to_outcomes(
    function: Callable, world_size: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[Outcome]:
    """Like `run`, for tests of failures: returns how each rank ended instead of raising."""
    import torch
    import torch.distributed as dist

    if not npu_emulator.is_emulated() and torch.npu.device_count() < world_size:
        pytest.skip(f"needs {world_size} NPUs, this machine has {torch.npu.device_count()}")
    # The ranks rendezvous in a store of this process, whose port the system chooses.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared_env = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # HCCL says which rank is missing, so it should speak before ranks are stopped.
        "HCCL_CONNECT_TIMEOUT": str(int(timeout * 0.8)),
        "HCCL_EXEC_TIMEOUT": str(int(timeout * 0.8)),
        **(env or {}),
    }
    module = sys.modules[function.__module__]
    where = (module.__name__, module.__file__, function.__qualname__)
    context = _server()
    outcomes = [Outcome(rank) for rank in range(world_size)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory, f"rank{rank}.log") for rank in range(world_size)]
        processes, waiting = [], {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            rank_env = shared_env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            task = (theirs, where, pickle.dumps(args), rank_env, str(logs[rank]), timeout)
            process = context.Process(target=_main, args=task)
            process.start()
            theirs.close()
            processes.append(process)
            waiting[ours] = rank
        deadline = start + timeout + GRACE
        while waiting and time.monotonic() < deadline:
            for connection in multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
                outcome = outcomes[waiting.pop(connection)]
                outcome.seconds = time.monotonic() - start
                with contextlib.suppress(EOFError):  # it died without a word
                    outcome.value, outcome.error = pickle.loads(connection.recv_bytes())
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for process, outcome, log in zip(processes, outcomes, logs, strict=True):
            process.join(GRACE if outcome.error is None else 1)
            if process.is_alive():
                process.kill()
                process.join()
            outcome.exitcode = process.exitcode
            outcome.output = log.read_text(errors="replace") if log.exists() else ""
    return outcomes


@functools.cache
def _server():
    # The server takes its environment from this process.
    os.environ.setdefault("NPU_EMULATOR_DEVICES", str(MAX_RANKS))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _main(connection, where: tuple[str, str, str], args: bytes, env: dict[str, str], log: str, timeout: float) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(timeout, exit=True, file=output)
    os.environ.update(env)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.npu.set_device(int(env["LOCAL_RANK"]))
        dist.init_process_group("hccl")
        dist.barrier()  # connects the ranks: from now on they notice when one of them dies
        value = _load(*where)(*pickle.loads(args))
        if dist.is_initialized():
            dist.destroy_process_group()
        result = pickle.dumps((value, None))
    except BaseException:  # a rank's KeyboardInterrupt or SystemExit is a result too
        result = pickle.dumps((None, traceback.format_exc()))
        connection.send_bytes(result)
        sys.exit(1)
    connection.send_bytes(result)
    faulthandler.cancel_dump_traceback_later()


def _load(name: str, path: str, qualname: str) -> Callable:
    # By path: pytest's importlib mode gives test modules names that nobody can import.
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    function = sys.modules[name]
    for part in qualname.split("."):
        function = getattr(function, part)
    return function
