"""Fingerprints change with data, code and arguments only."""

import functools
import importlib.util
import linecache
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeAwareObservation

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
def test_code_hash_covers_referenced_code_but_not_comments_or_caches(tmp_path, old, new, same):
    (tmp_path / "old").mkdir()
    module = loaded(tmp_path / "old", REWARDS)
    before = [code_hash(module.reward), code_hash(module.later)]
    module.reward("text 1", "", "")  # fills a cache
    assert code_hash(module.reward) == before[0]
    changed = loaded(tmp_path, REWARDS.replace(old, new))
    after = [code_hash(changed.reward), code_hash(changed.later)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [same, same]
    assert (
        code_hash(loaded(tmp_path, REWARDS.replace("scale=1.0", "scale=2.0")).reward) != before[0]
    )


DECORATED = """
import contextlib
import functools

def weight():
    return FACTOR

def scaled(function):
    @functools.wraps(function)
    def wrapper(*given):
        return FACTOR * function(*given)
    return wrapper

class Grader:
    DECORATOR
    def member(self):
        return RESULT

DECORATOR
def function(completion):
    return RESULT
"""


@pytest.mark.parametrize(
    ("decorator", "result"),
    [
        *(
            (f"@{name}", "weight()")
            for name in ("staticmethod", "classmethod", "property", "functools.cached_property")
        ),
        *((f"@{name}", "weight()") for name in ("functools.cache", "contextlib.contextmanager")),
        ("@scaled", "1"),
    ],
)
def test_code_hash_covers_code_behind_decorators(tmp_path, decorator, result):
    text = DECORATED.replace("DECORATOR", decorator).replace("RESULT", result)
    hashes = []
    for factor in "112":
        module = loaded(tmp_path, text.replace("FACTOR", factor))
        # Both decorators are for methods.
        if decorator in ("@staticmethod", "@classmethod"):
            functions = []
        else:
            functions = [module.function]
        hashes.append([code_hash(each) for each in (module.Grader, *functions) if callable(each)])
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def scaled(factor):
    return lambda completion, answer, question: factor * len(completion)


class Judge:
    def __init__(self, strict):
        self.strict = strict

    def __call__(self, completion, answer, question):
        return float(self.strict)

    def grade(self, completion, answer, question):
        return 1.0


def test_code_hash_covers_closures_and_attributes():
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


CONSTANTS = """
LIMIT = 4
def longer(text):
    return len(text) > LIMIT
"""
CHANGING = """
import dataclasses
from fractions import Fraction
import functools
import os
import time
from my_constants import LIMIT
from my_constants import longer

THRESHOLD = 0.5
CALLS = 0
try:
    STARTED = time.time()
except OSError:
    STARTED = 0.0

class Judge:
    def __init__(self, strict, started=time.time()):
        self.strict, self.pid = strict, os.getpid()
        self.started = time.time()
        self.calls = 0
        self.last = strict
    def __call__(self, completion, answer, question):
        self.calls += 1
        self.last = completion
        return self.strict + longer(completion)
    def grade(self, completion, answer, question):
        return self(completion, answer, question)

class Tally:
    def __init__(self, first):
        self.first = first
TALLY = Tally(0)

def weighted(weight):
    calls, began = 0, time.time()
    double = 2 * weight
    def reward(completion, answer, question):
        nonlocal calls
        calls += 1
        return double + calls + began
    return reward

def counted(function):
    calls = 0
    @functools.wraps(function)
    def wrapper(*given, **named):
        nonlocal calls
        calls += 1
        return function(*given, **named)
    return wrapper

@counted
def reward(completion, answer, question, began=time.time()):
    global CALLS
    CALLS += 1
    TALLY.first += 1
    reward.calls = CALLS
    return THRESHOLD + STARTED + (completion in {"a", "b", "c"}) + LIMIT

def local(weight):
    class Local:
        def __call__(self, completion, answer, question):
            return weight
    return Local()

@dataclasses.dataclass
class Record:
    limit: float
    calls: int = 0
    began: float = dataclasses.field(default_factory=time.time)
    def __call__(self, completion, answer, question):
        self.calls += 1
        return self.limit

class Either:
    def __init__(self, *functions, weight=None):
        if weight is None:
            weight = 0.5
        self.functions = functions
        self.weight = weight
    def __call__(self, completion, answer, question):
        return self.weight * max(each(completion, answer, question) for each in self.functions)

JUDGE = Judge(2.0)
REWARDS = [
    JUDGE, JUDGE.grade, weighted(3.0), reward, local(5.0), functools.partial(JUDGE, question="q"),
    lambda completion, answer, question: JUDGE(completion, answer, question), Record(7.0),
    Either(reward), Either(weighted(9.0)), Either(Record(1.0), weight=Fraction(1, 3)),
]
"""
HASHES = """
import my_changing
from evogrpo.envs.fingerprint import code_hash
print(*map(code_hash, my_changing.REWARDS))
"""


def changing(folder, constants=CONSTANTS, text=CHANGING):
    loaded(folder, constants, "my_constants")
    return loaded(folder, text, "my_changing").REWARDS


def test_values_that_change_in_a_run_or_between_processes_do_not_count(tmp_path):
    rewards = changing(tmp_path)
    before = [code_hash(each) for each in rewards]
    assert len({*before}) == len(before)
    for each in rewards:
        each("text", "answer", question="q")
    assert [code_hash(each) for each in rewards] == before
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    other = subprocess.run(
        [sys.executable, "-O", "-c", HASHES], env=environment, capture_output=True, check=True
    )
    assert other.stdout.decode().split() == before


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("Judge(2.0)", "Judge(2.5)", [0, 1, 5, 6]),
        ("weighted(3.0)", "weighted(3.5)", [2]),
        ("THRESHOLD = 0.5", "THRESHOLD = 0.6", [3, 8]),
        ("LIMIT = 4", "LIMIT = 5", [0, 1, 3, 5, 6, 8]),
        ("2 * weight", "3 * weight", [2, 9]),
        ("local(5.0)", "local(6.0)", [4]),
        ("Record(7.0)", "Record(8.0)", [7]),
        ("weighted(9.0)", "weighted(9.5)", [9]),
        ("Fraction(1, 3)", "Fraction(1, 4)", [10]),
        ('question="q"', 'question="other"', [5]),
    ],
)
def test_changed_constants_count(tmp_path, old, new, changed):
    (tmp_path / "old").mkdir()
    before = [code_hash(each) for each in changing(tmp_path / "old")]
    rewards = changing(tmp_path, CONSTANTS.replace(old, new), CHANGING.replace(old, new))
    after = [code_hash(each) for each in rewards]
    assert [place for place, each in enumerate(before) if each != after[place]] == changed


