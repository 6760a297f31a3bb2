"""Proposals: what a proposer sees, what a run does with its texts, and that it is asked once."""

import json
import time
from contextlib import suppress

import numpy as np
import pytest

from evogrpo import HyperparameterConfig, evolve, resume
from evogrpo.evolution import TruncationPBT
from evogrpo.evolution.mutation import Mutation
from evogrpo.members.language.vllm_server import VLLMError
from evogrpo.training.configuration.reading import absolute_paths
from evogrpo.training.configuration.user_code import make_proposer
from evogrpo.training.proposals import Proposer, Reflection, gepa_proposer
from tests.tiny_training import shared_model, tiny_env, tiny_population
from tests.vllm_server import RawServer

FIRST = "12+"
SPACE = HyperparameterConfig(task={"style": {"choices": [FIRST], "proposed": True}})


def styled_env(**options):
    template = [{"role": "user", "content": "{style}{question}"}]
    return tiny_env(conversation_template=template, settings={"style": FIRST}, **options)


def start(run_dir=None, *, proposer, generations=2, env=None, **options):
    population = tiny_population(2, hp_config=SPACE, seed=1)
    return evolve(
        population,
        env or styled_env(),
        strategy=TruncationPBT(quantile=0.5, mutation=Mutation(probability=1.0)),
        generations=generations,
        steps_per_generation=1,
        samples_per_step=8,
        test_questions=0,
        run_dir=run_dir,
        progress=False,
        proposer=proposer,
        **options,
    )


def events(run_dir, kind):
    lines = (run_dir / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def numbered(calls):
    """Return a proposer that records its calls and writes numbered texts."""

    def propose(candidate, reflective_dataset, components_to_update):
        calls.append((candidate, reflective_dataset, components_to_update))
        return {"style": f"{FIRST}{len(calls)}"}

    return propose


def test_a_mutated_text_is_proposed(tmp_path):
    calls = []
    run = start(tmp_path / "run", proposer=numbered(calls)).finish()
    members = run.population.agents
    texts = {agent.index: agent.hyperparameters["task.style"] for agent in members}
    assert calls
    born = events(tmp_path / "run", "proposal")
    assert len(born) == len(calls)
    for call, event in zip(calls, born, strict=True):
        candidate, dataset, names = call
        assert (candidate, names) == ({"style": FIRST}, ["style"])
        assert event["seen"] == dataset["style"]
        assert event["before"] == FIRST
        assert event["after"].startswith(FIRST)
    assert any(text != FIRST for text in texts.values())
    assert "<to be proposed>" not in (tmp_path / "run" / "journal.jsonl").read_text()


def test_a_proposer_sees_training_completions_of_the_parent_only():
    calls = []
    run = start(proposer=numbered(calls)).finish()
    env = run.trainer.env
    held_out = set()
    for split in ("validation", "test"):
        held_out |= set(env.make_batch(split, range(env.size(split))).questions)
    records = [record for _, dataset, _ in calls for record in dataset["style"]]
    assert records
    for record in records:
        assert set(record) == {"Inputs", "Generated Outputs", "Feedback"}
        assert record["Inputs"] not in held_out
        assert record["Feedback"].startswith("variety: ")


@pytest.mark.filterwarnings("ignore:No learning signal", "ignore:All .* held-out scores")
def test_a_proposer_sees_completions_where_all_rewards_are_equal():
    """A prompt that never earns anything needs another one most."""

    def nothing(completion, answer, question):
        return 0.0

    calls = []
    start(proposer=numbered(calls), env=styled_env(reward_fn=nothing)).finish()
    assert calls
    for _, dataset, _ in calls:
        assert dataset["style"]
        assert all(record["Feedback"] == "nothing: 0" for record in dataset["style"])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"style": FIRST}, "text of the parent"),
        ({"style": ""}, "must be a text"),
        ({"style": 3}, "must be a text"),
        ({"tone": "1"}, "for style, got"),
        (None, "must return a mapping"),
        ({"style": "1" * 200}, "context"),
        ({"style": "1" * 30_000}, "30,000 characters"),
    ],
)
def test_a_refused_text_leaves_that_of_the_parent(tmp_path, answer, reason):
    with pytest.warns(UserWarning, match="task.style"):
        run = start(tmp_path / "run", proposer=lambda *_: answer).finish()
    assert {agent.hyperparameters["task.style"] for agent in run.population.agents} == {FIRST}
    assert all(reason in event["refused"] for event in events(tmp_path / "run", "proposal"))


def test_functions_that_cannot_be_called_as_proposers_are_refused():
    async def waits(candidate, reflective_dataset, components_to_update):
        return candidate

    for function in (lambda candidate: candidate, waits):
        with pytest.raises(ValueError, match="function"):
            Proposer(function=function)
        with pytest.raises(ValueError, match=r"^proposer: "):
            start(proposer=function)


def test_a_strategy_that_does_not_mutate_never_asks():
    population = tiny_population(2, hp_config=SPACE, seed=1)
    options = {"proposer": numbered([]), "generations": 1, "test_questions": 0}
    with pytest.warns(UserWarning, match=r"no text of task\.style will be proposed"):
        evolve(population, styled_env(), strategy="fixed", samples_per_step=8, **options)


