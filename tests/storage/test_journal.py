"""A journal keeps every event through kills at any byte, and refuses damaged lines."""

import hashlib
import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from evogrpo.storage.journal import VERSION, Journal, JournalError, latest_generations, read_journal

ENDLESS: list = []
ENDLESS.append(ENDLESS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "journal.jsonl"


def kinds(path):
    return [event["event"] for event in read_journal(path)]


def test_events_come_back_in_order_with_their_times(path):
    start = time.time()
    with closing(Journal(path)) as journal:
        journal.append("run", seed=3, members=({"slot": 0},), task="é\n\u2028\x1b[31m\0<b>")
        journal.append("stopped", reason=None, fitness=np.float64(0.25))
    first, second = read_journal(path)
    assert first.pop("journal_version") == VERSION
    assert start <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {
        "event": "run", "seed": 3, "members": [{"slot": 0}], "task": "é\n\u2028\x1b[31m\0<b>",
    }  # fmt: skip
    assert second == {"event": "stopped", "reason": None, "fitness": 0.25}
    assert path.read_bytes().count(b"\n") == 2
    assert path.read_bytes().isascii()


def test_a_reopened_journal_continues(path):
    for event in ("run", "stopped"):
        with closing(Journal(path)) as journal:
            journal.append(event)
        with closing(Journal(path)) as journal:
            assert journal.size == path.stat().st_size
            assert journal.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert kinds(path) == ["run", "stopped"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": float("nan")}, r"step\.loss is nan.*Pass None"),
        ({"members": [{"kl": float("-inf")}]}, r"step\.members\[0\]\.kl is -inf"),
        ({"members": {0: 1}}, "keys are text"),
        ({"index": np.int64(3)}, "step.index is a int64"),
        ({"members": ENDLESS}, "contains itself"),
    ],
)
def test_what_is_not_strict_json_is_refused_and_nothing_is_written(path, fields, words):
    with closing(Journal(path)) as journal:
        journal.append("run")
        with pytest.raises(ValueError, match=words):
            journal.append("step", **fields)
        journal.append("stopped")
    assert kinds(path) == ["run", "stopped"]


def test_a_kill_at_any_byte_of_the_last_line_costs_only_that_event(path):
    with closing(Journal(path)) as journal:
        journal.append("run", seed=1)
        journal.append("generation", generation=1)
        before = path.read_bytes()
        journal.append("generation", generation=2, text="x{}\"'")
    content = path.read_bytes()
    for length in range(len(before), len(content) + 1):
        path.write_bytes(content[:length])
        survived = length == len(content)
        assert kinds(path) == ["run", "generation", "generation"][: 3 if survived else 2]
        with closing(Journal(path)) as journal:
            journal.append("stopped")
        assert kinds(path) == [
            "run",
            "generation",
            *(["generation"] if survived else []),
            "stopped",
        ]


def test_a_kill_at_any_byte_of_the_first_line_leaves_an_empty_journal(path):
    with closing(Journal(path)) as journal:
        journal.append("run", seed=1)
    content = path.read_bytes()
    for length in range(len(content) - 1):
        path.write_bytes(content[:length])
        assert read_journal(path) == []
        with closing(Journal(path)) as journal:
            journal.append("run", seed=2)
        assert [event["seed"] for event in read_journal(path)] == [2]


