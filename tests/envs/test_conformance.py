"""Environments of the package and a user-defined one pass the conformance suites."""

from itertools import product

import numpy as np
from gymnasium.spaces import MultiDiscrete

from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
from evogrpo.envs.text.reward_functions import StepRewards
from evogrpo.testing.environments import PlayedEnvironmentTestCase, PromptEnvironmentTestCase
from tests.envs import joint_probes, probes
from tests.envs.conftest import CHAT, build
from tests.two_turns import GuessTwice

SUMS = [(f"{a}+{b}=", str(a + b)) for a, b in product(range(10), range(10))]
TOKENIZER = build(CHAT)


def last_digit(completion, answer, question):
    return float(completion[-1:] == answer[-1:])


def length(completions, **columns):
    return [None if len(text) % 3 == 0 else float(len(text)) for text in completions]


def total_length(completions, **columns):
    result = []
    for last in completions:
        result.append(float(sum(len(message["content"]) for message in last)))
    return result


def steps(completion_ids, **columns):
    return [StepRewards([1.0, 0.5], [0, len(ids) - 1]) for ids in completion_ids]


def reply(row, messages):
    last = messages[-1]["content"]
    if last.endswith("0"):
        return None
    return f"{len(messages)} {last} {row['answer']}"


class ArithmeticPrompts(PromptEnvironmentTestCase):
    def complete(self, env, rng):
        text = "".join(rng.choice(list("0123456789 "), size=rng.integers(1, 5)))
        ids = env.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, env.tokenizer.eos_token_id] if rng.random() < 0.5 else ids


class TestAgileRLForm(ArithmeticPrompts):
    def make_env(self, seed=0):
        rows = [{"question": question, "answer": answer} for question, answer in SUMS]
        return HuggingFaceGym(rows, None, TOKENIZER, reward_fn=last_digit, seed=seed)


class TestTRLForm(ArithmeticPrompts):
    def make_env(self, seed=0):
        rows = [{"prompt": question, "answer": answer} for question, answer in SUMS]
        functions = [length, steps]
        return HuggingFaceGym(
            rows, None, build(None), reward_funcs=functions, reward_weights=[0.5, 2.0], seed=seed
        )


class TestMultiTurnGym(ArithmeticPrompts):
    def make_env(self, seed=0):
        rows = [
            {"prompt": [{"role": "user", "content": question}], "answer": answer}
            for question, answer in SUMS
        ]
        rewards = {"reward_funcs": [total_length, steps], "reward_weights": [1, 2]}
        return MultiTurnGym(rows, None, TOKENIZER, reply=reply, max_turns=3, **rewards, seed=seed)


class TestTwoTurns(ArithmeticPrompts):
    def make_env(self, seed=0):
        return GuessTwice(tokenizer=TOKENIZER, seed=seed)


class MaskedPair(probes.Masked):
    """A free action beside the masked one."""

    action_space = MultiDiscrete([2, 4])

    def draw(self):
        seen, infos = super().draw()
        return seen, {"action_mask": (np.ones(2, np.int8), infos["action_mask"])}

    def step(self, action):
        return super().step(action[1])


def played(make, env, **options):
    """Return a suite for environments of these options."""

    class Case(PlayedEnvironmentTestCase):
        def make_env(self, seed=0):
            return make(env, **options, seed=seed)

    return Case


TestNative = played(GymnasiumGroups, "Pendulum-v1", num_envs=5, max_episode_steps=30)
TestSerial = played(
    GymnasiumGroups, "CartPole-v1", vectorization="serial", num_envs=5, max_episode_steps=40
)
TestProcesses = played(
    GymnasiumGroups, "CartPole-v1", vectorization="processes", num_envs=2, max_episode_steps=15
)
TestMasked = played(GymnasiumGroups, probes.Masked)
TestMaskedPair = played(GymnasiumGroups, MaskedPair)
TestNoise = played(
    GymnasiumGroups, probes.NoisyWalk, reseed_noise=True, recreate_env=True, num_envs=7
)
TestBirthsAndEnds = played(PettingZooGroups, joint_probes.Lives, num_envs=5)
TestJointMasks = played(PettingZooGroups, joint_probes.Masked)
