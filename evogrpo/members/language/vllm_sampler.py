"""Sampler for vLLM: completions over HTTP from servers that hold the base model and the members' adapters."""

import http.client
import io
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
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, Strict, StrictInt, ValidationError
from safetensors.torch import save_file

from evogrpo.interruption import NEVER, Stop
from evogrpo.members.bank import FinishedCallback, SamplerError
from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.compatibility import is_quantised, vocabulary_of
from evogrpo.members.language.loading import loadable_name
from evogrpo.records import Batch, Rollout, SamplingBatch, TokenInputs
from evogrpo.text import expand_user, printable, shorten, shown
from evogrpo.validation import finite_number

ROWS_PER_REQUEST = 512
"""Maximum prompts of a request. vLLM refuses more than 1,024 by default."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
PROBE, PROBE_ROWS, PROBE_TOKENS, PROBE_TEMPERATURE = tuple(range(32, 40)), 8, 16, 2.0
"""Prompt, completions, their length and the temperature of the check at the start. A server that
reports raw log-probabilities, those of temperature 1, is thereby detected.
"""
EXACT_DIFFERENCE, HALF_PRECISION_DIFFERENCE = 0.05, 0.5
"""Largest mean difference between log-probabilities of server and trainer, in nats, by the
precision of the base.
"""

MAX_ANSWER = 4 * 2**20
"""Maximum bytes of an answer, without the completions that were requested."""
BYTES_PER_TOKEN, BYTES_PER_PROMPT_TOKEN = 512, 16
"""Maximum average bytes of a token in an answer. A completion's token has an id, its text three
times, and its log-probability twice; a prompt's token has an id. Runs of 128 spaces are the longest
common tokens.
"""
MAX_ERROR = 2000
"""Bytes that are read of an answer with an error."""

_URL = re.compile(r"https?://([\w.-]+|\[[\w.:]+\])(:(?P<port>\d{1,5}))?(/[!-~]*)?", re.ASCII)

T = TypeVar("T", bound=BaseModel)


class VLLMError(SamplerError):
    """A vLLM server does not answer, answers wrongly, or was started with other settings than the run needs."""


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
    place = urllib.parse.urlsplit(url)
    largest = next(each for each in LORA_RANKS if each >= rank)
    return (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model"
        f" {shlex.quote(model)} --host {shlex.quote(place.hostname or '')} --port"
        f" {place.port or 8000} --dtype {dtype} --enable-lora --max-loras {members} --max-lora-rank"
        f" {largest} --logprobs-mode processed_logprobs --generation-config vllm"
    )


class VLLMSampler:
    """Samples completions on vLLM servers over HTTP; see `evogrpo.members.bank.Sampler`.

    Members are dealt out over the servers. Each server has the base model and one adapter per
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
        if isinstance(url, list | tuple):
            urls: list[Any] = list(url)
        else:
            urls = [url]
        self._servers = [_Server(each, seconds) for each in urls]
        if not urls or len({server.url for server in self._servers}) < len(urls):
            raise ValueError(f"url must be one address or several different ones, got {len(urls)}.")
        # A folder and names of its own: several runs may share servers and adapters_dir.
        self._id = uuid.uuid4().hex[:12]
        self._adapters_dir = expand_user(adapters_dir, "adapters_dir").absolute()
        self._bank: AdapterBank | None = None
        # by slot, the bank's change counter of the newest adapter on the server
        self._versions: dict[int, int] = {}
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._adapters_dir / f"evogrpo-{self._id}"

    def connect(self, bank: AdapterBank) -> None:
        """Load the adapters of a bank's members on the servers, after checking that they serve its base model.

        Raises:
            VLLMError: If a server does not answer in time or was started with wrong settings.
            ValueError: If members train all weights.
        """
        if bank.lora_config is None:
            raise ValueError(NO_FULL_WEIGHTS)
        ranks = bank.processes
        self._id = ranks.broadcast(self._id)  # adapters have the names that rank 0 gives them
        self._bank = bank
        self._versions = dict(enumerate(bank.changes))
        with ranks.section():
            for server in self._servers:
                bases = [
                    name
                    for name, parent in server.models(threading.Event()).items()
                    if parent is None
                ]
                if not bases:
                    raise self._refused(server, "lists no base model")
                server.base = bases[0]
        for server in self._servers:
            self._check_log_probs(server)
        with ranks.section():
            if ranks.is_rank_zero:
                for slot in range(bank.size):
                    self._write(slot)
                _run(
                    [
                        partial(self._load, slot, version)
                        for slot, version in self._versions.items()
                    ],
                    NEVER,
                )

    def sync(self, slots: Sequence[int]) -> None:
        """Load the adapters of these slots again, if their weights have changed.

        Raises:
            VLLMError: If a server does not load an adapter. It is loaded in the next call.
        """
        bank = self._connected()
        changed = [slot for slot in slots if self._versions[slot] != bank.changes[slot]]
        with bank.processes.section():  # other ranks wait until rank 0 has loaded the adapters
            if bank.processes.is_rank_zero:
                for slot in changed:  # here, because a bank is not made for several threads
                    self._write(slot)
                _run([partial(self._replace, slot, bank.changes[slot]) for slot in changed], NEVER)
        self._versions.update({slot: bank.changes[slot] for slot in changed})

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        """Sample one completion per row, in one request per member and temperature.

        The servers draw their own random numbers. Rollouts are not exact.

        Raises:
            VLLMError: If a server does not answer in time or its answer is invalid.
        """
        groups: dict[tuple[int | None, float], list[int]] = {}
        if base:
            slots = [None] * len(rows)
        else:
            slots = rows.member_ids.tolist()
        for row, kind in enumerate(zip(slots, rows.temperature.tolist(), strict=True)):
            groups.setdefault(kind, []).append(row)
        requests: list[_Request] = []
        for (slot, _), numbers in groups.items():
            # All servers have the base, so they share its rows.
            size = min(
                ROWS_PER_REQUEST,
                math.ceil(len(numbers) / len(self._servers)) if base else len(numbers),
            )
            for start in range(0, len(numbers), size):
                server = self._server_of(start // size if slot is None else slot)
                requests.append((server, slot, numbers[start : start + size]))
        return self._sample(rows, requests, on_finished)

    def _connected(self) -> AdapterBank:
        if self._bank is None:
            raise ValueError("The sampler has no members. Pass it to population.sample_with.")
        return self._bank

    # ---- adapters and servers

    def _server_of(self, slot: int) -> "_Server":
        return self._servers[slot % len(self._servers)]

    def _name(self, slot: int, version: int) -> str:
        """Return the name of an adapter on the server, and of its folder."""
        return f"evogrpo-{self._id}-{slot}-{version}"

    def _write(self, slot: int) -> None:
        """Write a member in PEFT's format to the folder of its current version."""
        bank = self._connected()
        tensors, config = bank.peft_files(slot)
        folder = self._folder / self._name(slot, bank.changes[slot])
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        (folder / "adapter_config.json").write_bytes(config)

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
        server = self._server_of(slot)
        name = self._name(slot, version)
        body = {"lora_name": name, "lora_path": str(self._folder / name)}
        status, content = server.call("/v1/load_lora_adapter", body, ended=ended, final=True)
        # A repeated request fails if the first one was carried out.
        if status != http.HTTPStatus.OK and name not in server.models(ended):
            raise self._refused(
                server, f"did not load {body['lora_path']}: {server.shown(content)}"
            )

    def _check_log_probs(self, server: "_Server") -> None:
        """Sample a text from the base on the server, and score it with the trainer."""
        # 1. Sample.
        bank = self._connected()
        zeros = torch.zeros(PROBE_ROWS, dtype=torch.long)
        rows = SamplingBatch(
            prompts=(tuple(token % vocabulary_of(bank.base.model) for token in PROBE),),
            prompt_ids=zeros,
            member_ids=zeros,
            temperature=torch.full((PROBE_ROWS,), PROBE_TEMPERATURE),
            max_new_tokens=PROBE_TOKENS,
        )
        # All ranks score the tokens that rank 0 gets.
        rollout, *_ = bank.processes.run_section(
            lambda: self._sample(rows, [(server, None, list(range(PROBE_ROWS)))], None)
        )
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
        exact = bank.base.exact and not is_quantised(bank.base.model)
        if difference > (EXACT_DIFFERENCE if exact else HALF_PRECISION_DIFFERENCE):
            raise self._refused(
                server,
                f"serves {printable(shorten(server.base, 200))} with log-probabilities that differ"
                f" from those of the trainer's base model by {difference:.3g} nats on average."
                f" Serve the same model{' in float32' if exact else ''}, with --logprobs-mode"
                " processed_logprobs",
            )

    def _refused(self, server: "_Server", problem: str) -> VLLMError:
        """Return an error with the command that starts the server as this population needs it."""
        bank = self._connected()
        if is_quantised(bank.base.model):
            dtype = torch.bfloat16
        else:
            dtype = next(bank.base.model.parameters()).dtype
        command = vllm_command(
            loadable_name(bank.base.model) or "MODEL",
            members=max(1, sum(self._server_of(slot) is server for slot in range(bank.size))),
            rank=bank.trained.rank,
            dtype=str(dtype).removeprefix("torch."),
            url=server.url,
        )
        return VLLMError(f"{server.url} {problem}. Start it with: {command}")

    # ---- completions

    def _sample(
        self,
        rows: SamplingBatch,
        requests: "Sequence[_Request]",
        on_finished: FinishedCallback | None,
    ) -> Rollout:
        """Send the requests and collect the completions."""
        bank = self._connected()
        width = rows.max_new_tokens
        actions = torch.full((len(rows), width), bank.base.pad_id)
        log_probs = torch.zeros(len(rows), width)
        lengths = torch.zeros(len(rows), dtype=torch.long)
        counter = rows.stop.progress("writing", len(rows), "completions")

        def collect(number: int, choices: "Sequence[_Choice]") -> None:
            _, _, numbers = requests[number]
            for row, choice in zip(numbers, choices, strict=True):
                length = lengths[row] = len(choice.token_ids)
                actions[row, :length] = torch.tensor(choice.token_ids)
                if rows.temperature[row]:  # a greedy token is certain
                    log_probs[row, :length] = torch.tensor(choice.logprobs.token_logprobs).clamp(
                        max=0.0
                    )
            counter.add(len(numbers))
            if on_finished is not None:
                on_finished(numbers, [choice.token_ids for choice in choices])

        _run([partial(self._complete, rows, *request) for request in requests], rows.stop, collect)
        present = torch.arange(width) < lengths[:, None]
        ended = (torch.isin(actions, bank.end_ids.cpu()) & present).any(1)
        return Rollout(
            actions=actions, present=present, log_probs=log_probs, truncated=~ended, exact=False
        )

    def _complete(
        self,
        rows: SamplingBatch,
        server: "_Server",
        slot: int | None,
        numbers: Sequence[int],
        ended: threading.Event,
    ) -> "list[_Choice]":
        """Return the completions of some rows, all of one member (None: the base) and temperature."""
        # 1. Send the request; load the adapter again if the server was restarted.
        bank = self._connected()
        options = rows.options
        ids = rows.prompt_ids.tolist()
        histories = rows.history
        ends = bank.end_ids.tolist()
        if slot is None:
            name = server.base
        else:
            name = self._name(slot, self._versions[slot])
        shortest = min(rows.min_new_tokens, rows.max_new_tokens)
        longest = rows.max_new_tokens
        body: dict[str, Any] = {
            "model": name,
            "prompt": [
                [*rows.prompts[ids[row]], *(() if histories is None else histories[row])]
                for row in numbers
            ],
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
            # A prefix cached with old weights is never used. vLLM refuses salts with a slash, as
            # names of bases have.
            "cache_salt": self._id if slot is None else name,
        }
        prompt_tokens = sum(map(len, body["prompt"]))
        limit = (
            MAX_ANSWER
            + prompt_tokens * BYTES_PER_PROMPT_TOKEN
            + len(numbers) * longest * BYTES_PER_TOKEN
        )
        status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        if status == http.HTTPStatus.NOT_FOUND and slot is not None:
            self._load(slot, self._versions[slot], ended)
            status, content = server.call("/v1/completions", body, ended=ended, limit=limit)
        if status != http.HTTPStatus.OK:
            raise VLLMError(f"{server.url} refused to sample: {server.shown(content)}")

        # 2. Check the answer.
        class Completions(BaseModel):
            choices: Annotated[list[_Choice], Field(max_length=len(numbers), fail_fast=True)]

        choices = sorted(
            server.parsed(Completions, content).choices, key=lambda choice: choice.index
        )
        if [choice.index for choice in choices] != list(range(len(numbers))):
            raise VLLMError(
                f"{server.url} returned {len(choices)} completions for {len(numbers)} prompts."
            )
        vocabulary = vocabulary_of(bank.base.model)
        for choice, prompt in zip(choices, body["prompt"], strict=True):
            if choice.prompt_token_ids not in (None, prompt):
                raise VLLMError(
                    f"{server.url} returned the completions in another order than the prompts."
                )
            tokens = choice.token_ids
            values = choice.logprobs.token_logprobs
            places = [place for place, token in enumerate(tokens) if token in ends]
            # A completion ends with its only end token, or has the maximum length.
            if not places:
                whole = len(tokens) == longest
            else:
                whole = shortest <= places[0] == len(tokens) - 1 < longest
            if len(values) != len(tokens) or max(tokens) >= vocabulary or not whole:
                raise VLLMError(
                    f"{server.url} returned a completion of {len(tokens)} tokens, {len(values)}"
                    f" log-probabilities and end tokens at {places}, but {shortest} to {longest}"
                    " tokens up to the first end token were requested. Check its --max-model-len."
                )
        return choices


_Request = tuple["_Server", int | None, list[int]]
"""Server, slot (None: the base) and row numbers of a request; the rows have one temperature."""


# ---- HTTP


_MAX_FLOAT32 = torch.finfo(torch.float32).max
_LogProb = Annotated[float, Strict(), Field(ge=-_MAX_FLOAT32, lt=1e-3, allow_inf_nan=False)]
_TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]


