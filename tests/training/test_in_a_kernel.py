"""Runs in a notebook kernel: display, interrupt and event loop."""

import queue
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

BEGIN = f"""
import sys, os
sys.path.insert(0, {str(ROOT)!r})
import asyncio
import evogrpo
from evogrpo import GRPO, GymnasiumGroups, HuggingFaceGym, evolve
from tests.tiny_models import tiny_model, tiny_tokenizer
env = GymnasiumGroups("CartPole-v1", max_episode_steps=40, validation_size=4, test_size=4)
def members():
    return GRPO.population(2, env.observation_space, env.action_space)
"""
ASYNC = """
async def reward(completion, answer, question):
    await asyncio.sleep(0)
    return len(set(completion)) / 8
questions = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(8) for b in range(8)]
spoken = HuggingFaceGym(questions, tokenizer=tiny_tokenizer(), reward_fn=reward)
writers = GRPO.population(2, actor_network=tiny_model(), pad_token_id=0, max_output_tokens=4)
evolve(writers, spoken, generations=1, steps_per_generation=1, samples_per_step=8).finish().result.test
"""


class Kernel:
    """A kernel that runs cells."""

    def __init__(self) -> None:
        manager = pytest.importorskip("jupyter_client.manager", reason="needs the extra tutorials")
        pytest.importorskip("ipykernel", reason="needs the extra tutorials")
        self.manager, self.client = manager.start_new_kernel(cwd=None)

    def run(self, code: str, interrupt: bool = False) -> list[tuple[str, dict]]:
        """Return the messages of a cell; optionally interrupt it after its first generation."""
        cell, found, asked = self.client.execute(code), [], False
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != cell:
                continue
            found.append((message["msg_type"], message["content"]))
            text = message["content"].get("data", {}).get("text/plain", "")
            if interrupt and not asked and "Generation 1" in text:
                asked = True
                self.manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle":
                return found
        raise AssertionError(f"the cell did not end: {found[-3:]}")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    assert not [content for kind, content in kernel.run(BEGIN) if kind == "error"]
    yield kernel
    kernel.close()


def test_a_run_is_shown_interrupted_and_resumed(kernel, tmp_path):
    kernel.run(f"os.chdir({str(tmp_path)!r})")
    begin = 'run = evolve(members(), env, generations=10_000, samples_per_step=8, run_dir="run")'
    messages = kernel.run(f"{begin}\nrun.finish()", interrupt=True)
    (error,) = [content for kind, content in messages if kind == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert "Continue with evogrpo.resume('run', ...)." in error["evalue"]
    assert not any(kind == "update_display_data" for kind, _ in messages)  # tables of generations only
    going_on = """
generations = run.trainer.run_state.generation + 1
evogrpo.resume("run", env, generations=generations, progress=False).finish()"""
    (result,) = [content for kind, content in kernel.run(going_on) if kind == "execute_result"]
    assert "Run(after generation" in result["data"]["text/plain"]
    (result,) = [content for kind, content in kernel.run('evogrpo.report("run")') if kind == "execute_result"]
    assert set(result["data"]) == {"image/png", "text/plain"}


def test_async_rewards_run_inside_the_event_loop(kernel):
    messages = kernel.run(ASYNC)
    assert [content for kind, content in messages if kind == "error"] == []
    (result,) = [content for kind, content in messages if kind == "execute_result"]
    assert result["data"]["text/plain"].startswith("TestReport(questions=17")
    (after,) = [content for kind, content in kernel.run("await asyncio.sleep(0, 'alive')") if kind == "execute_result"]
    assert after["data"]["text/plain"] == "'alive'"
