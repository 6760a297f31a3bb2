"""Wrong configurations: one short sentence per fault names key, value and rule."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from evogrpo.cli import main
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.training.configuration.sections import LoggingConfig, PopulationConfig
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types import TASK_TYPES, TaskType, language

TASKS = {
    "built-in": {"name": "two_digit_sums"},
    "reasoning": {"reasoning_gym": "chain_sum"},
    "questions": {"dataset": {"train": "a.jsonl"}, "reward": "r.py:f", "form": "agilerl"},
    "environment": {"env": "CartPole-v1"},
    "team": {"parallel_env": "tests.envs.joint_probes:Favours"},
}
KINDS = {kind: next(iter(task)) for kind, task in TASKS.items()}
SHARED = [
    ("hyperparameters", Hyperparameters),
    ("schedule", Schedule),
    ("population", PopulationConfig),
    ("logging", LoggingConfig),
]
FREE = (
    "settings",
    "task_settings",
    "rewards",
    "reward_weights",
    "env_kwargs",
    "chat_template_kwargs",
    "options",
    "sizes",
)
"""Mappings with any keys."""
NAMED = ("environment_factory",)
"""One text, or a mapping from names to texts."""

# File | wrong settings | words of the answer. Values that are out of range, and settings that
# contradict each other.
TABLE = """
questions   | seed=-1                                  | seed must be at least 0, got -1
questions | precision=bf16 | precision must be one of; got 'bf16': did you mean 'bfloat16'?
questions   | model=[1]                                | model must be text, got [1]
questions | model=SmolLM2-135M | 'SmolLM2-135M': did you mean 'smollm2-135m'?
questions   | model=./nowhere                          | No folder at; nowhere'
questions | scedule.generations=2 | unknown key 'scedule': did you mean 'schedule'?
questions   | learning_rate=1                          | Use 'hyperparameters.lr'
questions   | hyperparameters.learning_rate=1          | 'learning_rate': it is called 'lr' here
questions   | hyperparameters.lr=0                     | hyperparameters.lr must be above 0, got 0
questions   | hyperparameters.lr=.nan                  | hyperparameters.lr must be finite, got nan
questions | hyperparameters.loss_type=grppo
  | hyperparameters.loss_type must be one of; did you mean 'grpo'?
questions   | hyperparameters.group_size=5             | must divide samples_per_step=64; got 5
questions   | schedule.generations=null                | schedule: A run needs a limit
questions | schedule.count_evaluations=true | schedule: count_evaluations needs max_tokens
questions | population.founders=[{lrr: 1}]
  | population: founder 1: unknown; 'lrr': did you mean 'lr'?
questions   | population.like=nowhere                  | population.like: ; nowhere
questions | strategy=turnament | unknown strategy 'turnament': did you mean 'tournament'?
questions   | strategy.z=-1                            | strategy: z must be at least 0, got -1
questions | fitness={by: rollouts, racing: true}
  | fitness: racing needs validation questions; by='rollouts'
questions | fitness=rollouts hyperparameters.group_size=64 schedule.steps_per_generation=2
  | got 1 with group_size 64
questions   | search_space.lr={min: 1, max: 0.1}       | search_space.lr: min must be below max
questions | search_space.lr={min: 0.1, max: 1, mim: 1}
  | unknown key in search_space.lr 'mim': did you mean 'min'?
questions   | search_space.lr.choices=[a, b]           | search_space: lr must be a number, got 'a'
questions | search_space.group_size.choices=[3, 4]
  | group_size must divide samples_per_step=64; got [3]
questions | search_space.gropu_size.choices=[2]
  | unknown hyperparameter 'gropu_size': did you mean 'group_size'?
questions   | agent.min_output_tokens=200              | agent: min_output_tokens; 200
questions | agent.eos_token_ids=[a] | agent.eos_token_ids[0] must be an integer, got 'a'
questions   | agent.lora_config.r=4                    | 'lora_config': it is called 'lora' here
questions | agent={adapter: a, lora: {r: 4}} | agent: adapter; /a' has its own LoRA settings
questions | agent={full_finetuning: true, lora: {r: 4}}
  | agent: full_finetuning; Remove lora and adapter
questions | agent.full_finetuning=true base_parts=2
  | agent.full_finetuning excludes base_parts; base_parts: 2
questions | agent.full_finetuning=true sampler={vllm: "http://a", adapters_dir: b}
  | agent.full_finetuning excludes vLLM; 'vllm'
