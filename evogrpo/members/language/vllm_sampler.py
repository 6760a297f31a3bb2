"""Sampler for vLLM: completions over HTTP from servers with the base model and the adapters."""

import http.client
import math
import shlex
import shutil
import threading
import urllib.parse
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors.torch import save_file

from evogrpo.interruption import NEVER, Stop
from evogrpo.members.bank import FinishedCallback
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.compatibility import is_quantised, vocabulary_of
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.peft_files import CONFIG, TENSORS
from evogrpo.members.language.vllm_server import (
    MAX_ANSWER,
    SUPPORTED_SERVERS,
    Choice,
    Server,
    VLLMError,
)
from evogrpo.records import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.text import expand_user, printable, shorten
from evogrpo.validation import finite_number

ROWS_PER_REQUEST = 512
"""Maximum prompts of a request. vLLM refuses more than 1,024 by default."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
# Prompt, completions, their length and the temperature of the check at the start. It detects a
# server that reports raw log-probabilities, those of temperature 1.
PROBE = tuple(range(32, 40))
PROBE_ROWS = 8
PROBE_TOKENS = 16
PROBE_TEMPERATURE = 2.0
# Largest mean difference between log-probabilities of server and trainer, in nats, by the precision
# of the base.
EXACT_DIFFERENCE = 0.05
HALF_PRECISION_DIFFERENCE = 0.5

# Maximum average bytes of a token in an answer. A completion's token has an id, its text three
# times, and its log-probability twice; a prompt's token has an id. Runs of 128 spaces are the
# longest common tokens.
BYTES_PER_TOKEN = 512
BYTES_PER_PROMPT_TOKEN = 16
_Request = tuple[Server, int | None, list[int]]
"""Server, slot (None: the base) and row numbers of a request; the rows have one temperature."""

NO_FULL_WEIGHTS = "vLLM samples LoRA adapters only. Leave out full_finetuning, or the sampler."


def vllm_command(
    model: str,
    *,
    members: int,
    rank: int | None,
    dtype: str = "float32",
    url: str = "http://127.0.0.1:8000",
) -> str:
    """Return the shell command that starts a vLLM server for a population.

    Args:
        model: Hub id or folder of the base model.
        members: Number of members that this server samples.
        rank: LoRA rank of the members; None if they train all weights.
        dtype: Precision of the base model.
        url: Address of the server.

    Raises:
        ValueError: If vLLM does not support the rank, or members train all weights.
    """
    if rank is None:
        raise ValueError(NO_FULL_WEIGHTS)
    if rank > LORA_RANKS[-1]:
        raise ValueError(
            f"vLLM supports LoRA ranks up to {LORA_RANKS[-1]}, got {rank}. Use a smaller rank."
        )
    address = urllib.parse.urlsplit(url)
    # vLLM accepts some ranks only: the smallest one that is large enough.
    largest = next(each for each in LORA_RANKS if each >= rank)
    return (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model"
        f" {shlex.quote(model)} --host {shlex.quote(address.hostname or '')} --port"
        f" {address.port or 8000} --dtype {dtype} --enable-lora --max-loras {members}"
        f" --max-lora-rank {largest} --logprobs-mode processed_logprobs --generation-config vllm"
    )


class VLLMSampler:
    """Samples completions on vLLM servers over HTTP; see `evogrpo.members.bank.Sampler`.

    Members are divided among the servers. Each server has the base model and one adapter per
    member. Changed adapters are written to a new folder, and the server loads them under a new
    name, so cached prefixes of old weights are never used. `Population.sample_with` connects the
    sampler and checks the servers. If VLLM_API_KEY is set, it is sent to these addresses only:
    redirects and proxies are not followed.

    With several ranks, each has a sampler and requests its own completions. Rank 0 writes and loads
    the adapters.

    Args:
        url: Address of a server, such as "http://127.0.0.1:8000", or of several.
        adapters_dir: Folder for adapters. The servers must see it under the same path.
        timeout: Seconds after which a request that fails or has no complete answer ends the run. A
            request is repeated within this time; one attempt may take half of it.

    Raises:
        ValueError: If an argument or VLLM_API_KEY is invalid.
    """

    def __init__(
        self, url: str | Sequence[str], adapters_dir: str | Path, *, timeout: float = 600.0
    ) -> None:
        seconds = float(finite_number("timeout", timeout))
        if seconds <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {seconds}.")
        urls: Sequence[Any] = url if isinstance(url, list | tuple) else [url]
        self._servers = [Server(each, seconds) for each in urls]
        if not urls or len({server.url for server in self._servers}) < len(urls):
            raise ValueError(f"url must be one address or several different ones, got {len(urls)}.")
        # A folder and names of its own: several runs may share servers and adapters_dir.
        self._id = uuid.uuid4().hex[:12]
        self._adapters_dir = expand_user(adapters_dir, "adapters_dir").absolute()
        self._bank: AdapterBank | None = None
        # By slot: the bank's change counter of the newest adapter on the server.
        self._versions: dict[int, int] = {}
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._adapters_dir / f"evogrpo-{self._id}"

    def connect(self, bank: AdapterBank) -> None:
        """Check that the servers have a bank's base model, and load its adapters on them.

        Raises:
            VLLMError: If a server does not answer in time or was started with wrong settings.
            ValueError: If members train all weights.
        """
        if bank.lora_config is None:
            raise ValueError(NO_FULL_WEIGHTS)
        ranks = bank.processes
        # Adapters have the names that rank 0 gives them.
        self._id = ranks.broadcast(self._id)
        self._bank = bank
        self._versions = dict(enumerate(bank.changes))
        # 2. Find the base model of each server, and compare it with the trainer's.
        with ranks.shared_errors():
            for server in self._servers:
                models = server.models(threading.Event())
                bases = [name for name, parent in models.items() if parent is None]
                if not bases:
                    raise self._refused(server, "lists no base model")
                server.base = bases[0]
        for server in self._servers:
            self._check_log_probs(server)
        # 3. Write and load the adapters.
        with ranks.shared_errors():
            if ranks.is_rank_zero:
                tasks = []
                for slot, version in self._versions.items():
                    self._write(slot)
                    tasks.append(partial(self._load, slot, version))
                _run(tasks, NEVER)

    def sync(self, slots: Sequence[int]) -> None:
        """Load the adapters of these slots again, if their weights have changed.

        Raises:
            VLLMError: If a server does not load an adapter. It is loaded in the next call.
        """
        bank = self._connected()
        changed = [slot for slot in slots if self._versions[slot] != bank.changes[slot]]
        # Other ranks wait until rank 0 has loaded the adapters.
        with bank.processes.shared_errors():
            if bank.processes.is_rank_zero:
                tasks = []
                for slot in changed:
                    # Written in this thread, because a bank is not made for several threads.
                    self._write(slot)
                    tasks.append(partial(self._replace, slot, bank.changes[slot]))
                _run(tasks, NEVER)
        for slot in changed:
            self._versions[slot] = bank.changes[slot]

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        """Sample one completion per row; the rows of a request share member and temperature.

        The servers draw their own random numbers and ignore `rows.uniforms`. Their
        log-probabilities differ a little from the trainer's, so `Rollout.exact` is False.

        Raises:
            VLLMError: If a server does not answer in time or its answer is invalid.
        """
        # 1. Group the rows by member (None = the base) and temperature.
        slots = [None] * len(rows) if base else rows.member_ids.tolist()
        groups: dict[tuple[int | None, float], list[int]] = {}
        for row, key in enumerate(zip(slots, rows.temperature.tolist(), strict=True)):
            groups.setdefault(key, []).append(row)
        # 2. Split each group into requests. A member is on one server; the base is on all of them,
        #    so they share its rows.
        requests: list[_Request] = []
        for (slot, _), group in groups.items():
            size = min(ROWS_PER_REQUEST, len(group))
            if base:
                size = min(size, math.ceil(len(group) / len(self._servers)))
            for number, start in enumerate(range(0, len(group), size)):
                server = self._server_of(number if slot is None else slot)
                requests.append((server, slot, group[start : start + size]))
        return self._sample(rows, requests, on_finished)

    def _connected(self) -> AdapterBank:
        """Return the bank of the members, or raise ValueError."""
        if self._bank is None:
            raise ValueError("The sampler has no members. Pass it to population.sample_with.")
        return self._bank

    # ---- adapters and servers

    def _server_of(self, slot: int) -> Server:
        return self._servers[slot % len(self._servers)]

    def _name(self, slot: int, version: int) -> str:
        """Return the name of an adapter on the server, and of its folder."""
        return f"evogrpo-{self._id}-{slot}-{version}"

    def _write(self, slot: int) -> None:
        """Write a member in PEFT's format to the folder of its current version."""
        # The folder has a new name for every version, as names of adapters do.
        bank = self._connected()
        tensors, config = bank.peft_files(slot)
        folder = self._folder / self._name(slot, bank.changes[slot])
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / TENSORS)
        (folder / CONFIG).write_bytes(config)

    def _replace(self, slot: int, version: int, ended: threading.Event) -> None:
        """Unload a member's old adapter and load the new one."""
        old = self._name(slot, self._versions[slot])
        # `load_inplace` is not used: vLLM stores it with the adapter and then reads the files again
        # for every batch. An old adapter that is missing was evicted, or lost in a restart; both
        # are fine.
        self._server_of(slot).call(
            "/v1/unload_lora_adapter", {"lora_name": old}, ended=ended, final=True
        )
        self._load(slot, version, ended)
        self._versions[slot] = version
        shutil.rmtree(self._folder / old, ignore_errors=True)

    def _load(self, slot: int, version: int, ended: threading.Event) -> None:
        """Make a server load an adapter from its folder."""
        server = self._server_of(slot)
        name = self._name(slot, version)
        body = {"lora_name": name, "lora_path": str(self._folder / name)}
        status, content = server.call("/v1/load_lora_adapter", body, ended=ended, final=True)
        # A repeated request fails if the first one was carried out.
        if status != http.HTTPStatus.OK and name not in server.models(ended):
            raise self._refused(
                server, f"did not load {body['lora_path']}: {server.shown(content)}"
            )

    def _check_log_probs(self, server: Server) -> None:
        """Sample a text from the base on the server, and score it with the trainer."""
        # 1. Sample.
        bank = self._connected()
        vocabulary = vocabulary_of(bank.base.model)
        prompt = tuple(token % vocabulary for token in PROBE)
        zeros = torch.zeros(PROBE_ROWS, dtype=torch.long)
        rows = SamplingBatch(
            prompts=(prompt,),
            prompt_ids=zeros,
            member_ids=zeros,
            temperature=torch.full((PROBE_ROWS,), PROBE_TEMPERATURE),
            max_new_tokens=PROBE_TOKENS,
        )
        # All ranks score the tokens that rank 0 gets.
        request = (server, None, list(range(PROBE_ROWS)))
        rollouts = bank.processes.gather_results(lambda: self._sample(rows, [request], None))
        rollout = rollouts[0]
        # 2. Score the same tokens.
        device = bank.base.device
        present = rollout.present.to(device)
        zeros = zeros.to(device)
        batch = Batch(
            inputs=TokenInputs(
                prompts=rows.prompts,
                prompt_ids=zeros,
                temperature=rows.temperature.to(device),
                min_new_tokens=0,
            ),
            actions=rollout.actions.to(device),
            present=present,
            action_mask=present,
            rewards=torch.zeros(PROBE_ROWS, device=device),
            group_ids=zeros,
            member_ids=zeros,
        )
        scored = bank.log_probs(batch, base=True).cpu()
        # 3. Compare.
        difference = float((rollout.log_probs - scored)[rollout.present].abs().mean())
        largest = HALF_PRECISION_DIFFERENCE
        precision = ""
        if bank.base.exact and not is_quantised(bank.base.model):
            largest = EXACT_DIFFERENCE
            precision = " in float32"
        if difference > largest:
            raise self._refused(
                server,
                f"serves {printable(shorten(server.base, 200))} with log-probabilities that differ"
                f" from those of the trainer's base model by {difference:.3g} nats on average."
                f" Serve the same model{precision}, with --logprobs-mode processed_logprobs",
            )

    def _refused(self, server: Server, problem: str) -> VLLMError:
        """Return an error with the command that starts the server as this population needs it."""
        bank = self._connected()
        model = bank.base.model
        dtype = next(model.parameters()).dtype
        if is_quantised(model):
            # It computes in bfloat16, and vLLM serves the plain model.
            dtype = torch.bfloat16
        members = sum(self._server_of(slot) is server for slot in range(bank.size))
        command = vllm_command(
            loadable_name(model) or "MODEL",
            members=max(1, members),
            rank=bank.trained.rank,
            dtype=str(dtype).removeprefix("torch."),
            url=server.url,
        )
        return VLLMError(f"{server.url} {problem}. Start it with: {command}")

    # ---- completions

    def _sample(
        self,
        rows: SamplingBatch,
        requests: Sequence[_Request],
        on_finished: FinishedCallback | None,
    ) -> Rollout:
        """Send the requests and collect the completions."""
        # 1. Buffers for all rows.
        bank = self._connected()
        width = rows.max_new_tokens
        actions = torch.full((len(rows), width), bank.base.pad_id)
        log_probs = torch.zeros(len(rows), width)
        lengths = torch.zeros(len(rows), dtype=torch.long)
        stopped = torch.zeros(len(rows), dtype=torch.bool)
        counter = rows.stop.progress("writing", len(rows), "completions")

        def collect(number: int, choices: Sequence[Choice]) -> None:
            """Write the completions of one request to its rows."""
            _, _, numbers = requests[number]
            for row, choice in zip(numbers, choices, strict=True):
                length = len(choice.token_ids)
                lengths[row] = length
                stopped[row] = choice.finish_reason == "stop"
                actions[row, :length] = torch.tensor(choice.token_ids)
                # A greedy token is certain.
                if rows.temperature[row]:
                    values = torch.tensor(choice.logprobs.token_logprobs)
                    log_probs[row, :length] = values.clamp(max=0.0)
            counter.add(len(numbers))
            if on_finished is not None:
                on_finished(numbers, [choice.token_ids for choice in choices])

        # 2. Send all requests at once; answers are collected in this thread.
        _run([partial(self._complete, rows, *request) for request in requests], rows.stop, collect)
        # 3. Rows that ended with an end token or a stop string.
        present = torch.arange(width) < lengths[:, None]
        return Rollout(
            actions=actions, present=present, log_probs=log_probs, truncated=~stopped, exact=False
        )

    def _complete(
        self,
        rows: SamplingBatch,
        server: Server,
        slot: int | None,
        numbers: Sequence[int],
        ended: threading.Event,
    ) -> list[Choice]:
        """Return completions of rows of one member (None: the base) and temperature."""
        # 1. Prompts, and what counts as a completion.
        bank = self._connected()
        prompts = []
        for row in numbers:
            tokens = list(rows.prompts[rows.prompt_ids[row]])
            if rows.history is not None:
                tokens += rows.history[row]
            prompts.append(tokens)
        ends = bank.end_ids.tolist()
        longest = rows.max_new_tokens
        shortest = min(rows.min_new_tokens, longest)
        # 2. Send the request; load the adapter again if the server was restarted.
        name = server.base
        # A prefix cached with old weights is never used. vLLM refuses salts with a slash, as names
        # of bases have.
        salt = self._id
        if slot is not None:
            name = self._name(slot, self._versions[slot])
            salt = name
        options = rows.options
        body: dict[str, Any] = {
            "model": name,
            "prompt": prompts,
            "max_tokens": longest,
            "min_tokens": shortest,
            "temperature": float(rows.temperature[numbers[0]]),
            "top_k": options.top_k,
            "top_p": options.top_p,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # only the trainer's end tokens count
            "stop_token_ids": ends,
            "logprobs": 0,  # of the sampled tokens only
            "return_token_ids": True,
            "cache_salt": salt,
        }
        if rows.stop_strings is not None:
            body["stop"] = list(rows.stop_strings.texts)
            # Stop strings may be special tokens.
            body["skip_special_tokens"] = False
        limit = MAX_ANSWER + sum(map(len, prompts)) * BYTES_PER_PROMPT_TOKEN
        limit += len(numbers) * longest * BYTES_PER_TOKEN
        status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        if status == http.HTTPStatus.NOT_FOUND and slot is not None:
            self._load(slot, self._versions[slot], ended)
            status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        if status != http.HTTPStatus.OK:
            raise VLLMError(f"{server.url} refused to sample: {server.shown(content)}")

        # 3. Check the answer.
        class Completions(BaseModel):
            choices: Annotated[list[Choice], Field(max_length=len(numbers), fail_fast=True)]

        answer = server.parsed(Completions, content)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(numbers))):
            raise VLLMError(
                f"{server.url} returned {len(choices)} completions for {len(numbers)} prompts."
                f" {SUPPORTED_SERVERS}"
            )
        vocabulary = vocabulary_of(bank.base.model)
        for choice, prompt in zip(choices, prompts, strict=True):
            if choice.prompt_token_ids not in (None, prompt):
                raise VLLMError(
                    f"{server.url} returned the completions in another order than the prompts."
                    f" {SUPPORTED_SERVERS}"
                )
            if not _finish(choice, rows, ends, vocabulary):
                tokens = choice.token_ids
                places = [place for place, token in enumerate(tokens) if token in ends]
                raise VLLMError(
                    f"{server.url} returned a completion of {len(tokens)} tokens,"
                    f" {len(choice.logprobs.token_logprobs)} log-probabilities and end tokens at"
                    f" {places}, but {shortest} to {longest} tokens up to the first end token were"
                    " requested. Check its --max-model-len."
                )
        return choices


