"""Fingerprints change with data, code and arguments only."""

import functools
import importlib.util
import linecache
import sys

import numpy as np
import pytest

from evogrpo import GymnasiumGroups, HuggingFaceGym, MultiTurnGym, PettingZooGroups
from evogrpo.envs.fingerprint import canonical, code_hash
from tests.envs import joint_probes, probes

ROWS = [{"question": f"{n}?", "answer": str(n)} for n in range(12)]
REWARDS = '''
"""Rewards."""
import re
BONUS = 1
NUMBER = re.compile(r"[0-9]+")
SEEN = {}

class Grader:
    """Grades."""
    limit = 3
    def grade(self, text):
        return min(len(NUMBER.findall(text)), self.limit)

def helper(text):
    # counts
    return Grader().grade(text) + BONUS

def reward(completion, answer, question, scale=1.0):
    """Return what it is worth."""
    SEEN[completion] = True
    return helper(completion) * scale

async def later(completion, answer, question):
    return helper(completion)
'''


def loaded(tmp_path, text, name="my_rewards"):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.checkcache()
    return module


@pytest.mark.parametrize("function", ["reward", "later"])
@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# counts", "# counts numbers", True),
        ("Return what it is worth.", "What it is worth.", True),
        ("import re\n", "import re\nimport os\nUNUSED = 7\n", True),
        ("BONUS = 1", "BONUS = 2", False),
        ("[0-9]+", "[1-9]+", False),
        ("Grader().grade(text) + BONUS", "Grader().grade(text) - BONUS", False),
    ],
)
def test_code_hash_covers_referenced_code_but_not_comments(tmp_path, function, old, new, same):
    (tmp_path / "old").mkdir()
    before = code_hash(getattr(loaded(tmp_path / "old", REWARDS), function))
    after = code_hash(getattr(loaded(tmp_path, REWARDS.replace(old, new)), function))
    assert (before == after) is same


def test_code_hash_covers_defaults_and_closures_but_not_caches(tmp_path):
    module = loaded(tmp_path, REWARDS)
    before = code_hash(module.reward)
    module.reward("text 1", "", "")
    assert code_hash(module.reward) == before
    assert code_hash(loaded(tmp_path, REWARDS.replace("scale=1.0", "scale=2.0")).reward) != before

    def scaled(factor):
        return lambda completion, answer, question: factor * len(completion)

    class Judge:
        def __init__(self, strict):
            self.strict = strict

        def __call__(self, completion, answer, question):
            return float(self.strict)

        def grade(self, completion, answer, question):
            return 1.0

    for one, other in [
        (scaled(1), scaled(2)),
        (Judge(True), Judge(False)),
        (Judge(True).grade, Judge(True)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, 1), functools.partial(min, 1)),
        (len, max),
        (lambda c, a, q: 1.0, lambda c, a, q: 2.0),
    ]:
        assert code_hash(one) != code_hash(other)
    assert code_hash(scaled(1)) == code_hash(scaled(1))
    assert code_hash(Judge(True).grade) == code_hash(Judge(True).grade)


def test_code_hash_covers_user_modules(tmp_path):
    hashes = []
    for number in (1, 2):
        loaded(tmp_path, f"def grade(text):\n    return {number}\n", "my_helpers")
        module = loaded(tmp_path, "import my_helpers\ndef reward(c, a, q):\n    return my_helpers.grade(c)\n")
        direct = loaded(tmp_path, "from my_helpers import grade\ndef reward(c, a, q):\n    return grade(c)\n", "other")
        hashes.append((code_hash(module.reward), code_hash(direct.reward)))
    assert hashes[0][0] != hashes[1][0]
    assert hashes[0][1] != hashes[1][1]