questions   | sampler={vllm: "http://a"}               | sampler: needs adapters_dir
questions   | sampler={name: vllm, adapters_dir: b}    | sampler: needs the address; vllm: URL
questions   | sampler=vllm_colocate                    | vllm_colocate requires vllm
questions   | sampler={name: vllm_colocate, gpu_memory_utilisation: 0.3}
  | 'gpu_memory_utilisation'; 'gpu_memory_utilization'
questions   | sampler={name: vllm_colocate, gpu_memory_utilization: 2}
  | gpu_memory_utilization must; 2
questions   | sampler={vllm: "http://a", adapters_dir: b, rank: 3} | rank
questions | sampler={vllm: "http://a", adapters_dir: b, timeout: abc}
  | sampler: timeout must be; got 'abc'
questions | sampler={vllm: "127.0.0.1:8000", adapters_dir: b} | sampler: url must; '127.0.0.1:8000'
questions   | sampler={vllm: 5, adapters_dir: b}       | sampler: url must; got 5
questions   | sampler={vllm: ["http://a", "http://b:x"], adapters_dir: b} | sampler: url must; 'http://b:x'
questions   | sampler={vllm: "http://a", adapters_dir: 3} | sampler: adapters_dir must; got 3
questions   | agent.network.hidden=[3] | unknown key in agent 'network': only tasks of another kind
environment | task.system_prompt=a | unknown key in task 'system_prompt': only tasks of another kind
environment | task.metric=r.py:f | unknown key in task 'metric': only tasks of another kind
environment | agent.gradient_checkpointing=true | only tasks of another kind
questions   | agent.strategy=fsdp                      | Use 'strategy', which selects; base_parts
questions | agent.objective.reference_mixing=0.5
  | agent.objective: reference_mixing; reference_sync_steps
questions | agent.objective.overlong_buffer=129
  | overlong_buffer must be at most max_output_tokens = 128
questions   | agent.optimizer.betas=[0.9]              | agent.optimizer.betas[1] must be given
questions | agent.optimizer.warmup_steps=5 | agent.optimizer: warmup_steps; target_kl; got 5
questions   | task.env=CartPole-v1                     | got dataset and env
questions
  | task={dataset: {train: a}, reward: f, form: trl, conversation_template: [{a: b}]}
  | conversation_template requires form: agilerl
questions   | task.metric_weights=[1]                  | metric_weights requires metric
questions   | metric=r.py:f                            | Use 'task.metric'
questions   | task.settings={a: [1]}                   | task.settings
questions | search_space.task.style.choices=[a, b] task.style=a | Use 'task.settings.style'
questions   | task.settings={style: a} style=b         | Use 'task.settings.style'
questions   | hyperparameters.task.style=a             | Use 'task.settings'
questions | task.dataset={trian: x} | unknown key in task.dataset 'trian': did you mean 'train'?
questions   | task.dataset={train: x, subset: y}       | task.dataset: subset requires hub
questions   | task.dataset={train: x, revision: y}     | task.dataset: revision requires hub
questions   | task.reward_funcs=f                      | 'reward_funcs': it is called 'reward' here
questions   | task={dataset: {train: a}}               | reward
questions   | task.dataset={train: "https://x.org/a.jsonl"} | train must be a file; Download it
questions   | hyperparameters.advantage=grpo            | did you mean 'outcome'?
questions | max_steps=9 | schedule.generations; schedule.steps_per_generation
questions   | task={dataset: {train: a}, environment_factory: "e.py:E"} | max_turns
questions   | task.max_turns=3 task.form=trl           | max_turns
questions | task.environment_timeout=9 | environment_timeout requires environment_factory or tools
questions | task.environment_workers=1 | environment_workers requires environment_factory or tools
questions | task.response_template=a.json | response_template requires environment_factory or tools
questions | task={dataset: {train: a}, environment_factory: {}, max_turns: 3}
  | max_turns requires environment_factory
questions   | task={dataset: {train: a}, tools: ["t.py:f"], max_turns: 3} | reward
questions | task={dataset: {train: a}, environment_factory: "e.py:E", max_turns: 3, form: agilerl}
  | form: trl
questions   | task.dataset={starts: 9}                 | dataset.starts
questions | task={dataset: {starts: 9, train: a}, environment_factory: "e.py:E", max_turns: 3}
  | starts
built-in    | task=null                                | task must be given
built-in | task={nmae: two_digit_sums} | unknown key in task 'nmae': did you mean 'name'?
built-in | task.name=two_digit_sum | unknown task 'two_digit_sum': did you mean 'two_digit_sums'?
built-in    | schedule.max_timesteps=9                 | max_timesteps is for small networks, got 9
reasoning   | task.options={seed: 1}                   | options must not contain seed
reasoning | task.sizes={tarin: 1} | split in sizes 'tarin': did you mean 'train'?
environment | model=m | model must be left out where task.env is given
environment | precision=bfloat16 | precision must be left out where task.env is given
environment | task.vectorization=proceses
  | task.vectorization must be one of; did you mean 'processes'?
