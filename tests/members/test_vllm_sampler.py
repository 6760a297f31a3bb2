"""The sampler for vLLM: conformance, versions of adapters, checks, and faults of servers."""

import gzip
import itertools
import json
import math
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from evogrpo import Objective, load_base
from evogrpo.config.task_settings import TaskSettings
from evogrpo.interruption import Interrupted, Stop
from evogrpo.members.language import vllm_sampler
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.vllm_sampler import VLLMError, VLLMSampler, vllm_command
from evogrpo.testing.samplers import (
    EOS,
    PROMPTS,
    SamplerTestCase,
    as_batch,
    different_members,
    make_rows,
    tiny_llama,
)
from tests.tiny_batches import tiny_bank
from tests.tiny_models import tiny_model
from tests.tiny_training import settings_env, tiny_population
from tests.vllm_server import RawServer, RealServer, VLLMServer

SIZE = 3
TIMEOUT = 900
"""Of requests to vLLM on a CPU, in seconds."""


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """The server of the tests takes as long for a row as for several."""
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_SERVER", 2)


@contextmanager
def serving(**settings):
    server = VLLMServer(settings.pop("model", None) or tiny_model(), **settings)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def bank():
    return tiny_bank(SIZE)


def connected(bank, folder, *servers, timeout=20.0):
    sampler = VLLMSampler([server.url for server in servers], folder, timeout=timeout)
    sampler.connect(bank)
    return sampler


@pytest.fixture(scope="module")
def pair():
    with serving(model=tiny_llama()) as one, serving(model=tiny_llama()) as other:
        yield one, other


class TestVLLMSampler(SamplerTestCase):
    uses_uniforms = False
    tolerance = 1e-3

    @pytest.fixture(autouse=True)
    def _serve(self, pair, tmp_path):
        self.servers = pair
        self.folder = tmp_path

    def make_sampler(self, bank):
        return connected(bank, self.folder, *self.servers)


# ---- requests and adapters


def test_rows_of_a_request_share_member_and_temperature(server, bank, tmp_path):
    sampler = connected(bank, tmp_path, server)
    server.requests.clear()
    rows = make_rows(range(SIZE))  # a temperature for each member
    finished = []
    rollout = sampler.sample(
        rows, on_finished=lambda numbers, tokens: finished.extend(zip(numbers, tokens, strict=True))
    )
    assert not rollout.exact
    sent = server.posts("/v1/completions")
    pairs = {(body["model"], body["temperature"]) for body in sent}
    assert sorted(temperature for _, temperature in pairs) == pytest.approx([0.7, 1.0, 1.3])
    assert sum(len(body["prompt"]) for body in sent) == len(rows)
    for body in sent:
        for prompt in body["prompt"]:
            for token in prompt:
                assert isinstance(token, int)
    assert all(body["return_token_ids"] and body["logprobs"] is not None for body in sent)
    completions = [
        tokens[present].tolist()
        for tokens, present in zip(rollout.actions, rollout.present, strict=True)
    ]
    assert dict(finished) == dict(enumerate(completions))
    assert len(finished) == len(rows)


@pytest.mark.parametrize(("rows_per_request", "requests", "largest"), [(2, 1, 2), (512, 4, 7)])
def test_large_requests_are_split(
    rows_per_request, requests, largest, server, bank, tmp_path, monkeypatch
):
    sampler = connected(bank, tmp_path, server)
    monkeypatch.setattr(vllm_sampler, "ROWS_PER_REQUEST", rows_per_request)
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_SERVER", requests)
    server.requests.clear()
    rows = make_rows(range(SIZE), greedy=True)
    assert len(rows) == 27
    rollout = sampler.sample(rows)
    assert max(len(body["prompt"]) for body in server.posts("/v1/completions")) == largest
    assert torch.equal(rollout.actions, bank.sample(rows).actions)