def test_cells_of_a_notebook_are_source():
    hashes = []
    for number, threshold in enumerate(("0.5", "0.5", "0.6")):
        shell = {"__name__": "__main__", "get_ipython": None, "In": []}
        cells = [f"import time\nTHRESHOLD = {threshold}\nSTARTED = time.time()\nCALLS = 0"]
        cells.append(
            "def reward(c, a, q):\n    global CALLS\n    CALLS += 1\n    return THRESHOLD + STARTED"
        )
        for place, cell in enumerate(cells):
            name = f"<cell {number}.{place}>"
            linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
            exec(compile(cell, name, "exec"), shell)  # noqa: S102
            shell["In"].append(cell)
        hashes.append(code_hash(shell["reward"]))
        shell["reward"]("", "", "")
        assert code_hash(shell["reward"]) == hashes[-1]
    assert hashes[0] == hashes[1] != hashes[2]


def test_code_hash_covers_user_modules(tmp_path):
    hashes = []
    for number in (1, 2):
        loaded(tmp_path, f"def grade(text):\n    return {number}\n", "my_helpers")
        module = loaded(
            tmp_path, "import my_helpers\ndef reward(c, a, q):\n    return my_helpers.grade(c)\n"
        )
        direct = loaded(
            tmp_path,
            "from my_helpers import grade\ndef reward(c, a, q):\n    return grade(c)\n",
            "other",
        )
        hashes.append((code_hash(module.reward), code_hash(direct.reward)))
    assert hashes[0][0] != hashes[1][0]
    assert hashes[0][1] != hashes[1][1]


