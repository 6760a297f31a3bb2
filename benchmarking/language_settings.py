"""SmolLM2 learns sums of two numbers: which rewards, prompts and proposals help?

    python benchmarking/language_settings.py rewards [--seeds 0 1 2] [--arms population]
    python benchmarking/language_settings.py prompts
    python benchmarking/language_settings.py proposals

The untrained model is right in one of a hundred sums of three-digit numbers, so that the plain
reward teaches little.

rewards: five reward functions, of which the user does not know which help. A population begins with
    six members whose weights are 0 or 1, and is halved after a generation if fitness differs by
    more than noise. The others take the samples of stopped members. One agent takes all five with
    weight 1, or the best one alone. An agent has 18 learning steps of 64 completions, the
    population six times as many samples; prints the share of right sums.
prompts: one member for each of four prompts, without selection, 18 learning steps of 64 completions
    with two rewards; prints the share of right digits before and after. The last arm is a
    population of the four prompts that selects, 18 learning steps too.
proposals: four members whose prompt is rewritten by a rule, which adds, drops or replaces sentences
    of a list, and the same population without proposals: two-digit numbers, 9 learning steps of 32
    completions, two rewards; prints the share of right sums.

Recorded runs are not repeated.
"""

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, HuggingFaceGym, HyperparameterConfig, evolve, load_base
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.task_settings import TaskSettings
from evogrpo.evolution import Fixed, SuccessiveHalving, Tournament

Record = dict[str, Any]
QUESTION = "State the final answer to the following arithmetic problem: {a} + {b} ="
PROMPTS = {
    "state": "State the final answer to the following arithmetic problem: ",
    "bare": "Sum: ",
    "number only": "Reply with the number only. ",
    "worked examples": "412 + 173 = 585\n608 + 254 = 862\n",
}
FIRST_SENTENCE = "You are a helpful assistant."
SENTENCES = (
    "State the final answer to the arithmetic problem.",
    "Add the two numbers.",
    "The answer has three or four digits.",
    "Reply with the number only.",
    "Think step by step before you answer.",
    "Answer in verse.",
    "Begin with a friendly greeting.",
)


def last_number(text: str) -> str:
    """Return the last number of a text, or nothing."""
    found = re.findall(r"\d{1,9}", text.replace(",", ""))
    return found[-1] if found else ""


def right(completion: str, answer: str, _: str) -> float:
    """Return 1 for the right number."""
    return float(last_number(completion) == answer)


def digits(completion: str, answer: str, _: str) -> float:
    """Return the share of right digits of a number with the right number of digits."""
    given = last_number(completion)
    if len(given) != len(answer):
        return 0.0
    return sum(map(str.__eq__, given, answer)) / len(answer)


def closeness(completion: str, answer: str, _: str) -> float:
    """Return more, up to 1, the closer the number is."""
    given = last_number(completion)
    if not given:
        return 0.0
    return 1 / (1 + abs(int(given) - int(answer)) / 10)


def short(completion: str, answer: str, _: str) -> float:
    """Return more for shorter answers."""
    return max(0.0, 1 - len(completion) / 40)


def wordy(completion: str, answer: str, _: str) -> float:
    """Return more for longer answers."""
    return min(1.0, len(completion) / 40)


REWARDS = [right, digits, closeness, short, wordy]


def questions(seed: int, low: int) -> list[dict[str, str]]:
    """Return 3,000 different sums of numbers from `low` to `10 * low - 1`, in random order."""
    rng = random.Random(seed)
    pairs: set[tuple[int, int]] = set()
    while len(pairs) < 3000:
        a = rng.randint(low, 10 * low - 1)
        b = rng.randint(low, 10 * low - 1)
        pairs.add((min(a, b), max(a, b)))
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in sorted(pairs)]
    rng.shuffle(rows)
    return rows


def make(
    seed: int, rewards: list[Callable[..., float]], *, low: int = 100, **task: Any
) -> tuple[Any, HuggingFaceGym]:
    """Return the loaded model and the task."""
    base = load_base("smollm2-135m")
    env = HuggingFaceGym(
        questions(seed, low),
        tokenizer=base.tokenizer,
        reward_fn=rewards,
        validation_size=96,
        test_size=192,
        seed=seed,
        **task,
    )
    return base, env


def agents(base: Any, size: int, seed: int, **settings: Any) -> Any:
    """Return a population with calibrated learning rates."""
    return GRPO.population(
        size,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=12,
        seed=seed,
        **settings,
    )


def result(run: Any) -> Record:
    """Return what a finished run reached."""
    test = run.result.test
    return {
        "before": test.before.mean,
        "after": test.after.mean,
        "settings": dict(run.best.hyperparameters.task_settings),
        "tokens": run.result.tokens,
        "members": [
            [
                {
                    "member": member.index,
                    "parent": member.parent,
                    "fitness": member.fitness,
                    "settings": dict(member.hyperparameters.task_settings),
                }
                for member in report.members
            ]
            for report in run.reports
        ],
    }


def finish(population: Any, env: HuggingFaceGym, **settings: Any) -> Record:
    """Train, and return what the run reached with its processor time."""
    began = time.process_time()
    run = evolve(population, env, progress=False, **settings)
    run.reports = list(run)
    return {**result(run), "seconds": round(time.process_time() - began, 1)}