def test_every_version_of_an_adapter_has_a_path_a_name_and_a_salt_of_its_own(
    server, bank, tmp_path
):
    sampler = connected(bank, tmp_path, server)
    rows = make_rows(range(SIZE), tokens=2)
    sampler.sample(rows)
    bank.inherit([1, 2, 2])
    sampler.sync(range(SIZE))
    sampler.sample(rows)
    loads = server.posts("/v1/load_lora_adapter")
    assert len(loads) == SIZE + 2  # an unchanged member is not loaded again
    assert (
        len({body["lora_path"] for body in loads})
        == len({body["lora_name"] for body in loads})
        == len(loads)
    )
    # vLLM would read the files again for every batch
    assert not any(body.get("load_inplace") for body in loads)
    salts = {body["model"]: set() for body in server.posts("/v1/completions")}
    for body in server.posts("/v1/completions"):
        salts[body["model"]].add(body["cache_salt"])
    assert len(salts) == len(loads) + 1  # and the base
    assert len(set().union(*salts.values())) == len(salts)
    # Old adapters are unloaded and removed.
    assert len(server.adapters) == SIZE
    assert {str(path.parent) for path in tmp_path.rglob("adapter_config.json")} == set(
        server.adapters.values()
    )
    del sampler
    assert not list(tmp_path.iterdir())


def rows_requested(server):
    """Return the row counts of requests for completions since the last call."""
    counts = [len(body["prompt"]) for body in server.posts("/v1/completions")]
    server.requests.clear()
    return counts


@pytest.mark.parametrize("members", [[0], range(SIZE)])
def test_every_server_has_all_adapters_and_an_equal_share_of_the_rows(members, bank, tmp_path):
    """Also of a single member or a single prompt."""
    rows = make_rows(members, greedy=True, prompts=((3, 4), (5, 6), (7, 8), (9, 10)))
    with serving() as first, serving() as second:
        sampler = connected(bank, tmp_path, first, second)
        assert [len(server.adapters) for server in (first, second)] == [SIZE, SIZE]
        alone = rows.select((rows.prompt_ids == 0) & (rows.member_ids == 0))
        for some, base in ((rows, False), (rows, True), (alone, False)):
            for server in (first, second):
                server.requests.clear()
            expected = bank.sample(some, base=base)
            assert torch.equal(sampler.sample(some, base=base).actions, expected.actions)
            counts = [sum(rows_requested(server)) for server in (first, second)]
            assert counts == [len(some) // 2, len(some) // 2]


# ---- checks at the start


WRONG_URLS = [
    "127.0.0.1:8000",
    [],
    ["http://a", "http://a/"],
    "ftp://a",
    "http://a:99999",
    "http://a:0",
    "http://ä",
    "http://a/ b",
    "http://a/ä",
]


@pytest.mark.parametrize("arguments", [{"timeout": 0}, *({"url": url} for url in WRONG_URLS)])
def test_wrong_arguments_are_refused(arguments, tmp_path):
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        VLLMSampler(**{"url": "http://127.0.0.1:1", "adapters_dir": tmp_path, **arguments})


SECRET = "sk-secret"


@pytest.mark.parametrize(
    "url", [f"http://user:{SECRET}@127.0.0.1:1", f"http://127.0.0.1:1/?key={SECRET}"]
)
def test_secrets_in_addresses_are_not_shown(url, tmp_path):
    with pytest.raises(ValueError, match="url") as caught:
        VLLMSampler(url, tmp_path)
    assert SECRET not in str(caught.value)


def test_an_invalid_key_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", f"{SECRET}\n")
    with pytest.raises(ValueError, match="VLLM_API_KEY") as caught:
        VLLMSampler("http://127.0.0.1:1", tmp_path)
    assert SECRET not in str(caught.value)


def test_a_sampler_without_members_is_refused(server, tmp_path):
    sampler = VLLMSampler(server.url, tmp_path)
    with pytest.raises(ValueError, match="sample_with"):
        sampler.sample(make_rows([0]))


def other_base():
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    return model


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": other_base}, "base"),
        ({"processed": False}, "--logprobs-mode"),
        ({"max_lora_rank": 2}, "max_lora_rank"),
        ({"runtime_updates": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"sees_files": False}, "No adapter found"),
    ],
)
def test_servers_with_wrong_settings_are_refused_with_the_right_command(
    settings, reason, bank, tmp_path
):
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    with serving(**settings) as server, pytest.raises(VLLMError, match=reason) as caught:
        connected(bank, tmp_path, server)
    command = vllm_command("MODEL", members=SIZE, rank=3, url=server.url)
    assert str(caught.value).endswith(command)
    for option in (
        "--max-loras 3",
        "--max-lora-rank 8",
        "--dtype float32",
        "--logprobs-mode processed_logprobs",
    ):
        assert option in command


