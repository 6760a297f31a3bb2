"""Tokens' work is recorded and replayed: here by what records and replays on a CPU as a CUDA graph does on a GPU."""

import dataclasses
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

from evogrpo.data import SamplingOptions
from evogrpo.policies.tokens import generation, replaying
from evogrpo.policies.tokens.replaying import EAGER, Replays
from tests.policies.test_direct_pass import KNOWN, Asking, built
from tests.tiny_batches import different_members, make_rows
from tests.tiny_models import tiny_model

SIZE = 3
SETTINGS = {
    "as it is": {},
    "greedy and not": {"temperature": torch.arange(27) % 3 / 2},
    "truncated": {"options": SamplingOptions(top_k=5, top_p=0.9, min_p=0.01)},
    "penalised": {"options": SamplingOptions(repetition_penalty=1.4)},
}


class Notes(Asking):
    """Notes operations with the very tensors that they read and made; what Python does between them is not known."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.done.append((func, args, kwargs or {}, made))
        return made

    def replay(self):
        for func, args, kwargs, made in self.done:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Stands in for CUDA graphs: whatever asks the device cannot be recorded, and memory is known by where it lies."""

    recorded = replayed = 0

    def __call__(self, work, device):
        notes, first = Notes(), [True]
        with notes:
            work()
        if notes.asked:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def again():
            self.replayed += 1
            if first:  # a CUDA graph does nothing while it is recorded, and this has done it
                first.clear()
            else:
                notes.replay()

        return again


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(replaying, "RECORDERS", {"cpu": recorder})
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", 8)
    return recorder


def agree(one, other):
    for field in ("actions", "present", "log_probs", "truncated"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field


def both_ways(bank, rows, monkeypatch):
    """Sample by recordings and without."""
    replayed = bank.sample(rows)
    with monkeypatch.context() as patch:
        patch.setattr(replaying, "RECORDERS", {})
        return replayed, bank.sample(rows)


@pytest.mark.parametrize("architecture", KNOWN)
def test_what_is_replayed_writes_what_is_launched_one_by_one(architecture, recorder, monkeypatch):
    """Rows end and leave, room grows twice, ends are ruled out at first."""
    bank = different_members(built(KNOWN[architecture]), SIZE)
    agree(*both_ways(bank, make_rows(range(SIZE), tokens=40, min_new_tokens=7), monkeypatch))
    assert recorder.recorded >= 3
    assert recorder.replayed > 10


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("min_new_tokens", [0, 40])
def test_however_tokens_are_chosen(settings, min_new_tokens, recorder, monkeypatch):
    bank = different_members(built(KNOWN["mistral, window"]), SIZE)
    rows = make_rows(range(SIZE), tokens=40, min_new_tokens=min_new_tokens)
    agree(*both_ways(bank, dataclasses.replace(rows, **SETTINGS[settings]), monkeypatch))
    assert recorder.replayed > 10


def test_turns_that_go_on_are_replayed_as_well(recorder, monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = dataclasses.replace(make_rows(range(SIZE), tokens=24), keep=True)
    first, again = both_ways(bank, rows, monkeypatch)
    agree(first, again)
    history = [(*row[real].tolist(), 5) for row, real in zip(first.actions, first.present, strict=True)]
    further = dataclasses.replace(rows, history=history, kept=first.kept, keep=False)
    before = recorder.replayed
    agree(*both_ways(bank, further, monkeypatch))
    assert recorder.replayed > before


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama 3", "mistral, window", "qwen3", "gemma3"])
def test_cuda_graphs_write_what_is_launched_one_by_one(architecture, monkeypatch):
    bank = different_members(built(KNOWN[architecture]).to("cuda"), SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(*both_ways(bank, make_rows(range(SIZE), tokens=40, min_new_tokens=7), monkeypatch))
    assert replaying.RECORDERS


# ---- what is not recorded


def hooked_head():
    model = tiny_model("llama")
    model.get_output_embeddings().register_forward_hook(lambda module, given, made: made)
    return different_members(model, SIZE)


UNSTEADY = {
    "transformers' own pass": lambda: different_members(tiny_model("gpt2"), SIZE),
    "a head that is watched": hooked_head,
    "what learning will read": lambda: different_members(tiny_model("llama"), SIZE, reduce_memory_peak=False),
}


@pytest.mark.parametrize("kind", UNSTEADY)
def test_where_a_token_does_more_than_the_device_knows_nothing_is_recorded(kind, recorder):
    bank = UNSTEADY[kind]()
    bank.sample(dataclasses.replace(make_rows(range(SIZE), tokens=20), learnt=True))
    assert recorder.recorded == 0


def test_what_cannot_be_recorded_is_launched_one_by_one_and_said_once(monkeypatch):
    def record(work, device):
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    tried = []
    bank, rows = different_members(tiny_model("llama"), SIZE), make_rows(range(SIZE), tokens=20)
    expected = bank.sample(rows)
    monkeypatch.setattr(replaying, "RECORDERS", {"cpu": record})
    with pytest.warns(UserWarning, match=r"launched operation by operation.*when stream is capturing\)$") as said:
        agree(bank.sample(rows), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(bank.sample(rows), expected)
    assert len(tried) == len(said) == 1


def test_rows_are_halved_where_there_is_no_memory_for_a_recording(recorder, monkeypatch):
    def record(work, device):
        tried.append(work)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("none is left")
        return recorder(work, device)

    tried = []
    bank, rows = different_members(tiny_model("llama"), SIZE), make_rows(range(SIZE), tokens=20)
    monkeypatch.setattr(replaying, "RECORDERS", {})
    expected = bank.sample(rows)
    monkeypatch.setattr(replaying, "RECORDERS", {"cpu": record})
    got = bank.sample(rows)
    assert torch.equal(got.actions, expected.actions)
    assert recorder.recorded >= 2
    assert replaying.RECORDERS


# ---- recordings by themselves


def counting():
    done, recorded = [], []

    def record(work, device):
        recorded.append(len(done))
        return lambda: done.append("replayed")

    return done, recorded, record


def test_work_is_done_twice_before_it_is_recorded_and_again_in_another_layout(monkeypatch):
    done, recorded, record = counting()
    monkeypatch.setattr(replaying, "RECORDERS", {"cpu": record})
    replays = Replays(torch.device("cpu"))
    for layout in ["one"] * 5 + ["other"] * 4 + [None] * 4 + ["other"] * 3:
        replays.do(lambda: done.append("launched"), layout)
    launched = EAGER * ["launched"]
    assert done == [
        *launched, *3 * ["replayed"], *launched, *2 * ["replayed"], *4 * ["launched"], *launched, "replayed",
    ]  # fmt: skip
    assert recorded == [2, 7, 15]
