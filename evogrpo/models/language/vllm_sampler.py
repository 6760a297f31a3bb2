"""Sampler for vLLM: completions over HTTP from servers that hold the base model and the members' adapters."""

import http.client
import json
import math
import os
import re
import shlex
import shutil
import socket
import threading
import time
import urllib.parse
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from evogrpo.data import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.distributed import processes
from evogrpo.interruption import NEVER, Stop
from evogrpo.models.bank import FinishedCallback, SamplerError
from evogrpo.models.language.bank import AdapterBank
from evogrpo.models.language.compatibility import is_quantised, vocabulary_of
from evogrpo.models.language.loading import loadable_name
from evogrpo.text import printable, shorten

ROWS_PER_REQUEST = 512
"""Maximum prompts of a request. vLLM refuses more than 1,024 by default."""
MAX_THREADS = 64
"""Maximum requests under way at once."""
MAX_RESTARTS = 3
"""Number of times that lost adapters are loaded again while the same rows are sampled."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
MEAN_DIFFERENCE, MAX_DIFFERENCE = 0.05, 2.0
"""Largest differences between log-probabilities of server and trainer, in nats: on average for a base in float32, and
for each token in half precision."""
PROBE, PROBE_ROWS, PROBE_TOKENS, PROBE_TEMPERATURE = tuple(range(32, 40)), 8, 16, 2.0
"""Prompt of the check at the start, completions at each of two temperatures, their length, the second temperature."""
LARGEST_ANSWER = 1 << 24
"""Maximum bytes of an answer without completions."""
BYTES_PER_TOKEN = 512
"""Maximum bytes of a token in an answer: its text, id and log-probability."""
_MAX_LORA = re.compile(r'vllm:lora_requests_info\{[^}]*max_lora="(\d+)"')


class VLLMError(SamplerError):
    """A vLLM server does not answer, answers wrongly, or was started with other settings than the run needs."""


NO_FULL_WEIGHTS = "vLLM samples LoRA adapters only. Leave out full_finetuning, or the sampler."


class _LostAdapterError(Exception):
    """The server does not know the adapter, most often because it was restarted."""


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
        raise ValueError(f"vLLM supports LoRA ranks up to {LORA_RANKS[-1]}, got {rank}. Use a smaller rank.")
    place = urllib.parse.urlsplit(url)
    largest = next(each for each in LORA_RANKS if each >= rank)
    return (
        f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model {shlex.quote(model)} "
        f"--host {shlex.quote(place.hostname or '')} --port {place.port or 8000} --dtype {dtype} --enable-lora "
        f"--max-loras {members} --max-lora-rank {largest} --logprobs-mode processed_logprobs --generation-config vllm"
    )


class VLLMSampler:
    """Samples completions on vLLM servers over HTTP; see `evogrpo.models.bank.Sampler`.

    Members are dealt out over the servers. Each server has the base model and one adapter per member. Changed adapters
    are written to a new folder, and the server loads them under a new name, so cached prefixes of old weights are never
    used. `Population.sample_with` connects the sampler and checks the servers. If VLLM_API_KEY is set, it is sent.

    Args:
        url: Address of a server, such as "http://127.0.0.1:8000", or of several.
        adapters_dir: Folder for adapters. The servers must see it under the same path.
        timeout: Seconds after which a request that fails or is not answered ends the run. A request is repeated within
            this time; one attempt may take half of it.

    Raises:
        ValueError: If a URL or the timeout is invalid.
    """

    def __init__(self, url: str | Sequence[str], adapters_dir: str | Path, *, timeout: float = 600.0) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"url must be one address or several different ones, got {urls}.")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")
        self._servers = [_Server(each, float(timeout)) for each in urls]
        # A folder and names of its own: several runs may share servers and adapters_dir.
        self._id = uuid.uuid4().hex[:12]
        self._folder = Path(adapters_dir).expanduser().absolute() / f"evogrpo-{self._id}"
        self._bank: AdapterBank | None = None
        self._versions: dict[int, int] = {}  # by slot, the bank's change counter of the newest adapter on the server
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def connect(self, bank: AdapterBank) -> None:
        """Load the adapters of a bank's members on the servers, after checking that they serve its base model.

        Raises:
            VLLMError: If a server does not answer in time or was started with wrong settings.
            ValueError: If several processes train together, or members train all weights.
        """
        if bank.lora_config is None:
            raise ValueError(NO_FULL_WEIGHTS)
        if processes().size > 1:
            raise ValueError(f"VLLMSampler supports one process, got {processes().size}. Start a single process.")
        self._bank, self._versions = bank, {}
        for slot in range(bank.size):
            self._write(slot, bank.changes[slot])
        for server in self._servers:
            self._prepare(server)

    def sync(self, slots: Sequence[int]) -> None:
        """Load the adapters of these slots again, if their weights have changed.

        Raises:
            VLLMError: If a server does not load an adapter. It is loaded in the next call.
        """
        bank = self._connected()
        changed = [slot for slot in slots if self._versions.get(slot) != bank.changes[slot]]
        tasks = [partial(self._replace, slot, bank.changes[slot]) for slot in changed]
        for slot in changed:  # here, because a bank is not made for several threads
            self._write(slot, bank.changes[slot])
        _run(tasks, NEVER)

    def sample(
        self, rows: SamplingBatch, *, base: bool = False, on_finished: FinishedCallback | None = None
    ) -> Rollout:
        """Sample one completion per row, in one request per member and temperature.

        The servers draw their own random numbers. Rollouts are not exact.

        Raises:
            VLLMError: If a server does not answer in time or its answer is invalid.
        """
        groups: dict[tuple[int | None, float], list[int]] = {}
        kinds = zip(rows.member_ids.tolist(), rows.temperature.tolist(), strict=True)
        for row, (slot, temperature) in enumerate(kinds):
            groups.setdefault((None if base else slot, temperature), []).append(row)
        requests = []
        for (member, temperature), numbers in groups.items():
            # All servers have the base, so they share its rows.
            size = min(ROWS_PER_REQUEST, math.ceil(len(numbers) / len(self._servers)) if base else len(numbers))
            for start in range(0, len(numbers), size):
                server = self._server_of(start // size if member is None else member)
                part = tuple(numbers[start : start + size])
                requests.append(_Request(server=server, slot=member, temperature=temperature, rows=part))
        return self._sample(rows, requests, on_finished)

    # ---- the servers

    def _connected(self) -> AdapterBank:
        if self._bank is None:
            raise ValueError("The sampler has no members. Pass it to population.sample_with.")
        return self._bank

    def _server_of(self, slot: int) -> "_Server":
        return self._servers[slot % len(self._servers)]

    def _name(self, slot: int, version: int) -> str:
        return f"evogrpo-{self._id}-{slot}-{version}"

    def _adapter_folder(self, slot: int, version: int) -> Path:
        return self._folder / f"slot_{slot}" / f"version_{version}"

    def _write(self, slot: int, version: int) -> None:
        """Write a member in PEFT's format to the folder of this version."""
        tensors, config = self._connected().peft_files(slot)
        folder = self._adapter_folder(slot, version)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_bytes(config)
        self._versions.setdefault(slot, version)

    def _replace(self, slot: int, version: int, abort: "_Abort") -> None:
        """Unload a member's old adapter and load the new one."""
        server, old = self._server_of(slot), self._versions[slot]
        # `load_inplace` is not used: vLLM stores it with the adapter and then reads the files again for every batch.
        # An old adapter that is missing was evicted, or lost in a restart; both are fine.
        server.call("/v1/unload_lora_adapter", {"lora_name": self._name(slot, old)}, abort=abort, final=True)
        self._load(server, slot, version, abort)
        self._versions[slot] = version
        shutil.rmtree(self._adapter_folder(slot, old), ignore_errors=True)

    def _load(self, server: "_Server", slot: int, version: int, abort: "_Abort") -> None:
        name, path = self._name(slot, version), str(self._adapter_folder(slot, version))
        body = {"lora_name": name, "lora_path": path}
        status, content = server.call("/v1/load_lora_adapter", body, abort=abort, final=True)
        # A repeated request fails if the first one was carried out.
        if status != http.HTTPStatus.OK and name not in server.models(abort):
            raise VLLMError(f"{server.url} did not load {path}: {_text(content)}.{self._advice(server)}")

    def _prepare(self, server: "_Server") -> None:
        """Check a server that was started or restarted, and load all of its adapters."""
        abort = _Abort()
        # 1. The base is the model that no other one is the parent of.
        listed = server.models(abort)
        bases = [name for name, parent in listed.items() if parent is None]
        if not bases:
            raise VLLMError(f"{server.url} lists no base model.{self._advice(server)}")
        server.base = bases[0]
        # 2. Its base and its log-probabilities are the trainer's.
        self._check_log_probs(server)
        # 3. It takes the adapters of all of its members.
        own = [slot for slot in self._versions if self._server_of(slot) is server]
        missing = [slot for slot in own if self._name(slot, self._versions[slot]) not in listed]
        _run([partial(self._load, server, slot, self._versions[slot]) for slot in missing], NEVER)
        status, content = server.call("/metrics", abort=abort)
        found = _MAX_LORA.search(content.decode(errors="replace")) if status == http.HTTPStatus.OK else None
        if found is not None and int(found[1]) < len(own):
            raise VLLMError(
                f"{server.url} has {found[1]} LoRA slots for {len(own)} members. Each member needs one."
                f"{self._advice(server)}"
            )

    def _check_log_probs(self, server: "_Server") -> None:
        """Score a sampled text with server and trainer, at temperature 1 and at another one."""
        bank, count = self._connected(), 2 * PROBE_ROWS
        # 1. Sample from the base.
        zeros, every = torch.zeros(count, dtype=torch.long), torch.arange(count)
        rows = SamplingBatch(
            prompts=(tuple(token % vocabulary_of(bank.base.model) for token in PROBE),),
            prompt_ids=zeros,
            member_ids=zeros,
            temperature=torch.where(every < PROBE_ROWS, 1.0, PROBE_TEMPERATURE),
            max_new_tokens=PROBE_TOKENS,
        )
        requests = [
            _Request(server=server, slot=None, temperature=temperature, rows=tuple(part.tolist()))
            for temperature, part in zip((1.0, PROBE_TEMPERATURE), every.chunk(2), strict=True)
        ]
        rollout = self._sample(rows, requests, None)
        # 2. Score the same tokens with the trainer, also at temperature 1 throughout.
        device = bank.base.device
        inputs = TokenInputs(
            prompts=rows.prompts, prompt_ids=zeros.to(device), temperature=rows.temperature.to(device), min_new_tokens=0
        )
        batch = Batch(
            inputs=inputs,
            actions=rollout.actions.to(device),
            present=rollout.present.to(device),
            action_mask=rollout.present.to(device),
            rewards=torch.zeros(count, device=device),
            group_ids=zeros.to(device),
            member_ids=zeros.to(device),
        )
        raw_batch = replace(batch, inputs=replace(inputs, temperature=torch.ones(count, device=device)))
        processed, raw = (bank.log_probs(each, base=True).cpu() for each in (batch, raw_batch))
        # 3. At temperature 1 both kinds are equal, so a difference is one of the models.
        cold, warm = (rollout.log_probs - processed).abs().split(PROBE_ROWS)
        cold, warm = cold[rollout.present[:PROBE_ROWS]], warm[rollout.present[PROBE_ROWS:]]
        mean, largest = float(cold.mean()), float(cold.max())
        exact = bank.base.exact and not is_quantised(bank.base.model)
        if mean > MEAN_DIFFERENCE if exact else largest > MAX_DIFFERENCE:
            raise VLLMError(
                f"{server.url} serves {printable(shorten(str(server.base), 200))}, whose log-probabilities differ from "
                f"the trainer's base model by {mean:.3g} nats on average and {largest:.3g} at most. Serve the same "
                f"model{' in float32' if exact else ''}.{self._advice(server)}"
            )
        to_raw = (rollout.log_probs - raw).abs()[PROBE_ROWS:][rollout.present[PROBE_ROWS:]]
        if float(to_raw.mean()) + MEAN_DIFFERENCE < float(warm.mean()):
            raise VLLMError(
                f"{server.url} returns raw log-probabilities. --logprobs-mode must be processed_logprobs."
                f"{self._advice(server)}"
            )

    def _advice(self, server: "_Server") -> str:
        """Return a sentence with the command that starts the server as this population needs it."""
        bank = self._connected()
        members = sum(self._server_of(slot) is server for slot in range(bank.size))
        dtype = next(bank.base.model.parameters()).dtype
        return " Start it with: " + vllm_command(
            loadable_name(bank.base.model) or "MODEL",
            members=max(1, members),
            rank=bank.trained.rank,
            dtype=str(torch.bfloat16 if is_quantised(bank.base.model) else dtype).removeprefix("torch."),
            url=server.url,
        )

    # ---- completions

    def _sample(
        self, rows: SamplingBatch, requests: "Sequence[_Request]", on_finished: FinishedCallback | None
    ) -> Rollout:
        """Send the requests, again after a restart of their server, and collect the completions."""
        bank, width = self._connected(), rows.max_new_tokens
        actions = torch.full((len(rows), width), bank.base.pad_id)
        log_probs, lengths = torch.zeros(len(rows), width), torch.zeros(len(rows), dtype=torch.long)
        counter = rows.stop.progress("writing", len(rows), "completions")
        sent = list(requests)

        def collect(number: int, completions: "list[tuple[list[int], list[float]]]") -> None:
            request = sent[number]
            for row, (tokens, values) in zip(request.rows, completions, strict=True):
                actions[row, : len(tokens)] = torch.tensor(tokens)
                if request.temperature:  # a greedy token is certain
                    log_probs[row, : len(values)] = torch.tensor(values)
                lengths[row] = len(tokens)
            counter.add(len(request.rows))
            if on_finished is not None:
                on_finished(request.rows, [tokens for tokens, _ in completions])

        for _ in range(1 + MAX_RESTARTS):
            lost = _run([partial(self._complete, request, rows) for request in sent], rows.stop, collect)
            sent = [sent[number] for number in lost]
            for server in {request.server.url: request.server for request in sent}.values():
                self._prepare(server)
            if not sent:
                break
        else:
            raise VLLMError(f"{sent[0].server.url} lost its adapters {MAX_RESTARTS + 1} times. See its log.")
        present = torch.arange(width) < lengths[:, None]
        ended = (torch.isin(actions, bank.end_ids.cpu()) & present).any(1)
        return Rollout(actions=actions, present=present, log_probs=log_probs, truncated=~ended, exact=False)

    def _complete(
        self, request: "_Request", rows: SamplingBatch, abort: "_Abort"
    ) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probabilities of the rows of one request."""
        bank, server, options, slot = self._connected(), request.server, rows.options, request.slot
        ids, histories, ends = rows.prompt_ids.tolist(), rows.history, bank.end_ids.tolist()
        prompts = [[*rows.prompts[ids[row]], *(() if histories is None else histories[row])] for row in request.rows]
        name = server.base if slot is None else self._name(slot, self._versions[slot])
        body: dict[str, Any] = {
            "model": name,
            "prompt": prompts,
            "max_tokens": rows.max_new_tokens,
            "min_tokens": min(rows.min_new_tokens, rows.max_new_tokens),
            "temperature": request.temperature,
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
            # A prefix cached with old weights is never used. vLLM refuses salts with a slash, as names of bases have.
            "cache_salt": self._id if slot is None else name,
        }
        length = sum(map(len, prompts)) + len(prompts) * rows.max_new_tokens
        limit = LARGEST_ANSWER + BYTES_PER_TOKEN * length
        status, content = server.call("/v1/completions", body, abort=abort, limit=limit)
        if status == http.HTTPStatus.NOT_FOUND and slot is not None:
            raise _LostAdapterError
        if status != http.HTTPStatus.OK:
            raise VLLMError(f"{server.url} refused to sample: {_text(content)}")
        check = partial(
            _completion,
            vocabulary=vocabulary_of(bank.base.model),
            ends=frozenset(ends),
            shortest=body["min_tokens"],
            longest=rows.max_new_tokens,
        )
        try:
            return [check(choice) for choice in _choices(_json(content), len(prompts))]
        except ValueError as error:
            raise VLLMError(f"{server.url} returned an invalid answer: {error}") from error


# ---- HTTP


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Rows of one member (None: the base) and one temperature, and their server."""

    server: "_Server"
    slot: int | None
    temperature: float
    rows: tuple[int, ...]


