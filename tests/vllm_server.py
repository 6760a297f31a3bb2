"""A vLLM of tests, over the bank of a tiny model: its HTTP interface and its Python interface.

Answers have the fields that vLLM sends. Adapters are read from disk when they are loaded, as by
vLLM. `RealServer` starts vLLM itself.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from evogrpo.members.language.bank import AdapterBank
from evogrpo.members.language.peft_files import read_adapter
from evogrpo.records import Batch, SamplingBatch, SamplingOptions, TokenInputs
from evogrpo.stop_strings import StopStrings

Fault = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | tuple[int, bytes] | None]
"""(request, answer) -> another answer, (status, content), or None to close the connection without
an answer.
"""


BASE = "models/base"
"""Name of the base model, with a slash as those of hubs."""
RANK_3 = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")


class FakeEngine:
    """Completes prompts with a base model and adapters.

    Args:
        model: The base; each engine needs its own.
        processed: Log-probabilities after temperature and truncation; False = raw ones.
        lora_config: LoRA settings of all adapters.
        tokenizer: Decodes completions to look for stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        processed: bool = True,
        lora_config: LoraConfig = RANK_3,
        tokenizer: Any = None,
    ) -> None:
        self.model = model
        self.processed = processed
        self.tokenizer = tokenizer
        # Other banks are made like this one, which saves them the checks of the model.
        self._base = AdapterBank(
            model, size=1, pad_token_id=0, eos_token_ids=[1], lora_config=lora_config
        )
        self._banks: dict[str, AdapterBank] = {}

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from its folder."""
        self._banks[name] = AdapterBank(
            self.model,
            size=1,
            pad_token_id=0,
            eos_token_ids=[1],
            initial_adapter=read_adapter(folder),
            like=self._base,
        )

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for completions."""
        # 1. Sample with the bank.
        prompts = [tuple(prompt) for prompt in body["prompt"]]
        bank = self._banks.get(body["model"], self._base)
        bank.end_ids = torch.tensor(sorted(body["stop_token_ids"]))
        zeros = torch.zeros(len(prompts), dtype=torch.long)
        rows = SamplingBatch(
            prompts=tuple(prompts),
            prompt_ids=torch.arange(len(prompts)),
            member_ids=zeros,
            temperature=torch.full((len(prompts),), float(body["temperature"])),
            max_new_tokens=body["max_tokens"],
            min_new_tokens=body["min_tokens"],
            options=SamplingOptions(
                **{name: body[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
            ),
        )
        if "stop" in body:
            texts = tuple(body["stop"])
            rows = replace(rows, stop_strings=StopStrings(texts=texts, tokenizer=self.tokenizer))
        base = body["model"] == BASE
        rollout = bank.sample(rows, base=base)
        log_probs = rollout.log_probs
        # 2. vLLM gives greedy tokens their log-probability at temperature 1, and so all tokens in
        #    raw mode.
        if not self.processed or not body["temperature"]:
            inputs = TokenInputs(
                prompts=rows.prompts,
                prompt_ids=rows.prompt_ids,
                temperature=torch.ones(len(prompts)),
                min_new_tokens=0,
            )
            batch = Batch(
                inputs=inputs,
                actions=rollout.actions,
                present=rollout.present,
                action_mask=rollout.present,
                rewards=torch.zeros(len(prompts)),
                group_ids=zeros,
                member_ids=zeros,
            )
            log_probs = bank.log_probs(batch, base=base)
        # 3. vLLM's answer.
        choices = []
        rows_of = zip(
            rollout.actions, rollout.present, rollout.truncated.tolist(), log_probs, strict=True
        )
        for index, (tokens, present, truncated, values) in enumerate(rows_of):
            ids = tokens[present].tolist()
            scores = {
                "text_offset": [0] * len(ids),
                "token_logprobs": values[present].tolist(),
                "tokens": [f"token_{token}" for token in ids],
                "top_logprobs": [{f"token_{token}": 0.0} for token in ids],
            }
            if truncated:
                reason = {"finish_reason": "length"}
            else:
                reason = {"finish_reason": "stop", "stop_reason": ids[-1]}
            choices.append(
                {
                    "index": index,
                    "text": "",
                    "logprobs": scores,
                    "token_ids": ids,
                    "prompt_token_ids": list(prompts[index]),
                    **reason,
                }
            )
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": body["model"],
            "choices": choices,
            "usage": {},
        }


class VLLMServer(FakeEngine):
    """Serves a base model and adapters on a loopback port.

    Args:
        model: The base; each server needs its own.
        max_lora_rank: Largest rank.
        runtime_updates: Adapters can be loaded.
        sees_files: The server sees the folder of the adapters.
        settings: Further arguments of `FakeEngine`.

    Attributes:
        requests: Path and body of all requests.
        fault: Changes answers to /v1/completions; None = none.
        adapters: Folder of each loaded adapter by name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_lora_rank: int = 16,
        runtime_updates: bool = True,
        sees_files: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(model, **settings)
        self.max_lora_rank = max_lora_rank
        self.runtime_updates = runtime_updates
        self.sees_files = sees_files
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.fault: Fault | None = None
        self.delay = 0.0
        self.adapters: dict[str, str] = {}
        self._lock = threading.Lock()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Serve, without adapters; after `stop` on the same port."""
        server = self
        self.adapters = {}
        self._banks = {}

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(*server.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, body))
                self._answer(*server.post(self.path, body))

            def _answer(self, status: int, content: bytes | None) -> None:
                if content is None:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # the client has closed the connection

        self._http = Server(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        self._http.shutdown()
        self._http.server_close()

    def posts(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies sent to a path."""
        return [body for each, body in self.requests if each == path]

    def get(self, path: str) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b""
        if path == "/v1/models":
            cards = [{"id": BASE, "root": BASE, "parent": None, "max_model_len": 128}]
            cards += [
                {"id": name, "root": folder, "parent": BASE}
                for name, folder in self.adapters.items()
            ]
            return 200, json.dumps({"object": "list", "data": cards}).encode()
        return 404, b'{"detail":"Not Found"}'

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes | None]:
        if path.endswith("_lora_adapter") and not self.runtime_updates:
            return 404, b'{"detail":"Not Found"}'
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            del self._banks[body["lora_name"]]
            return 200, b"Success"
        assert path == "/v1/completions"
        if body["model"] != BASE and body["model"] not in self.adapters:
            return _error(404, f"The model `{body['model']}` does not exist.")
        salt = body["cache_salt"]
        if not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0"):
            return _error(
                400,
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@',"
                " '/'.",
            )
        with self._lock:
            answer = self.complete(body)
        time.sleep(self.delay)
        if self.fault is not None:
            changed = self.fault(body, answer)
            if changed is None or isinstance(changed, tuple):
                return changed or (0, None)
            answer = changed
        return 200, json.dumps(answer).encode()

    def _load(self, name: str, folder: str) -> tuple[int, bytes]:
        if not self.sees_files or not os.path.isdir(folder):
            return _error(404, f"Loading lora {name} failed: No adapter found for {folder}")
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        adapter = read_adapter(folder)
        if adapter.lora_config.r > self.max_lora_rank:
            return _error(
                500,
                f"LoRA rank {adapter.lora_config.r} is greater than max_lora_rank"
                f" {self.max_lora_rank}.",
            )
        with self._lock:
            self.load(name, folder)
        self.adapters[name] = folder
        return 200, b"Success"


class RawServer:
    """Serves bytes that need not be HTTP on a loopback port.

    Args:
        answer: Gets each connection and the first bytes of its request; the connection is closed
            when it returns.

    Attributes:
        requests: First bytes of all requests.
    """

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client has closed the connection
            request = connection.recv(2**16)
            self.requests.append(request)
            self._answer(connection, request)


class RealServer:
    """A process of vLLM, with the interpreter that VLLM_PYTHON names.

    Args:
        command: Printed by `evogrpo vllm-command`.

    Attributes:
        group: Process group of the server and its workers.
    """

    def __init__(self, command: str) -> None:
        assert "VLLM_PYTHON" in os.environ, "VLLM_PYTHON is not set: run make test-vllm"
        variable, _, *words = shlex.split(command)
        name, _, value = variable.partition("=")
        self._words = [os.environ["VLLM_PYTHON"], *words, "--enforce-eager"]
        # PYTHONPATH is for this interpreter. Compiling a few small functions would take longer than
        # all tests.
        self._environment = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
        self._environment |= {
            name: value,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self._environment |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        with tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                self._words,
                env=self._environment,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self.group = self._process.pid
            deadline = time.monotonic() + 1200
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                        return
                except OSError:
                    time.sleep(1)
                except KeyboardInterrupt:
                    self.stop()
                    raise
            status = self._process.poll()
            self.stop()
            output.seek(0)
            end = output.read().decode(errors="replace")[-5000:]
        if status is None:
            reason = "did not start within 20 minutes"
        else:
            reason = f"ended with status {status} at its start"
        raise AssertionError(f"vLLM {reason}. vllm-cpu needs a CPU with AVX2. {end}")

    def stop(self) -> None:
        """Kill the server and its workers."""
        if self._process.poll() is None:
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()


def _error(status: int, message: str) -> tuple[int, bytes]:
    return (
        status,
        json.dumps(
            {"error": {"message": message, "type": "Error", "param": None, "code": status}}
        ).encode(),
    )
