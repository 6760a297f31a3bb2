"""What was computed while writing serves the learning step under the same weights, and no other."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Olmo2Config

from evogrpo.functional.log_probs import TILE, chunked_log_probs
from evogrpo.hyperparameters import Hyperparameters
from evogrpo.policies.tokens import sampling
from evogrpo.policies.tokens.engine import recording as recordings
from evogrpo.policies.tokens.engine.direct import linears
from evogrpo.policies.tokens.engine.direct.elementwise import ACTIVATIONS, gated
from evogrpo.policies.tokens.engine.recording import Known
from tests.rounding import assert_gradients_agree
from tests.tiny_batches import as_batch, different_members, grpo_loss, make_rows, same_state
from tests.tiny_models import COMMON, tiny_model

SIZE = 3
HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(SIZE)}
SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)
ROOTED = tuple((*SYSTEM, *own) for own in ((3, 4, 5), (8,), (10, 11)))
LINEARS = 7
"""Linear layers of a decoder layer: queries, keys, values, output, gate, up, down."""


def model_of(name):
    """Build a tiny model that the direct pass knows."""
    others = {"mistral": MistralConfig(**COMMON, sliding_window=5), "olmo2": Olmo2Config(**COMMON, attention_bias=True)}
    if name not in others:
        return tiny_model(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(others[name])


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Record, however the suite is run: only direct passes are."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)


@pytest.fixture
def products(monkeypatch):
    """Count products with frozen weights of layers that many tokens go through at once."""
    counts, product = [0], linears.product

    def counting(*given):
        counts[0] += 1
        return product(*given)

    monkeypatch.setattr(linears, "product", counting)
    return counts


def banks(model, **settings):
    """Build the same members twice: those that record, and those that do not."""
    return (
        different_members(model, SIZE, reduce_memory_peak=False, **settings),
        different_members(model, SIZE, **settings),
    )


def learnt(bank, batch, *, entropy_gradient=False):
    """Return the gradients and losses of all members."""
    loss = grpo_loss(batch)

    def both(rows, log_probs, entropies):
        return loss(rows, log_probs, entropies) - 0.1 * entropies.sum(1)

    with bank.base.working():
        found = bank.passes.gradients(batch, range(SIZE), both, entropy_gradient=entropy_gradient)
        return {slot: (gradient.clone(), value) for slot, gradient, value in found}


def assert_same_gradients(got, expected):
    for slot in range(SIZE):
        assert_gradients_agree(got[slot][0], expected[slot][0], what=f"gradients of slot {slot}")
        assert got[slot][1] == pytest.approx(expected[slot][1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "mistral", "olmo2"])
@pytest.mark.parametrize("prompts", [None, ROOTED])
def test_what_was_recorded_gives_the_gradients_that_are_computed(name, prompts, products):
    model = model_of(name)
    recording, computing = banks(model)
    rows = make_rows(range(SIZE), tokens=9, min_new_tokens=1, **{} if prompts is None else {"prompts": prompts})
    plain, rollout = computing.sample(rows), recording.sample(replace(rows, learnt=True))
    assert torch.equal(rollout.actions, plain.actions)
    assert torch.equal(rollout.log_probs, plain.log_probs), "recording changes nothing of what is written"
    batch = as_batch(rows, rollout)
    for entropy_gradient in (False, True):
        products[0] = 0
        got = learnt(recording, batch, entropy_gradient=entropy_gradient)
        backward, products[0] = products[0], 0
        expected = learnt(computing, batch, entropy_gradient=entropy_gradient)
        runs = 1 if prompts is None else 2  # what prompts begin with runs by itself
        assert products[0] - backward == LINEARS * COMMON["num_hidden_layers"] * runs
        assert_same_gradients(got, expected)


def test_gates_that_were_recorded_are_kept_nowhere_else():
    inside, kept = COMMON["intermediate_size"], [0]

    def counted(tensor):
        kept[0] += tensor.shape[-1] == inside and tensor.shape[0] != COMMON["hidden_size"]  # not the frozen weights
        return tensor

    recording, computing = banks(tiny_model("llama"))
    rows = make_rows(range(SIZE), tokens=9)
    batch, each = as_batch(rows, recording.sample(replace(rows, learnt=True))), []
    for bank in (recording, computing):
        kept[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
            learnt(bank, batch)
        each.append(kept[0])
    assert each[1] - each[0] == 2 * COMMON["num_hidden_layers"]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [0, 1, 11])
def test_gates_of_many_rows_and_their_gradients_whether_kept_or_recorded(rows, name):
    rng, wide, activation = torch.Generator().manual_seed(0), TILE // 4, ACTIVATIONS[name]
    recorded = [torch.randn((13, wide), generator=rng, dtype=torch.float64) for _ in range(2)]
    known = [Known(whole, torch.randperm(13, generator=rng)[:rows]) for whole in recorded]
    slope, found = torch.randn((rows, wide), generator=rng, dtype=torch.float64), []
    for way, kept in (
        (lambda gate, up: activation.of(gate) * up, Known.copied),
        (lambda gate, up: gated(gate, up, activation), Known.copied),
        (lambda gate, up: gated(gate, up, activation, known), Known.stood_for),
    ):
        both = [kept(one).requires_grad_() for one in known]
        out = way(*both)
        found.append((out.detach(), *torch.autograd.grad(out, both, slope)))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(same, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at_once", [4, 128])
@pytest.mark.parametrize("micro_batch_tokens", [25, 60, 1024])
def test_however_rows_are_written_and_learnt_from_together(at_once, micro_batch_tokens, monkeypatch, products):
    monkeypatch.setattr(sampling, "ENOUGH_ROWS", at_once)
    monkeypatch.setattr(sampling, "ENOUGH_TOKENS", at_once)
    many_ends = {"eos_token_ids": list(range(1, 16))}
    recording, computing = banks(tiny_model("llama"), micro_batch_tokens=micro_batch_tokens, **many_ends)
    rows = make_rows(range(SIZE), tokens=9)
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows = rows.select(mixed)
    batch = as_batch(rows, recording.sample(replace(rows, learnt=True)))
    assert len(set(batch.present.sum(1).tolist())) > 3, "rows end at different times"
    some = batch.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[: len(rows) - 5])
    products[0] = 0
    got, done = learnt(recording, some), products[0]
    assert_same_gradients(got, learnt(computing, some))
    assert 0 < 2 * done < products[0]


def test_in_half_precision_the_sampler_s_own_numbers_are_learnt_from():
    model = tiny_model("llama").to(torch.bfloat16)
    recording, computing = banks(model)
    rows = make_rows(range(SIZE), tokens=9)
    rollout = recording.sample(replace(rows, learnt=True))
    batch, log_probs = as_batch(rows, rollout), []

    def loss(numbers, found, entropies):
        log_probs.append((found.detach() - rollout.log_probs[numbers]).abs().max())
        return found.sum(1)

    for bank in (recording, computing):
        with bank.base.working():
            for slot, gradient, _ in bank.passes.gradients(batch, range(SIZE), loss, entropy_gradient=False):
                if bank is recording:
                    log_probs.append(gradient.clone())
                else:
                    apart = (gradient - log_probs[1 + slot]).norm() / gradient.norm()
                    assert apart < 0.2, "a few roundings of 2^-8 in 20 products, of sums that cancel"
    assert log_probs[0] < 1e-5, "no pass of another shape lies between"
    assert log_probs[-1] > 1e-4


CHANGES = {
    "a step": lambda bank, batch: bank.update(batch, grpo_loss(batch), HYPERPARAMETERS),
    "other weights": lambda bank, batch: [bank.load_state(slot, bank.state((slot + 1) % SIZE)) for slot in range(SIZE)],
    "inheritance": lambda bank, batch: bank.inherit([1, 2, 0]),
    "something else written": lambda bank, batch: bank.sample(replace(make_rows(range(SIZE), seed=5), learnt=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_since_is_computed(name, products):
    recording, computing = banks(tiny_model("llama"))
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, recording.sample(replace(rows, learnt=True)))
    for bank in (recording, computing):
        CHANGES[name](bank, batch)
    for slot in range(SIZE):
        computing.load_state(slot, recording.state(slot))
    products[0] = 0
    got, done = learnt(recording, batch), products[0]
    expected = learnt(computing, batch)
    assert products[0] == 2 * done
    for slot in range(SIZE):
        assert torch.equal(got[slot][0], expected[slot][0])


def test_only_the_rows_of_members_that_have_not_changed_are_read(products):
    recording, computing = banks(tiny_model("llama"), micro_batch_tokens=60)
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, recording.sample(replace(rows, learnt=True)))
    for bank in (recording, computing):
        bank.load_state(1, bank.state(2))
    products[0] = 0
    got, done = learnt(recording, batch), products[0]
    products[0] = 0
    assert_same_gradients(got, learnt(computing, batch))
    assert products[0] / 2 < done < products[0]


def test_nothing_is_recorded_that_nobody_asked_for(products):
    model, rows = tiny_model("llama"), make_rows(range(SIZE))
    recording, computing = banks(model)
    for bank, asked, base in (
        (recording, rows, False),
        (recording, replace(rows, learnt=True), True),
        (computing, replace(rows, learnt=True), False),
    ):
        bank.sample(asked, base=base)
        assert bank.passes.recording is None
    other = different_members(tiny_model("gpt2"), SIZE, reduce_memory_peak=False)
    other.sample(replace(rows, learnt=True))
    assert other.passes.recording is None, "a model that transformers runs"


@pytest.mark.parametrize("hooked", ["lm_head", "model.layers.1"])
def test_a_model_that_somebody_has_hooked_into_since_computes_itself(hooked):
    model = tiny_model("llama")
    recording, computing = banks(model)
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, recording.sample(replace(rows, learnt=True)))
    handle = model.get_submodule(hooked).register_forward_hook(lambda module, given, out: None)
    try:
        assert_same_gradients(learnt(recording, batch), learnt(computing, batch))
    finally:
        handle.remove()


def test_the_memory_is_taken_once():
    bank, _ = banks(tiny_model("llama"))
    rows = replace(make_rows(range(SIZE), tokens=9), learnt=True)
    bank.sample(rows)
    whole = bank.passes.recording
    places = {name: part.whole.data_ptr() for name, part in whole._made.items()}
    batch = as_batch(rows, bank.sample(rows))
    bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    bank.sample(rows)
    assert bank.passes.recording is whole
    assert places == {name: part.whole.data_ptr() for name, part in whole._made.items()}


def test_what_grows_keeps_what_was_written():
    growing, parts = recordings._Growing(), [torch.randn(size, 5) for size in (3, 1, 7, 2, 30, 1)]
    first = 0
    for part in parts:
        growing.put(first, part.T.contiguous().T)
        first += len(part)
    assert torch.equal(growing.whole[:first], torch.cat(parts))


def test_where_memory_runs_out_while_writing_nothing_is_recorded_any_more(monkeypatch):
    recording, computing = banks(tiny_model("llama"))
    rows, put, calls = make_rows(range(SIZE)), recordings._Growing.put, []

    def scarce(self, first, part):
        calls.append(first)
        if len(calls) > 40:
            raise torch.OutOfMemoryError("no room for more")
        put(self, first, part)

    monkeypatch.setattr(recordings._Growing, "put", scarce)
    expected = computing.sample(rows)
    for _ in range(2):
        rollout = recording.sample(replace(rows, learnt=True))
        assert torch.equal(rollout.actions, expected.actions)
        assert len(calls) == 41
    batch = as_batch(rows, rollout)
    for bank in (recording, computing):
        bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
    for slot in range(SIZE):
        assert same_state(recording.state(slot), computing.state(slot))


@pytest.mark.parametrize("tokens", [1, 1024])
def test_where_memory_runs_out_while_learning_what_was_recorded_goes_first(tokens):
    recording, computing = banks(tiny_model("llama"), micro_batch_tokens=tokens)
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, recording.sample(replace(rows, learnt=True)))
    loss, tried = grpo_loss(batch), []

    def scarce(numbers, log_probs, entropies):
        tried.append(len(numbers))
        if len(tried) == 1:
            raise torch.OutOfMemoryError("this once")
        return loss(numbers, log_probs, entropies)

    reports = recording.update(batch, scarce, HYPERPARAMETERS)
    expected = computing.update(batch, loss, HYPERPARAMETERS)
    assert recording.micro_batch_tokens == computing.micro_batch_tokens
    assert not recording.passes.recording.open
    for slot in range(SIZE):
        assert reports[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=1e-5)


def test_known_logits_are_scored_as_those_that_the_head_gives():
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((9, 4), generator=rng), torch.randn((11, 4), generator=rng)
    targets = torch.randint(0, 11, (9,), generator=rng)
    logits = hidden @ weight.T
    found = []
    for known in (None, lambda part: logits[part].clone()):
        leaf = hidden.clone().requires_grad_()
        log_probs, entropies = chunked_log_probs(
            leaf,
            lambda x: x @ weight.T,
            targets,
            torch.full((9,), 0.7),
            torch.arange(9) < 2,
            torch.tensor([1]),
            4,
            entropy_gradient=True,
            weight=weight,
            known=known,
        )
        (log_probs * torch.arange(9.0) + entropies).sum().backward()
        found.append((log_probs.detach(), entropies.detach(), leaf.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