class _Scores(BaseModel):
    token_logprobs: Annotated[list[_LogProb], Field(fail_fast=True)]


class _Choice(BaseModel):
    """A completion in an answer: token ids and their log-probabilities, in the order of the prompts by `index`."""

    index: StrictInt
    token_ids: Annotated[_TokenIds, Field(min_length=1)]
    prompt_token_ids: _TokenIds | None = None
    logprobs: _Scores


class _Model(BaseModel):
    id: str
    parent: str | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(fail_fast=True)]


class _Server:
    """HTTP client of one server.

    Attributes:
        url: Address of the server.
        base: Name of the base model, once known.
    """

    def __init__(self, url: str, timeout: float) -> None:
        # 1. Check the address. One with a password or a query is not shown.
        if isinstance(url, str) and set(url) & set("@?#"):
            raise ValueError(
                "url must have no user name, password, query or fragment. Set VLLM_API_KEY to the"
                " key of the server."
            )
        if isinstance(url, str):
            match = _URL.fullmatch(url)
        else:
            match = None
        if match is None or not 1 <= int(match["port"] or 1) <= 65_535:
            raise ValueError(f'url must look like "http://127.0.0.1:8000", got {shown(url)}.')
        self.url = url.rstrip("/")
        self.base = ""
        self._timeout = timeout
        self._place = urllib.parse.urlsplit(self.url)
        # 2. Read the key. http.client would show an invalid one in its error.
        self._key = os.environ.get("VLLM_API_KEY", "")
        if not re.fullmatch("[!-~]*", self._key):
            raise ValueError(
                "VLLM_API_KEY must consist of visible ASCII characters, without spaces or line"
                " breaks."
            )

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        ended: threading.Event,
        final: bool = False,
        limit: int = MAX_ANSWER,
    ) -> tuple[int, bytes]:
        """Return status and content of the answer to a request, repeated while the server does not answer.

        Args:
            path: Path of the endpoint.
            body: Sent as JSON with POST; None = GET.
            ended: Set if the answer is no longer needed.
            final: Return status 500 and above too, instead of repeating the request.
            limit: Maximum bytes of the answer.

        Raises:
            VLLMError: If there is no whole answer in time, it is too large, or the server redirects
                to another address.
        """
        sent = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self._timeout
        pause = 0.05
        # Send the request until there is an answer, with longer and longer pauses.
        while True:
            seconds = max(0.1, min(deadline - time.monotonic(), self._timeout / 2))
            try:
                status, content = self._exchange(path, sent, seconds, limit)
                if status < http.HTTPStatus.INTERNAL_SERVER_ERROR or final:
                    return status, content
                problem = f"status {status}: {self.shown(content)}"
            except VLLMError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            if deadline - time.monotonic() < pause or ended.wait(pause):
                raise VLLMError(
                    f"The vLLM server at {self.url} gave no answer within {self._timeout:g} seconds"
                    f" ({self.shown(problem.encode(errors='replace'))}). Start it again, or raise"
                    " timeout."
                )
            pause = min(2 * pause, 2.0)

    def _exchange(
        self, path: str, body: bytes | None, seconds: float, limit: int
    ) -> tuple[int, bytes]:
        """Send a request once and return status and content of the answer.

        Neither redirects nor proxies of the environment are followed: they would hand the key to
        another host.

        Args:
            path: Path of the endpoint.
            body: Content of a POST; None = GET.
            seconds: Time for the whole exchange.
            limit: Maximum bytes of the answer. Of an answer with an error, the beginning is
                returned.

        Raises:
            VLLMError: If the answer is a redirect or too large.
            OSError: If the server does not answer in time.
            HTTPException: If the answer is not HTTP, or incomplete.
            ValueError: The same.
        """
        # 1. Connect and send.
        deadline = time.monotonic() + seconds
        is_https = self._place.scheme == "https"
        connect = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with closing(
            connect(self._place.hostname or "", self._place.port, timeout=seconds)
        ) as connection:
            connection.connect()
            connection.response_class = partial(_Response, deadline=deadline)  # type: ignore[assignment]
            connection.sock.settimeout(max(0.1, deadline - time.monotonic()))
            method = "GET" if body is None else "POST"
            connection.request(method, self._place.path + path, body, headers)
            # 2. Read the answer piece by piece: its length in the header may be wrong.
            with closing(connection.getresponse()) as response:
                status = response.status
                if http.HTTPStatus.MULTIPLE_CHOICES <= status < http.HTTPStatus.BAD_REQUEST:
                    raise VLLMError(
                        f"{self.url} answered with a redirect (status {status}), which is not"
                        " followed. Use the final address of the server."
                    )
                if status != http.HTTPStatus.OK:
                    limit = MAX_ERROR
                content = bytearray()
                while len(content) <= limit and (piece := response.read1(2**16)):
                    content += piece
                if len(content) <= limit and response.length:
                    raise http.client.IncompleteRead(b"", response.length)
        # 3. Check its size.
        if len(content) > limit and status == http.HTTPStatus.OK:
            raise VLLMError(
                f"{self.url} returned more than {limit:,} bytes, the most that the request allows."
            )
        return status, bytes(content[:limit])

    def models(self, ended: threading.Event) -> dict[str, str | None]:
        """Return the names of all models of the server, each with its parent; a base has None."""
        status, content = self.call("/v1/models", ended=ended)
        if status != http.HTTPStatus.OK:
            raise VLLMError(
                f"{self.url} refused to list its models (status {status}): {self.shown(content)}"
            )
        return {model.id: model.parent for model in self.parsed(_Models, content).data}

    def parsed(self, kind: type[T], content: bytes) -> T:
        """Return an answer as a record; VLLMError if it has another form."""
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise VLLMError(
                f"{self.url} returned an invalid answer: {'.'.join(map(str, first['loc']))}"
                f" {first['msg']}, in {self.shown(content)}. vLLM 0.10.2 or newer is needed."
            ) from None

    def shown(self, content: bytes) -> str:
        """Return an answer, which is untrusted text, shortened and printable.

        A key that it repeats is left out.
        """
        text = content[:MAX_ERROR].decode(errors="replace")
        if self._key:
            text = text.replace(self._key, "…")
        return printable(shorten(text, 500))


class _Response(http.client.HTTPResponse):
    """HTTP response that must be complete before a deadline.

    A timeout of the socket limits each packet only.
    """

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock, deadline))


class _TimedReader(io.RawIOBase):
    """Bytes of a socket until a deadline, a time of `time.monotonic`."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._bytes = sock.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the answer was not complete in time")
        self._socket.settimeout(seconds)
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


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
    ended = threading.Event()
    results = SimpleQueue[tuple[int, Any, Exception | None]]()

    def work(number: int, task: Callable[[threading.Event], Any]) -> None:
        try:
            results.put((number, task(ended), None))
        except Exception as error:  # noqa: BLE001  # raised in the calling thread
            results.put((number, None, error))

    for number, task in enumerate(tasks):
        threading.Thread(
            target=work, args=(number, task), daemon=True, name=f"vllm {number}"
        ).start()
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