environment | task.wrappers=Halves                     | task.wrappers must be a list, got 'Halves'
environment | task.wrappers=[{name: a, option: 1}]
  | task.wrappers[0]; 'option': did you mean 'options'?
environment | task.n_envs=4                            | 'n_envs': it is called 'num_envs' here
environment | agent.lora.r=3                           | unknown key in agent 'lora'
environment | agent.network.convolutions=[[1, 2]] | agent.network.convolutions[0][2] must be given
environment | agent.evolve_network={min_units: 9, max_units: 8} | agent; min_units; 9
environment | agent.objective.overlong_buffer=3        | overlong_buffer
environment | env=CartPole-v1                          | Use 'task.env'
environment | net_arch=[64]                            | Use 'agent.network.hidden'
environment | hyperparameters.lr=auto search_space.lr={min: 0.1, max: 1}
  | hyperparameters: lr must not evolve
environment | hyperparameters.lr=auto hyperparameters.target_kl=null
  | hyperparameters: lr="auto" needs target_kl
environment | agent.objective=dapo agent.objective.delta=2
  | Cannot set agent.objective.delta: agent.objective must be
team | model=m | model must be left out where task.parallel_env is given
team        | agent.objective.dynamic_sampling=1       | dynamic_sampling
environment | task.env_kwargs={sutton_barto_reward: 2024-01-01}
  | task.env_kwargs.sutton_barto_reward is a date
environment | run_dir=~nosuchuser/x                    | ~nosuchuser/x
questions   | model=~nosuchuser/x                      | ~nosuchuser/x
environment | task.env=CartPol-v1                      | CartPol-v1; Did you mean: `CartPole`?
environment | task.env=my_maze.py:Maze                | task.env must; my_maze:
environment | task.env=my_maaze:Maze-v0            | No module named 'my_maaze'
environment | task.env_kwargs={sutton: true}           | unexpected keyword argument 'sutton'
environment | task.env=Blackjack-v1 task.vectorization=native | vectorization
team        | task.parallel_env=mpe2.simple_spred_v3   | No module named 'mpe2.simple_spred_v3'
team | task.parallel_env=json | json has no function parallel_env. Give a module that has one
team | task.parallel_env=gymnasium:make task.env_kwargs={id: CartPole-v1}
  | must create a pettingzoo ParallelEnv
team        | task.parallel_env=mpe2.simple_tag_v3     | Set policies='prefix'
team        | task.env_kwargs={bad: 1}                 | cannot be created
team        | task.score=green                         | prefixes, got 'green'
project     | model=./missing                          | missing
project     | device=cuda:99                           | device 'cuda:99'
project     | task.dataset.train=missing.jsonl         | cannot read the dataset
project     | task.dataset.train=rows.txt              | must end in
project     | task.reward=missing.py:score             | no file
project     | task.reward=rewards                      | "path.py:function"
project | task.reward=no_such_module:f | loading no_such_module raised ModuleNotFoundError
project     | task.form=trl                            | must have the columns
project     | search_space.task.style.choices=[a, b]   | reads the setting; task.style
project     | search_space.task.style.choices=[a, b] task.system_prompt="{stile}"
  | reads the setting; {stile}; {style}
project     | search_space.reward_weights.scor.choices=[0, 1] | 'scor': did you mean 'score'?
project     | search_space.data_weights.a.choices=[0, 1] | data_column
project     | task.settings={style: a} search_space.task.stile.choices=[a, b] | task.stile
project     | fitness=rollouts search_space.reward_weights.score.choices=[0, 1]
  | fitness 'rollouts'; reward_weights.score
project     | task.data_column=levl                    | data_column 'levl'
project     | task.metric=missing.py:f                 | no file
project     | task.max_prompt_length=1                 | left out
project | task.reward_workers=0 task.reward_timeout=3
  | reward_timeout requires reward_workers of at least 1
project     | agent.max_output_tokens=4000             | agent.max_output_tokens must be below
project     | agent.lora.target_modules=[nothing]      | matches no module
project | agent.full_finetuning=true precision=bfloat16
  | full_finetuning requires precision float32, got bfloat16