def _finish(choice: Choice, rows: SamplingBatch, ends: Sequence[int], vocabulary: int) -> bool:
    """Cut a completion behind its first stop string, and set its finish reason.

    Returns:
        False if the completion is invalid. It must end with its only end token or with a stop
        string, or have the maximum length.
    """
    # 1. Compare tokens and log-probabilities.
    tokens = choice.token_ids
    values = choice.logprobs.token_logprobs
    if len(values) != len(tokens) or max(tokens) >= vocabulary:
        return False
    # 2. Find the stop string. The server decodes completions together with their prompts, so it may
    #    find one that the tokens of the completion alone do not show.
    stopped = False
    if rows.stop_strings is not None:
        stopped = choice.finish_reason == "stop"
        end = rows.stop_strings.end_of(tokens)
        if end is not None:
            stopped = True
            tokens = tokens[:end]
            choice.token_ids = tokens
            choice.logprobs.token_logprobs = values[:end]
    # 3. Find the end token.
    longest = rows.max_new_tokens
    places = [place for place, token in enumerate(tokens) if token in ends]
    choice.finish_reason = "length"
    if places or stopped:
        choice.finish_reason = "stop"
    if places:
        shortest = min(rows.min_new_tokens, longest)
        return shortest <= places[0] == len(tokens) - 1 < longest
    return stopped or len(tokens) == longest