def test_a_proposer_that_fails_or_hangs_does_not_end_the_run(tmp_path):
    def fails(*_):
        raise RuntimeError("no connection")

    def hangs(*_):
        time.sleep(60)

    for function, reason in ((fails, "no connection"), (hangs, "no answer within")):
        folder = tmp_path / function.__name__
        with pytest.warns(UserWarning, match=reason):
            run = start(folder, proposer=Proposer(function=function, timeout=0.3)).finish()
        assert run.result.complete


def test_a_resumed_run_never_asks_again(tmp_path):
    calls = []
    whole = start(tmp_path / "whole", proposer=numbered(calls)).finish()
    asked = len(calls)
    # A kill between the proposal and the checkpoint: the checkpoint does not know of it.
    killed = start(tmp_path / "killed", proposer=numbered(again := []))
    save = killed.trainer._save
    count = 0

    def die(*arguments):
        nonlocal count
        if killed.trainer.run_state.generation:
            raise KeyboardInterrupt
        save(*arguments)

    killed.trainer._save = die
    with pytest.raises(KeyboardInterrupt):
        killed.finish()
    assert len(again) == asked

    def refuses(*_):
        raise AssertionError("asked again")

    resumed = resume(
        tmp_path / "killed",
        styled_env(),
        actor_network=shared_model(),
        proposer=refuses,
        progress=False,
    ).finish()
    texts = [agent.hyperparameters["task.style"] for agent in resumed.population.agents]
    assert texts == [agent.hyperparameters["task.style"] for agent in whole.population.agents]
    assert resumed.population.members.checksum() == whole.population.members.checksum()


def test_proposer_and_search_space_belong_together():
    with pytest.raises(ValueError, match="proposer"):
        start(proposer=None)
    with pytest.raises(ValueError, match="proposer"):
        evolve(tiny_population(2), tiny_env(), generations=1, proposer=numbered([]))
    with pytest.raises(ValueError, match="proposed"):
        HyperparameterConfig(reward_weights={"right": {"choices": ["a", "b"], "proposed": True}})


def test_the_proposer_of_gepa_writes_what_its_model_answers():
    pytest.importorskip("gepa")
    prompts = []

    def model(prompt):
        prompts.append(prompt)
        return "```\nAnswer with one number only.\n```"

    propose = gepa_proposer(model)
    seen = [{"Inputs": "1+1=", "Generated Outputs": "3", "Feedback": "right: 0"}]
    assert propose({"style": FIRST}, {"style": seen}, ["style"]) == {
        "style": "Answer with one number only."
    }
    assert FIRST in prompts[0]
    assert "right: 0" in prompts[0]


def answered(status, body):
    """Return a reply of a server."""
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n"
    return head.encode(), body


def test_a_reflection_model_is_asked_by_http():
    body = json.dumps({"choices": [{"message": {"content": "A new text."}}]}).encode()
    requests = []

    def reply(connection, request):
        requests.append(request)
        head, content = answered(200, body)
        connection.sendall(head + b"\r\n" + content)

    server = RawServer(reply)
    model = Reflection(url=f"{server.url}/v1", model="writer")
    assert model("Write.") == "A new text."
    assert b"POST /v1/chat/completions" in requests[0]


@pytest.mark.parametrize("kind", ["slow", "error", "redirect", "huge", "invalid"])
def test_a_reflection_model_that_answers_wrongly_raises(kind):
    def reply(connection, request):
        if kind == "slow":
            time.sleep(1.0)
            return
        status, content = 200, b"{}"
        if kind == "error":
            status = 400
        if kind == "redirect":
            connection.sendall(b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\n\r\n")
            return
        if kind == "huge":
            content = b" " * 10_000_000
        head, content = answered(status, content)
        with suppress(OSError):
            connection.sendall(head + b"\r\n" + content)

    server = RawServer(reply)
    with pytest.raises(VLLMError):
        Reflection(url=server.url, model="writer", timeout=0.5)("Write.")


@pytest.mark.parametrize(
    "options",
    [{"url": "file:///etc/passwd"}, {"url": "http://a:b@c"}, {"api_key_env": "NO_SUCH_KEY"}],
)
def test_invalid_endpoints_are_refused(options):
    with pytest.raises(ValueError, match=r"url|NO_SUCH_KEY"):
        Reflection(**{"url": "http://127.0.0.1:1", "model": "writer", **options})


def test_a_text_is_proposed_in_runs_only():
    agent = tiny_population(1, hp_config=SPACE)[0]
    with pytest.raises(ValueError, match=r"task\.style is proposed"):
        agent.mutate(np.random.default_rng(0))


def test_a_proposer_of_a_configuration_is_relative_to_its_file(tmp_path):
    (tmp_path / "write.py").write_text("def write(*_): return {}")
    for given in ("write.py:write", {"name": "write.py:write", "timeout": 5}):
        values = absolute_paths({"proposer": given}, tmp_path)
        name = values["proposer"] if isinstance(given, str) else values["proposer"]["name"]
        assert name == f"{tmp_path}/write.py:write"
        assert make_proposer({"name": name}).function() == {}