@pytest.mark.parametrize(
    "tail", [b"\0" * 300, b"\xff\xfe", b'{"event": "step", "loss": NaN}', b"[1]"]
)
def test_any_rubbish_after_the_last_newline_is_a_torn_line(path, tail):
    with closing(Journal(path)) as journal:
        journal.append("run")
    with path.open("ab") as file:
        file.write(tail)
    assert kinds(path) == ["run"]
    with closing(Journal(path)) as journal:
        journal.append("stopped")
    assert kinds(path) == ["run", "stopped"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "rubbish",
        "[]",
        '"run"',
        "{}",
        '{"event": 3}',
        '{"event": "step", "loss": NaN}',
        '{"event": "step"} {}',
        '{"event": "step", "a": 1e999}',
        '{"event": "a", "event": "b"}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_corrupt_line_with_a_newline_is_an_error_that_names_the_line(path, line):
    path.parent.mkdir()
    content = (
        f'{{"event": "run", "journal_version": {VERSION}}}\n' + line + '\n{"event": "stopped"}\n'
    )
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(JournalError, match=r"line 2 of .*journal\.jsonl is not an event"):
        read_journal(path)


def test_a_file_that_is_no_journal_is_left_alone(path):
    path.parent.mkdir()
    path.write_text("my notes, without a last newline")
    with pytest.raises(JournalError, match="is not a journal"):
        Journal(path)
    assert path.read_text() == "my notes, without a last newline"


def test_a_full_disk_leaves_the_journal_as_it_was(path, monkeypatch):
    journal = Journal(path)
    journal.append("run")
    real = os.write

    def writes_half(descriptor, content):
        if len(content) < 30:
            raise OSError(28, "No space left on device")
        return real(descriptor, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", writes_half)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        journal.append("step", reward=0.5)
    monkeypatch.undo()
    journal.append("stopped")
    assert kinds(path) == ["run", "stopped"]


def test_a_resumed_run_leaves_out_the_events_after_its_checkpoint(path):
    sizes = []
    with closing(Journal(path)) as journal:
        for number in range(5):
            journal.append("generation", generation=number)
            sizes.append(journal.size)
        journal.append("resumed", offset=sizes[3])
        assert kinds(path) == ["generation"] * 4 + ["resumed"]
        journal.append("resumed", offset=sizes[1])  # drops the earlier `resumed` too
        journal.append("generation", generation=7)
    assert [event.get("generation") for event in read_journal(path)] == [0, 1, None, 7]


def test_a_resumed_event_that_is_left_out_leaves_out_nothing(path):
    # The run continues from checkpoint 1, as that of generation 2 is damaged; then 2 is restored
    # from a copy.
    sizes = []
    with closing(Journal(path)) as journal:
        for number in range(3):
            journal.append("generation", generation=number)
            sizes.append(journal.size)
        for checkpoint, number in ((1, 7), (2, 3)):
            journal.append("resumed", offset=sizes[checkpoint])
            journal.append("generation", generation=number)
    assert [event.get("generation") for event in read_journal(path)] == [0, 1, 2, None, 3]


@pytest.mark.parametrize("offset", [None, -1, True, 1.0, 10**6])
def test_a_resumed_event_needs_an_offset_before_itself(path, offset):
    with closing(Journal(path)) as journal:
        journal.append("run")
        journal.append("resumed", offset=offset)
    with pytest.raises(JournalError, match="offset"):
        read_journal(path)


def test_a_damaged_line_after_the_checkpoint_is_left_out(path):
    with closing(Journal(path)) as journal:
        journal.append("run")
        size = journal.size
        journal.append("step")
    content = bytearray(path.read_bytes())
    content[size + 5] = 255
    path.write_bytes(content)
    with pytest.raises(JournalError, match="line 2"):
        read_journal(path)
    with closing(Journal(path)) as journal:
        journal.append("resumed", offset=size)
    assert kinds(path) == ["run", "resumed"]


def test_a_journal_of_another_version_is_refused(path):
    path.parent.mkdir()
    for line in ('{"event": "run"}', '{"event": "run", "journal_version": 1}'):
        path.write_text(line + "\n")
        with pytest.raises(JournalError, match="version"):
            read_journal(path)


def test_a_journal_that_another_process_appends_to_is_refused(path):
    with closing(Journal(path)) as journal:
        journal.append("run")
        with path.open("a") as file:
            file.write('{"event": "other"}\n')
        with pytest.raises(JournalError, match="changed"):
            journal.append("step")
    assert kinds(path) == ["run", "other"]


def replaced(path):
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def edited(path):
    path.with_name("copy").write_bytes(path.read_bytes().replace(b"run", b"ran"))
    path.with_name("copy").replace(path)


def overwritten(path):
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b"run", b"ran"))


def linked(path):
    path.rename(path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


def touched(path):
    os.utime(path, (1, 1))


CHANGES = [
    *((change, False) for change in (replaced, touched)),
    *(
        (change, True)
        for change in (edited, overwritten, linked, Path.unlink, lambda path: os.truncate(path, 3))
    ),
]


@pytest.mark.parametrize(("change", "warns"), CHANGES)
def test_a_journal_that_is_replaced_removed_or_changed_meanwhile_is_written_again(
    path, change, warns
):
    with closing(Journal(path)) as journal:
        journal.append("run")
        before = path.read_bytes()
        change(path)
        changed = path.read_bytes() if path.exists() else b""
        assert ("written again" in (journal.check() or "")) == warns
        journal.append("step")
        digest = journal.sha256
    assert kinds(path) == ["run", "step"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    kept = [each.read_bytes() for each in path.parent.glob("journal-kept-*")]
    assert kept == (
        [] if before.startswith(changed) and not path.with_name("copy").exists() else [changed]
    )


def test_a_hard_link_to_a_journal_is_not_written_through(path):
    with closing(Journal(path)) as journal:
        journal.append("run")
    backup = path.with_name("backup")
    os.link(path, backup)
    with closing(Journal(path)) as journal:
        journal.append("step")
    assert (kinds(backup), kinds(path)) == (["run"], ["run", "step"])


def test_later_events_complete_a_generation():
    events = [
        {"event": "generation", "generation": 1, "plan": None},
        {"event": "plan", "generation": 1, "plan": {"elite": 0}},
        {"event": "generation", "generation": 2, "plan": None},
    ]
    assert [event["plan"] for event in latest_generations(events)] == [{"elite": 0}, None]


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_links_pipes_and_folders_are_no_journal(tmp_path, kind):
    path = tmp_path / "journal.jsonl"
    elsewhere = tmp_path / "elsewhere"
    if kind == "link":
        elsewhere.write_text(f'{{"event": "run", "journal_version": {VERSION}}}\n')
    if kind in ("link", "dangling"):
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = elsewhere.read_text() if elsewhere.exists() else None
    for act in (Journal, read_journal):
        with pytest.raises(JournalError, match="must be a regular file"):
            act(path)
    assert (elsewhere.read_text() if elsewhere.exists() else None) == before
