"""Programs that are interrupted, or end without waiting."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from ckptio import sync
from tests.programs import TIMEOUT_S, run_program

if TYPE_CHECKING:
    from pathlib import Path

SAVE = """
import signal, sys, torch, ckptio.sync
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
state = {"w": torch.ones(8_000_000)}
print("go", flush=True)
ckptio.sync.save(state, sys.argv[1])
print("saved", flush=True)
"""
FORGET = """
import sys, torch, ckptio
ckptio.save({"w": torch.ones(8_000_000)}, sys.argv[1])
"""
LEFT_OPEN = """
import sys, torch, ckptio.sync
engine = ckptio.sync.Engine().__enter__()
engine.start_save({"w": torch.ones(8_000_000)}, sys.argv[1])
"""
#: The loop forgets the callback that a handler raises out of: here one that ends a wait.
LOST = """
import asyncio, signal, sys, torch, ckptio
def handler(*_):
    raise SystemExit(9)
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "_copy_end":
        sys.setprofile(None)
        signal.raise_signal(signal.SIGTERM)
async def train():
    async with ckptio.Engine() as engine:
        await engine.save({"w": torch.ones(3)}, sys.argv[1])
        sys.setprofile(look)
        await (engine.load(sys.argv[1]) if sys.argv[2] == "load" else engine.__aexit__(*[None] * 3))
signal.signal(signal.SIGTERM, handler)
asyncio.run(train())
"""


@pytest.mark.stress
@pytest.mark.parametrize("delay_ms", range(0, 150, 5))
def test_an_interrupt_at_any_time_ends_the_program(tmp_path: Path, delay_ms: int) -> None:
    """A blocking save gives way to Ctrl-C, whole or without a trace."""
    path = tmp_path / "c"
    program = subprocess.Popen(
        [sys.executable, "-c", SAVE, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        program.stdout.readline()
        time.sleep(delay_ms / 1000)  # when the signal comes is what is tested
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=TIMEOUT_S)
    finally:
        program.kill()
        program.communicate()
    if output:  # saved: the signal came when the program was about to end anyway
        assert sync.verify(path).is_whole
    else:
        assert program.returncode
        assert "KeyboardInterrupt" in errors
        assert not path.exists() or sync.verify(path).is_whole


@pytest.mark.parametrize("program", [FORGET, LEFT_OPEN])
def test_a_save_that_nobody_waits_for_is_finished(tmp_path: Path, program: str) -> None:
    """A program that ends right after the call still commits, and ends, engine closed or not."""
    path = tmp_path / "c"
    run_program(program, path)
    assert sync.verify(path).is_whole


@pytest.mark.parametrize("waits_for", ["load", "exit"])
def test_an_interrupt_of_the_loop_that_waits_ends_the_program(
    tmp_path: Path, waits_for: str
) -> None:
    """Whatever asyncio has forgotten then: it waits for the tasks that it cancels."""
    run_program(LOST, tmp_path / "c", waits_for, code=9)
    assert sync.verify(tmp_path / "c").is_whole