def test_code_is_hashed_while_its_file_is_being_edited(tmp_path):
    module = loaded(tmp_path, "def reward(c, a, q):\n    return 1\n")
    (tmp_path / "my_rewards.py").write_text("def reward(c,\n")
    assert len(code_hash(module.reward)) == 12


def test_canonical_is_equal_for_equal_values():
    assert canonical({"b": np.int64(1), "a": np.array([1.5])}) == canonical({"a": [1.5], "b": 1})
    assert canonical(object()) == canonical(object())
    nested = {(1, 2): "a", 3: {"b", "c", "d"}, "k": [{None: 1, "x": 2}]}
    assert canonical(nested) == canonical(dict(reversed(nested.items())))
    assert canonical(nested) != canonical({**nested, 3: {"b", "c"}})


# ---- environments: the keys of a fingerprint name the difference


def changed(make, options, **base):
    """Return the keys that differ between an environment with and without these options."""
    before = make(**base).fingerprint()
    same = make(**base).fingerprint()
    after = make(**{**base, **options}).fingerprint()
    assert before == same
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def one(completion, answer, question):
    return 1.0


def other(completion, answer, question):
    return 0.0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"reward_fn": other}, {"reward one", "reward other"}),
        ({"train_dataset": [*ROWS, {"question": "12?", "answer": "12"}]}, {"prompts"}),
        (
            {"train_dataset": [{**row, "answer": "1"} for row in ROWS]},
            {"train questions", "validation questions"},
        ),
        ({"train_dataset": [{**row, "level": 1} for row in ROWS]}, {"train questions"}),
        ({"test_dataset": [{"question": "x", "answer": "y"}]}, {"test questions"}),
        ({"validation_size": 3}, {"validation questions", "train questions"}),
        ({"conversation_template": [{"role": "user", "content": "Q {question}"}]}, {"prompts"}),
        ({"chat_template_kwargs": {"extra": 1}}, {"chat_template_kwargs"}),
        ({"seed": 1}, {"seed"}),
        ({"data_batch_size": 3, "reward_workers": 0, "on_reward_error": "exclude"}, set()),
    ],
)
def test_fingerprints_of_datasets(tokenizer, options, names):
    found = changed(HuggingFaceGym, options, train_dataset=ROWS, tokenizer=tokenizer, reward_fn=one)
    assert names <= found
    assert bool(names) == bool(found)


def zero(completions, **_):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("options", [{"reply": lambda row, messages: "Go on."}, {"max_turns": 3}])
def test_fingerprints_of_conversations(tokenizer, options):
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(9)]
    base = {
        "tokenizer": tokenizer,
        "reward_funcs": zero,
        "reply": lambda row, messages: None,
        "max_turns": 2,
    }
    assert changed(MultiTurnGym, options, train_dataset=rows, **base) == {*options}


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (GymnasiumGroups, {"env": probes.Masked}, {"environment"}),
        (GymnasiumGroups, {"max_episode_steps": 20}, {"max_episode_steps"}),
        (GymnasiumGroups, {"env_kwargs": {"sutton_barto_reward": True}}, {"env_kwargs"}),
        (GymnasiumGroups, {"reseed_noise": True, "vectorization": "serial"}, {"reseed_noise"}),
        (GymnasiumGroups, {"seed": 4}, {"seed"}),
        (GymnasiumGroups, {"wrappers": [TimeAwareObservation]}, {"wrappers"}),
        (GymnasiumGroups, {"test_size": 9}, {"test starts"}),
        (GymnasiumGroups, {"vectorization": "serial", "num_envs": 3}, set()),
        (PettingZooGroups, {"env": joint_probes.Masked}, {"environment"}),
        (PettingZooGroups, {"score": joint_probes.first_earns}, {"score"}),
        (PettingZooGroups, {"score": "sum"}, set()),
    ],
)
def test_fingerprints_of_played_environments(make, options, names):
    found = changed(
        make, options, env="CartPole-v1" if make is GymnasiumGroups else joint_probes.Lives
    )
    assert names <= found
    assert bool(names) == bool(found)


def test_the_version_of_an_installed_environment_counts():
    installed = GymnasiumGroups("CartPole-v1").fingerprint()
    assert installed["package"] == f"gymnasium {gymnasium.__version__}"
    assert "package" not in GymnasiumGroups(probes.Masked).fingerprint()