class _Abort:
    """Ends the requests of other threads: shuts their sockets down and prevents further attempts.

    Attributes:
        event: Set if requests must end.
    """

    def __init__(self) -> None:
        self.event, self._lock, self._sockets = threading.Event(), threading.Lock(), set[socket.socket]()

    def request(self) -> None:
        """End all requests."""
        with self._lock:
            self.event.set()
            for each in self._sockets:
                with suppress(OSError):  # the other side may have closed it
                    each.shutdown(socket.SHUT_RDWR)

    def add(self, connected: socket.socket) -> None:
        """Add the socket of a request; ConnectionAbortedError if requests must end."""
        with self._lock:
            if self.event.is_set():
                raise ConnectionAbortedError("the request was ended")
            self._sockets.add(connected)

    def discard(self, connected: socket.socket) -> None:
        """Remove a socket."""
        with self._lock:
            self._sockets.discard(connected)


class _Server:
    """HTTP client of one server.

    Attributes:
        url: Its address.
        base: Name of the base model, once known.
    """

    def __init__(self, url: str, timeout: float) -> None:
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise ValueError(f'url must look like "http://127.0.0.1:8000", got {url!r}.')
        self.url, self.base = url.rstrip("/"), ""
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path, self._timeout = parts.path.rstrip("/"), timeout

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        abort: _Abort,
        limit: int = LARGEST_ANSWER,
        final: bool = False,
    ) -> tuple[int, bytes]:
        """Return status and content of the answer to a request, repeated while the server does not answer.

        Args:
            path: Path of the endpoint.
            body: Sent as JSON with POST; None = GET.
            abort: Ends the request from another thread.
            limit: Maximum bytes of the answer.
            final: Return status 500 and above too, instead of repeating the request.

        Raises:
            VLLMError: If there is no answer in time, or it is too long.
        """
        content = None if body is None else json.dumps(body).encode()
        deadline, pause = time.monotonic() + self._timeout, 0.05
        while True:
            left = deadline - time.monotonic()
            try:
                status, answer = self._attempt(path, content, abort, limit, max(0.1, min(left, self._timeout / 2)))
                if status < http.HTTPStatus.INTERNAL_SERVER_ERROR or final:
                    return status, answer
                problem = f"status {status}: {_text(answer)}"
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            left = deadline - time.monotonic()
            if left < pause or abort.event.wait(pause):
                raise VLLMError(
                    f"The vLLM server at {self.url} gave no answer within {self._timeout:g} seconds "
                    f"({printable(shorten(problem, 500))}). Start it again, or raise timeout."
                )
            pause = min(2 * pause, 2.0)

    def _attempt(
        self, path: str, content: bytes | None, abort: _Abort, limit: int, seconds: float
    ) -> tuple[int, bytes]:
        deadline = time.monotonic() + seconds
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        with closing(kind(self._host, self._port, timeout=min(seconds, 10.0))) as connection:
            connection.connect()
            connected: socket.socket = connection.sock  # the connection forgets it before the answer is read
            try:
                connected.settimeout(seconds)
                abort.add(connected)
                connection.request("GET" if content is None else "POST", self._path + path, content, headers)
                parts, size = list[bytes](), 0
                with closing(connection.getresponse()) as response:
                    while part := response.read1(1 << 20):
                        parts.append(part)
                        size += len(part)
                        if size > limit:
                            raise VLLMError(f"{self.url} returned more than {limit:,} bytes for {path}.")
                        if time.monotonic() > deadline:
                            raise TimeoutError(f"the answer took longer than {seconds:.0f} seconds")
                    if response.length:
                        raise http.client.IncompleteRead(b"", response.length)
                return response.status, b"".join(parts)
            finally:
                abort.discard(connected)
                connected.close()

    def models(self, abort: _Abort) -> dict[str, str | None]:
        """Return the names of all models of the server, each with its parent; a base has None."""
        status, content = self.call("/v1/models", abort=abort)
        try:
            if status != http.HTTPStatus.OK:
                raise ValueError(_text(content))
            return {str(each["id"]): each.get("parent") for each in _json(content)["data"]}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise VLLMError(f"{self.url} does not list its models: {error}") from error