"""
SHARED_KEYS = ("seed", "schedule", "loss_type", "advantage")
"""Keys that several sections have."""
SEVERAL = [
    ("questions", "seed=-1 hyperparameters.lr=x schedule.generations=0 modle=3", 4),
    ("environment", "task.num_envs=0 task.train_size=x agent.network.hidden=3", 3),
    ("team", "task.credit=x agent.agents=1 agent.network.activation=x", 3),
]


def task_of(kind: str) -> tuple[TaskType, type]:
    """Return the task type and the record of the task section."""
    for task_type in TASK_TYPES.values():
        for task in task_type.tasks:
            if task.key == KINDS[kind]:
                return task_type, task
    raise KeyError(kind)


def records(kind: str) -> Iterator[tuple[str, type]]:
    """Yield paths and records of a task's sections, and once for each task type of its agent's."""
    if kind == "project":
        return
    task_type, task = task_of(kind)
    yield "task", task
    if kind in ("questions", "environment"):
        yield "agent", task_type.agent
        for name, hint in get_type_hints(task_type.agent).items():
            if dataclasses.is_dataclass(hint):
                yield f"agent.{name}", hint
    if kind == "questions":
        yield from SHARED


def generated(kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield for each key a wrong type, an unknown key near it, or a wrong section, in turn."""
    turn = 0
    for path, record in records(kind):
        for field in dataclasses.fields(record):
            key = field.name
            hint = get_type_hints(record)[field.name]
            section = any(map(dataclasses.is_dataclass, get_args(hint) or (hint,)))
            turn += 1
            if turn % 3 == 0:
                yield f"{path}.{key[0]}{key}=1", [f"did you mean {key!r}?"]
            elif key == "metric_weights":  # a list or a mapping
                yield f"{path}.{key}=7", [f"{path}.{key} must be a list or a mapping", "got 7"]
            elif turn % 3 == 1 and key not in FREE and not section:
                found = "got 1" if key in NAMED else "{'x': 1}"
                yield f"{path}.{key}={{x: 1}}", [f"{path}.{key}", " must be ", found]
            elif turn % 3 == 1:
                yield f"{path}.{key}=7", [f"{path}.{key} must be a mapping", "got 7"]
            elif key not in SHARED_KEYS:
                elsewhere = "schedule" if path == "logging" else "logging"
                yield f"{elsewhere}.{key}=1", [f"'{elsewhere}.{key}'", f"Use '{path}.{key}'."]


def cases(kind: str) -> list[tuple[str, list[str]]]:
    """Return overrides and the parts of the error; an indented line continues the one before."""
    result = list(generated(kind))
    for row in TABLE.strip().replace("\n  ", " ").splitlines():
        name, words, rule = row.split(" | ")
        if name.strip() == kind:
            result.append((words.strip(), rule.strip().split("; ")))
    return result


def overrides(words: str) -> list[str]:
    return re.split(r" (?=[\w.]+=)", words)


@pytest.fixture
def answer(project, workdir, capsys, monkeypatch):
    """Return a function that trains with wrong settings and returns the error."""
    monkeypatch.setattr(language, "load_base", lambda *_, **__: pytest.fail("a model was loaded"))
    for kind, task in TASKS.items():
        values = {"task": task, "schedule": {"generations": 1, "samples_per_step": 64}}
        Path(f"{kind}.yaml").write_text(yaml.safe_dump(values))
    files = sorted(workdir.iterdir())

    def train(kind: str, words: str) -> str:
        file = project / "tiny.yaml" if kind == "project" else f"{kind}.yaml"
        assert main(["train", str(file), *overrides(words)]) == 2, words
        assert sorted(workdir.iterdir()) == files, words
        lines = capsys.readouterr().err.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("warning: "))

    return train


def test_there_are_enough_cases():
    assert sum(len(cases(kind)) for kind in TASKS) >= 150


@pytest.mark.parametrize("kind", [*TASKS, "project"])
def test_a_short_sentence_names_key_value_and_rule(answer, kind):
    wrong = []
    for words, rule in cases(kind):
        error = answer(kind, words)
        longest = max(len(sentence.split()) for sentence in re.split(r"(?<=[.?])\s", error))
        good = (
            error.startswith("error: ")
            and error.count("\n") == 1
            and "Traceback" not in error
            and longest <= 30
        )
        if not good or not all(part in error for part in rule):
            wrong.append(f"{words} | {'; '.join(rule)} | {error}")
    assert wrong == []


@pytest.mark.parametrize(("kind", "words", "faults"), SEVERAL)
def test_every_fault_has_a_sentence(answer, kind, words, faults):
    lines = answer(kind, words).splitlines()
    assert len(lines) == faults
    for each in overrides(words):
        key = each.partition("=")[0].rpartition(".")[2]
        assert any(key in line for line in lines)