def rewards(arm: str, seed: int) -> Record:
    """Train on all five rewards, on the best one, or on those that a population finds."""
    template = [{"role": "user", "content": PROMPTS["state"] + "{question}"}]
    used = [digits] if arm == "right digits" else REWARDS
    base, env = make(seed, used, metric=right, conversation_template=template)
    if arm == "population":
        space = HyperparameterConfig(reward_weights={each.__name__: [0, 1] for each in REWARDS})
        population = agents(base, 6, seed, hp_config=space, samples_per_step=64)
        schedule: Record = {"generations": 3, "steps_per_generation": 6}
    else:
        population = agents(base, 1, seed, samples_per_step=64)
        schedule = {"generations": 1, "steps_per_generation": 18, "strategy": Fixed()}
    return finish(population, env, samples_per_step=64, **schedule)


def prompts(arm: str, seed: int) -> Record:
    """Train a member with each prompt, or a population that selects among them."""
    template = [{"role": "user", "content": "{before}{question}"}]
    base, env = make(
        seed,
        [right, closeness],
        metric=digits,
        conversation_template=template,
        settings={"before": PROMPTS["state"]},
    )
    space = HyperparameterConfig(task={"before": list(PROMPTS.values())})
    names = list(PROMPTS)
    random.Random(seed).shuffle(names)
    founders = [
        Hyperparameters(
            target_kl=DEFAULT_TARGET_KL, task_settings=TaskSettings({"task.before": PROMPTS[name]})
        )
        for name in names
    ]
    population = agents(
        base,
        4,
        seed,
        hp_config=space,
        founders=founders,
        target_kl=DEFAULT_TARGET_KL,
        samples_per_step=64,
    )
    settings = {slot: population[slot].hyperparameters.task_settings for slot in range(4)}
    untrained = {}
    for slot, name in enumerate(names):
        scores = evaluate(population.members, [slot], env, "test", settings=settings, base=True)
        untrained[name] = float(np.mean(scores))
    if arm == "each prompt":
        schedule: Record = {"generations": 1, "steps_per_generation": 18, "strategy": Fixed()}
    else:
        schedule = {
            "generations": 3,
            "steps_per_generation": 3,
            "strategy": SuccessiveHalving(),
        }
    record = finish(population, env, samples_per_step=64, **schedule)
    trained = {}
    if arm == "each prompt":
        scores = evaluate(population.members, range(4), env, "test", settings=settings)
        trained = {name: float(np.mean(scores[slot])) for slot, name in enumerate(names)}
    return {**record, "untrained": untrained, "trained": trained}


class Rewriter:
    """A rule that adds, drops or replaces one sentence, without reading any completion."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return a new text for each name."""
        return {name: self.rewrite(candidate[name]) for name in components_to_update}

    def rewrite(self, text: str) -> str:
        """Return the text with one change."""
        sentences = re.findall(r"[^.]+\.", text)
        kept = [sentence.strip() for sentence in sentences]
        new = self.rng.choice([each for each in SENTENCES if each not in kept])
        change = self.rng.choice(
            ["add", "drop", "replace"] if len(kept) > 1 else ["add", "replace"]
        )
        if change != "add":
            kept.pop(self.rng.randrange(len(kept)))
        if change != "drop":
            kept.append(new)
        return " ".join(kept)


def proposals(arm: str, seed: int) -> Record:
    """Train four members whose prompt is rewritten, or stays as it is."""
    base, env = make(
        seed,
        [right, digits],
        low=10,
        metric=right,
        system_prompt="{style}",
        settings={"style": FIRST_SENTENCE},
    )
    proposed = arm == "with proposals"
    space = None
    if proposed:
        texts = {"choices": [FIRST_SENTENCE], "proposed": True}
        space = HyperparameterConfig(task={"style": texts})
    population = agents(base, 4, seed, hp_config=space, samples_per_step=32)
    return finish(
        population,
        env,
        samples_per_step=32,
        generations=3,
        steps_per_generation=3,
        strategy=Tournament(),
        proposer=Rewriter(seed) if proposed else None,
    )


CASES: dict[str, tuple[Callable[[str, int], Record], tuple[str, ...]]] = {
    "rewards": (rewards, ("all with weight 1", "right digits", "population")),
    "prompts": (prompts, ("each prompt", "population")),
    "proposals": (proposals, ("without proposals", "with proposals")),
}


def main() -> None:
    """Do all runs that are not recorded, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("runs/language_settings"))
    given = parser.parse_args()
    train, arms = CASES[given.case]
    torch.set_num_threads(1)
    for arm in given.arms or arms:
        if arm not in arms:
            parser.error(f"Unknown arm {arm!r}; there are: {', '.join(arms)}.")
        for seed in given.seeds:
            path = given.folder / f"{given.case} {arm} {seed}.json"
            if not path.exists():
                write_record(path, train(arm, seed))
            record = json.loads(path.read_text("utf-8"))
            print(
                f"| {arm} | {seed} | {record['before']:.3f} → {record['after']:.3f} |"
                f" {record['tokens'] / 1e3:.0f} k tokens | {record['seconds']:.0f} s |",
                flush=True,
            )
            for name, before in record.get("untrained", {}).items():
                after = record["trained"].get(name)
                print(f"    {name}: {before:.3f} → {after}", flush=True)


if __name__ == "__main__":
    main()