def _run(
    tasks: Sequence[Callable[[_Abort], Any]],
    stop: Stop,
    on_result: Callable[[int, Any], object] = lambda number, result: None,
) -> list[int]:
    """Run tasks in threads; an error or a stop ends all of them.

    Args:
        tasks: Functions of an `_Abort`.
        stop: Checked while waiting.
        on_result: Called in this thread with number and result of each finished task.

    Returns:
        Numbers of the tasks that raised `_LostAdapterError`.
    """
    if not tasks:
        return []
    abort, lost = _Abort(), []
    pool = ThreadPoolExecutor(min(len(tasks), MAX_THREADS), thread_name_prefix="vllm")
    try:
        numbers = {pool.submit(task, abort): number for number, task in enumerate(tasks)}
        waiting = set(numbers)
        while waiting:
            finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            stop.check()
            for future in finished:
                if isinstance(future.exception(), _LostAdapterError):
                    lost.append(numbers[future])
                else:
                    on_result(numbers[future], future.result())
    finally:
        abort.request()
        pool.shutdown(cancel_futures=True)
    return sorted(lost)


# ---- answers: untrusted text


def _text(content: bytes) -> str:
    """Return the message of an error, shortened and printable."""
    try:
        answer = _json(content)
        error = answer.get("error", answer)
        text = str(error.get("message") or error.get("detail") or answer)
    except (ValueError, AttributeError):
        text = content[:2000].decode(errors="replace")
    return printable(shorten(text, 500))


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error