def _run(
    tasks: Sequence[Callable[[threading.Event], Any]],
    stop: Stop,
    on_result: Callable[[int, Any], object] = lambda number, result: None,
) -> None:
    """Run tasks in threads.

    The first error, or a stop, is raised at once, and the other threads are left to end.

    Args:
        tasks: Functions of an event that is set when their results are no longer needed.
        stop: Checked while waiting.
        on_result: Called in this thread with number and result of each finished task.
    """
    # 1. One thread per task. They are daemons: a request that hangs does not keep the process.
    ended = threading.Event()
    results = SimpleQueue[tuple[int, Any, Exception | None]]()

    def work(number: int, task: Callable[[threading.Event], Any]) -> None:
        """Put the result of a task, or its error, into the queue."""
        try:
            results.put((number, task(ended), None))
        except Exception as error:  # noqa: BLE001  # raised in the calling thread
            results.put((number, None, error))

    for number, task in enumerate(tasks):
        threading.Thread(
            target=work, args=(number, task), daemon=True, name=f"vllm {number}"
        ).start()
    # 2. Collect results; look for a stop in between.
    try:
        waiting = len(tasks)
        while waiting:
            stop.check()
            try:
                number, result, error = results.get(timeout=0.2)
            except Empty:
                continue
            waiting -= 1
            if error is not None:
                raise error
            on_result(number, result)
    finally:
        ended.set()