def test_canonical_is_equal_for_equal_values():
    assert canonical({"b": np.int64(1), "a": np.array([1.5])}) == canonical({"a": [1.5], "b": 1})
    assert canonical(object()) == canonical(object())
    odd = {(1, 2): "a", 3: {"b", "c", "d"}, "k": [{None: 1, "x": 2}]}
    assert canonical(odd) == canonical(dict(reversed(odd.items())))
    assert canonical(odd) != canonical({**odd, 3: {"b", "c"}})
    assert canonical({"s": {"b", "a"}}) == canonical({"s": {"a", "b"}})


def one(completion, answer, question):
    return 1.0


def other(completion, answer, question):
    return 0.0


def fingerprint_with(tokenizer, rows=ROWS, test=None, **options):
    return HuggingFaceGym(rows, test, tokenizer, **{"reward_fn": one, **options}).fingerprint()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"reward_fn": other}, {"reward one", "reward other"}),
        ({"rows": [*ROWS, {"question": "12?", "answer": "12"}]}, {"prompts"}),
        ({"rows": [{**row, "answer": "1"} for row in ROWS]}, {"train questions", "validation questions"}),
        ({"rows": [{**row, "level": 1} for row in ROWS]}, {"train questions"}),
        ({"test": [{"question": "x", "answer": "y"}]}, {"test questions"}),
        ({"validation_size": 3}, {"validation questions", "train questions"}),
        ({"conversation_template": [{"role": "user", "content": "Q {question}"}]}, {"prompts"}),
        ({"chat_template_kwargs": {"extra": 1}}, {"chat_template_kwargs"}),
        ({"seed": 1}, {"seed"}),
        ({"data_batch_size": 3, "reward_workers": 0, "on_reward_error": "exclude"}, set()),
    ],
)
def test_fingerprint_keys_name_the_difference(tokenizer, options, names):
    before, after = fingerprint_with(tokenizer), fingerprint_with(tokenizer, **options)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert names <= changed
    assert bool(names) == bool(changed)


def first_reply(row, messages):
    return None


def other_reply(row, messages):
    return "Go on."


def test_fingerprint_covers_reply_and_max_turns(tokenizer):
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(9)]

    def length(completions, **_):
        return [0.0 for _ in completions]

    def make(**options):
        return MultiTurnGym(
            rows, tokenizer=tokenizer, reward_funcs=length, **{"reply": first_reply, "max_turns": 2, **options}
        ).fingerprint()

    assert make() == make()
    assert make()["reply"] != make(reply=other_reply)["reply"]
    assert make()["max_turns"] != make(max_turns=3)["max_turns"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"env": "MountainCar-v0"}, "environment"),
        ({"max_episode_steps": 20}, "max_episode_steps"),
        ({"env_kwargs": {"sutton_barto_reward": True}}, "env_kwargs"),
        ({"reseed_noise": True, "vectorization": "serial"}, "reseed_noise"),
        ({"seed": 4}, "seed"),
        ({"test_size": 9}, "test starts"),
        ({"vectorization": "serial"}, None),
        ({"num_envs": 3}, None),
    ],
)
def test_fingerprint_keys_name_changed_arguments(options, name):
    before = GymnasiumGroups("CartPole-v1").fingerprint()
    after = GymnasiumGroups(**{"env": "CartPole-v1", **options}).fingerprint()
    changed = {key for key in before if before[key] != after[key]}
    assert name in changed if name else not changed


def doubled(returns):
    return 2 * sum(returns.values())


def test_fingerprint_covers_environment_and_score_code():
    assert GymnasiumGroups(probes.Masked).fingerprint() != GymnasiumGroups(probes.NoisyWalk).fingerprint()
    assert PettingZooGroups(joint_probes.Lives).fingerprint() != PettingZooGroups(joint_probes.Masked).fingerprint()
    scored = PettingZooGroups(joint_probes.Lives, score=doubled).fingerprint()
    plain = PettingZooGroups(joint_probes.Lives).fingerprint()
    assert {name for name in plain if plain[name] != scored[name]} == {"score"}
