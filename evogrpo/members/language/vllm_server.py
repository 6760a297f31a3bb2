"""HTTP client of a vLLM server, and the answers that it accepts."""

import http.client
import json
import math
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, Strict, StrictInt, ValidationError

from evogrpo.members.bank import SamplerError
from evogrpo.text import printable, shorten, shown

MAX_ANSWER = 4 * 2**20
"""Maximum bytes of an answer, without the completions that were requested."""
MAX_ERROR = 2000
"""Bytes that are read of an answer with an error."""
SUPPORTED_SERVERS = "Use vLLM 0.10.2 or newer, or another server with the same endpoints."
"""Remedy for answers of another form."""

_URL = re.compile(r"https?://([\w.-]+|\[[\w.:]+\])(:(?P<port>\d{1,5}))?(/[!-~]*)?", re.ASCII)

T = TypeVar("T", bound=BaseModel)


class VLLMError(SamplerError):
    """A vLLM server does not answer, answers wrongly, or has other settings than the run needs."""


_MAX_FLOAT32 = torch.finfo(torch.float32).max
_LogProb = Annotated[float, Strict(), Field(ge=-_MAX_FLOAT32, lt=1e-3, allow_inf_nan=False)]
_TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(fail_fast=True)]


class _Scores(BaseModel):
    token_logprobs: Annotated[list[_LogProb], Field(fail_fast=True)]


class Choice(BaseModel):
    """A completion in an answer; `index` is the number of its prompt."""

    index: StrictInt
    finish_reason: str | None = None
    token_ids: Annotated[_TokenIds, Field(min_length=1)]
    prompt_token_ids: _TokenIds | None = None
    logprobs: _Scores


class _Model(BaseModel):
    id: str
    parent: str | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(fail_fast=True)]


class Server:
    """HTTP client of one server.

    Args:
        url: Address of the server.
        timeout: Seconds without any whole answer of the server after which a call fails,
            repetitions included.
        key_name: Environment variable with the key of the server; None = no key.
        name: Name of the server in messages.

    Attributes:
        url: Address of the server.
        base: Name of the base model, once known.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        *,
        key_name: str | None = "VLLM_API_KEY",
        name: str = "vLLM server",
    ) -> None:
        # 1. Check the address. One with a password or a query is not shown.
        match = None
        if isinstance(url, str):
            if set(url) & set("@?#"):
                raise ValueError(
                    "url must have no user name, password, query or fragment. Set"
                    f" {key_name or 'an environment variable'} to the key of the server."
                )
            match = _URL.fullmatch(url)
        if match is None or not 1 <= int(match["port"] or 1) <= 65_535:
            raise ValueError(f'url must look like "http://127.0.0.1:8000", got {shown(url)}.')
        self.url = url.rstrip("/")
        self.base = ""
        self._timeout = timeout
        # Time of the latest answer. While the server answers other calls, a call without an answer
        # is only waiting for its turn.
        self._answered = -math.inf
        self._address = urllib.parse.urlsplit(self.url)
        # 2. Read the key. http.client would show an invalid one in its error.
        self._name = name
        self._key = os.environ.get(key_name, "") if key_name else ""
        if not re.fullmatch("[!-~]*", self._key):
            raise ValueError(
                f"{key_name} must consist of visible ASCII characters, without spaces or line"
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
        """Return status and content of an answer; repeat a request that fails.

        A request that has no answer yet is not repeated: the server may still be working on it.

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
        sent = None
        if body is not None:
            sent = json.dumps(body).encode()
        began = time.monotonic()

        def seconds_left() -> float:
            """Return the seconds that are left; each answer to any call starts the time again."""
            return max(began, self._answered) + self._timeout - time.monotonic()

        pause = 0.05
        # Send the request until there is an answer, with longer and longer pauses.
        while True:
            try:
                status, content = self._exchange(path, sent, seconds_left, limit)
                # A repetition may help against faults of the server, not against those of the
                # request.
                if status < http.HTTPStatus.INTERNAL_SERVER_ERROR or final:
                    self._answered = time.monotonic()
                    return status, content
                problem = f"status {status}: {self.shown(content)}"
            except VLLMError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            if seconds_left() < pause or ended.wait(pause):
                raise VLLMError(
                    f"The {self._name} at {self.url} gave no answer within {self._timeout:g}"
                    f" seconds ({self.shown(problem.encode(errors='replace'))}). Start it again, or"
                    " raise timeout."
                )
            # Wait longer each time, up to 2 seconds.
            pause = min(2 * pause, 2.0)

    def _exchange(
        self, path: str, body: bytes | None, seconds_left: Callable[[], float], limit: int
    ) -> tuple[int, bytes]:
        """Send a request once and return status and content of the answer.

        Neither redirects nor proxies of the environment are followed: they would hand the key to
        another host.

        Args:
            path: Path of the endpoint.
            body: Content of a POST; None = GET.
            seconds_left: Returns the time that is left for the exchange.
            limit: Maximum bytes of the answer. Of an answer with an error, the beginning is
                returned.

        Raises:
            VLLMError: If the answer is a redirect or too large.
            OSError: If the server does not answer in time.
            HTTPException: If the answer is not HTTP, or incomplete.
            ValueError: The same.
        """
        # 1. Connect, in a part of the time, so that there is a second attempt. The timeout of a
        #    socket limits each packet only, so a thread ends the exchange.
        is_https = self._address.scheme == "https"
        connect: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if is_https:
            connect = http.client.HTTPSConnection
        seconds = max(0.1, min(seconds_left(), self._timeout / 4))
        connection = connect(self._address.hostname or "", self._address.port, timeout=seconds)
        with closing(connection):
            connection.connect()
            # From here on a thread watches the time, also that of a slow answer in many pieces.
            connection.sock.settimeout(None)
            done = threading.Event()
            expired = threading.Event()
            arguments = (connection.sock, seconds_left, done, expired)
            threading.Thread(target=_watch, args=arguments, daemon=True).start()
            try:
                # 2. Send.
                headers = {"Content-Type": "application/json", "Connection": "close"}
                if self._key:
                    headers["Authorization"] = f"Bearer {self._key}"
                method = "POST"
                if body is None:
                    method = "GET"
                connection.request(method, self._address.path + path, body, headers)
                # 3. Read the answer piece by piece: its length in the header may be wrong.
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
                    # The connection has ended before the answer.
                    if len(content) <= limit and response.length:
                        raise http.client.IncompleteRead(b"", response.length)
            finally:
                done.set()
        # 4. Check time and size. Without a length in the header, the end that `_watch` makes looks
        #    like the end of the answer.
        if expired.is_set():
            raise TimeoutError("the answer was not complete in time")
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
                f" {first['msg']}, in {self.shown(content)}. {SUPPORTED_SERVERS}"
            ) from None

    def shown(self, content: bytes) -> str:
        """Return an answer, which is untrusted text, shortened and printable.

        A key that it repeats is left out.
        """
        # Only the beginning is decoded: an answer may be long.
        text = content[:MAX_ERROR].decode(errors="replace")
        if self._key:
            text = text.replace(self._key, "…")
        return printable(shorten(text, 500))


def _watch(
    connection: socket.socket,
    seconds_left: Callable[[], float],
    done: threading.Event,
    expired: threading.Event,
) -> None:
    """End all reads and writes of a socket when its time is over, unless `done` is set before."""
    while not done.wait(max(0.0, seconds_left())):
        if seconds_left() <= 0:
            expired.set()
            with suppress(OSError):  # closed already
                # Not the method of an SSL socket, which would also drop the state that reads use.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
            return
