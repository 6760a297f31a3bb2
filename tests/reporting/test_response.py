"""Share of variance explained by a hyperparameter, and its significance."""

import numpy as np
import pytest

from evogrpo.reporting.response import Gain, response, responses
from evogrpo.reporting.summary import summarise
from tests.reporting.journals import baseline, generation, member


def gains_of(values, gains, each=1):
    """Return the gains of `each` members per value, one gain each."""
    return [
        Gain(index=index, generation=number, value=value, gain=gain)
        for index, (value, own) in enumerate(zip(values, np.reshape(gains, (len(values), each)), strict=True))
        for number, gain in enumerate(own.tolist(), 1)
    ]


@pytest.mark.parametrize("names", [(1e-4, 1e-2), ("grpo", "dapo")])
@pytest.mark.parametrize(("between", "within"), [(3.0, 1.0), (1.0, 2.0), (1.0, 0.0)])
def test_the_share_equals_that_of_the_analysis_of_variance(names, between, within):
    """Two values with gains at +-between, each with deviations of +-within: S_t = n (b^2 + w^2) and S_w = n w^2."""
    values = [names[index % 2] for index in range(20)]
    made = [(between if index % 2 else -between) + (within if index % 4 < 2 else -within) for index in range(20)]
    found = response("x", gains_of(values, made))
    expected = 1 - (within**2 / 18) / ((between**2 + within**2) / 19)
    assert found.share.share == pytest.approx(expected, abs=1e-12)
    assert [level.mean for level in found.levels] == pytest.approx([-between, between])
    # The standard error of a mean of 10 independent gains, sample variance 10 w^2 / 9.
    assert [level.standard_error for level in found.levels] == pytest.approx([within / 3] * 2)
    assert found.share.significant == (between >= within)


def test_independent_gains_are_rarely_significant():
    rng = np.random.default_rng(1)
    told, shares = 0, []
    for _ in range(60):
        found = response("lr", gains_of(np.exp(rng.normal(size=24)).tolist(), rng.normal(size=72), each=3))
        told += found.share.significant
        shares.append(found.share.share)
    assert told <= 6  # 5 of 100 by construction
    assert abs(np.mean(shares)) < 0.03  # unbiased


def test_repeated_gains_of_few_members_count_as_these_members():
    """Each member has a skill independent of its value, which requires permuting whole members."""
    rng = np.random.default_rng(2)
    told = 0
    for _ in range(40):
        skill = np.repeat(rng.normal(size=8), 10) + 0.1 * rng.normal(size=80)
        told += response("lr", gains_of(np.exp(rng.normal(size=8)).tolist(), skill, each=10)).share.significant
    assert told <= 6


def test_an_optimum_in_the_middle_is_detected():
    values = np.exp(np.linspace(-5, 5, 40))
    made = -(np.log(values) ** 2)
    found = response("lr", gains_of(values.tolist(), made - made.mean()))
    assert found.share.significant
    assert found.share.share > 0.75
    means = [level.mean for level in found.levels]
    assert 0 < np.argmax(means) < len(means) - 1
    assert found.levels[0].low == pytest.approx(values[0])
    assert found.levels[-1].high == pytest.approx(values[-1])


@pytest.mark.parametrize(
    "gains",
    [
        [],
        gains_of([1.0, 2.0, 3.0], range(12), each=4),
        gains_of([1.0] * 10, range(20), each=2),
        gains_of(list(range(1, 7)), range(6)),
    ],
    ids=["none", "three members", "one value", "six gains"],
)
def test_too_few_gains_or_values_give_no_result(gains):
    found = response("lr", gains)
    assert found.share is None
    assert len(found.gains) == len(gains)


def test_equal_gains_explain_nothing():
    found = response("lr", gains_of(list(range(1, 13)), [0.0] * 24, each=2))
    assert found.share.share == 0
    assert not found.share.significant


BASELINE = baseline()


def test_gains_are_differences_of_a_lineage_less_the_generations_mean():
    run = {"event": "run", "evolvable": {"lr": {"min": 1e-6, "max": 1.0, "scale": "log"}}}
    slow, fast = {"hyperparameters": {"lr": 1e-4}}, {"hyperparameters": {"lr": 1e-3}}
    events = [
        run,
        BASELINE,
        generation(1, member(0, 0, fitness=1.0, **slow), member(1, 1, fitness=4.0, **fast)),
        generation(2, member(0, 2, 1, 6.0, **slow), member(1, 1, fitness=None, **fast), best=2),
        generation(3, member(0, 2, 1, 7.0, **slow), member(1, 3, 2, 9.0, **fast), best=3),
    ]
    (found,) = responses(summarise(events))
    # Generation 1: +1 and +4. Generation 2: a single gain. Generation 3: +1 and, from 6, +3.
    told = {(gain.generation, gain.index): (gain.value, gain.gain) for gain in found.gains}
    assert told == {(1, 0): (1e-4, -1.5), (1, 1): (1e-3, 1.5), (3, 2): (1e-4, -1.0), (3, 3): (1e-3, 1.0)}


def test_without_a_baseline_founders_have_no_gain():
    run = {"event": "run", "evolvable": {"lr": {}}}
    (found,) = responses(summarise([run, generation(1, member(0, 0), member(1, 1, fitness=0.7))]))
    assert found.gains == ()


def test_hyperparameters_are_sorted_by_share(tmp_path, fake_run):
    from evogrpo.storage.journal import read_journal

    run = fake_run(tmp_path, size=16, generations=6, evolve=("clip_coef", "lr", "group_size"), seed=3)
    found = responses(summarise(read_journal(run / "journal.jsonl")))
    assert found[0].name == "lr"
    assert found[0].share.significant
