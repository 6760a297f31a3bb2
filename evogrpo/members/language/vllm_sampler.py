"""Sampler for vLLM servers: completions over HTTP from servers with the base and the adapters."""

import http.client
import math
import shlex
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

from pydantic import BaseModel, Field

from evogrpo.interruption import NEVER, Stop
from evogrpo.members.bank import FinishedCallback
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.loading import loadable_name
from evogrpo.members.language.vllm_base import (
    Completions,
    VLLMBase,
    largest_rank,
    served_dtype,
)
from evogrpo.members.language.vllm_server import (
    MAX_ANSWER,
    SUPPORTED_SERVERS,
    Choice,
    Server,
    VLLMError,
)
from evogrpo.records import Rollout, SamplingBatch
from evogrpo.text import printable, shorten
from evogrpo.validation import finite_number

ROWS_PER_REQUEST = 512
"""Maximum prompts of a request. vLLM refuses more than 1,024 by default."""
REQUESTS_PER_SERVER = 32
"""Requests into which the rows of a server are split. If one fails, only its rows are repeated."""

# Maximum average bytes of a token in an answer. A completion's token has an id, its text three
# times, and its log-probability twice; a prompt's token has an id. Runs of 128 spaces are the
# longest common tokens.
BYTES_PER_TOKEN = 512
BYTES_PER_PROMPT_TOKEN = 16
_Request = tuple[Server, int | None, list[int]]
"""Server, slot (None: the base) and row numbers of a request; the rows have one temperature."""


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
        members: Number of members.
        rank: LoRA rank of the members; None if they train all weights.
        dtype: Precision of the base model.
        url: Address of the server.

    Raises:
        ValueError: If vLLM does not support the rank, or members train all weights.
    """
    address = urllib.parse.urlsplit(url)
    return (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model"
        f" {shlex.quote(model)} --host {shlex.quote(address.hostname or '')} --port"
        f" {address.port or 8000} --dtype {dtype} --enable-lora --max-loras {members}"
        f" --max-lora-rank {largest_rank(rank)} --logprobs-mode processed_logprobs"
        " --generation-config vllm"
    )


class VLLMSampler(VLLMBase):
    """Samples completions on vLLM servers over HTTP; see `evogrpo.members.bank.Sampler`.

    Each server has the base model and the adapters of all members. Rows go to the server with the
    least to do. `Population.sample_with` connects the sampler and checks the servers. If
    VLLM_API_KEY is set, it is sent to these addresses only: redirects and proxies are not followed.

    With several ranks, each has a sampler and requests its own completions. Rank 0 writes and loads
    the adapters.

    Args:
        url: Address of a server, such as "http://127.0.0.1:8000", or of several.
        adapters_dir: Folder for adapters. The servers must see it under the same path.
        timeout: Seconds without an answer of a server after which the run ends. Until then, a
            request that fails is repeated. Each completed request starts the time again, so a step
            may take longer.

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
        if not urls:
            raise ValueError("url must contain at least one address, got none.")
        different = set[str]()
        for server in self._servers:
            if server.url in different:
                raise ValueError(f"url must contain each address once, got {server.url} twice.")
            different.add(server.url)
        super().__init__(adapters_dir)

    def connect(self, bank: AdapterBank) -> None:
        """Check that the servers have a bank's base model, and load its adapters on them.

        Raises:
            VLLMError: If a server does not answer in time or was started with wrong settings.
            ValueError: If members train all weights.
        """
        largest_rank(bank.trained.rank)
        ranks = bank.processes
        # Adapters have the names that rank 0 gives them.
        self._id = ranks.broadcast(self._id)
        self._bank = bank
        self._versions = {}
        # 1. Find the base model of each server, and compare it with the trainer's.
        with ranks.shared_errors():
            for server in self._servers:
                models = server.models(threading.Event())
                bases = [name for name, parent in models.items() if parent is None]
                if not bases:
                    raise self._refused(server, "lists no base model")
                server.base = bases[0]
        for server in self._servers:
            # Completions of the base show whether the server has the same model.
            difference = self._difference(partial(self._sample_base, server))
            if difference is not None:
                raise self._refused(
                    server,
                    f"serves {printable(shorten(server.base, 200))} {difference}, with"
                    " --logprobs-mode processed_logprobs",
                )
        # 2. Write and load the adapters.
        self.sync(range(bank.size))

    def sync(self, slots: Sequence[int]) -> None:
        """Load the adapters of these slots again, if their weights have changed.

        Raises:
            VLLMError: If a server does not load an adapter. It is loaded in the next call.
        """
        bank = self._connected()
        changed = self._changed(slots)
        # Other ranks wait until rank 0 has loaded the adapters.
        with bank.processes.shared_errors():
            if bank.processes.is_rank_zero:
                tasks = []
                for slot in changed:
                    # Written in this thread, because a bank is not made for several threads.
                    self._write(slot)
                    version = bank.changes[slot]
                    tasks += [partial(self._replace, each, slot, version) for each in self._servers]
                _run(tasks, NEVER)
        self._keep_current(changed)

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
        # 1. Group the rows by member (None = the base), temperature and prompt. Rows of one prompt
        #    stay on one server, which caches it, unless they are more than an equal share.
        slots = [None] * len(rows) if base else rows.member_ids.tolist()
        groups: dict[tuple[int | None, float, int], list[int]] = {}
        keys = zip(slots, rows.temperature.tolist(), rows.prompt_ids.tolist(), strict=True)
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        # Large groups are split, so that all servers have work.
        share = math.ceil(len(rows) / len(self._servers))
        pieces = []
        for (slot, temperature, _), group in groups.items():
            pieces += [(slot, temperature, part) for part in _parts(group, share)]
        # 2. Give each piece, the largest first, to the server with the fewest rows.
        pieces.sort(key=lambda piece: -len(piece[2]))
        load = [0] * len(self._servers)
        given: dict[tuple[int, int | None, float], list[int]] = {}
        for slot, temperature, numbers in pieces:
            server = load.index(min(load))
            load[server] += len(numbers)
            given.setdefault((server, slot, temperature), []).extend(numbers)
        # 3. Split the rows of each server into requests.
        size = min(ROWS_PER_REQUEST, math.ceil(share / REQUESTS_PER_SERVER))
        requests: list[_Request] = []
        for (server, slot, _), numbers in given.items():
            parts = _parts(numbers, size)
            requests += [(self._servers[server], slot, part) for part in parts]
        return self._sample(rows, requests, on_finished)

    # ---- adapters and servers

    def _replace(self, server: Server, slot: int, version: int, ended: threading.Event) -> None:
        """Unload a member's old adapter, if there is one, and load the new one."""
        if slot in self._versions:
            old = self._name(slot, self._versions[slot])
            # `load_inplace` is not used: vLLM stores it with the adapter and then reads the files
            # again for every batch. An old adapter that is missing was evicted, or lost in a
            # restart; both are fine.
            server.call("/v1/unload_lora_adapter", {"lora_name": old}, ended=ended, final=True)
        self._load(server, self._name(slot, version), ended)

    def _load(self, server: Server, name: str, ended: threading.Event) -> None:
        """Make a server load an adapter from its folder."""
        body = {"lora_name": name, "lora_path": str(self._folder / name)}
        status, content = server.call("/v1/load_lora_adapter", body, ended=ended, final=True)
        # A repeated request fails if the first one was carried out.
        if status != http.HTTPStatus.OK and name not in server.models(ended):
            raise self._refused(
                server, f"did not load {body['lora_path']}: {server.shown(content)}"
            )

    def _sample_base(self, server: Server, rows: SamplingBatch) -> Rollout:
        """Sample rows from the base on one server."""
        everything = list(range(len(rows)))
        return self._sample(rows, [(server, None, everything)], None)

    def _refused(self, server: Server, problem: str) -> VLLMError:
        """Return an error with the command that starts the server as this population needs it."""
        bank = self._connected()
        command = vllm_command(
            loadable_name(bank.base.model) or "MODEL",
            members=bank.size,
            rank=bank.trained.rank,
            dtype=str(served_dtype(bank.base.model)).removeprefix("torch."),
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
        """Send all requests at once, and collect the completions in this thread."""
        completions = Completions(rows, self._connected().base.pad_id, on_finished)
        tasks = [partial(self._complete, rows, *request) for request in requests]

        def add(task: int, choices: Any) -> None:
            """Add the completions of one request."""
            _, _, numbers = requests[task]
            completions.add(numbers, choices)

        _run(tasks, rows.stop, add)
        return completions.rollout()

    def _complete(
        self,
        rows: SamplingBatch,
        server: Server,
        slot: int | None,
        numbers: Sequence[int],
        ended: threading.Event,
    ) -> list[Choice]:
        """Return completions of rows of one member (None: the base) and temperature."""
        # 1. Describe the request.
        prompts = self._prompts(rows, numbers)
        name = server.base
        # A prefix cached with old weights is never used. vLLM refuses salts with a slash, as names
        # of bases have.
        salt = self._id
        if slot is not None:
            name = self._name(slot, self._versions[slot])
            salt = name
        body = {
            **self._parameters(rows, float(rows.temperature[numbers[0]])),
            "model": name,
            "prompt": prompts,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        # 2. Send it.
        limit = MAX_ANSWER + sum(map(len, prompts)) * BYTES_PER_PROMPT_TOKEN
        limit += len(numbers) * rows.max_new_tokens * BYTES_PER_TOKEN
        status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        # A server that was restarted has lost its adapters: load this one, and repeat.
        if status == http.HTTPStatus.NOT_FOUND and slot is not None:
            self._load(server, name, ended)
            status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        if status != http.HTTPStatus.OK:
            raise VLLMError(f"{server.url} refused to sample: {server.shown(content)}")

        # 3. Check the answer.
        # A longer list of completions is refused without reading it.
        class Answer(BaseModel):
            choices: Annotated[list[Choice], Field(max_length=len(numbers), fail_fast=True)]

        answer = server.parsed(Answer, content)
        # A server may return them in any order.
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(numbers))):
            raise VLLMError(
                f"{server.url} returned {len(choices)} completions for {len(numbers)} prompts."
                f" {SUPPORTED_SERVERS}"
            )
        self._check(choices, prompts, rows, server.url)
        return choices


def _parts(numbers: list[int], size: int) -> list[list[int]]:
    """Return consecutive parts of a list, of at most this size."""
    starts = range(0, len(numbers), size)
    return [numbers[start : start + size] for start in starts]


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