def test_ranks_above_those_of_vllm_are_refused():
    assert "--max-lora-rank 512 " in vllm_command("m", members=1, rank=400)
    with pytest.raises(ValueError, match="rank"):
        vllm_command("m", members=1, rank=600)


# ---- faults


def changed_choice(**changes):
    """Return a fault that changes an answer's last completion; a function gets the old value."""

    def fault(body, answer):
        choice = answer["choices"][-1]
        for name, change in changes.items():
            choice[name] = change(choice[name]) if callable(change) else change
        return answer

    return fault


def scores_changed(change):
    return changed_choice(
        logprobs=lambda scores: {**scores, "token_logprobs": change(scores["token_logprobs"])}
    )


WRONG = {
    "a missing completion": lambda body, answer: {**answer, "choices": answer["choices"][1:]},
    "a repeated index": changed_choice(index=0),
    "no choices": lambda body, answer: {"choices": None},
    "not JSON": lambda body, answer: (200, b"<html>"),
    "nested too deeply": lambda body, answer: (200, b"[" * 200_000),
    "refused": lambda body, answer: (
        400,
        b'{"error": {"message": "This model\'s maximum context length is 8"}}',
    ),
    "no log-probabilities": changed_choice(logprobs=None),
    **{
        f"log-probability {value!r}": scores_changed(
            lambda values, value=value: [value, *values[1:]]
        )
        for value in (math.nan, -math.inf, -1e300, "-1.0", False, None)
    },
    "a log-probability outside float64": lambda body, answer: (
        200,
        json.dumps(scores_changed(lambda values: ["?"] * len(values))(body, answer))
        .replace('"?"', "-1e400")
        .encode(),
    ),
    "prompts in another order": changed_choice(prompt_token_ids=lambda ids: [*ids, 5]),
    "an index that is no integer": changed_choice(index=False),
    "too many completions": lambda body, answer: {
        **answer,
        "choices": answer["choices"][:1] * 10_000,
    },
    "a huge token": changed_choice(token_ids=lambda ids: [10**400, *ids[1:]]),
    "larger than requested": lambda body, answer: {
        **answer,
        "usage": "x" * (vllm_sampler.MAX_ANSWER + 10**6),
    },
    "compressed": lambda body, answer: (200, gzip.compress(json.dumps(answer).encode())),
    "a positive log-probability": scores_changed(lambda values: [0.5, *values[1:]]),
    "too few log-probabilities": scores_changed(lambda values: values[1:]),
    "no token ids": changed_choice(token_ids=None),
    "a token outside the vocabulary": changed_choice(token_ids=lambda ids: [64, *ids[1:]]),
    "a token that is no integer": changed_choice(token_ids=lambda ids: [True, *ids[1:]]),
    "an end before the last token": changed_choice(
        token_ids=[1, 5, 5, 5, 5, 5], logprobs={"token_logprobs": [-1.0] * 6}
    ),
    "too short": changed_choice(token_ids=[5], logprobs={"token_logprobs": [-1.0]}),
    "too long": changed_choice(token_ids=[5] * 7, logprobs={"token_logprobs": [-1.0] * 7}),
    "too long, with an end": changed_choice(
        token_ids=[5, 5, 5, 5, 5, 5, 1], logprobs={"token_logprobs": [-1.0] * 7}
    ),
    "empty": changed_choice(token_ids=[], logprobs={"token_logprobs": []}),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with serving() as server:
        yield server, connected(tiny_bank(SIZE), tmp_path_factory.mktemp("adapters"), server)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers_raise_an_error(kind, shared, monkeypatch):
    server, sampler = shared
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_SERVER", 1)  # two rows
    server.fault = WRONG[kind]
    with pytest.raises(VLLMError):
        sampler.sample(make_rows([0], prompts=PROMPTS[:1]))
    server.fault = None


# ---- HTTP faults

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RAW = {  # beginning, then pieces without end, and the pause between them
    "headers without end": (HEAD + b"X: ", b"a", 0.02),
    "content without end": (HEAD + b"Content-Length: 1000000\r\n\r\n", b" ", 0.02),
    "provisional answers without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02),
    "chunks without end": (CHUNKED, b"10000\r\n" + b" " * 2**16 + b"\r\n", 0.0),
    "no length and no end": (HEAD + b"\r\n", b" " * 2**16, 0.0),
    "an error without end": (b"HTTP/1.1 400 Bad\r\n\r\n", b"x" * 2**16, 0.0),
    "too large a length": (HEAD + b"Content-Length: 1" + b"0" * 23 + b"\r\n\r\n{}", b"", 0.0),
    "a length that is no number": (HEAD + b"Content-Length: x\r\n\r\n{}", b"", 0.0),
    "too large a chunk": (CHUNKED + b"f" * 20 + b"\r\n{}", b"", 0.0),
    "a negative chunk": (CHUNKED + b"-1\r\n{}", b"", 0.0),
    "not HTTP": (b"\x00\xff\r\n", b"", 0.0),
    "errors without end": (HEAD + b'\r\n{"data": [' + b"{}," * 10**6 + b"{}]}", b"", 0.0),
}


def connect_raw(answer, bank, folder):
    """Connect a sampler to a server of raw answers; return the server and the error's message."""
    server = RawServer(answer)
    try:
        with pytest.raises(VLLMError) as caught:
            connected(bank, folder, server, timeout=0.4)
    finally:
        server.stop()
    return server, str(caught.value)


@pytest.mark.parametrize("kind", RAW)
def test_answers_that_are_not_http_or_have_no_end_raise_an_error_in_time(kind, bank, tmp_path):
    head, piece, pause = RAW[kind]

    def answer(connection, request):
        connection.sendall(head)
        for _ in itertools.count() if piece else ():
            connection.sendall(piece)
            time.sleep(pause)

    began = time.monotonic()
    _, message = connect_raw(answer, bank, tmp_path)
    assert time.monotonic() - began < 10
    assert len(message) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_refused(status, bank, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    other = RawServer(lambda connection, request: connection.sendall(HEAD + b"\r\n{}"))
    monkeypatch.setenv("http_proxy", other.url)
    monkeypatch.setenv("HTTP_PROXY", other.url)
    location = f"HTTP/1.1 {status} Moved\r\nLocation: {other.url}/{SECRET}\r\n\r\n{SECRET}"
    server, message = connect_raw(
        lambda connection, request: connection.sendall(location.encode()), bank, tmp_path
    )
    other.stop()
    assert SECRET.encode() in server.requests[0]
    assert not other.requests
    assert SECRET not in message


def test_a_key_in_an_answer_is_not_shown(bank, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    answer = f"HTTP/1.1 401 Unauthorized\r\n\r\nwrong key {SECRET}"
    _, message = connect_raw(
        lambda connection, request: connection.sendall(answer.encode()), bank, tmp_path
    )
    assert "wrong key" in message
    assert SECRET not in message


def test_failed_requests_are_repeated_and_no_others(shared):
    server, sampler = shared
    failures = iter([None, (500, b"EngineDeadError"), (503, b"")])
    server.fault = lambda body, right: next(failures, right)
    rows = make_rows([0], greedy=True)
    assert len(rows) == 6
    server.requests.clear()
    rollout = sampler.sample(rows)
    assert next(failures, "used up") == "used up"
    assert rows_requested(server) == [3] * 5  # two requests, and three that are repeated
    server.fault = None
    assert torch.equal(rollout.actions, sampler.sample(rows).actions)


def test_a_dead_server_ends_in_an_error_within_the_timeout(server, bank, tmp_path):
    server.stop()
    with pytest.raises(VLLMError, match=server.url):
        connected(bank, tmp_path, server, timeout=0.5)


def test_a_slow_server_ends_in_an_error_within_the_timeout(server, bank, tmp_path):
    server.delay = 60.0
    began = time.monotonic()
    with pytest.raises(VLLMError, match="timeout"):
        connected(bank, tmp_path, server, timeout=0.5)
    assert time.monotonic() - began < 30


def test_a_step_may_take_longer_than_the_timeout(server, bank, tmp_path, monkeypatch):
    """Each answer starts the time again, so no request is repeated."""
    sampler = connected(bank, tmp_path, server, timeout=0.8)
    lock = threading.Lock()

    def slowly(body, answer):
        with lock:
            time.sleep(0.25)
        return answer

    server.fault = slowly
    server.requests.clear()
    monkeypatch.setattr(vllm_sampler, "REQUESTS_PER_SERVER", 32)
    rows = make_rows([0], tokens=1)
    began = time.monotonic()
    sampler.sample(rows)
    assert time.monotonic() - began > 1.5
    assert sum(rows_requested(server)) == len(rows)


def test_a_restarted_server_gets_all_adapters_again(server, bank, tmp_path):
    sampler = connected(bank, tmp_path, server)
    rows = make_rows(range(SIZE), tokens=3, greedy=True)
    expected = sampler.sample(rows).actions
    before = dict(server.adapters)
    server.stop()
    timer = threading.Timer(0.1, server.start)
    timer.start()
    assert torch.equal(sampler.sample(rows).actions, expected)
    timer.join()
    assert server.adapters == before
    # The same if only one member has changed since.
    server.stop()
    server.start()
    bank.inherit([2, 1, 2])
    sampler.sync([0])
    assert torch.equal(sampler.sample(rows).actions, bank.sample(rows).actions)


def test_an_adapter_that_was_not_loaded_is_loaded_by_the_next_sync(server, bank, tmp_path):
    sampler = connected(bank, tmp_path, server)
    bank.inherit([0, 2, 2])
    server.max_lora_rank = 1
    with pytest.raises(VLLMError):
        sampler.sync([1])
    server.max_lora_rank = 16
    sampler.sync([1])
    rows = make_rows(range(SIZE), greedy=True)
    assert torch.equal(sampler.sample(rows).actions, bank.sample(rows).actions)


def test_a_stop_ends_requests_at_once(server, bank, tmp_path):
    sampler = connected(bank, tmp_path, server)
    server.delay = 60.0
    stop = Stop()
    threading.Timer(0.1, stop.request, ["test"]).start()
    began = time.monotonic()
    rows = replace(make_rows(range(SIZE)), stop=stop)
    with pytest.raises(Interrupted):
        sampler.sample(rows)
    assert time.monotonic() - began < 30


# ---- in populations


def test_members_of_a_population_learn_and_stay_marked_until_they_are_loaded(tmp_path):
    objective = Objective(importance_correction="token_truncate")
    population = tiny_population(2, objective=objective, lr=3e-3)
    population[1].task_settings = TaskSettings({"task.style": "12+"})
    env = settings_env()
    members = population.members
    with serving(model=tiny_model()) as server:
        population.sample_with(VLLMSampler(server.url, tmp_path))
        for step in range(2):
            collected = population.collect(env, step=step, samples_per_step=8, starts_per_step=4)
            assert members.changed_slots == []
            batch = collected.experience["default"]
            assert not batch.exact
            assert {len(prompt) for prompt in batch.inputs.prompts} == {9, 12}
            scored = population.members.bank.log_probs(batch)
            torch.testing.assert_close(batch.sampler_log_probs, scored, rtol=1e-3, atol=1e-3)
            reports = population.learn(collected.experience, step=step)
            assert all(report.failed is None for report in reports.values())
            assert members.changed_slots == [0, 1]
        server.max_lora_rank = 1
        with pytest.raises(VLLMError):
            population.collect(env, step=2, samples_per_step=8, starts_per_step=4)
        assert members.changed_slots == [0, 1]
        server.max_lora_rank = 16
        population.evaluate(env)
        assert members.changed_slots == []


# ---- vLLM itself


@pytest.fixture(scope="module")
def smollm2():
    return load_base("smollm2-135m", dtype=torch.float32).model


@pytest.fixture(scope="module")
def vllm(smollm2):
    """Start vLLM with the printed command."""
    server = RealServer(
        vllm_command(loadable_name(smollm2), members=SIZE, rank=16, url="http://127.0.0.1:8037")
    )
    yield server
    server.stop()


def smollm2_members(model, size=SIZE, rank=16, **settings):
    return different_members(
        model,
        size,
        std=0.08,
        lora_config=LoraConfig(r=rank, target_modules="all-linear"),
        **settings,
    )


@pytest.mark.vllm
class TestVLLMSamplerWithVLLM(SamplerTestCase):
    uses_uniforms = False
    tolerance = 1e-2

    @pytest.fixture(autouse=True)
    def _serve(self, smollm2, vllm, tmp_path):
        self.model = smollm2
        self.server = vllm
        self.folder = tmp_path

    def make_bank(self):
        # For `min_tokens`, vLLM rules out the model's own end of sequence too.
        model_eos = self.model.config.eos_token_id
        return smollm2_members(self.model, eos_token_ids=[EOS, model_eos, *range(50, 58)])

    def make_sampler(self, bank):
        return connected(bank, self.folder, self.server, timeout=TIMEOUT)


@pytest.mark.vllm
def test_vllm_samples_with_current_weights_and_survives_a_kill(smollm2, vllm, tmp_path):
    bank = smollm2_members(smollm2)
    sampler = connected(bank, tmp_path, vllm, timeout=TIMEOUT)
    prompt = tuple(range(400, 464))  # several blocks of the prefix cache
    rows = replace(
        make_rows(range(SIZE), prompts=(prompt,), tokens=8), uniforms=None, max_new_tokens=8
    )

    def check():
        for base in (False, True):
            rollout = sampler.sample(rows, base=base)
            expected = bank.log_probs(as_batch(rows, rollout), base=base)
            torch.testing.assert_close(rollout.log_probs, expected, rtol=0, atol=1e-2)

    check()
    # A prefix that was cached with old weights would change the first log-probabilities by tenths.
    bank.inherit([1, 2, 0])
    sampler.sync(range(SIZE))
    check()
    greedy = replace(rows, temperature=torch.zeros(len(rows)))
    assert torch.equal(sampler.sample(greedy).actions[:, 0], bank.sample(greedy).actions[:, 0])
    # A killed server that is started again gets all adapters.
    vllm.stop()
    vllm.start()
    check()


@pytest.mark.vllm
def test_vllm_for_smaller_members_is_refused(smollm2, vllm, tmp_path):
    with pytest.raises(VLLMError, match="max_lora_rank"):
        connected(smollm2_members(smollm2, rank=32), tmp_path, vllm, timeout=TIMEOUT)


@pytest.mark.vllm
def test_vllm_with_raw_log_probabilities_is_refused(smollm2, tmp_path):
    command = vllm_command(
        loadable_name(smollm2), members=SIZE, rank=16, url="http://127.0.0.1:8039"
    )
    server = RealServer(command.replace("processed_logprobs", "raw_logprobs"))
    try:
        with pytest.raises(VLLMError, match="--logprobs-mode"):
            connected(smollm2_members(smollm2), tmp_path, server, timeout=TIMEOUT)
    finally:
        server.stop()
