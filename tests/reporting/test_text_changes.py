"""Changes of texts of task settings from parent to child."""

from hypothesis import given
from hypothesis import strategies as st

from evogrpo.reporting.lineage import differences, text_changes
from evogrpo.reporting.report import html_page
from evogrpo.reporting.summary import summarise
from tests.reporting.journals import generation, member

STYLE = "task.style"
OLD = "Answer with a number."
NEW = "Answer with one <b>number</b> only."


def styled(slot, index, text, fitness, parent=None, changes=None):
    values = {"lr": 1e-4, "task_settings": {STYLE: text}}
    others = {"hyperparameters": values, "changes": changes or {}}
    return member(slot, index, parent, fitness, **others)


def run_of_a_child():
    space = {STYLE: {"choices": [OLD], "proposed": True}}
    start = {"event": "run", "evolvable": space, "samples_per_step": 8, "seed": 0}
    child = styled(1, 2, NEW, 0.7, parent=0, changes={STYLE: [OLD, NEW]})
    return summarise(
        [
            start,
            generation(1, styled(0, 0, OLD, 0.5), styled(1, 1, OLD, 0.4)),
            generation(2, styled(0, 0, OLD, 0.55), child | {"born": 1}, best=2),
        ]
    )


@given(st.text(max_size=60), st.text(max_size=60))
def test_pieces_join_to_both_texts(old, new):
    parts = list(differences(old, new))
    assert "".join(words for kind, words in parts if kind != "ins") == old
    assert "".join(words for kind, words in parts if kind != "del") == new


def test_a_changed_text_is_shown_with_the_fitness_of_parent_and_child():
    (change,) = text_changes(run_of_a_child())
    assert (change.name, change.parent, change.index) == (STYLE, 0, 2)
    assert change.before.startswith("0.5")
    assert change.after.startswith("0.7")
    assert ("del", " a number.") in change.parts
    page = html_page(run_of_a_child())
    assert "<del> a number.</del>" in page
    assert "&lt;b&gt;number&lt;/b&gt;" in page
    assert "<b>number" not in page