def _choices(answer: Any, count: int) -> list[Mapping[str, Any]]:
    """Return the choices of an answer in the order of the prompts."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
        raise ValueError("it has no choices")
    by_index = {choice.get("index"): choice for choice in choices}
    if len(choices) != count:
        raise ValueError(f"it has {len(choices)} completions for {count} prompts")
    if set(by_index) != set(range(count)):
        raise ValueError("its completions have wrong indices")
    return [by_index[index] for index in range(count)]


def _completion(
    choice: Mapping[str, Any], *, vocabulary: int, ends: frozenset[int], shortest: int, longest: int
) -> tuple[list[int], list[float]]:
    """Return token ids and log-probabilities of a choice.

    Args:
        choice: Part of the answer.
        vocabulary: Number of token ids.
        ends: Token ids that end a completion.
        shortest: Number of first tokens that cannot be an end.
        longest: Length of a completion without an end.
    """
    # 1. Types and ranges.
    tokens, scores = choice.get("token_ids"), choice.get("logprobs")
    values = scores.get("token_logprobs") if isinstance(scores, Mapping) else None
    if not isinstance(tokens, list):
        raise ValueError("it has no token_ids. vLLM 0.10.2 or newer is needed")
    if not isinstance(values, list):
        raise ValueError("it has no log-probabilities")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise ValueError(f"a token id is not an integer from 0 to {vocabulary - 1}")
    if len(values) != len(tokens):
        raise ValueError(f"it has {len(values)} log-probabilities for {len(tokens)} tokens")
    if not all(type(value) in (int, float) and math.isfinite(value) and value < 1e-3 for value in values):
        raise ValueError("a log-probability is missing, not finite or positive")
    # 2. The completion ends with its only end, or has the maximum length.
    if not 1 <= len(tokens) <= longest:
        raise ValueError(f"a completion has {len(tokens)} tokens, but 1 to {longest} were requested")
    first = next((place for place, token in enumerate(tokens) if token in ends), None)
    if first is None and len(tokens) < longest:
        raise ValueError(
            f"a completion stopped after {len(tokens)} of {longest} tokens without an end, as with too small a "
            "--max-model-len"
        )
    if first is not None and (first < shortest or first < len(tokens) - 1):
        raise ValueError(f"a completion of {len(tokens)} tokens has an end at token {first + 1}")
    return tokens, [min(value, 0.0) for value in values]
